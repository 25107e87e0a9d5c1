"""Training learns, a second stage starts from a first one, and runs can be listed and plotted."""

import array
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from training import PROGRAM, only_sentence

ROOT = Path(__file__).parents[2]


def mean_loss(lines):
    return sum(line["loss"] for line in lines) / len(lines)


def test_two_gka_layers_learn_to_recall(gka):
    gka.write(steps=150, batch_tokens=1024, accumulation=1, eval_every=150, eval_batches=8)
    gka.train("small.json", "--set", "model.vocab_size=32", "--set", "data.vocab_size=32")
    lines = gka.metrics("runs/small")
    assert lines[0]["loss"] == pytest.approx(math.log(32), rel=0.05)
    assert mean_loss(lines[-10:]) < 0.5 * mean_loss(lines[:10])
    assert lines[-1]["eval_accuracy"] > 0.6  # by chance: 1 of 16 values


def test_a_run_ends_early_once_it_is_accurate_enough(gka):
    gka.train(gka.write(stop_accuracy=0, eval_every=5))
    assert [line["step"] for line in gka.metrics("runs/small")][-1] == 5
    assert "finished after step 5" in gka.train("runs/small", "--resume").stderr


def test_metrics_hold_everything_per_step(whole):
    lines = whole.metrics("runs/small")
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert [line["tokens"] for line in lines] == [256 * step for step in range(1, 25)]
    for line in lines:
        assert set(line) >= {"loss", "learning_rate", "gradient_norm", "tokens_per_second", "memory_bytes", "seconds"}
    assert [line["step"] for line in lines if "eval_loss" in line] == [10, 20, 24]
    assert all(0 <= line["eval_accuracy"] <= 1 for line in lines if "eval_loss" in line)


def test_lines_are_plain_where_there_is_no_terminal(gka):
    done = gka.train(gka.write(steps=4, log_every=2, eval_every=0))
    steps = [line for line in done.stderr.splitlines() if line.startswith("step")]
    assert len(steps) == 2
    pattern = r"step 2/4  loss [\d.]+  lr [\d.e-]+  \|g\| [\d.]+  [\d.]+k? tok/s  [\d.]+ [MG]B  \d+s left"
    assert re.fullmatch(pattern, steps[0])
    assert "\x1b" not in done.stderr


def test_a_second_stage_starts_from_the_weights_of_the_first(gka, whole):
    first = whole.folder / "runs/small"
    gka.write(learning_rate=0, steps=1, length=32, batch_tokens=256, eval_every=0)
    gka.train("small.json", "--from", first, "--set", "data.sizes.0.tokens=32")
    assert gka.weights("runs/small") == whole.weights("runs/small")
    assert len(gka.metrics("runs/small")) == 1


def test_a_second_stage_can_be_resumed_like_any_run(gka, whole):
    arguments = ["small.json", "--from", whole.folder / "runs/small", "--set", "steps=10"]
    gka.write()
    gka.train(*arguments, "--set", "output=a")
    for fault in ["step@3", "step@9"]:
        gka.call("train", *arguments, "--set", f"output={fault}", GKA_TEST_FAULT=fault)
        gka.train(fault, "--resume")
        assert gka.weights(fault) == gka.weights("a")


def test_a_checkpoint_is_a_model(whole, tmp_path):
    (tmp_path / "ids.txt").write_text("1 2 3 4 5 6 7 8\n")
    done = whole.call("score", "runs/small/latest", "--ids", tmp_path / "ids.txt")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_runs_are_listed(whole):
    done = whole.call("runs")
    head, line = done.stdout.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "eval", "loss", "accuracy", "time"]
    assert line.split()[:3] == ["runs/small", "finished", "24/24"]
    loss = whole.metrics("runs/small")[-1]["loss"]
    (told,) = json.loads(whole.call("runs", "--json").stdout)
    assert (told["loss"], told["step"], told["state"]) == (loss, 24, "finished")


