"""experiments/vision at toy size: it trains every mixer alike, goes on where it was stopped, and draws."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

numpy = pytest.importorskip("numpy")
EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
PROGRAM = os.environ.get("GKA_PROGRAM") or str(Path(sys.executable).parent / "gka")
sys.path.insert(0, str(EXPERIMENTS / "data"))

import images  # noqa: E402


def call(*words, program=PROGRAM):
    command = [sys.executable, EXPERIMENTS / "vision" / "run.py", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"GKA": str(program)})


def works(*words):
    done = call(*words)
    assert done.returncode == 0, done.stderr
    return done


def part(count, seed):
    """Dark pictures and light ones."""
    draw = numpy.random.default_rng(seed)
    labels = draw.integers(0, 2, count)
    pixels = (draw.integers(0, 100, (count, 9, 8, 1)) + 150 * labels[:, None, None, None]).astype(numpy.uint8)
    return images.Part([pixels], labels, (9, 8, 1))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "light"
    images.make(folder, {}, lambda: (("dark", "light"), {"train": part(256, 0), "test": part(40, 1)}), again=False)
    return folder


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_mixers_are_trained_alike_once_and_reported(data, tmp_path):
    words = ["--data", data, "--mixers", "gka", "attention", "--epochs", "2", "--out", tmp_path, "--device", "cpu"]
    works("train", *words, "--minutes", "1e-9")
    assert not (tmp_path / "results.jsonl").exists(), "it was stopped"
    works("train", *words, "--jobs", "2")
    found = {line["mixer"]: line for line in lines_of(tmp_path / "results.jsonl")}
    assert sorted(found) == ["attention", "gka"]
    for line in found.values():
        assert [point["epoch"] for point in line["curve"]] == [0.5, 1, 1.5, 2], "a look at every step of these few"
        assert line["accuracy"] == line["curve"][-1]["accuracy"] and line["test_images"] == 40
    assert found["gka"]["recipe"] == found["attention"]["recipe"]
    before = (tmp_path / "results.jsonl").read_bytes()
    works("train", *words)
    assert (tmp_path / "results.jsonl").read_bytes() == before, "what is done is not done again"
    said = works("report", "--out", tmp_path).stdout
    assert "| Gated KalmaNet |" in said and "one seed" in said
    assert (tmp_path / "small-light-e2-cpu.png").stat().st_size > 10_000
    assert works("list", *words).stdout.count("done") == 2
    other = works("list", "--data", data.with_name("dark"), *words[2:]).stdout
    assert "done" not in other and "not known" in other, "on other images it is another run"


def test_what_is_missing_or_fails_is_said_and_is_no_success(data, tmp_path):
    done = call("train", "--data", tmp_path / "nowhere", "--out", tmp_path)
    assert done.returncode == 1 and "there are no images in" in done.stderr
    done = call("train", "--data", data, "--out", tmp_path, "--mixers", "gka", program=tmp_path / "nowhere")
    assert done.returncode == 1 and "nowhere" in done.stderr
    done = call("prepare", "--size", "t")
    assert done.returncode == 1 and "ImageNet is in no package" in done.stderr


def test_errors_are_those_of_the_seeds_and_of_the_number_of_images():
    report = load("report")
    runs = [
        {"accuracy": a, "test_images": 10_000, "seconds": 1, "parameters": 5000, "loss": 0.5} for a in (0.89, 0.91, 0.9)
    ]
    (row,) = report.rows({"gka": runs})
    assert row[1:4] == ["90.00", "0.58", "0.30"], "√(0.0001/3) and √(0.9·0.1/10000)"
    assert report.rows({"gka": runs[:1]})[0][2] == "one seed"


def test_results_of_other_machines_are_merged(tmp_path, monkeypatch):
    run = load("run")
    monkeypatch.setattr(run, "RESULTS", tmp_path / "kept.jsonl")
    for name, accuracy in (("a", 0.5), ("b", 0.6)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"name": name, "accuracy": accuracy}) + "\n")
        run.merge(run.argparse.Namespace(files=[tmp_path / f"{name}.jsonl"]))
    assert [line["accuracy"] for line in lines_of(tmp_path / "kept.jsonl")] == [0.5, 0.6]


def load(name):
    """Of experiments/vision: other experiments have files of the same name."""
    folder = EXPERIMENTS / "vision"
    sys.path[:0] = [str(EXPERIMENTS), str(folder)]
    known = sys.modules.pop("models", None)
    try:
        about = importlib.util.spec_from_file_location(f"vision_{name}", folder / f"{name}.py")
        module = importlib.util.module_from_spec(about)
        sys.modules[about.name] = module
        about.loader.exec_module(module)
    finally:
        del sys.path[:2]
        sys.modules.pop("models", None)
        if known:
            sys.modules["models"] = known
    return module
