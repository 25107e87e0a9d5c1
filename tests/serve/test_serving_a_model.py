"""`gka serve` on a model with random weights: the command, the engine behind the API, and memories over a restart."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from byte_model import write_byte_model
from openai import OpenAI
from servers import started

PROGRAM = Path(sys.executable).parent / "gka"
GOLDENS = Path(__file__).resolve().parents[1] / "goldens"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return write_byte_model(folder, norms_of_one=True, eos_token_id=256, max_position_embeddings=2048)


def serve(model, *options):
    return started(PROGRAM, "serve", model, "--tokenizer", "bytes", "--port", "0", "--device", "cpu", *options)


def test_answers_are_those_of_the_command_line(model):
    ids = [104, 101, 108, 108, 111]
    with serve(model) as server:
        client = OpenAI(base_url=f"{server.address}/v1", api_key="none", _strict_response_validation=True)
        name = client.models.list().data[0].id
        assert name == model.name
        got = server.post(
            "/v1/completions",
            {"prompt": ids, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True},
        )
        chat = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=8, seed=1
        )
        assert chat.usage.completion_tokens <= 8
        scored = server.post("/v1/completions", {"prompt": [ids], "echo": True, "max_tokens": 0, "logprobs": 1})
        assert len(scored["choices"][0]["logprobs"]["token_logprobs"]) == len(ids)
        for iterations in (0, 1, "auto"):
            refused = server.post("/v1/completions", {"prompt": ids, "iterations": iterations}, status=400)["error"]
            assert refused["param"] == "iterations"
            assert "no GKA layer" in refused["message"]
    file = model / "ids.txt"
    file.write_text(" ".join(map(str, ids)) + "\n")
    said = subprocess.run(
        [PROGRAM, "generate", model, "--ids", file, "--max-tokens", "12", "--greedy", "--print-ids"],
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [int(token) for token in said.stdout.split()]
    assert got["choices"][0]["token_ids"][: len(expected)] == expected


def test_a_memory_outlives_the_server_and_answers_as_its_tokens_would(model, tmp_path):
    memory_ids, ids = list(range(40, 120)), [1, 2, 3]
    ask = {"max_tokens": 6, "temperature": 0, "return_token_ids": True, "logprobs": 1, "ignore_eos": True}
    with serve(model, "--memories", tmp_path) as server:
        made = server.post("/v1/memories", {"input": memory_ids, "name": "numbers"})
        assert (made["tokens"], made["name"]) == (80, "numbers")
        plain = server.post("/v1/completions", {"prompt": memory_ids + ids, **ask})
    with serve(model, "--memories", tmp_path) as server:
        assert [memory["id"] for memory in server.get("/v1/memories")["data"]] == [made["id"]]
        got = server.post("/v1/completions", {"prompt": ids, "memory": made["id"], **ask})
        assert got["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
        assert got["choices"][0]["logprobs"] == plain["choices"][0]["logprobs"]
        assert got["gka"]["remembered_tokens"] > 0


def test_a_memory_that_does_not_fit_the_disk_is_refused_and_the_server_goes_on(model, tmp_path):
    words = [PROGRAM, "serve", model, "--tokenizer", "bytes", "--port", "0", "--memories", tmp_path, "--quiet"]
    with started("bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *words) as server:  # files of 4 KiB
        said = server.post("/v1/memories", {"input": [7] * 2000}, status=500)["error"]["message"]
        assert re.fullmatch(rf"cannot write {tmp_path}/mem-\w+\.safetensors: File too large", said)
        made = server.post("/v1/memories", {"input": [7] * 20})
        assert server.get("/v1/memories")["data"] == [made]
        assert [path.name for path in tmp_path.iterdir()] == [made["id"] + ".safetensors"]


def test_memories_that_could_not_be_written_leave_no_room_taken(model, tmp_path):
    words = [PROGRAM, "serve", model, "--tokenizer", "bytes", "--port", "0", "--memories", tmp_path, "--quiet"]
    with started("bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *words, "--context", "1024", "--slots", "2") as server:
        for at in range(40):  # as many tokens each as half of the caches hold
            said = server.post("/v1/memories", {"input": [at + 1] * 960}, status=500)["error"]["message"]
            assert "File too large" in said
        assert server.post("/v1/completions", {"prompt": [3] * 1000, "max_tokens": 2})["usage"]["completion_tokens"]


def test_servers_share_a_folder_of_memories_and_models_know_their_own(model, tmp_path):
    other = GOLDENS / "tiny-hqwen3-gka"
    ask = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    with serve(model, "--memories", tmp_path) as first, serve(model, "--memories", tmp_path) as second:
        made = first.post("/v1/memories", {"input": list(range(80)), "name": "shared"})
        assert second.get("/v1/memories")["data"] == [made]  # it came while this one ran
        late = first.post("/v1/memories", {"input": list(range(90))})
        answers = [one.post("/v1/completions", {**ask, "memory": late["id"]})["choices"] for one in (first, second)]
        assert answers[0] == answers[1]
        assert second.ask("DELETE", f"/v1/memories/{late['id']}")[0] == 200
        assert first.post("/v1/completions", {**ask, "memory": late["id"]}, status=404)["error"]["param"] == "memory"
        assert first.get("/v1/memories")["data"] == [made]
    with serve(model, other, "--memories", tmp_path) as both:  # a second model, and the first has what it had
        assert both.get("/v1/memories")["data"] == [made]
        own = both.post("/v1/memories", {"model": other.name, "input": list(range(80))})
        assert both.post("/v1/completions", {**ask, "memory": made["id"]})["model"] == model.name
        for path, body in [
            ("/v1/completions", {**ask, "model": other.name, "memory": made["id"]}),
            (f"/v1/memories/{own['id']}/fork", {"model": model.name}),
        ]:
            error = both.post(path, body, status=400)["error"]
            assert error["param"] == "memory" and "belongs to the model" in error["message"]
    with serve(model, "--memories", tmp_path) as alone:
        assert alone.get("/v1/memories")["data"] == [made]
        assert alone.ask("DELETE", f"/v1/memories/{own['id']}")[0] == 404


def test_a_model_says_how_it_wants_to_be_drawn_from(model, tmp_path):
    folder = tmp_path / "said"
    folder.mkdir()
    for file in model.glob("*.*"):
        (folder / file.name).symlink_to(file)
    own = {"temperature": 0.0001, "top_k": 3, "top_p": 0.9, "eos_token_id": 256, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(own))
    ask = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}

    def drawn(server, **more):
        return {str(server.post("/v1/completions", {**ask, **more})["choices"][0]["token_ids"]) for _ in range(4)}

    with serve(folder) as server:
        greedy = drawn(server, temperature=0)
        assert len(greedy) == 1 and drawn(server) == drawn(server, temperature=None) == greedy
        assert len(drawn(server, temperature=1.5, top_k=0, top_p=1)) > 1  # what a request says counts
        settings = server.get("/props")["default_generation_settings"]
        assert settings["params"] == {"temperature": 0.0001, "top_p": 0.9, "top_k": 3}
        assert "generation_config.json" in server.log()
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    words = [PROGRAM, "serve", folder, "--tokenizer", "bytes", "--port", "0"]
    failed = subprocess.run(words, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "generation_config.json: 'temperature' takes a number from 0 to 100" in failed.stderr


def test_a_memory_that_keeps_a_part_of_its_cache_is_the_same_after_a_restart(model, tmp_path):
    memory_ids = [i % 200 for i in range(300)]
    ask = {"prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    with serve(model, "--memories", tmp_path) as server:
        whole, kept = (server.post("/v1/memories", {"input": memory_ids, **keep}) for keep in ({}, {"keep_tokens": 64}))
        assert (whole["kept_tokens"], kept["kept_tokens"]) == (300, 108)
        assert whole["cache_bytes"] == 4 * kept["cache_bytes"]
        answers = [server.post("/v1/completions", {**ask, "memory": made["id"]}) for made in (whole, kept)]
        assert [answer["gka"]["kept_tokens"] for answer in answers] == [300, 108]
        assert answers[0]["choices"][0]["logprobs"] != answers[1]["choices"][0]["logprobs"]
    with serve(model, "--memories", tmp_path) as server:
        assert server.get(f"/v1/memories/{kept['id']}") == kept
        for made, before in zip((whole, kept), answers, strict=True):
            got = server.post("/v1/completions", {**ask, "memory": made["id"]})
            assert got["choices"][0]["logprobs"] == before["choices"][0]["logprobs"]
            assert got["gka"]["remembered_tokens"] == 256


def test_certainty_and_solver_steps_of_a_model_with_gka_layers():
    body = {"prompt": list(range(8)), "max_tokens": 3, "temperature": 0, "certainty": True}
    with serve(GOLDENS / "tiny-hqwen3-gka") as server:
        own = server.get("/props")["iterations"]
        answers = [server.post("/v1/completions", {**body, "iterations": n})["gka"] for n in [own, 0, "auto"]]
        for answer in answers:
            assert len(answer["certainty"]) == len(answer["layer_certainty"]) == 3
            for mean, layers in zip(answer["certainty"], answer["layer_certainty"], strict=True):
                assert mean == pytest.approx(sum(layers) / 2, rel=1e-4)
        assert answers[0]["certainty"] != answers[1]["certainty"]
        assert answers[2]["certainty"] == pytest.approx(answers[0]["certainty"], rel=0.05)
        for wrong in [own + 1, -1]:
            assert (
                server.post("/v1/completions", {**body, "iterations": wrong}, status=400)["error"]["param"]
                == "iterations"
            )
        no_end = {**body, "response_format": {"type": "json_object"}}
        assert server.post("/v1/completions", no_end, status=400)["error"]["param"] == "response_format"


def test_a_conversation_of_responses_is_remembered_and_answered_as_chat_would_answer_it():
    folder = Path(__file__).resolve().parents[2] / "experiments" / "hybrid" / "recall-8m"
    told = "Anna lives in Lisbon. Marek has a rabbit. Zonadu drinks tea. Minna is in the garden. " * 4
    asked = "What pet does Marek have?"
    with started(PROGRAM, "serve", folder, "--port", "0", "--device", "cpu", "--stored-responses", "2") as server:
        client = OpenAI(base_url=f"{server.address}/v1", api_key="none", _strict_response_validation=True)
        ask = {"model": folder.name, "temperature": 0}
        first = client.responses.create(input=told, max_output_tokens=12, **ask)
        turns = [
            {"role": "user", "content": told},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": asked},
        ]
        second = client.responses.create(input=asked, previous_response_id=first.id, max_output_tokens=12, **ask)
        chat = client.chat.completions.create(messages=turns, max_tokens=12, **ask)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached == second.gka["remembered_tokens"] and cached >= 64


def test_a_folder_that_is_no_model_is_one_sentence(tmp_path):
    done = subprocess.run([PROGRAM, "serve", tmp_path, "--port", "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "tokenizer" in done.stderr.splitlines()[-1] or "config.json" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["/nowhere/at/all"], "there is no folder /nowhere/at/all"),
        (["--api-key", "k", "--name", "n", "--cors-origin", "*", "FOLDER"], "has no tokenizer.json"),  # one word each
        (["FOLDER", "--name", "a", "--name", "b"], "--name is given 2 times, and there are 1 models"),
        (["FOLDER", "FOLDER", "--name", "a", "--name", "a"], "two models have the same --name"),
        (["FOLDER", "--api-key", ""], "--api-key"),
        (["FOLDER", "--cors-origin", "example.com"], "takes a site as in https://example.com"),
        (["FOLDER", "--cors-origin", "https://example.com/"], "takes a site as in https://example.com"),
        (["FOLDER", "--memories", "/proc/none"], "cannot make --memories /proc/none"),
        (["FOLDER", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:0: Cannot assign requested address"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(words, says, tmp_path):
    words = [str(tmp_path) if word == "FOLDER" else word for word in words]
    done = subprocess.run([PROGRAM, "serve", "--port", "0", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "--help" not in line]
    assert len(lines) == 1
    assert says in lines[0]
    assert lines[0].count("--port") == 0


def test_told_ten_facts_the_hybrid_of_the_repository_says_which_belongs_to_a_name():
    folder = Path(__file__).resolve().parents[2] / "experiments" / "hybrid" / "recall-8m"
    facts = {
        "Where does Anna live?": ("Anna lives in Lisbon.", "Lisbon"),
        "What pet does Marek have?": ("Marek has a rabbit.", "rabbit"),
        "What does Zonadu drink?": ("Zonadu drinks tea.", "tea"),
        "What is Tobias's number?": ("Tobias's number is 4711.", "4711"),
        "What does Vibeke play?": ("Vibeke plays the cello.", "cello"),
        "What is Rika's favourite colour?": ("Rika's favourite colour is green.", "green"),
        "What does Samir work as?": ("Samir works as a baker.", "baker"),
        "When does Lone come?": ("Lone comes on Friday.", "Friday"),
        "Which language does Paulo speak?": ("Paulo speaks Danish.", "Danish"),
        "Where is Minna?": ("Minna is in the garden.", "garden"),
    }
    told = " ".join(fact for fact, _ in facts.values())
    right = []
    with started(PROGRAM, "serve", folder, "--port", "0", "--device", "cpu") as server:
        client = OpenAI(base_url=f"{server.address}/v1", api_key="none", _strict_response_validation=True)
        for question, (_, value) in facts.items():
            turns = [
                {"role": "user", "content": told},
                {"role": "assistant", "content": "Noted."},
                {"role": "user", "content": question},
            ]
            chat = client.chat.completions.create(model=folder.name, messages=turns, max_tokens=24, temperature=0)
            print(question, chat.choices[0].message.content)
            right.append(value in chat.choices[0].message.content)
    assert sum(right) >= 7
