"""What a run finds in its folder, its files and its settings: used, mended, or refused in one sentence."""

import json
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import gka_command
import pytest
from training import SETTINGS, Gka, only_sentence


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of the run that was never interrupted: 24 steps, checkpoints of 16 and 24."""
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True, symlinks=True)
    return Gka(tmp_path)


def test_latest_and_keep_are_mended_after_a_kill_in_the_last_save(finished):
    run = finished.folder / "runs/small"
    shutil.copytree(run / "checkpoints/step-000000016", run / "checkpoints/step-000000008")
    (run / "latest").unlink()
    (run / "latest").symlink_to("checkpoints/step-000000016")
    finished.train("runs/small", "--resume")
    assert (run / "latest").readlink().name == "step-000000024"
    assert finished.checkpoints("runs/small") == ["step-000000016", "step-000000024"]


def test_checkpoints_without_their_train_json_are_left_alone(finished):
    (finished.folder / "runs/small/train.json").unlink()
    before = finished.weights("runs/small")
    assert "holds checkpoints of a run that has lost its train.json" in only_sentence(
        finished.call("train", "small.json")
    )
    assert finished.weights("runs/small") == before


def test_a_run_goes_on_for_more_steps(finished):
    finished.train("runs/small", "--resume", "--set", "steps=26")
    assert [line["step"] for line in finished.metrics("runs/small")] == list(range(1, 27))
    assert json.loads((finished.folder / "runs/small/train.json").read_text())["steps"] == 26
    assert "has taken 26 steps already" in only_sentence(
        finished.call("train", "runs/small", "--resume", "--set", "steps=25")
    )


def test_models_are_checked_whenever_they_are_loaded(finished):
    latest = finished.folder / "runs/small/latest"
    ask = ["score", latest, "--ids", "ids"]
    (finished.folder / "ids").write_text("1 2 3\n")
    assert finished.call(*ask).returncode == 0

    sums = (latest / "CHECKSUMS.xxh64").read_text()
    for text in ["", sums.split("\n")[0], sums.split("\n")[0] + "\n"]:
        (latest / "CHECKSUMS.xxh64").write_text(text)
        assert "is damaged" in only_sentence(finished.call(*ask))
    (latest / "CHECKSUMS.xxh64").write_text(sums)

    weights = bytearray((latest / "model.safetensors").read_bytes())
    weights[-4:] = struct.pack("<f", float("nan"))
    (latest / "model.safetensors").write_bytes(weights)
    assert "model.safetensors is not what was written" in only_sentence(finished.call(*ask))
    (latest / "CHECKSUMS.xxh64").unlink()
    assert "has numbers that are not finite" in only_sentence(finished.call(*ask))


def test_runs_shows_what_it_can_read(finished):
    runs = finished.folder / "runs"
    (runs / "loop").symlink_to(runs, target_is_directory=True)
    for name, state in [
        ("bad", "[" * 100000),
        ("odd", '{"state": 7}'),
        ("sly", '{"state": "failed", "message": "\\u001b[31m"}'),
    ]:
        (runs / name).mkdir()
        (runs / name / "train.json").write_text("{}")
        (runs / name / "run.json").write_text(state)
    done = finished.call("runs")
    assert done.returncode == 0
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "finished" in lines["runs/small"]
    assert "damaged" in lines["runs/bad"] and "damaged" in lines["runs/odd"] and "failed" in lines["runs/sly"]
    assert "\x1b" not in done.stdout and done.stdout.count("runs/small") == 1
    assert {run["state"] for run in json.loads(finished.call("runs", "--json").stdout)} == {
        "finished",
        "damaged",
        "failed",
    }


def test_runs_goes_on_past_folders_it_may_not_read():
    """As nobody where the tests are root's, who may read everything: with a copy of the program that nobody may run."""
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name)
        runs.chmod(0o755)
        program = shutil.copy(gka_command.binary(), runs)
        Path(program).chmod(0o755)
        for run, state in [("a", "finished"), ("shut", "finished"), ("z", "failed")]:
            (runs / run / "deeper").mkdir(parents=True)
            (runs / run / "deeper/train.json").write_text("{}")
            (runs / run / "deeper/run.json").write_text(json.dumps({"state": state}))
        (runs / "odd/run.json").mkdir(parents=True)
        (runs / "odd/train.json").write_text("{}")
        (runs / "circle").symlink_to("circle")
        (runs / "shut").chmod(0)
        other = {"user": "nobody", "extra_groups": []} if os.geteuid() == 0 else {}
        done = subprocess.run([program, "runs", runs], capture_output=True, text=True, **other)
        (runs / "shut").chmod(0o755)
    assert done.returncode == 0, done.stderr
    states = {Path(line.split()[0]).relative_to(runs): line.split()[1] for line in done.stdout.splitlines()[1:5]}
    assert {str(path): state for path, state in states.items()} == {
        "a/deeper": "finished",
        "odd": "damaged",
        "shut": "damaged",
        "z/deeper": "failed",
    }
    assert f"{runs}/shut: cannot read the folder: Permission denied" in done.stdout
    assert f"{runs}/odd: cannot read {runs}/odd/run.json: it is not a file" in done.stdout


