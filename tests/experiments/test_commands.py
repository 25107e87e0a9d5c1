"""Commands that are started where a card is lent, at toy size: they begin with nothing but the variable GKA, leave
results, go on where they were stopped, and draw. experiments/lm, ablations and hybrids have theirs in test_lm.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
BENCH = EXPERIMENTS.parent / "bench"
PROGRAM = os.environ.get("GKA_PROGRAM") or str(Path(sys.executable).parent / "gka")


def call(*command, program=PROGRAM):
    """As on a lent machine: GKA names the program, and nothing else says where it is."""
    environment = {key: value for key, value in os.environ.items() if key != "GKA_PROGRAM"} | {"GKA": str(program)}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, env=environment)


def works(*command):
    done = call(*command)
    assert done.returncode == 0, done.stderr
    return done


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def grid(out, *more):
    command = [EXPERIMENTS / "mqar" / "grid.py", "--cells", "32x4:8", "--layers", "gka", "gdn", "--seeds", "1"]
    command += ["--rates", "0.01", "--steps", "4", "--batch", "2", "--vocabulary", "64", "--eval-batches", "1"]
    return [*command, "--device", "cpu", "--out", out, *more]


def test_the_grid_of_mqar_trains_reports_other_sequences_goes_on_and_draws(tmp_path):
    works(*grid(tmp_path, "--minutes", "1e-9"))
    assert len(read_lines(tmp_path / "grid.jsonl") if (tmp_path / "grid.jsonl").exists() else []) < 2, "it was stopped"
    works(*grid(tmp_path))
    runs = read_lines(tmp_path / "grid.jsonl")
    assert sorted(run["layer"] for run in runs) == ["gdn", "gka"]
    assert all(len(run["curve"]) == 4 and run["steps"] == 4 and 0 <= run["accuracy"] <= 1 for run in runs)
    before = (tmp_path / "grid.jsonl").read_bytes()
    works(*grid(tmp_path))
    assert (tmp_path / "grid.jsonl").read_bytes() == before, "what is done is not done again"
    assert "Gated DeltaNet" in works(*grid(tmp_path, "--draw")).stdout
    assert (tmp_path / "grid-1.png").stat().st_size > 10_000


def ablations(out, *more):
    command = [EXPERIMENTS / "mqar" / "ablations.py", "--cells", "32x4:8", "--seeds", "1", "--rates", "0.01"]
    command += ["--steps", "4", "--batch", "2", "--vocabulary", "64", "--eval-batches", "1"]
    return [*command, "--device", "cpu", "--out", out, *more]


def test_the_ablations_on_mqar_train_what_they_say_go_on_and_draw(tmp_path):
    works(*ablations(tmp_path, "--layers", "gka"))
    works(*ablations(tmp_path))
    runs = {run["layer"]: run for run in read_lines(tmp_path / "ablations.jsonl")}
    assert len(runs) == len(read_lines(tmp_path / "ablations.jsonl")) == 18, "GKA is not trained again"
    learned = {name: tuple(map(tuple, run["learning"])) for name, run in runs.items()}
    assert len(set(learned.values())) == 18, "each variant learns otherwise, from the first weights on"
    assert [name for name, run in runs.items() if "with_iterations" in run] == ["gka"]
    works(*ablations(tmp_path, "--draw"))
    assert "| constant λ = 0.25 | " in (tmp_path / "ablations.md").read_text()
    figures = ("ablations-32x4-8.png", "ridges-32x4-8-lr0.01.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in figures)


def test_the_tables_of_the_ablations_are_those_of_the_runs_that_are_kept(tmp_path):
    kept = EXPERIMENTS / "mqar"
    (tmp_path / "ablations.jsonl").write_bytes((kept / "ablations.jsonl").read_bytes())
    works(kept / "ablations.py", "--out", tmp_path, "--draw")
    assert (tmp_path / "ablations.md").read_text() == (kept / "ablations.md").read_text()


SPIKES = f"""
import json, sys
sys.path.insert(0, {str(EXPERIMENTS / "mqar")!r})
from ablations import lengths
print(json.dumps(lengths(160 * [10.0] + 50 * [0.1, 0.1, 5.0] + [60.0, 16.0, 2.0])))
"""


def test_a_gradient_is_a_spike_by_the_long_ones_among_those_just_before_it():
    found = json.loads(works("-c", SPIKES).stdout)
    assert found == {"longest": 60.0, "median": 10.0, "furthest": 12.0, "spikes": {"3": 2, "10": 1}}


def test_a_program_that_is_not_there_is_said_and_is_no_success(tmp_path):
    done = call(*grid(tmp_path), program=tmp_path / "nowhere")
    assert done.returncode == 1 and "nowhere" in done.stderr.splitlines()[-1]


def test_throughput_is_measured_and_reported_at_the_size_that_a_cpu_takes(tmp_path):
    program = EXPERIMENTS / "throughput" / "run.py"
    works(program, "measure", "--part", "tiny", "--lengths", "64", "--steps", "1", "--batch-tokens", "64",
          "--device", "cpu", "--out", tmp_path)  # fmt: skip
    works(program, "report", "--out", tmp_path)
    assert "GKA, slope" in (tmp_path / "results.md").read_text()


TRIALS = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
from gpu import Shape
from trials import Ran, Where, Work, measure_all, whole_sequences

def breaks(where):
    raise RuntimeError("a kernel that no card has run")

good = whole_sequences(1, 80, Shape(1, 8, 8), backward=True, iterations=5)
works = [Work("new", "first", 1.0, good), Work("new", "second", 1.0, breaks), Work("new", "third", 1.0, good)]
sys.exit(not measure_all(works, Where("cpu")))
"""


