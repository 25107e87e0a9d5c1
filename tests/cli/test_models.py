"""gka score and gka generate: on the published checkpoints, on models made here, and on what goes wrong."""

import gzip
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from byte_model import write_byte_model
from safetensors.torch import load_file

PROGRAM = Path(sys.executable).parent / "gka"
GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
CHECKPOINTS = ["tiny-hqwen3-gka", "tiny-hqwen3-gdn"]


def call(*arguments):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)


def told(done):
    """The one sentence of a command that failed."""
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.removeprefix("gka: ")


def told_last(done):
    """The sentence of a command that failed, after warnings."""
    assert done.returncode == 1, done
    return done.stderr.splitlines()[-1]


def error_of(got, expected):
    return (torch.linalg.norm(got.double() - expected.double()) / torch.linalg.norm(expected.double())).item()


def write_ids(path, sequences):
    path.write_text("".join(" ".join(map(str, sequence)) + "\n" for sequence in sequences))
    return path


@pytest.fixture(params=CHECKPOINTS)
def golden(request):
    return GOLDENS / request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_byte_model(tmp_path_factory.mktemp("model"), a_key_of_tomorrow=1)


def test_score_gives_the_logits_of_published_checkpoints(golden, tmp_path):
    expected = load_file(golden / "golden.safetensors")
    ids = write_ids(tmp_path / "ids.txt", [expected[f"input_ids.{i}"].tolist() for i in range(3)])
    done = call("score", golden, "--ids", ids, "--per-token", "--logits", tmp_path / "logits.safetensors")
    assert done.returncode == 0, done.stderr
    logits = load_file(tmp_path / "logits.safetensors")
    result = json.loads(done.stdout)
    assert sorted(logits) == ["logits.0", "logits.1", "logits.2"]
    for i, sequence in enumerate(result["sequences"]):
        assert logits[f"logits.{i}"].dtype == torch.float32
        assert error_of(logits[f"logits.{i}"], expected[f"logits.{i}"]) < 2e-3
        tokens = expected[f"input_ids.{i}"]
        each = expected[f"logits.{i}"][:-1].double().log_softmax(1).gather(1, tokens[1:, None]).squeeze(1)
        assert sequence["tokens"] == len(tokens)
        assert sequence["log_probabilities"] == pytest.approx(each.tolist(), abs=2e-2)
        assert sequence["log_probability"] == pytest.approx(sum(sequence["log_probabilities"]), rel=1e-6)
    assert result["tokens"] == 275
    assert result["predicted_tokens"] == 272
    assert result["perplexity"] == pytest.approx(math.exp(-result["log_probability"] / 272), rel=1e-6)


def test_generate_gives_the_greedy_tokens_of_published_checkpoints(golden, tmp_path):
    expected = load_file(golden / "golden.safetensors")
    first, second = expected["input_ids.0"].tolist(), expected["input_ids.1"].tolist()
    ids = write_ids(tmp_path / "ids.txt", [first, second, first])
    done = call("generate", golden, "--ids", ids, "--max-tokens", 24, "--greedy", "--print-ids")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line in [lines[0], lines[2]]:
        assert line == " ".join(map(str, expected["greedy"].tolist()))
    assert len(lines[1].split()) == 24


