"""gka bench: what it prints and what it says when something does not fit. Speed itself is no property to test."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = os.environ.get("GKA_PROGRAM") or Path(sys.executable).parent / "gka"
TINY = Path(__file__).parents[2] / "configs" / "tiny"


def call(*arguments):
    return subprocess.run([PROGRAM, "bench", *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_models_are_measured_at_every_length_beside_the_attention_model():
    lengths = ["--lengths", "16,32", "--batch-tokens", "64", "--steps", "1"]
    done = call("train", TINY / "gka.train.json", *lengths, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    measured = [(row["config"], row["length"], row["sequences"]) for row in told["rows"]]
    assert measured == [
        ("tiny/gka", 16, 4),
        ("tiny/attention", 16, 4),
        ("tiny/gka", 32, 2),
        ("tiny/attention", 32, 2),
    ]
    for row in told["rows"]:
        assert row["tokens_per_second"] == pytest.approx(64 / row["seconds_per_step"])
        used = row["tokens_per_second"] * row["flops_per_token"] / told["matrix_product_flops"]
        assert row["utilisation"] == pytest.approx(used)
        assert ("ratio" in row) == (row["config"] == "tiny/gka")
    assert "tiny/gka, T = 16" in done.stderr


def test_rows_come_one_by_one_each_with_what_they_have_in_common():
    shape = ["--lengths", "16,32", "--device", "cpu", "--json-lines"]
    done = call("train", TINY / "gka.json", *shape, "--batch-tokens", "64", "--steps", "1", "--attention", "flash")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["config"], row["length"], row["batch_tokens"]) for row in rows] == [
        ("tiny/gka", 16, 64),
        ("tiny/attention", 16, 64),
        ("tiny/gka", 32, 64),
        ("tiny/attention", 32, 64),
    ]
    assert all(row["tokens_per_second"] == pytest.approx(64 / row["seconds_per_step"]) for row in rows)
    layer = ["--layers", "*,GKA", "--batch", 1, "--heads", 1, "--head-dim", 16, "--repetitions", 1]
    rows = [json.loads(line) for line in call("layer", *layer, *shape).stdout.splitlines()]
    assert [(row["layer"], row["length"], row["head_dim"]) for row in rows] == [
        ("*", 16, 16),
        ("GKA", 16, 16),
        ("*", 32, 16),
        ("GKA", 32, 16),
    ]
    assert call("layer", *layer, *shape, "--json").returncode != 0, "one of the two"


def test_models_learn_from_text_before_they_are_timed_on_it(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be " * 200)
    subprocess.run([PROGRAM, "tokenize", tmp_path / "a.txt", "--out", tmp_path / "a"], check=True, capture_output=True)
    lengths = ["--lengths", "16,32", "--batch-tokens", "64", "--steps", "1", "--device", "cpu", "--json"]
    losses = []
    for after in (0, 60):
        done = call("train", TINY / "gka.json", *lengths, "--text", tmp_path / "a.tokens", "--after", after)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["text"], told["after"]) == (["a.tokens"], after)
        losses.append([row["loss"] for row in told["rows"]])
    assert all(learned < 0.6 * fresh for fresh, learned in zip(*losses, strict=True)), losses


def test_the_flops_of_attention_grow_with_the_length_and_those_of_a_memory_do_not():
    arguments = ["--lengths", "16,32", "--steps", "1", "--device", "cpu", "--json"]
    rows = json.loads(call("train", TINY / "gka.json", *arguments).stdout)["rows"]
    gka, attention = (
        [row["flops_per_token"] for row in rows if row["config"] == f"tiny/{name}"] for name in ["gka", "attention"]
    )
    assert gka[0] == gka[1]
    # Two blocks of 64 channels see 8 more tokens on average: q with k and the answer with v, forward and backward.
    assert attention[1] - attention[0] == 2 * 64 * 8 * (2 * 2) * 3


def test_layers_are_measured_against_the_length():
    shape = ["--batch", 1, "--heads", 1, "--head-dim", 16, "--repetitions", 1]
    done = call("layer", "--layers", "*,GKA", "--lengths", "16,32", *shape, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "Gated KalmaNet, ms" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["16", "32"]


def test_a_layer_that_takes_long_is_not_silent():
    shape = ["--layers", "GKA", "--batch", "1", "--heads", "1", "--head-dim", "16", "--repetitions", "1000000"]
    command = [PROGRAM, "bench", "layer", *shape, "--lengths", "16,32", "--device", "cpu"]
    terminal, stderr = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process:
        os.close(stderr)  # so that its end is an error of the read below
        assert process.stdout.readline().split() == [b"T", b"Gated", b"KalmaNet,", b"ms"]
        said = b""
        while b" of 1000000" not in said:
            said += os.read(terminal, 1000)
        process.kill()
    assert b"T = 16: Gated KalmaNet, " in said
    os.close(terminal)


def test_a_length_is_told_when_it_is_measured():
    shape = ["--layers", "GKA", "--batch", "1", "--heads", "1", "--head-dim", "16", "--repetitions", "5"]
    command = [PROGRAM, "bench", "layer", *shape, "--lengths", "16,512k", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        rows = [process.stdout.readline().split()[0] for _ in range(2)]
        still_running = process.poll() is None
        process.kill()
    assert rows == [b"T", b"16"]
    assert still_running


def test_decoding_reading_and_http_are_measured_beside_what_the_machine_allows():
    arguments = ["--batches", "1,2", "--contexts", "32,130", "--prefill", "70", "--http", "2", "--tokens", "4"]
    done = call("serve", TINY / "attention.json", *arguments, "--device", "cpu", "--weights", "int8", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(row["what"], row["sequences"], row["context"]) for row in told["rows"]] == [
        ("decode", 1, 32),
        ("decode", 2, 32),
        ("decode", 1, 130),
        ("decode", 2, 130),
        ("prefill", 1, 70),
        ("engine", 2, 32),
        ("http", 2, 32),
    ]
    assert told["weights"] == "int8"
    for row in told["rows"][:4]:
        seconds = row["milliseconds"] / 1e3
        assert row["tokens_per_second"] == pytest.approx(row["sequences"] / seconds)
        assert row["of_copy"] == pytest.approx(row["bytes"] / seconds / told["copy_bytes_per_second"])
    # Two blocks with a cache of 4 bytes for each of 64 keys and 64 values of a token.
    assert told["rows"][2]["bytes"] - told["rows"][0]["bytes"] == 2 * (130 - 32) * (64 + 64) * 4


def test_caches_of_bytes_and_one_by_one_are_measured_too():
    arguments = [
        "--batches",
        "2",
        "--contexts",
        "64,128",
        "--prefill",
        "70",
        "--tokens",
        "2",
        "--device",
        "cpu",
        "--json",
    ]
    done = call("serve", TINY / "attention.json", *arguments, "--kv-cache-dtype", "int8", "--deterministic")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["kv_cache_dtype"], told["deterministic"]) == ("int8", True)
    heads = json.loads((TINY / "attention.json").read_text())["num_key_value_heads"]
    # Two blocks with a byte for each of 64 keys and 64 values of a token, and 4 for the scale of each head.
    assert told["rows"][1]["bytes"] - told["rows"][0]["bytes"] == 2 * 2 * 64 * 2 * (64 + 4 * heads)


def test_output_that_cannot_be_written_is_a_failure():
    shape = ["--layers", "*", "--lengths", "16", "--batch", "1", "--heads", "1", "--head-dim", "16"]
    with open("/dev/full", "w") as full:
        command = [PROGRAM, "bench", "layer", *shape, "--repetitions", "1", "--device", "cpu"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert "gka: the output could not be written" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "nowhere.json"], "no configuration 'nowhere.json'"),
        (["train", TINY / "gka.json", "--lengths", "16,x"], "'x'"),
        (["train", TINY / "gka.json", "--lengths", "16,24"], "a multiple of every length"),
        (["train", TINY / "gka.json", "--device", "cuda:99"], "cuda:99"),
        (["train", TINY / "gka.json", "--after", "5"], "no --text to learn from"),
        (["serve", TINY / "gka.json", "--contexts", "1x"], "--contexts got '1x'"),
        (["serve", TINY / "gka.json", "--http", "1x"], "--http got '1x'"),
        (["layer", "--layers", "GKB"], "no mixer 'GKB'"),
        (["layer", "--lengths", "9007199254740993k"], "'9007199254740993k'"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_sentence(arguments, part):
    done = call(*arguments)
    assert done.returncode == 1
    assert part in done.stderr
    assert done.stderr.count("\n") == 1