def checksum(data):
    """CRC-32C bit by bit, masked as TensorFlow's records have it."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    while data:
        length, of_length = struct.unpack("<QI", data[:12])
        content, (of_content,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        assert (of_length, of_content) == (checksum(data[:8]), checksum(content))
        yield content
        data = data[16 + length :]


def fields(message):
    """(number, value) of a protocol buffer."""
    while message:
        tag, message = message[0], message[1:]
        if tag & 7 in (1, 5):
            size = 8 if tag & 7 == 1 else 4
            yield tag >> 3, struct.unpack("<d" if size == 8 else "<f", message[:size])[0]
        else:
            size = value = shift = 0
            while True:
                value, shift, size = value | (message[size] & 127) << shift, shift + 7, size + 1
                if message[size - 1] < 128:
                    break
            if tag & 7 == 2:
                message, size = message[size:], value
                value = message[:size]
            yield tag >> 3, value
        message = message[size:]


def test_tensorboard_gets_every_number_of_the_metrics(whole):
    (path,) = (whole.folder / "runs/small").glob("*tfevents*")
    first, *events = (dict(fields(content)) for content in records(path.read_bytes()))
    assert first[3] == b"brain.Event:2"
    told = []
    for event in events:
        values = [dict(fields(value)) for number, value in fields(event[5]) if number == 1]
        told.append({value[1].decode(): value[2] for value in values} | {"step": event[2]})
    assert told == [
        {
            name: value if name == "step" else struct.unpack("<f", struct.pack("<f", value))[0]
            for name, value in line.items()
        }
        for line in whole.metrics("runs/small")
    ]
    times = [event[1] for event in events]
    assert times == sorted(times)


def test_curves_are_drawn(whole):
    pytest.importorskip("matplotlib")
    done = whole.call("plot", "runs/small", "-o", "curves.png", "--x", "tokens", "--y", "loss,accuracy,gradient_norm")
    assert done.returncode == 0, done.stderr
    assert (whole.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout == "curves.png: loss, accuracy, gradient norm of 1 run, up to step 24\n"
    done = whole.call("plot", "runs/small", "-o", "without")
    assert done.stdout == "without.png: loss, accuracy of 1 run, up to step 24\n", done.stderr
    assert (whole.folder / "without.png").exists()


def test_a_full_disk_keeps_the_picture_that_was_there(whole):
    pytest.importorskip("matplotlib")
    (whole.folder / "kept.png").write_text("older")
    before = sorted(whole.folder.iterdir())
    done = whole.call("plot", "runs/small", "-o", "kept.png", limit=1)
    assert done.returncode == 1
    assert done.stderr == "gka plot: cannot write 'kept.png': File too large\n"
    assert (whole.folder / "kept.png").read_text() == "older"
    assert sorted(whole.folder.iterdir()) == before


def test_a_place_that_takes_no_picture_is_named(whole):
    pytest.importorskip("matplotlib")
    done = whole.call("plot", "runs/small", "-o", "x" * 250 + ".png")
    assert done.returncode == 1
    assert re.fullmatch("gka plot: cannot write 'x{250}.png': File name too long\n", done.stderr)


def test_a_run_may_have_any_name(whole, tmp_path):
    pytest.importorskip("matplotlib")
    names = ["_first", "$5_$6", os.fsdecode(b"caf\xe9")]
    for name in names:
        shutil.copytree(whole.folder / "runs/small", tmp_path / name, symlinks=True)
    paths = [str(tmp_path / name) for name in names]
    done = whole.call("plot", *paths, "-o", str(tmp_path / os.fsdecode(b"\xe9.svg")), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    picture = (tmp_path / os.fsdecode(b"\xe9.svg")).read_text()
    assert all(f"<!-- {label} -->" in picture for label in (" _first", "$5_$6", "caf?"))


def test_six_panels_stand_in_two_rows_with_bytes_in_their_unit(whole):
    pytest.importorskip("matplotlib")
    panels = "loss,accuracy,learning_rate,gradient_norm,tokens_per_second,memory"
    assert whole.call("plot", "runs/small", "-o", "six.svg", "--y", panels).returncode == 0
    picture = (whole.folder / "six.svg").read_text()
    across, down = (float(word) for word in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture).groups())
    assert 1.5 < across / down < 3
    assert re.search(r"<!-- \d+(\.\d+)? MB -->", picture)
    assert "<!-- accuracy (exact match) -->" in picture


def test_the_accuracy_of_a_text_is_that_of_single_tokens(whole, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "train.json").write_text(json.dumps({"data": {"kind": "tokens", "files": []}, "eval_data": None}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "eval_accuracy": 0.5}\n')
    assert whole.call("plot", str(tmp_path), "-o", "text.svg").returncode == 0
    assert "<!-- accuracy (next token) -->" in (whole.folder / "text.svg").read_text()


def test_a_plot_of_nothing_says_so(whole):
    pytest.importorskip("matplotlib")
    done = whole.call("plot", "nowhere", "-o", "curves.png")
    assert done.returncode == 1
    assert "'nowhere' holds no run" in done.stderr
    done = whole.call("plot", "runs/small", "-o", ".")
    assert done.stderr == "gka plot: '.' is a folder; --output takes the name of a picture, such as curves.png.\n"


def test_the_documentation_has_every_key(gka):
    table = gka.call("train", "--keys").stdout
    assert table.count("\n") > 20
    assert table in (ROOT / "docs/training.md").read_text()


def test_a_list_of_runs_comes_from_standard_input(gka, whole):
    gka.write(output="a")
    gka.write("wrong.json", output="b", steps=0)
    gka.write("far.json", output="c", learning_rate=1e30, clip=0, warmup=0, weight_decay=0)
    (gka.folder / "list").write_text("small.json\nwrong.json\nfar.json\n")
    done = subprocess.run(
        f"{PROGRAM} train - < list",
        shell=True,
        cwd=gka.folder,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    first, second, third = done.stdout.splitlines()
    assert first == "finished small.json"
    assert second.startswith("failed wrong.json: ")
    assert third.startswith("diverged far.json: the loss is ")
    assert [told["state"] for told in json.loads(gka.call("runs", "c", "--json").stdout)] == ["failed"]
    assert done.returncode == 1
    assert gka.weights("a") == whole.weights("runs/small")  # as alone in its process


def test_a_checkpoint_takes_the_tokenizer_along(gka):
    (gka.folder / "text.txt").write_text("the cat sat on the mat and the dog sat on the cat " * 40)
    made = gka.call("tokenizer", "train", "text.txt", "--vocab-size", 280, "--out", "tok.json")
    assert made.returncode == 0, made.stderr
    made = gka.call("tokenize", "text.txt", "--tokenizer", "tok.json", "--out", "text")
    assert made.returncode == 0, made.stderr
    gka.write(data={"kind": "tokens", "files": ["text.tokens"]}, steps=1, eval_every=0)
    gka.train("small.json", "--set", "model.vocab_size=300")
    said = gka.call("generate", "runs/small", "--prompt", "the cat", "--max-tokens", 3, "--greedy")
    assert said.returncode == 0, said.stderr


def test_evaluation_without_anything_to_evaluate_on_says_what_to_set(gka):
    (gka.folder / "text.txt").write_text("the cat sat on the mat " * 40)
    gka.call("tokenize", "text.txt", "--out", "text")
    gka.write(data={"kind": "tokens", "files": ["text.tokens"]})
    sentence = only_sentence(gka.call("train", "small.json", "--set", "model.vocab_size=257"))
    for key in ["data.eval_fraction", "eval_data", "eval_every=0"]:
        assert key in sentence


def test_a_mixture_trains_on_files_beside_the_training_file_and_goes_on_as_if_never_stopped(gka):
    """Every fourth batch is a task's; the tokenizer is that of its text."""
    (gka.folder / "there").mkdir()
    (gka.folder / "there" / "text.txt").write_text("the cat sat on the mat and the dog sat on the cat " * 40)
    made = gka.call("tokenize", "there/text.txt", "--out", "there/text")
    assert made.returncode == 0, made.stderr
    task = {"kind": "task", "task": "mqar", "vocab_size": 64, "tokens": 8, "pairs": 2}
    text = {"kind": "tokens", "files": ["text.tokens"], "eval_fraction": 0.3, "packed": True, "weight": 3}
    mixture = {"kind": "mixture", "sources": [text, task]}
    gka.write("there/mixed.json", data=mixture, steps=8, eval_every=4, checkpoint_every=4)
    gka.train("there/mixed.json", "--set", "model.vocab_size=257")
    tokens = [line["tokens"] for line in gka.metrics("runs/mixed")]
    steps = {after - before for before, after in zip([0, *tokens], tokens, strict=False)}
    assert steps > {256}, "batches of the task are shorter, and some parts of a step are"
    done = gka.call("train", "there/mixed.json", "--set", "model.vocab_size=257", "--set", "output=again",
                    GKA_TEST_FAULT="step@6")  # fmt: skip
    assert done.returncode != 0
    gka.train("again", "--resume")
    assert gka.weights("again") == gka.weights("runs/mixed")
    said = gka.call("generate", "runs/mixed", "--prompt", "the cat", "--max-tokens", 3, "--greedy")
    assert said.returncode == 0, said.stderr


