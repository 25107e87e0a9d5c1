"""gka.Engine: the engine from Python, against the command line, which is the same engine by another way."""

import copy
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gka

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
MODEL = GOLDENS / "tiny-hqwen3-gka"
PROMPT = [5, 17, 3, 99, 42, 7]


def command(*arguments):
    program = shutil.which("gka", path=str(Path(sys.executable).parent)) or "gka"
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def engine():
    with gka.Engine(MODEL, device="cpu", tokenizer="bytes") as made:
        yield made


@pytest.fixture
def ids(tmp_path):
    path = tmp_path / "ids.txt"
    path.write_text(" ".join(map(str, PROMPT)) + "\n")
    return path


def test_it_generates_what_the_command_does(engine, ids):
    options = ["--ids", ids, "--max-tokens", 12, "--print-ids", "--seed", 3, "--top-k", 20]
    expected = [int(word) for word in command("generate", MODEL, *options).split()]
    done = engine.generate(PROMPT, max_tokens=12, seed=3, top_k=20)
    assert done.ids == expected
    assert done.finish in {"length", "stop"}
    assert done.prompt_tokens == len(PROMPT)
    assert [token.id for token in engine.stream(PROMPT, max_tokens=12, seed=3, top_k=20)] == expected


def test_it_scores_what_the_command_does(engine, ids):
    expected = json.loads(command("score", MODEL, "--ids", ids, "--per-token"))["sequences"][0]
    tokens = engine.score(PROMPT, top_logprobs=3)
    assert [token.id for token in tokens] == PROMPT
    assert tokens[0].logprob is None
    assert [token.logprob for token in tokens[1:]] == expected["log_probabilities"]
    assert all(token.top[0][1] >= token.logprob for token in tokens[1:])


def test_many_prompts_go_together_and_give_what_each_gives_alone(engine):
    prompts = [[*PROMPT, n] for n in range(5)]
    together = engine.generate(prompts, max_tokens=6, temperature=0)
    assert [done.ids for done in together] == [engine.generate(p, max_tokens=6, temperature=0).ids for p in prompts]


def test_texts_go_through_the_tokenizer(engine):
    done = engine.generate("äb", max_tokens=8, temperature=0)
    assert done.ids == engine.generate(list("äb".encode()), max_tokens=8, temperature=0).ids
    assert engine.encode("äb") == list("äb".encode())
    assert engine.decode(engine.encode("äb")) == "äb"


def test_a_text_stops_the_answer_and_is_no_part_of_it(engine):
    ask = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    whole = engine.generate("äb", **ask)
    for size in (1, 2, 5):
        stop = whole.text[7 : 7 + size]
        done = engine.generate("äb", stop=["never said", stop], **ask)
        assert done.text == whole.text[: whole.text.find(stop)]
        assert done.finish == "stop" and done.prompt_tokens == 3
        assert done.ids == whole.ids[: len(done.ids)]
        streamed = engine.stream("äb", stop=stop, **ask)
        assert "".join(token.text for token in streamed) == done.text
    almost = whole.text[-3:] + "?"  # begun at the end, and not come
    assert engine.generate("äb", stop=almost, **ask) == engine.generate("äb", **ask)
    for wrong in ("", ["a", ""], [1]):
        with pytest.raises(ValueError, match="stop takes a text"):
            engine.generate("äb", stop=wrong)


def test_a_prompt_is_remembered(engine):
    prompt = [n % 200 for n in range(150)]
    engine.generate(prompt, max_tokens=1)
    assert engine.generate(prompt, max_tokens=1).remembered_tokens == 128


def test_leaving_a_stream_cancels_it(engine):
    stream = engine.stream(PROMPT, max_tokens=4000, ignore_eos=True)
    next(stream)
    stream.close()
    assert engine.generate(PROMPT, max_tokens=2, ignore_eos=True).finish == "length"


def test_solver_steps_and_certainty(engine):
    done = engine.generate(PROMPT, max_tokens=4, iterations="auto", certainty=True)
    assert all(-0.01 <= token.certainty <= 1.01 for token in done.tokens)
    with pytest.raises(ValueError, match="iterations must be from 0"):
        engine.generate(PROMPT, iterations=1000)


def test_what_goes_wrong_is_a_sentence(engine, tmp_path):
    with pytest.raises(ValueError, match="there is no model 'nowhere': it is a checkpoint's folder"):
        gka.Engine("nowhere")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.generate([10**6])
    with pytest.raises(ValueError, match="temperature"):
        engine.generate(PROMPT, temperature=-1)
    with pytest.raises(ValueError, match=r"^slots takes 0 .the engine's choice. or more, and got -1$"):
        gka.Engine(MODEL, device="cpu", slots=-1)
    with pytest.raises(TypeError, match="a prompt is a text or token numbers"):
        engine.generate(None)
    with gka.Engine(MODEL, device="cpu") as plain:
        numbers = plain.generate(PROMPT, max_tokens=2).ids
        assert numbers
        if not (MODEL / "tokenizer.json").exists():
            with pytest.raises(ValueError, match="no tokenizer"):
                plain.generate("text")
    with pytest.raises(ValueError, match="closed"):
        plain.generate(PROMPT)


