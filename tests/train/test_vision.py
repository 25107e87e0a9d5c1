"""gka vision: a data set that can be learned in seconds, runs that stop and go on, and what goes wrong."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import Gka

SIZE, CLASSES = 8, 4
MODEL = {
    "model_type": "gka_vision",
    "image_size": [SIZE, SIZE],
    "channels": 1,
    "classes": CLASSES,
    "class_names": ["rows", "columns", "left", "top"],
    "in_dim": 8,
    "dim": 16,
    "stem_strides": [1, 2],
    "depths": [1, 2],
    "kinds": ["conv", "mixer"],
    "heads": [1, 2],
    "window_sizes": [2, 2],
    "mixer": "gka",
    "mixer_config": {"conv_size": 3, "head_dim": 16, "expand_k": 0.5, "expand_v": 0.5},
}
RUN = ["--device", "cpu", "--augment", "none"]


def pictures(count, seed):
    """Stripes along rows or along columns, and pictures bright at the left or at the top, all under noise."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    dark, bright = 60, 190
    place = torch.arange(SIZE)
    stripes = torch.where(place % 2 == 0, bright, dark)
    half = torch.where(place < SIZE // 2, bright, dark)
    patterns = [stripes[:, None], stripes[None, :], half[None, :], half[:, None]]
    images = torch.stack([patterns[label].expand(SIZE, SIZE) for label in labels])
    images = images + torch.randint(-40, 41, images.shape, generator=random)
    return {"images": images.to(torch.uint8)[..., None].contiguous(), "labels": labels}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    save_file(pictures(64, 0), folder / "train.safetensors", {"class_names": json.dumps(MODEL["class_names"])})
    save_file(pictures(48, 1), folder / "test.safetensors")
    return folder


@pytest.fixture
def gka(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    return Gka(tmp_path)


def train(gka, *arguments):
    done = gka.call("vision", "train", *arguments)
    assert done.returncode == 0, done.stderr
    return done


def told(done):
    assert done.returncode == 1, done
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def learned(data, tmp_path_factory):
    """A run that has learned the data set."""
    folder = tmp_path_factory.mktemp("learned")
    (folder / "model.json").write_text(json.dumps(MODEL))
    gka = Gka(folder)
    train(gka, "model.json", "--data", data, "--out", "run", "--steps", 40, "--batch", 16, "--lr", 5e-3, *RUN)
    return gka


def test_a_model_learns_what_can_be_learned(learned, data):
    last = learned.metrics("run")[-1]
    assert last["eval_accuracy"] > 0.9
    done = learned.call("vision", "eval", "run", "--data", data, "--json")
    scores = json.loads(done.stdout)
    assert scores["images"] == 48
    assert scores["top1"]["value"] == pytest.approx(last["eval_accuracy"])
    assert scores["loss"] == pytest.approx(last["eval_loss"], rel=1e-5)
    right = scores["top1"]["value"]
    assert scores["top1"]["stderr"] == pytest.approx((right * (1 - right) / 48) ** 0.5)
    assert "top5" not in scores  # of four classes
    assert [entry["class"] for entry in scores["classes"]] == MODEL["class_names"]
    mean = sum(entry["accuracy"] * entry["images"] for entry in scores["classes"]) / 48
    assert mean == pytest.approx(right)


def test_mixers_that_see_to_either_side_learn_too(gka, data):
    for mixer in ["attention", "mamba"]:
        (gka.folder / "other.json").write_text(json.dumps(MODEL | {"mixer": mixer, "mixer_config": {}}))
        train(gka, "other.json", "--data", data, "--out", mixer, "--steps", 40, "--batch", 16, "--lr", 5e-3, *RUN)
        assert gka.metrics(mixer)[-1]["eval_accuracy"] > 0.9, mixer


def test_logits_and_classes_say_the_same(learned, data):
    done = learned.call(
        "vision", "eval", "run/latest", "--data", data / "test.safetensors", "--logits", "l.safetensors"
    )
    assert done.returncode == 0, done.stderr
    assert "top1" in done.stdout and "columns" in done.stdout
    chances = load_file(learned.folder / "l.safetensors")["logits"].softmax(-1)
    answers = json.loads(learned.call("vision", "classify", "run", data, "--index", 5, 2, "--json").stdout)
    assert [answer["image"] for answer in answers] == [5, 2]
    for answer in answers:
        likely = {entry["class"]: entry["probability"] for entry in answer["likely"]}
        assert list(likely.values()) == sorted(likely.values(), reverse=True)
        for place, name in enumerate(MODEL["class_names"]):
            assert likely[name] == pytest.approx(chances[answer["image"], place].item(), abs=1e-6)
        assert answer["label"] == MODEL["class_names"][answer["image"] % CLASSES]
    shown = learned.call("vision", "classify", "run", data, "--index", 5).stdout
    assert shown.startswith("image 5, labelled columns\n")


def test_a_run_that_was_killed_goes_on_to_the_same_bits(gka, data):
    """Killed in a step and while saving: with branches dropped and images changed by chance all the way."""
    (gka.folder / "model.json").write_text(json.dumps(MODEL | {"drop_path": 0.3}))
    settings = ["model.json", "--data", data, "--batch", 20, "--device", "cpu", "--steps", 10, "--checkpoint-every", 4]
    train(gka, *settings, "--out", "whole")
    for fault, resume in [("step@6", []), ("save@8", ["--resume"])]:
        killed = gka.call("vision", "train", *settings, "--out", "parts", *resume, GKA_TEST_FAULT=fault)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert gka.checkpoints("parts")[-1] == "step-000000004"
    train(gka, "--out", "parts", "--resume")
    assert gka.weights("whole") == gka.weights("parts")
    assert [line["loss"] for line in gka.metrics("whole")] == [line["loss"] for line in gka.metrics("parts")]


def test_ctrl_c_saves_and_says_how_to_go_on(gka, data):
    process = gka.start("vision", "train", "model.json", "--data", data, "--out", "run", "--steps", 10**6, *RUN)
    for _ in range(2):  # what it begins with, and the first look at the test images
        process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors
    assert "`gka vision train --out run --resume` goes on from there" in errors
    last = gka.metrics("run")[-1]["step"]
    assert gka.checkpoints("run")[-1] == f"step-{last:09}"


def test_a_run_may_go_on_for_longer_and_with_nothing_else_changed(gka, data):
    train(gka, "model.json", "--data", data, "--out", "run", "--steps", 2, "--batch", 8, *RUN)
    train(gka, "--out", "run", "--resume", "--steps", 3, "--keep", 1)
    assert [line["step"] for line in gka.metrics("run")] == [1, 2, 3]
    assert "has another learning_rate" in told(gka.call("vision", "train", "--out", "run", "--resume", "--lr", 0.1))
    assert "already holds a run" in told(gka.call("vision", "train", "model.json", "--data", data, "--out", "run"))
    assert "at least as many" in told(gka.call("vision", "train", "--out", "run", "--resume", "--steps", 1))
    assert "finished" in gka.call("runs", ".").stdout


def test_a_configuration_leaves_sizes_and_names_to_the_images(gka, data):
    left_out = ("image_size", "channels", "classes", "class_names")
    (gka.folder / "open.json").write_text(json.dumps({k: v for k, v in MODEL.items() if k not in left_out}))
    train(gka, "open.json", "--data", data, "--out", "run", "--steps", 1, "--batch", 4, *RUN)
    made = json.loads((gka.folder / "run/latest/config.json").read_text())
    assert {key: made[key] for key in left_out} == {key: MODEL[key] for key in left_out}
    shown = gka.call("vision", "classify", "run", data, "--index", 1).stdout
    assert shown.startswith("image 1, labelled columns\n")
    train(gka, "open.json", "--out", "run", "--resume", "--steps", 2)
    (gka.folder / "more.json").write_text(
        json.dumps({k: v for k, v in MODEL.items() if k != "class_names"} | {"classes": 1000})
    )
    said = told(gka.call("vision", "train", "more.json", "--data", data, "--out", "other"))
    assert "'classes' of more.json is 1000, and " in said and "has 4: leave the key out" in said
    assert not (gka.folder / "other").exists()


def test_curves_of_images_are_named_after_them(learned):
    pytest.importorskip("matplotlib")
    words = ["-o", "curves.svg", "--x", "epoch", "--y", "loss,accuracy,images_per_second"]
    assert learned.call("plot", "run", *words).returncode == 0
    picture = (learned.folder / "curves.svg").read_text()
    for label in ("loss (nats per image)", "accuracy (the likeliest class)", "images per second", "epoch"):
        assert f"<!-- {label} -->" in picture
    words[3:] = ["time", "--y", "loss"]
    (learned.folder / "short").mkdir()
    lines = "".join(f'{{"step": {i}, "loss": 1, "seconds": {i / 10}}}\n' for i in (1, 9))
    (learned.folder / "short/metrics.jsonl").write_text(lines)
    assert learned.call("plot", "short", *words).returncode == 0
    assert "<!-- 0.4 -->" in (learned.folder / "curves.svg").read_text(), "parts of one are no thousandths"
    done = learned.call("plot", "run", "-o", "curves.svg", "--x", "tokens")
    assert done.returncode == 1
    assert done.stderr == "gka plot: none of the runs counts 'tokens'; --x takes step, tokens, images, epoch, time.\n"


def test_commands_say_what_they_were_given_instead(learned, gka, data):
    run = learned.folder / "run"
    assert "a model for images" in told(gka.call("generate", run, "--prompt", "x"))
    assert "a model for images" in told(gka.call("serve", run))
    assert "a model for images" in told(gka.call("train", run, "--resume"))
    assert "a model for images" in told(gka.call("train", "model.json"))
    (gka.folder / "shoe.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert "is a picture" in told(gka.call("vision", "classify", run, "shoe.png"))
    text = {"model_type": "qwen3", "hidden_size": 8}
    (gka.folder / "config.json").write_text(json.dumps(text))
    assert "a model for text" in told(gka.call("vision", "eval", ".", "--data", data))
    (gka.folder / "text").mkdir()
    (gka.folder / "text/train.json").write_text(json.dumps({"model": text}))
    assert "a model for text" in told(gka.call("vision", "train", "--out", "text", "--resume"))


def test_what_is_missing_is_named(gka, data):
    assert "--data FOLDER" in told(gka.call("vision", "train", "model.json", "--out", "run"))
    both = gka.call("vision", "train", "model.json", "--data", data, "--out", "r", "--steps", 1, "--epochs", 1)
    assert "give one of them" in told(both)
    wrong = gka.call("vision", "train", "model.json", "--data", data, "--out", "r", "--augment", "turn")
    assert "--augment takes" in told(wrong)
    assert not (gka.folder / "r").exists()
    nothing = gka.call("vision", "train", "model.json", "--data", gka.folder, "--out", "r")
    assert "images.py makes one of a folder of pictures" in told(nothing)
    assert not (gka.folder / "r").exists()