def test_a_text_is_scored_through_the_tokenizer(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("äb\n")
    ids = write_ids(tmp_path / "ids.txt", [text.read_bytes()])
    by_text = json.loads(call("score", model, "--text", text, "--tokenizer", "bytes", "--per-token").stdout)
    by_ids = json.loads(call("score", model, "--ids", ids, "--per-token").stdout)
    assert by_text["sequences"] == by_ids["sequences"]
    assert by_text["tokens"] == 4


def test_a_compressed_text_is_scored_and_continued_as_the_text_it_is(model, tmp_path):
    text = "a text of some bytes, again and again, " * 4
    plain, packed = tmp_path / "text", tmp_path / "packed"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    byte = ["--tokenizer", "bytes"]
    assert call("score", model, "--text", packed, *byte).stdout == call("score", model, "--text", plain, *byte).stdout
    written = [
        call("generate", model, "--prompt-file", path, *byte, "--greedy", "--max-tokens", 4, "--print-ids").stdout
        for path in (plain, packed)
    ]
    assert written[0] == written[1] != ""
    packed.write_bytes(gzip.compress(text.encode())[:-9])
    assert "compressed text" in call("score", model, "--text", packed, *byte).stderr


def test_a_slash_behind_a_new_folder_changes_nothing(model, tmp_path):
    (tmp_path / "there").mkdir()
    for command in (["export"], ["convert", "--pattern", "*-GKA"]):
        out = tmp_path / command[0]
        done = call(*command, model, "--out", f"{out}/")
        assert done.returncode == 0, done.stderr
        assert (out / "model.safetensors").exists()
        assert "which is there already" in told_last(call(*command, model, "--out", f"{tmp_path}/there/"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["convert", "export", "there"]


def test_output_that_cannot_be_written_is_a_failure(model, tmp_path):
    ids = write_ids(tmp_path / "ids.txt", [[1, 2, 3], [4]])
    for words in [["score"], ["generate", "--print-ids", "--max-tokens", "20"]]:
        with open("/dev/full", "w") as full:
            command = [PROGRAM, words[0], model, *words[1:], "--ids", ids]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1
        assert "gka: the output could not be written" in done.stderr.splitlines()[-1]


def test_another_tokenizer_than_the_models_own_is_refused(model, tmp_path):
    own = tmp_path / "model"
    shutil.copytree(model, own)
    text = tmp_path / "text.txt"
    text.write_text("some words of a text " * 9)
    for name, size in [("a.json", 270), ("b.json", 265)]:
        call("tokenizer", "train", text, "--vocab-size", size, "--out", tmp_path / name)
    shutil.copy(tmp_path / "a.json", own / "tokenizer.json")
    said = f"is of another tokenizer than the one the model {own} keeps in its folder (byte-level BPE"
    call("tokenize", text, "--out", tmp_path / "bytes")
    for words in [
        ["score", own, "--text", text, "--tokenizer", "bytes"],
        ["score", own, "--text", text, "--tokenizer", tmp_path / "b.json"],
        ["score", own, "--tokens", tmp_path / "bytes.tokens"],
        ["generate", own, "--prompt", "x", "--tokenizer", "bytes"],
        ["serve", own, "--tokenizer", "bytes", "--port", "0"],
    ]:
        done = call(*words)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr.splitlines()[-1]
    # The same one in another place is the same, and a model without one takes what it is given.
    call("tokenizer", "train", text, "--vocab-size", 257, "--out", own / "tokenizer.json")
    shutil.copy(own / "tokenizer.json", tmp_path / "c.json")
    assert call("score", own, "--text", text, "--tokenizer", tmp_path / "c.json").returncode == 0


def test_a_sequence_of_one_token_has_nothing_to_predict(model, tmp_path):
    result = json.loads(call("score", model, "--ids", write_ids(tmp_path / "ids.txt", [[7]]), "--per-token").stdout)
    assert result["sequences"] == [{"tokens": 1, "log_probability": 0.0, "perplexity": None, "log_probabilities": []}]


def test_a_prompt_is_continued_as_text_or_as_numbers(model):
    arguments = ["generate", model, "--prompt", "abc", "--tokenizer", "bytes", "--max-tokens", 12, "--seed", 5]
    numbers = [int(word) for word in call(*arguments, "--print-ids").stdout.split()]
    assert len(numbers) == 12
    shown = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True).stdout.decode()
    assert shown == bytes(number for number in numbers if number < 256).decode(errors="replace") + "\n"
    echoed = subprocess.run([PROGRAM, *map(str, arguments), "--echo"], capture_output=True).stdout.decode()
    assert echoed == "abc" + shown


def test_a_seed_repeats_and_sampling_obeys_its_options(model, tmp_path):
    ids = write_ids(tmp_path / "ids.txt", [[1, 2, 3]])

    def numbers(*options):
        return call("generate", model, "--ids", ids, "--max-tokens", 10, "--print-ids", *options).stdout

    assert numbers("--seed", 1) == numbers("--seed", 1)
    assert numbers("--seed", 1) != numbers("--seed", 2)
    assert numbers("--top-p", 1e-9) == numbers("--greedy")
    assert numbers("--top-k", 1) == numbers("--min-p", 1) == numbers("--greedy")
    assert numbers("--temperature", 1e-6) == numbers("--greedy")


def test_a_summary_is_the_sum_of_its_tokens(model, tmp_path):
    ids = write_ids(tmp_path / "ids.txt", [range(100), [3, 1, 4]])
    short, full = (json.loads(call("score", model, "--ids", ids, *more).stdout) for more in [[], ["--per-token"]])
    assert short["sequences"] == 2
    assert {key: full[key] for key in full if key != "sequences"} == {
        key: short[key] for key in short if key != "sequences"
    }


def test_windows_score_each_token_once_and_see_what_they_overlap(model, tmp_path):
    tokens = [(7 * i) % 251 for i in range(20)]
    ids = write_ids(tmp_path / "ids.txt", [tokens])

    def scores(*options):
        done = call("score", model, "--ids", ids, "--per-token", *options)
        return json.loads(done.stdout)["sequences"][0]["log_probabilities"]

    pieces = [tokens[:8], tokens[8:16], tokens[16:]]
    alone = json.loads(call("score", model, "--ids", write_ids(tmp_path / "pieces.txt", pieces), "--per-token").stdout)
    assert scores("--window", 8) == [value for piece in alone["sequences"] for value in piece["log_probabilities"]]
    assert len(scores("--window", 8, "--overlap", 4)) == 19
    assert scores("--window", 20, "--overlap", 4) == scores()


def test_what_is_read_is_not_written_over(model, tmp_path):
    ids = write_ids(tmp_path / "ids.txt", [[1, 2, 3]])
    (tmp_path / "link.txt").symlink_to(ids)
    for out in (ids, tmp_path / "link.txt"):
        done = call("score", model, "--ids", ids, "--logits", out)
        assert done.returncode == 1
        assert f"--logits is {out}, which is read and would be written over" in done.stderr
    text = tmp_path / "text.tokens"
    text.write_text("the cat and the cat " * 9)
    for arguments in (["tokenizer", "train", text, "--out", text], ["tokenize", text, "--out", tmp_path / "text"]):
        assert f"--out is {text}, which is read and would be written over" in told(call(*arguments))
    assert (ids.read_text(), text.read_text()[:8]) == ("1 2 3\n", "the cat ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", 1], "--window is 1, and the first token of a window is not scored; it takes 2 or more"),
        (["--window", 10**20], "--window: takes at most 2^53, and got 100000000000000000000"),
    ],
)
def test_a_window_that_cannot_be_is_named(model, tmp_path, arguments, message):
    done = call("score", model, "--ids", write_ids(tmp_path / "ids.txt", [[1, 2, 3]]), *arguments)
    assert done.returncode != 0
    assert message in done.stderr


