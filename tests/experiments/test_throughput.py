"""experiments/throughput: the time of all blocks follows from that of few."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "experiments" / "throughput" / "run.py"
specification = importlib.util.spec_from_file_location("throughput", FILE)
throughput = importlib.util.module_from_spec(specification)
sys.modules["throughput"] = throughput  # where its dataclasses look for themselves
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


def test_attention_is_inferred_where_only_few_blocks_of_it_were_measured():
    fixed, gka, attention = 0.3, 0.11, 0.19
    steps = {"gka": {n: fixed + n * gka for n in (4, 8)}, "attention": {4: fixed + 4 * attention}}
    assert throughput.whole(told(**steps), "8b", "attention", 16384) is None
    speed = throughput.inferred(told(**steps), "8b", 16384)
    assert speed == pytest.approx(65536 / (fixed + 36 * attention))
    assert throughput.inferred(told(gka=steps["gka"]), "8b", 16384) is None
    table = throughput.slopes(told(**steps), "8b")
    assert "attention, inferred" in table and f"{speed:,.0f}" in table


def test_what_both_models_are_inferred_to_share_they_share():
    for size in ("8b", "14b"):
        gka, attention = (
            json.loads((FILE.parents[2] / "configs" / size / f"{model}.json").read_text())
            for model in ("gka", "attention")
        )
        del gka["gka_config"], gka["hybrid_override_pattern"], attention["hybrid_override_pattern"]
        assert gka == attention


STAND_IN = """#!{python}
import json, sys, time
words = sys.argv[1:]
config, lengths = words[2], words[words.index("--lengths") + 1].split(",")
name = "/".join(config.removesuffix(".json").split("/")[-2:])
for length in map(int, lengths):
    if length == {slow}:
        time.sleep(60)
    row = dict(config=name, length=length, batch_tokens=32, seconds_per_step=1.0, tokens_per_second=32, machine="m")
    print(json.dumps(row | dict(date="today", dtype="float32")), flush=True)
"""


def rows_in(folder):
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [(row["config"], row["length"]) for row in map(json.loads, lines)]


def test_a_row_is_kept_when_it_is_measured_and_the_next_call_measures_what_is_missing(tmp_path, monkeypatch):
    program = tmp_path / "gka"
    monkeypatch.setattr(throughput, "PROGRAM", str(program))
    monkeypatch.setattr(throughput, "START", 0.0)
    words = ["run.py", "measure", "--part", "tiny", "--models", "gka", "--lengths", "16,32", "--device", "cpu"]
    words += ["--out", str(tmp_path / "out")]

    def measure(slow, *more):
        program.write_text(STAND_IN.format(python=sys.executable, slow=slow))
        program.chmod(0o755)
        monkeypatch.setattr(sys, "argv", [*words, *more])
        return throughput.main()

    out = tmp_path / "out"

    class EndOfBudget(threading.Timer):
        """In place of the clock: the budget is over when there is a row."""

        def run(self):
            while not (out.exists() or self.finished.wait(0.01)):
                continue
            self.function()

    with monkeypatch.context() as early:
        early.setattr(throughput.threading, "Timer", EndOfBudget)
        early.setattr(throughput.Measurement, "left", lambda _: 0.0 if out.exists() else 100.0)
        assert measure(32) == 0
    assert rows_in(out) == [("tiny-4/gka", 16)], "32 was stopped at the end of the budget"
    assert measure(0) == 0
    assert rows_in(out)[1:] == [("tiny-4/gka", 32), ("tiny-8/gka", 16), ("tiny-8/gka", 32)]
    assert measure(16) == 0, "nothing is left, so nothing is slow"
    assert len(rows_in(out)) == 4
    monkeypatch.setattr(throughput, "START", 10.0)
    assert measure(0, "--batch-tokens", "64", "--budget", "5") == 0
    assert len(rows_in(out)) == 4, "what would not end within the budget is not begun"


def test_rows_of_several_runs_are_one_list_of_which_the_later_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "RESULTS", tmp_path / "results.jsonl")
    row = {"part": "8b", "model": "gka", "config": "8b-4/gka", "length": 16384, "batch_tokens": 65536}
    for name, rows in (
        ("a", [row | {"seconds_per_step": 2.0}]),
        ("b", [row | {"seconds_per_step": 1.0}, row | {"seconds_per_step": 3.0, "trial": "x"}]),
    ):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["run.py", "merge", str(tmp_path / "a"), str(tmp_path / "b")])
    assert throughput.main() == 0
    merged = throughput.read_rows(tmp_path / "results.jsonl")
    assert [(row["seconds_per_step"], row.get("trial")) for row in merged] == [(1.0, None), (3.0, "x")]
    assert len(throughput.of_part(merged, "8b")["rows"]) == 1, "the newest is what tables show"


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