def test_a_plot_of_damaged_metrics_draws_what_is_whole(finished):
    path = finished.folder / "runs/small/metrics.jsonl"
    path.write_text('7\n{"step": "x", "loss": []}\n' + "[" * 100000 + "\n" + path.read_text() + '\xff{"st')
    done = finished.call("plot", "runs/small", "-o", "x.png")
    assert done.returncode == 0, done.stderr
    path.write_text("[1]\n")
    assert "has not finished a step yet" in finished.call("plot", "runs/small", "-o", "x.png").stderr


def test_a_failed_start_leaves_what_was_there(gka):
    gka.write(output="mine", data={"kind": "tokens", "files": "nowhere.tokens"})
    (gka.folder / "mine").mkdir()
    assert "nowhere.tokens" in only_sentence(gka.call("train", "small.json"))
    assert list((gka.folder / "mine").iterdir()) == []
    (gka.folder / "mine/lock").write_text("my own\n")
    assert "it is not a lock of gka's" in only_sentence(gka.call("train", "small.json"))
    assert (gka.folder / "mine/lock").read_text() == "my own\n"


def test_a_run_that_never_began_leaves_none_of_the_folders_it_made(gka):
    (gka.folder / "mine").mkdir()
    before = sorted(gka.folder.rglob("*"))
    name = gka.write(output="mine/deeper/run", data={"kind": "tokens", "files": "nowhere.tokens"})
    assert "nowhere.tokens" in only_sentence(gka.call("train", name))
    gka.write(output="mine/deeper/run", steps=1)
    done = gka.call("train", name, limit="0")  # a file may have no byte: not even the lock can be written
    assert "cannot write mine/deeper/run/lock: File too large" in only_sentence(done)
    assert sorted(gka.folder.rglob("*")) == sorted([*before, gka.folder / name])


def test_a_run_without_a_step_is_replaced(gka):
    run = gka.folder / "runs/small"
    run.mkdir(parents=True)
    (run / "train.json").write_text(json.dumps(SETTINGS | {"steps": 9}))
    (run / "run.json").write_text('{"state": "failed", "steps": 9, "message": "out of memory"}')
    gka.train(gka.write(steps=1, eval_every=0))
    assert len(gka.metrics("runs/small")) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"length": 2**32, "accumulation": 2**32}, "length is 4294967296; it takes"),
        ({"steps": 2**40}, "steps is 1099511627776; it takes"),
        ({"model": SETTINGS["model"] | {"num_hidden_layers": 10**7}}, "'num_hidden_layers' of"),
        ({"model": SETTINGS["model"] | {"gka_config": {"num_iter": 2**62}}}, "'num_iter' of 'gka_config'"),
        (
            {"model": SETTINGS["model"] | {"hybrid_override_pattern": "(" * 100000}},
            "at most 50 groups within each other",
        ),
        ({"data": SETTINGS["data"] | {"sizes": [{"tokens": 16, "pairs": 2**62}]}}, "pairs must be from 1 to 268435456"),
        ({"data": {"kind": "task", "task": "variable_tracking", "chains": 2**61, "hops": 2**61}}, "must be from"),
        ({"steps": 1, "tokens": 1}, "both steps and tokens"),
        ({"model": SETTINGS["model"] | {"gka_config": {"ridge_strength": 0}}}, "'ridge_strength' of 'gka_config'"),
        ({"model": SETTINGS["model"] | {"head_dim": 300}}, "a key of a head has 300 channels"),
    ],
)
def test_a_number_beyond_its_range_is_refused_before_anything_is_made(gka, settings, said):
    gka.write(**settings)
    assert said in only_sentence(gka.call("train", "small.json"))
    assert not (gka.folder / "runs/small").exists()


def test_what_cannot_be_read_is_said(gka):
    gka.write()
    (gka.folder / "deep.json").write_text("[" * 100000)
    assert "deep.json is nested more than 100 levels deep" in only_sentence(gka.call("train", "deep.json"))
    (gka.folder / "model.json").write_text(json.dumps(SETTINGS["model"]))
    assert "'model.json' is a model's configuration" in only_sentence(gka.call("train", "model.json"))
    done = gka.call("train", "small.json", "--set", "data.sizes.99999999999999999999999.pairs=1")
    assert "there is nothing named '99999999999999999999999' in [{" in only_sentence(done)
    done = gka.call("train", "small.json", "--set", "steps=1", "--set", "tokens=1")
    assert "both say how long to train" in only_sentence(done)