def test_caches_of_bytes_leave_a_trained_models_perplexity_where_it_was(tmp_path):
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "text.txt").write_text((root / "LICENSE").read_text()[:5000])

    def perplexity(*options):
        model = root / "experiments" / "hybrid" / "recall-8m"
        done = call("score", model, "--text", tmp_path / "text.txt", "--device", "cpu", *options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["perplexity"]

    plain, rounded = perplexity(), perplexity("--kv-cache-dtype", "int8")
    assert rounded == pytest.approx(plain, rel=0.005)
    assert rounded != plain
    assert perplexity("--kv-cache-dtype", "auto") == plain


def test_a_token_file_is_scored_document_by_document(model, tmp_path):
    (tmp_path / "text.txt").write_text("one\n")
    done = call("tokenize", tmp_path / "text.txt", "--tokenizer", "bytes", "--out", tmp_path / "text")
    assert done.returncode == 0, done.stderr
    by_file = json.loads(call("score", model, "--tokens", tmp_path / "text.tokens", "--per-token").stdout)
    ids = write_ids(tmp_path / "ids.txt", [[*b"one\n", 256][: by_file["tokens"]]])
    by_ids = json.loads(call("score", model, "--ids", ids, "--per-token").stdout)
    assert by_file["sequences"] == by_ids["sequences"]


def test_a_stop_text_ends_the_answer_and_is_not_shown(model, tmp_path):
    arguments = [PROGRAM, "generate", model, "--prompt-file", "-", "--tokenizer", "bytes", "--seed", "5"]

    def text(*options):
        return subprocess.run([*map(str, arguments), *options], input=b"abc", capture_output=True).stdout[:-1]

    whole = text("--max-tokens", "40")
    stop = whole.decode(errors="replace")[5:7]
    assert text("--max-tokens", "40", "--stop", stop) == whole[: whole.find(stop.encode())]
    assert (
        whole
        == subprocess.run(
            [*map(str, arguments[:3]), "--prompt", "abc", *arguments[5:], "--max-tokens", "40"], capture_output=True
        ).stdout[:-1]
    )


def test_an_end_token_ends_the_text(model, tmp_path):
    ids = write_ids(tmp_path / "ids.txt", [[1, 2, 3]])
    arguments = ["--ids", ids, "--max-tokens", 10, "--print-ids", "--greedy"]
    numbers = call("generate", model, *arguments).stdout.split()
    ended = tmp_path / "model"
    ended.mkdir()
    config = json.loads((model / "config.json").read_text()) | {"eos_token_id": int(numbers[0])}
    (ended / "config.json").write_text(json.dumps(config))
    (ended / "model.safetensors").symlink_to(model / "model.safetensors")
    assert call("generate", ended, *arguments).stdout.split() == numbers[:1]


def test_a_run_stands_for_its_newest_checkpoint(model, tmp_path):
    (tmp_path / "latest").symlink_to(model)
    arguments = ["--ids", write_ids(tmp_path / "ids.txt", [[1, 2, 3]]), "--max-tokens", 5, "--greedy", "--print-ids"]
    assert call("generate", tmp_path, *arguments).stdout == call("generate", model, *arguments).stdout != ""


def test_an_unknown_key_of_a_checkpoint_is_one_line_of_warning(model, tmp_path):
    done = call("score", model, "--ids", write_ids(tmp_path / "ids.txt", [[1, 2]]))
    assert done.returncode == 0
    assert sum("a_key_of_tomorrow" in line for line in done.stderr.splitlines()) == 1


def test_other_types_are_taken(model, tmp_path):
    ids = write_ids(tmp_path / "ids.txt", [[1, 2, 3, 4]])
    single, double = (
        json.loads(call("score", model, "--ids", ids, "--dtype", dtype).stdout)["log_probability"]
        for dtype in ["float32", "float64"]
    )
    assert single == pytest.approx(double, rel=1e-4)
    assert single != double


def test_what_goes_wrong_is_said_in_a_sentence(model, tmp_path):
    ids = write_ids(tmp_path / "ids.txt", [[1, 2], [3]])
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "there is no model 'nowhere': it is a checkpoint's folder or a training run" in told(
        call("score", "nowhere", "--ids", ids)
    )
    assert "is not a checkpoint" in told(call("generate", folder, "--ids", ids, "--max-tokens", 1))
    assert "there is no 'no where'; SOURCE is a model's folder" in told(
        call("export", "no where", "--out", folder / "x")
    )
    cannot = f"cannot make the folder '{ids}': Not a directory"
    assert "--out is empty" in told(call("export", GOLDENS / CHECKPOINTS[0], "--out", ""))
    assert cannot in told(call("export", GOLDENS / CHECKPOINTS[0], "--out", ids / "x"))

    def complaint(path):
        done = call("score", model, "--ids", path)
        warning, sentence = done.stderr.splitlines()
        assert "a_key_of_tomorrow" in warning
        assert (done.returncode, done.stdout) == (1, "")
        return sentence

    assert "cannot open nowhere.txt: No such file" in complaint("nowhere.txt")
    assert "has no token numbers in it" in complaint(empty)
    assert "token 257 of line 2" in complaint(write_ids(tmp_path / "large.txt", [[1], [2, 257]]))
    assert "token -1 of line 1" in complaint(write_ids(tmp_path / "small.txt", [[-1]]))
    assert "'x' of line 1" in complaint(write_ids(tmp_path / "word.txt", [["x"]]))
    assert "line 2 of" in complaint(write_ids(tmp_path / "gap.txt", [[1], [], [2]]))
    assert "--device takes cpu, cuda or cuda:N, and got 'abacus'" in told(
        call("score", model, "--ids", ids, "--device", "abacus")
    )
    assert "--dtype takes one of float64, float32" in told(call("score", model, "--ids", ids, "--dtype", "int8"))


def test_a_model_without_a_tokenizer_says_what_to_do(model):
    done = call("generate", model, "--prompt", "a", "--max-tokens", 1)
    assert done.returncode == 1
    assert "name one with --tokenizer ('bytes' for a model of bytes), or give token numbers with --ids" in done.stderr
    done = call("generate", model, "--prompt", "", "--max-tokens", 1, "--tokenizer", "bytes")
    assert "the prompt is empty" in done.stderr


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("score", [], "[--text,--ids,--tokens] is required"),
        ("score", ["--ids", "a", "--text", "b"], "[--text,--ids,--tokens] is required"),
        ("score", ["--ids", "a", "--overlap", "3"], "--window"),
        ("generate", ["--ids", "a", "--max-tokens", "-1"], "--max-tokens"),
        ("generate", ["--ids", "a", "--iterations", "many"], "takes a number or auto"),
        ("generate", ["--ids", "a", "--max-tokens", "1", "--greedy", "--seed", "1"], "--greedy"),
    ],
)
def test_options_that_do_not_go_together_are_refused(model, command, arguments, words):
    done = call(command, model, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