def silence(file):
    """Layers and MLPs add nothing any more, and embedding and head are always the same: the loss tells batches apart,
    and not layers."""
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, tensor in json.loads(raw[8:start]).items():
        first, end = (start + place for place in tensor.get("data_offsets", (0, 0)))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            raw[first:end] = bytes(end - first)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            draw = random.Random(name)
            raw[first:end] = array.array("f", (draw.gauss(0, 0.1) for _ in range((end - first) // 4))).tobytes()
    file.write_bytes(raw)


def test_models_of_other_layers_see_the_same_batches_in_the_same_order(gka):
    """Text by weight and packed, mixed with a task."""
    for name, text in (("a", "the cat sat on the mat and the dog on the cat. "), ("b", "One, two, three and four. ")):
        (gka.folder / f"{name}.txt").write_text(text * 60)
        assert gka.call("tokenize", f"{name}.txt", "--out", name).returncode == 0
    files = [{"path": "a.tokens", "weight": 3}, {"path": "b.tokens", "weight": 1}]
    task = {"kind": "task", "task": "mqar", "vocab_size": 64, "tokens": 16, "pairs": 2}
    mixture = {"kind": "mixture", "sources": [{"kind": "tokens", "files": files, "packed": True, "weight": 3}, task]}
    gka.write(data=mixture, learning_rate=0, steps=8, eval_every=0, checkpoint_every=0)
    common = ["small.json", "--set", "model.vocab_size=257"]

    def losses(layer, seed):
        words = [*common, "--set", f"model.hybrid_override_pattern={layer}-{layer}", "--set", f"seed={seed}"]
        gka.train(*words, "--set", "steps=1", "--set", f"output=drawn-{layer}-{seed}")
        first = gka.folder / f"first-{layer}-{seed}"
        shutil.copytree(gka.folder / f"drawn-{layer}-{seed}" / "latest", first, dirs_exist_ok=True)
        for file in ("optimizer.safetensors", "trainer.json", "CHECKSUMS.xxh64"):
            (first / file).unlink()
        silence(first / "model.safetensors")
        gka.train(*words, "--from", first, "--set", f"output=run-{layer}-{seed}")
        return [line["loss"] for line in gka.metrics(f"run-{layer}-{seed}")]

    wanted = losses("GKA", 0)
    assert len(set(wanted)) == 8, "batches differ"
    assert losses("GDN", 0) == pytest.approx(wanted, rel=1e-6)
    assert losses("*", 0) == pytest.approx(wanted, rel=1e-6)
    assert losses("*", 1) != pytest.approx(wanted, rel=1e-3), "another seed draws others"
