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
    budget = ["--tokens", "4096", "--batch-tokens", "256", "--eval-batches", "1", "--rates", "1e-2", "3e-3"]
    done = subprocess.run([*command, *sizes, *budget, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_sweep_tries_the_rates_then_the_seeds_and_goes_on_where_it_ended(tmp_path):
    pytest.importorskip("matplotlib")
    first = sweep(tmp_path, "--seeds", "1")
    assert len(first) == 4 and {(r["layer"], r["rate"]) for r in first} == {
        (layer, rate) for layer in ("gka-plain", "gdn") for rate in (1e-2, 3e-3)
    }
    assert all(0 <= r["accuracy"] <= 1 and r["train_tokens"] == 4096 for r in first)
    both = sweep(tmp_path, "--seeds", "2")
    assert both[:4] == first  # kept, not trained again
    for result in both[4:]:
        of_layer = [r for r in first if r["layer"] == result["layer"]]
        used = next(r for r in of_layer if r["rate"] == result["rate"])
        assert result["seed"] == 1
        assert used["accuracy"] == max(r["accuracy"] for r in of_layer)
    assert len(both) == 6
    assert (tmp_path / "mqar.png").read_bytes().startswith(b"\x89PNG")
