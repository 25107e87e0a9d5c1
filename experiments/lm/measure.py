"""What a trained model is asked: held-out text token by token, and tasks.

  loss          by source; by position in the context; and by what the context could have told:
                seen      the token before was followed by this one earlier in the context, within so many tokens,
                          and that pair is rare in training (a frequent one needs no memory)
                rest      all other tokens
  tasks         gka eval: choices, LAMBADA, bits per byte of enwik8's test part, extraction

Windows of T + 1 tokens as training has them, documents running on.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HEADER = 96  # bytes of a token file before its tokens
WINDOWS = 128  # of a source, at most
FREQUENT = 1e-5  # of all pairs of the training text, above which a pair is frequent
FIRST = 16  # positions whose loss is kept one by one: there is little to remember yet
NEAR, FAR = 64, 512  # tokens back: within reach of a convolution's layers, and beyond most windows


def read_header(path: Path) -> dict[str, int]:
    """Of a token file (docs/data.md)."""
    with path.open("rb") as file:
        header = file.read(HEADER)
    fields = {"width": (12, 16), "tokens": (16, 24), "documents": (24, 32), "vocabulary": (32, 40)}
    return {name: int.from_bytes(header[first:end], "little") for name, (first, end) in fields.items()}


def read_tokens(path: Path) -> np.ndarray:
    header = read_header(path)
    return np.memmap(path, f"<u{header['width']}", "r", HEADER, (header["tokens"],))


def frequent_pairs(files: Sequence[Path], vocabulary: int, most: int = 4_000_000) -> np.ndarray:
    """Pairs of neighbours, as one number each, that are more than FREQUENT of all; from the beginning of each file."""
    pairs = []
    for file in files:
        tokens = read_tokens(file)[:most].astype(np.int64)
        pairs.append(tokens[:-1] * vocabulary + tokens[1:])
    found, counts = np.unique(np.concatenate(pairs), return_counts=True)
    return found[counts > FREQUENT * counts.sum()]


def windows_of(tokens: np.ndarray, length: int, most: int = WINDOWS) -> np.ndarray:
    """[N, length + 1], evenly over the whole."""
    count = (len(tokens) - 1) // length
    chosen = np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64)) if count else []
    return np.stack([tokens[i * length : i * length + length + 1] for i in chosen]).astype(np.int64)


def distances(window: np.ndarray, vocabulary: int) -> np.ndarray:
    """For each predicted token, how far back the same pair stands, 0 where it does not."""
    last: dict[int, int] = {}
    found = np.zeros(len(window) - 1, np.int64)
    for place, pair in enumerate((window[:-1] * vocabulary + window[1:]).tolist()):
        if pair in last:
            found[place] = place - last[pair]
        last[pair] = place
    return found


def kinds(windows: np.ndarray, frequent: np.ndarray, vocabulary: int) -> dict[str, np.ndarray]:
    """Masks over [N, length]."""
    back = np.stack([distances(window, vocabulary) for window in windows])
    rare = ~np.isin(windows[:, :-1] * vocabulary + windows[:, 1:], frequent)
    seen = (back > 0) & rare
    return {
        "seen": seen,
        f"seen within {NEAR}": seen & (back <= NEAR),
        f"seen within {FAR}": seen & (back > NEAR) & (back <= FAR),
        f"seen beyond {FAR}": seen & (back > FAR),
        "rest": ~seen,
    }


def score(program: str, model: Path, windows: np.ndarray, where: Sequence[str]) -> np.ndarray:
    """The loss of every token of every window but the first."""
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids"
        ids.write_text("".join(" ".join(map(str, row)) + "\n" for row in windows.tolist()))
        command = [program, "score", str(model), "--ids", str(ids), "--per-token", *where]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"measure: gka score: {done.stderr.strip()}")
    return -np.array([one["log_probabilities"] for one in json.loads(done.stdout)["sequences"]])


def mean(losses: np.ndarray) -> dict[str, float]:
    """With its standard error over windows, whose tokens are not independent."""
    per_window = losses.mean(axis=1)
    error = per_window.std(ddof=1) / math.sqrt(len(per_window)) if len(per_window) > 1 else 0.0
    return {"loss": float(losses.mean()), "stderr": float(error), "tokens": int(losses.size)}


def held_out(
    program: str, model: Path, tests: dict[str, Path], frequent: np.ndarray, length: int, vocabulary: int,
    where: Sequence[str], most: int = WINDOWS,
) -> dict[str, object]:  # fmt: skip
    """By source, by position, at each of the first, by kind of token."""
    cut = {name: windows_of(read_tokens(path), length, most) for name, path in tests.items()}
    windows = np.concatenate(list(cut.values()))
    losses = score(program, model, windows, where)
    by_source, first = {}, 0
    for name, rows in cut.items():
        by_source[name] = mean(losses[first : first + len(rows)])
        first += len(rows)
    edges = [0, *(2**i for i in range(4, 40) if 2**i < length), length]
    by_position = {f"{low}-{high - 1}": float(losses[:, low:high].mean()) for low, high in itertools.pairwise(edges)}
    first = [float(loss) for loss in losses[:, :FIRST].mean(axis=0)]
    by_kind = {
        name: {"loss": float(losses[mask].mean()) if mask.any() else None, "tokens": int(mask.sum())}
        for name, mask in kinds(windows, frequent, vocabulary).items()
    }
    by_window = [round(float(loss), 4) for loss in losses.mean(axis=1)]  # the same windows for every model: pairs
    return {"all": mean(losses), "windows": by_window, "source": by_source, "position": by_position, "first": first,
            "kind": by_kind}  # fmt: skip


def tasks(program: str, model: Path, files: Sequence[Path], limit: int, where: Sequence[str]) -> dict[str, object]:
    """Metric by metric, as gka eval prints them."""
    if not files:
        return {}
    # The test part of enwik8 is whole texts, not items: a limit would make it another number.
    found: dict[str, object] = {}
    texts = [file for file in files if file.stem == "enwik8"]
    for group, most in (([file for file in files if file not in texts], limit), (texts, 0)):
        if group:
            command = [program, "eval", str(model), "--json", "--tasks", *map(str, group), *where]
            command += ["--limit", str(most)] if most else []
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
            if done.returncode:
                raise SystemExit(f"measure: gka eval: {done.stderr.strip()[-500:]}")
            for name, task in json.loads(done.stdout)["tasks"].items():
                found[name] = {"items": task["items"], "seconds": round(task["seconds"], 1), **task["metrics"]}
    return found
