"""What goes wrong ends in one sentence that says what to do."""

import json

import pytest
from training import only_sentence


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
