"""experiments/throughput: the time of all blocks follows from that of few."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "experiments" / "throughput" / "run.py"
specification = importlib.util.spec_from_file_location("throughput", FILE)
throughput = importlib.util.module_from_spec(specification)
specification.loader.exec_module(throughput)


def told(**seconds):
    rows = [
        {"config": f"8b-{blocks}/{name.split('_')[0]}", "length": 16384, "seconds_per_step": value}
        for name, values in seconds.items()
        for blocks, value in values.items()
    ]
    return {"batch_tokens": 65536, "rows": rows}


def test_all_blocks_take_what_few_take_and_as_much_more_for_each():
    fixed, block = 0.3, 0.11
    steps = {n: fixed + n * block for n in (4, 8)}
    speed = throughput.whole(told(gka=steps), "8b", "gka", 16384)
    assert speed == pytest.approx(65536 / (fixed + 36 * block))
    assert throughput.whole(told(gka={4: 1.0}), "8b", "gka", 16384) is None, "what did not fit has no slope"


def test_a_model_is_cut_to_so_many_blocks_and_keeps_its_shape(tmp_path):
    for size in ("8b", "14b"):
        whole = json.loads((FILE.parents[2] / "configs" / size / "gka.json").read_text())
        assert whole["hybrid_override_pattern"] == f"{throughput.BLOCKS[size]}xGKA"
        few = json.loads(throughput.cut(size, "gka", 4, tmp_path).read_text())
        assert few.pop("hybrid_override_pattern") == "4xGKA"
        assert few.items() <= whole.items()
