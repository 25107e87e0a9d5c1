"""experiments/throughput: the time of all blocks follows from that of few."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
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


def test_layers_of_others_are_timed_and_what_is_missing_is_said(tmp_path):
    pytest.importorskip("torch")
    layers = tmp_path / "fla" / "layers"
    layers.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").write_text('__version__ = "0"')
    (layers / "__init__.py").write_text("")
    stand_in = """
        import torch
        class GatedDeltaNet(torch.nn.Module):
            def __init__(self, hidden_size, layer_idx, num_heads, head_dim, expand_v):
                super().__init__()
                assert hidden_size == num_heads * head_dim and expand_v == 2
                self.inner = torch.nn.Linear(hidden_size, hidden_size)
            def forward(self, x):
                return self.inner(x), None, None
    """
    (layers / "gated_deltanet.py").write_text(textwrap.dedent(stand_in))
    command = [sys.executable, FILE.with_name("beside.py"), tmp_path, "--layers", "GDN,KDA", "--lengths", "8,1k"]
    command += ["--heads", "2", "--head-dim", "4", "--repetitions", "2", "--device", "cpu"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, *missing = json.loads(done.stdout)["rows"]
    assert (first["name"], first["length"], second["length"]) == ("FLA GDN", 8, 1024)
    assert first["milliseconds"] > 0 and all("fla.layers.kda" in row["error"] for row in missing)
    assert "FLA GDN, ms" in throughput.layers(json.loads(done.stdout))
