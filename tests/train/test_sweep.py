"""The MQAR sweep trains what is missing, keeps what is there, and draws it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def sweep(out, *arguments):
    command = [sys.executable, ROOT / "experiments/mqar/run.py", "--device", "cpu", "--jobs", "1", "--out", out]
    sizes = ["--layers", "gka-plain", "gdn", "--widths", "16", "--sizes", "16x2", "--vocabulary", "32"]
    budget = ["--steps", "6", "--batch", "16", "--eval-batches", "1", "--rates", "1e-2", "3e-3"]
    done = subprocess.run([*command, *sizes, *budget, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_sweep_tries_the_rates_then_the_seeds_and_goes_on_where_it_ended(tmp_path):
    pytest.importorskip("matplotlib")
    first = sweep(tmp_path, "--seeds", "1", "--longer-below", "0")
    assert {(r["layer"], r["rate"]) for r in first} == {
        (layer, rate) for layer in ("gka-plain", "gdn") for rate in (1e-2, 3e-3)
    }
    assert len(first) == 4 and all(0 <= r["accuracy"] <= 1 and r["train_tokens"] == 1536 for r in first)
    both = sweep(tmp_path, "--seeds", "2", "--longer-below", "0")
    assert both[:4] == first  # kept, not trained again
    best = {}
    for result in first:
        if result["accuracy"] > best.get(result["layer"], {"accuracy": -1})["accuracy"]:
            best[result["layer"]] = result
    assert {(r["layer"], r["seed"], r["rate"], r["long"]) for r in both[4:]} == {
        (layer, 1, chosen["rate"], False) for layer, chosen in best.items()
    }
    assert (tmp_path / "mqar.png").read_bytes().startswith(b"\x89PNG")
    longer = sweep(tmp_path, "--seeds", "2", "--longer-below", "1.1")[6:]  # nothing reaches that
    assert {(r["layer"], r["seed"], r["rate"], r["long"], r["train_tokens"]) for r in longer} == {
        (layer, seed, chosen["rate"], True, 3 * 1536) for layer, chosen in best.items() for seed in (0, 1)
    }
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert all(cell["long"] and cell["seeds"] == 2 for cell in summary)  # they stand for their layer


def test_the_grid_has_every_rate_and_seed_and_reports_other_sequences_than_it_chose_by(tmp_path):
    pytest.importorskip("matplotlib")
    command = [sys.executable, ROOT / "experiments/mqar/grid.py", "--out", tmp_path]
    plan = ["--cells", "16x2:16", "--layers", "gka-plain", "--heads", "2", "--rates", "1e-2", "3e-3", "--seeds", "2"]
    small = ["--vocabulary", "32", "--steps", "6", "--batch", "16", "--device", "cpu"]
    for more in [], ["--draw"]:
        done = subprocess.run([*command, *plan, *small, *more], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in (tmp_path / "grid.jsonl").read_text().splitlines()]
    assert {(r["rate"], r["seed"], r["heads"]) for r in results} == {
        (rate, seed, 2) for rate in (1e-2, 3e-3) for seed in (0, 1)
    }
    assert any(r["accuracy"] != r["chosen_by"] for r in results)
    (cell,) = json.loads((tmp_path / "grid-2.json").read_text())
    assert cell["accuracies"] == sorted(r["accuracy"] for r in results if r["rate"] == cell["rate"])