def test_a_memory_answers_as_if_its_tokens_stood_before_the_prompt_and_survives_the_engine(tmp_path):
    story, more, question = list(range(100, 300)), list(range(40, 60)), PROMPT
    options = {"max_tokens": 8, "temperature": 0}
    with gka.Engine(MODEL, device="cpu", memories=tmp_path) as engine:
        told = engine.create_memory(story, name="a story")
        longer = engine.create_memory(more, name="and on", after=told.id)
        assert (told.tokens, longer.tokens, told.name) == (200, 220, "a story")
        assert told.state_bytes > 0
        expected = [engine.generate(before + question, **options).ids for before in (story, story + more)]
        assert [engine.generate(question, memory=m.id, **options).ids for m in (told, longer)] == expected
        assert {m.id for m in engine.memories()} == {told.id, longer.id}
    with gka.Engine(MODEL, device="cpu", memories=tmp_path) as engine:
        assert {(m.id, m.name, m.tokens) for m in engine.memories()} == {
            (m.id, m.name, m.tokens) for m in (told, longer)
        }
        assert engine.generate(question, memory=longer.id, **options).ids == expected[1]
        engine.delete_memory(told.id)
        assert [m.id for m in engine.memories()] == [longer.id]
        for wrong in (lambda: engine.delete_memory(told.id), lambda: engine.create_memory([], after=told.id)):
            with pytest.raises(ValueError, match="there is no memory"):
                wrong()
        with pytest.raises(ValueError, match="memory"):
            engine.generate(question, memory=told.id)


def test_caches_may_be_bytes_and_nothing_unknown(engine):
    with gka.Engine(MODEL, device="cpu", kv_cache_dtype="int8") as rounded:
        scores = [token.logprob for token in rounded.score(PROMPT)[1:]]
    assert scores == pytest.approx([token.logprob for token in engine.score(PROMPT)[1:]], abs=0.05)
    with pytest.raises(ValueError, match="or int8, and got 'fp8'"):
        gka.Engine(MODEL, device="cpu", kv_cache_dtype="fp8")


def test_a_text_is_that_of_its_tokens_to_the_last_byte(engine):
    """A model of bytes writes characters in pieces, and some that never become whole."""
    for seed in range(8):
        done = engine.generate("ä", max_tokens=40, seed=seed, ignore_eos=True)
        assert done.text == engine.decode(done.ids)
    assert "".join(token.text for token in engine.score("äb€")) == "äb€"


def test_an_engine_that_closes_ends_its_streams():
    with gka.Engine(MODEL, device="cpu") as short:
        stream = short.stream(PROMPT, max_tokens=1000, ignore_eos=True)
        next(stream)
        untouched = short.stream(PROMPT, max_tokens=1000, ignore_eos=True)
    for one in (stream, untouched):
        with pytest.raises(ValueError, match="closed"):
            next(one)
        one.close()
        assert list(one) == []


def test_one_bad_prompt_leaves_no_request_running(engine):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.generate([PROMPT, [10**6]], max_tokens=1000, ignore_eos=True)
    assert len(engine._streams) == 0


def test_prompts_may_be_tensors(engine):
    options = {"max_tokens": 4, "temperature": 0}
    expected = engine.generate(PROMPT, **options).ids
    assert engine.generate(torch.tensor(PROMPT), **options).ids == expected
    assert [done.ids for done in engine.generate(torch.tensor([PROMPT, PROMPT]), **options)] == [expected] * 2


def test_an_option_of_another_type_is_named(engine):
    with pytest.raises(TypeError, match="max_tokens is 'ten'"):
        engine.generate(PROMPT, max_tokens="ten")
    with pytest.raises(ValueError, match="max_tokens is 18446744073709551617, which is no number of 64 bits"):
        engine.generate(PROMPT, max_tokens=2**64 + 1)
    with pytest.raises(ValueError, match="token 18446744073709551617 is no number of 64 bits"):
        engine.generate([1, 2**64 + 1])


def test_an_engine_is_not_copied(engine):
    stream = engine.stream(PROMPT, max_tokens=2)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        for thing in (engine, stream):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copying(thing)


def test_a_fork_leaves_the_engine_to_its_parent():
    """Its thread is not in the child, where waiting for it would never end."""
    program = f"""
import os, sys, gka
engine = gka.Engine({str(MODEL)!r}, device="cpu")
child = os.fork()
if child == 0:
    try:
        engine.generate([1, 2])
    except ValueError as error:
        print(error, flush=True)
    engine.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert engine.generate([1, 2], max_tokens=2, ignore_eos=True).finish == "length"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "belongs to the process that made it" in done.stdout