def test_a_key_given_twice_is_refused(gka):
    gka.write()
    text = (gka.folder / "small.json").read_text()
    (gka.folder / "small.json").write_text(text.replace("{", '{"length": 32, ', 1))
    assert "small.json has the key 'length' twice" in only_sentence(gka.call("train", "small.json"))
    (gka.folder / "small.json").write_text(text.replace('"hidden_size"', '"hidden_size": 64, "hidden_size"', 1))
    assert "has the key 'hidden_size' twice" in only_sentence(gka.call("train", "small.json"))


def test_too_little_text_to_evaluate_on_is_found_before_the_first_step(gka):
    """Not at the first evaluation, when there are hours of work and no checkpoint."""
    (gka.folder / "text").write_text("some words of a text " * 40)
    gka.call("tokenize", "text", "--out", "book")
    model = SETTINGS["model"] | {"vocab_size": 257}
    gka.write(model=model, data={"kind": "tokens", "files": ["book.tokens"], "eval_fraction": 0.01})
    sentence = only_sentence(gka.call("train", "small.json"))
    assert "have 8 tokens here, too few for a window of 17" in sentence and "a larger eval_fraction" in sentence
    assert not (gka.folder / "runs/small").exists()
    done = gka.call("train", "small.json", "--set", "data.eval_fraction=0", "--set", "eval_every=0", "--set", "steps=1")
    assert done.returncode == 0, done.stderr


def test_token_files_are_verified_and_their_end_token_is_the_models(gka):
    (gka.folder / "text").write_text("some words of a text " * 40)
    gka.call("tokenizer", "train", "text", "--vocab-size", "270", "--out", "bpe.json")
    gka.call("tokenize", "text", "--tokenizer", "bpe.json", "--out", "book")
    gka.call("tokenize", "text", "--tokenizer", "book.tokenizer.json", "--out", "book")  # onto its own copy
    model = SETTINGS["model"] | {"vocab_size": 300, "eos_token_id": 256}
    gka.write(model=model, data={"kind": "tokens"}, eval_every=0, steps=1)
    done = gka.train("small.json", "--set", "data.files=book.tokens")
    assert "end with token 0, so that is the model's eos_token_id, not 256" in done.stderr
    latest = gka.folder / "runs/small/latest"
    assert json.loads((latest / "config.json").read_text())["eos_token_id"] == 0
    assert (latest / "tokenizer.json").read_text() == (gka.folder / "bpe.json").read_text()

    file = gka.folder / "book.tokens"
    content = bytearray(file.read_bytes())
    content[120] ^= 1
    file.write_bytes(content)
    again = ["train", "small.json", "--set", "data.files=book.tokens", "--set", "output=runs/b"]
    assert "book.tokens is damaged: its contents do not match its checksum" in only_sentence(gka.call(*again))
    assert gka.call(*again, "--no-verify").returncode == 0


def test_a_run_from_a_model_with_another_tokenizer_is_refused(gka):
    (gka.folder / "text").write_text("some words of a text " * 40)
    gka.call("tokenize", "text", "--out", "bytes")
    gka.call("tokenizer", "train", "text", "--vocab-size", "270", "--out", "bpe.json")
    gka.call("tokenize", "text", "--tokenizer", "bpe.json", "--out", "bpe")
    model = SETTINGS["model"] | {"vocab_size": 300}
    gka.write(model=model, data={"kind": "tokens", "files": ["bpe.tokens"]}, eval_every=0, steps=1)
    gka.train("small.json")
    again = ["train", "small.json", "--from", "runs/small", "--set", "output=runs/b", "--set"]
    assert "bytes.tokens is of another tokenizer than the one the model" in only_sentence(
        gka.call(*again, 'data.files=["bytes.tokens"]')
    )
    assert not (gka.folder / "runs/b").exists()
    assert gka.call(*again, 'data.files=["bpe.tokens"]').returncode == 0


def test_a_model_of_bytes_takes_its_tokenizer_along(gka):
    (gka.folder / "text").write_text("some words of a text " * 40)
    gka.call("tokenize", "text", "--out", "book")
    model = SETTINGS["model"] | {"vocab_size": 257}
    gka.write(model=model, data={"kind": "tokens", "files": ["book.tokens"]}, eval_every=0, steps=1)
    gka.train("small.json")
    latest = gka.folder / "runs/small/latest"
    assert "bytes, 257 tokens" in gka.call("tokenizer", "info", latest).stdout
    from tokenizers import Tokenizer

    assert Tokenizer.from_file(str(latest / "tokenizer.json")).encode("aé").ids == list("aé".encode())
