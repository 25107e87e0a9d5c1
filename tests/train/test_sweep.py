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
    first = sweep(tmp_path, "--seeds", "1")
    rates = [r for r in first if not r["long"]]
    assert {(r["layer"], r["rate"]) for r in rates} == {
        (layer, rate) for layer in ("gka-plain", "gdn") for rate in (1e-2, 3e-3)
    }
    assert len(rates) == 4 and all(0 <= r["accuracy"] <= 1 and r["train_tokens"] == 1536 for r in rates)
    both = sweep(tmp_path, "--seeds", "2")
    assert both[: len(first)] == first  # kept, not trained again
    for layer in ("gka-plain", "gdn"):
        best = max(r["accuracy"] for r in rates if r["layer"] == layer)
        longer = [r for r in first if r["layer"] == layer and r["long"]]
        assert [r["train_tokens"] for r in longer] == ([3 * 1536] if best < 0.1 else [])  # where it was left at chance
        (second,) = [r for r in both[len(first) :] if r["layer"] == layer]
        used = (longer or [r for r in rates if r["layer"] == layer and r["accuracy"] == best])[-1]
        assert (second["seed"], second["rate"], second["long"]) == (1, used["rate"], used["long"])
    assert (tmp_path / "mqar.png").read_bytes().startswith(b"\x89PNG")
