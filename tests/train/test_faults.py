"""What goes wrong ends in one sentence that says what to do."""

import json
import re
import signal

import pytest
from training import SETTINGS, only_sentence


def test_a_full_disk_keeps_the_last_checkpoint_and_says_how_to_go_on(gka):
    # Files may have 100 KiB: the weights fit, the optimiser's two averages together do not.
    gka.write()
    size = sum(p.stat().st_size for p in _first_checkpoint(gka).iterdir() if p.name == "model.safetensors")
    blocks = int(size * 1.2) // 1024
    done = gka.call("train", "small.json", "--resume", limit=blocks)
    sentence = only_sentence(done)
    assert "step 16 could not be saved" in sentence
    assert "File too large" in sentence
    assert "`gka train runs/small --resume` goes on after step 8." in sentence
    assert gka.checkpoints("runs/small") == ["step-000000008"]
    (told,) = json.loads(gka.call("runs", "--json").stdout)
    assert told["state"] == "failed"
    gka.train("runs/small", "--resume")


def test_a_disk_that_fills_up_between_two_checkpoints_says_how_to_go_on(gka):
    # Of 3 KiB metrics.jsonl has the first dozen steps.
    sentence = only_sentence(gka.call("train", gka.write(checkpoint_every=0), limit=3))
    assert re.match("gka: cannot write runs/small/(metrics|events).*: File too large; make room there, then ", sentence)
    assert sentence.endswith("`gka train runs/small --resume` goes on from the beginning.")
    assert 5 < len((gka.folder / "runs/small/metrics.jsonl").read_text().splitlines()) < 24
    gka.train("runs/small", "--resume")
    assert len(gka.metrics("runs/small")) == 24


def on_text(gka, words=400, **changes):
    """A training file on a text of so many words."""
    (gka.folder / "text").write_text("".join(f"{i} sheep, " for i in range(words)))
    assert gka.call("tokenize", "text", "--out", "text").returncode == 0
    model = SETTINGS["model"] | {"vocab_size": 257, "eos_token_id": 1}
    data = {"kind": "tokens", "files": ["text.tokens"], "eval_fraction": 0.5}
    return gka.write(model=model, data=data, **changes)


def test_a_run_does_not_go_on_with_another_text_under_the_same_name(gka):
    gka.train(on_text(gka, steps=8))
    before = (gka.folder / "text.tokens").read_bytes()
    on_text(gka, words=500)
    sentence = only_sentence(gka.call("train", "runs/small", "--resume", "--set", "steps=16"))
    assert "text.tokens' is not the one that the run had up to step 8; put that one back, or start" in sentence
    (told,) = json.loads(gka.call("runs", "--json").stdout)
    assert (told["state"], told["steps"], told["message"]) == ("finished", 8, "")
    gka.train("small.json", "--from", "runs/small", "--set", "output=other", "--set", "steps=1")
    (gka.folder / "text.tokens").write_bytes(before)
    gka.train("runs/small", "--resume", "--set", "steps=16")


def test_nor_is_it_evaluated_on_another_text(gka):
    file = on_text(
        gka, steps=2, eval_every=2, eval_data={"kind": "tokens", "files": ["test.tokens"], "eval_fraction": 0.5}
    )
    assert gka.call("tokenize", "text", "--out", "test").returncode == 0
    gka.train(file)
    (gka.folder / "text").write_text("".join(f"{i} goats, " for i in range(500)))
    assert gka.call("tokenize", "text", "--out", "test").returncode == 0
    assert "test.tokens' is not the one" in only_sentence(
        gka.call("train", "runs/small", "--resume", "--set", "steps=4")
    )