def test_a_trial_that_fails_is_said_and_the_rest_are_measured():
    done = call("-c", TRIALS)
    assert done.returncode == 1
    assert "new, second: RuntimeError: a kernel that no card has run" in done.stderr
    rows = [line for line in done.stdout.splitlines() if "│ new" in line]
    assert ["✓" in row for row in rows] == [True, False, True]
    assert "failed" in rows[1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sources of text and two tasks, as experiments/data leaves them."""
    folder = tmp_path_factory.mktemp("data")
    for part in ("text", "tasks"):
        (folder / part).mkdir()
    sentence = "The river ran to the sea and the old house stood by the road where nobody came. "
    for source in ("wikipedia", "prose"):
        for part in ("train", "test"):
            text = json.dumps({"text": f"{source} {part}. " + 8 * sentence}) + "\n"
            (folder / "text" / f"{source}.{part}.jsonl").write_text((30 if part == "train" else 2) * text)
    choice = [{"context": "The river ran to", "choices": ["the sea", "the house"], "answer": i % 2} for i in range(210)]
    word = [{"context": "The river ran to the", "target": "sea"}] * 80
    for name, kind, items in (("piqa", "choice", choice), ("lambada", "last_word", word)):
        lines = [{"task": name, "kind": kind}, *items]
        (folder / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_hybrid_is_prepared_trained_exported_and_asked(data, tmp_path):
    words = ["prepare", "train", "export", "evaluate", "--data", data, "--out", tmp_path]
    words += ["--chats", "40", "--items", "1"]
    small = ["hidden_size=32", "intermediate_size=32", "num_attention_heads=1", "num_key_value_heads=1", "head_dim=32"]
    settings = ["steps=2", "batch_tokens=2048", "eval_every=0", "device=cpu", *(f"model.{key}" for key in small)]
    for setting in settings:
        words += ["--set", setting]
    done = works(EXPERIMENTS / "hybrid" / "run.py", *words)
    assert "exact_match" in done.stdout and (tmp_path / "model" / "tokenizer_config.json").exists()


def test_published_numbers_are_asked_piece_by_piece(data, tmp_path):
    program, model = EXPERIMENTS / "published" / "run.py", EXPERIMENTS / "hybrid" / "recall-8m"
    words = [program, "--model", model, "--data", data, "--tasks", "piqa", "lambada", "--out", tmp_path]
    works(*words, "--minutes", "1e-9")
    assert not (tmp_path / "pieces.jsonl").exists()
    works(*words)
    pieces = [(piece["task"], piece["first"], len(piece["right"])) for piece in read_lines(tmp_path / "pieces.jsonl")]
    assert pieces == [("piqa", 0, 200), ("lambada", 0, 70), ("piqa", 200, 10), ("lambada", 70, 10)]
    again = works(*words)
    assert "all 210 | 0.500 ± 0.035 | 0.669 | -0.169 |" in again.stdout, "of all items nothing is in doubt"
    assert len(read_lines(tmp_path / "pieces.jsonl")) == 4


def test_solver_steps_at_inference_are_measured_and_drawn(data, tmp_path):
    words = [EXPERIMENTS / "hybrid" / "iterations.py", "--steps", "0", "25", "--items", "2", "--answers", "2"]
    words += ["--data", data, "--out", tmp_path]
    works(*words)
    found = read_lines(tmp_path / "iterations.jsonl")
    assert [line["steps"] for line in found if "steps" in line] == [0, 25, "auto"]
    _, twenty_five, auto, *_ = found
    assert twenty_five["certainty"] == auto["certainty"], "auto is 25 of them with this model's ridge"
    (tmp_path / "iterations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found[1:]))
    assert "Wikipedia" in works(*words).stdout
    again = read_lines(tmp_path / "iterations.jsonl")
    first, last = ({key: value for key, value in line.items() if key != "date"} for line in (found[0], again[-1]))
    assert last == first and len(again) == len(found), (
        "what was missing is asked again, and gives the same, after midnight too"
    )
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("iterations.png", "certainty.png"))
