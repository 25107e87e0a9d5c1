"""bench: what its scripts make of rows, whole or as far as they came."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import common  # noqa: E402

SETTING = {"machine": "card", "date": "2026-11-18", "device": "cuda:0", "dtype": "bfloat16"}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(SETTING | row) + "\n" for row in rows))
    return path


def test_rows_that_were_kept_make_the_section_that_all_of_them_would(tmp_path):
    shape = {"batch": 4, "heads": 8, "head_dim": 128}
    rows = [
        {"name": name, "length": length, "milliseconds": 0.5 * length}
        for length in (1024, 2048)
        for name in ("softmax attention", "gated linear attention")
    ]
    kept = write_lines(tmp_path / "rows.jsonl", [shape | row for row in rows])
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(SETTING | shape | {"rows": rows}, indent=2))
    sections = []
    for source in (kept, whole):
        words = [sys.executable, BENCH / "layer.py", "--from", source, "-o", tmp_path / "layer.png"]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        sections.append(done.stdout)
    assert sections[0] == sections[1] and "| 2,048 | 1024.00 | 1024.00 |" in sections[0]
    assert "half as many heads" in sections[0] and "2026-11-18" in sections[0]


def test_a_run_on_text_that_was_stopped_shows_the_lengths_it_came_to(tmp_path):
    text = {"batch_tokens": 65536, "text": ["a.tokens"], "after": 100, "matrix_product_flops": 7e14}
    rows = [
        {"config": f"440m/{name}", "length": 4096, "tokens_per_second": speed, "seconds_per_step": 0.5,
         "utilisation": 0.5, "memory_bytes": 7e10, "loss": 5.0, **ratio}
        for name, speed, ratio in (("gka", 1.2e5, {"ratio": 0.86}), ("attention", 1.4e5, {}))
    ]  # fmt: skip
    kept = write_lines(tmp_path / "rows.jsonl", [text | row for row in rows])
    words = [sys.executable, BENCH / "train.py", "--from", kept]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Training on text" in done.stdout and "0.86 ✗ (≥ 0.9)" in done.stdout


def test_rows_are_kept_as_they_come(tmp_path, monkeypatch):
    program = tmp_path / "gka"
    stand_in = f"""#!{sys.executable}
import sys
assert sys.argv[1:] == ["bench", "layer", "--json-lines"]
print('{{"a": 1, "b": 2}}', flush=True)
sys.exit(3)
"""
    program.write_text(stand_in)
    program.chmod(0o755)
    monkeypatch.setattr(common, "PROGRAM", str(program))
    with pytest.raises(SystemExit):
        common.gka_rows(["bench", "layer"], keep=tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_text() == '{"a": 1, "b": 2}\n', "the program failed, and its row is there"
    assert common.gka_rows([], source=tmp_path / "rows.jsonl")["rows"] == [{"a": 1, "b": 2}]


def test_processes_that_compile_share_a_kernels_configurations():
    rivals = pytest.importorskip("rivals")
    configurations = list(range(36))
    for most, wanted in ((0, set(configurations)), (12, set(range(0, 36, 3)))):
        for kernel in (0, 5):
            shares = [rivals.some_of(configurations, most, (i, 14), kernel) for i in range(14)]
            assert set().union(*shares) == wanted and all(shares)
    assert rivals.some_of(configurations, 12, (0, 1), 3) == list(range(0, 36, 3)), "in their order"