def test_a_token_file_that_goes_away_while_it_is_read_is_not_missed(gka):
    process = gka.start("train", on_text(gka, steps=200, checkpoint_every=100))
    for line in process.stderr:
        if line.startswith("step"):
            break
    for file in gka.folder.glob("text.*"):
        file.unlink()
    assert process.communicate(timeout=100)[1].splitlines()[-1].startswith("finished after step 200")
    assert (gka.folder / "runs/small/latest/tokenizer.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("run", ["fresh", "resumed"])
def test_an_interrupt_before_the_first_step_ends_at_once_and_leaves_what_was_there(gka, number, run):
    file, words = on_text(gka, steps=8), []
    if run == "resumed":
        gka.train(file)
        words = ["--resume", "--set", "steps=16"]
    before = {path: path.read_bytes() for path in gka.folder.rglob("*") if path.is_file() and path.name != "lock"}
    # Too little to evaluate on is found before the first step; of so many batches that takes minutes.
    process = gka.start("train", file, *words, "--set", "eval_batches=1000000000")
    assert "eos_token_id" in process.stderr.readline()
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said.strip() == "gka: interrupted before the first step; nothing was begun."
    assert before == {path: path.read_bytes() for path in before}
    assert run == "resumed" or not (gka.folder / "runs").exists()


def _first_checkpoint(gka):
    gka.call("train", "small.json", GKA_TEST_FAULT="step@9")
    return gka.folder / "runs/small/checkpoints/step-000000008"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
def test_a_truncated_checkpoint_is_noticed(gka, name):
    gka.write()
    folder = _first_checkpoint(gka)
    file = folder / name
    file.write_bytes(file.read_bytes()[:-1])
    sentence = only_sentence(gka.call("train", "runs/small", "--resume"))
    assert f"{folder.name}' is damaged: {name} is not what was written" in sentence
    assert "remove that folder" in sentence


def test_starting_from_a_truncated_checkpoint_is_refused(gka):
    gka.write()
    file = _first_checkpoint(gka) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    sentence = only_sentence(gka.call("train", "small.json", "--from", "runs/small", "--set", "output=other"))
    assert "model.safetensors is not what was written" in sentence


def test_a_loss_that_is_not_finite_names_the_layer_and_the_step(gka):
    gka.write(learning_rate=1e30, clip=0, warmup=0, weight_decay=0)
    sentence = only_sentence(gka.call("train", "small.json"))
    assert "at step 2: the first values that are not finite are those of model." in sentence
    assert "start a new run with a lower learning_rate (it was 1e+30)" in sentence


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nowhere.json"], "there is no training file 'nowhere.json'"),
        (["small.json", "--set", "model=nowhere.json"], "there is no model configuration 'nowhere.json'"),
        (["small.json", "--from", "nowhere"], "nowhere' to start from; check the path."),
        (["small.json", "--resume"], "there is no run in 'runs/small' to resume; leave out --resume to start one."),
        (["small.json", "--resume", "--from", "x"], "give one of them"),
        (["small.json", "--set", "from="], 'from is ""; it takes a path to a checkpoint, a run or a model, or null.'),
        (["small.json", "--set", "model.hybrid_override_pattern="], "the pattern '' cannot be read"),
        (["small.json", "--set", "lerning_rate=1"], "did you mean 'learning_rate'?"),
        (["small.json", "--set", "model.hiden_size=1"], "did you mean 'hidden_size'?"),
        (["small.json", "--set", "data.vocab_size=100"], "set model.vocab_size to at least 100."),
        (["small.json", "--set", "length=32"], "longest sequence of the data has 16 tokens; set length=16."),
        (["small.json", "--set", "device=cuda:77"], "--set device=cpu trains on the CPU."),
    ],
)
def test_a_mistake_has_its_sentence(gka, arguments, said):
    gka.write()
    assert said in only_sentence(gka.call("train", *arguments))


def test_a_missing_token_file_is_named(gka):
    gka.write(data={"kind": "tokens", "files": ["nowhere.tokens"]})
    assert "nowhere.tokens" in only_sentence(gka.call("train", "small.json"))


def test_a_folder_that_cannot_be_made_is_named(gka):
    (gka.folder / "file").write_text("")
    gka.write(output="file/run")
    assert "cannot make the folder 'file/run'" in only_sentence(gka.call("train", "small.json"))


def test_a_path_may_begin_in_the_home_folder(gka):
    (gka.folder / "home/models").mkdir(parents=True)
    home = {"HOME": str(gka.folder / "home")}
    file = gka.write(steps=1, output="~/runs/a")
    (gka.folder / "home/models/small.json").write_text(json.dumps(SETTINGS["model"]))
    gka.train(file, "--set", "model=~/models/small.json", **home)
    gka.train(file, "--set", "output=~/b", "--set", "from=~/runs/a", **home)
    assert (gka.folder / "home/b/latest/model.safetensors").exists() and not (gka.folder / "~").exists()
    gka.write("tokens.json", data={"kind": "tokens", "files": ["~/none.tokens"]})
    assert "home/none.tokens" in only_sentence(gka.call("train", "tokens.json", **home))
    assert "HOME does not say where that is" in only_sentence(gka.call("train", file, HOME=""))


def test_a_run_is_not_started_over_another(gka):
    gka.train(gka.write(steps=1))
    before = gka.weights("runs/small")
    sentence = only_sentence(gka.call("train", "small.json"))
    assert "'runs/small' already holds a run; `gka train runs/small --resume` continues it" in sentence
    assert gka.weights("runs/small") == before


def test_two_processes_do_not_train_into_one_folder(gka):
    first = gka.start("train", gka.write(steps=100000))
    for line in first.stderr:
        if line.startswith("step"):
            break
    sentence = only_sentence(gka.call("train", "runs/small", "--resume"))
    (told,) = json.loads(gka.call("runs", "--json").stdout)
    first.kill()
    first.communicate()
    assert f"another process ({first.pid}) is training into 'runs/small'" in sentence
    assert told["state"] == "running"
