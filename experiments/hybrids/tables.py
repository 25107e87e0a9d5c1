"""results.md and the heat maps (length × depth) from results.jsonl."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT / "experiments" / "lm")]

import report  # noqa: E402
from console import write_atomically  # noqa: E402
from sweep import Results  # noqa: E402

DEPTHS = 5  # rows of a heat map


def of_stage(results: Results, size: str, stage: str, titles: dict[str, str]) -> dict[str, dict]:
    """By title, a model's newest result with something measured."""
    those = [r for r in results.values() if (r["size"], r["stage"]) == (size, stage) and "measures" in r]
    found: dict[str, dict] = {}
    for name, title in titles.items():
        for run in (run for run in those if run["model"] == name):
            begun = f", ε {run['eps']:g}" if run.get("eps") else ""
            begun += f", begun at {run['first_output']:g}" if run.get("first_output", 1) != 1 else ""
            found[title + begun] = run
    return found


def losses(runs: dict[str, dict]) -> str:
    first = next(iter(runs.values()))["measures"]["held_out"]
    rows = []
    for title, run in runs.items():
        held = run["measures"]["held_out"]
        tasks = run["measures"].get("tasks", {})
        contains = [tasks.get(task, {}).get("contains", {}).get("value") for task in ("squad", "rfc_headers")]
        rows.append([
            title,
            f"{run['parameters'] / 1e6:.1f}M",
            report.number(held["all"]["loss"]),
            *(report.number(held["kind"][kind]["loss"]) for kind in first["kind"]),
            *(report.number(value) for value in contains),
        ])  # fmt: skip
    return report.markdown(["model", "parameters", "loss", *first["kind"], "SQuAD", "RFC headers"], rows)


def scores(run: dict) -> dict[str, dict[int, float]]:
    """RULER's score by task and length."""
    found: dict[str, dict[int, float]] = {}
    for name, one in run["measures"]["ruler"].items():
        task, length = name.rsplit("-", 1)
        found.setdefault(task, {})[int(length)] = one["score"]
    return found


def mean_at(by_task: dict[str, dict[int, float]], length: int, without: str = "") -> float | None:
    values = [lengths[length] for task, lengths in by_task.items() if length in lengths and task != without]
    return sum(values) / len(values) if values else None


def averages(runs: dict[str, dict]) -> str:
    every = {title: scores(run) for title, run in runs.items()}
    lengths = sorted({length for by_task in every.values() for found in by_task.values() for length in found})
    rows = []
    for title, by_task in every.items():
        for without, addition in (("", ""), ("niah_single_1", ", without S-NIAH-1")):
            rows.append([title + addition, *(report.number(mean_at(by_task, n, without), 1) for n in lengths)])
    return report.markdown(["model", *(f"{length:,}" for length in lengths)], rows)


def grid(run: dict) -> tuple[list[int], list[list[float | None]]]:
    """Mean score of the needle tasks by depth and length."""
    cells: dict[tuple[int, int], list[float]] = {}
    for name, one in run["measures"]["ruler"].items():
        task, length = name.rsplit("-", 1)
        if task.startswith(("niah_single", "niah_multikey")):
            for depth, score in one["items"]:
                cells.setdefault((min(int(depth * DEPTHS), DEPTHS - 1), int(length)), []).append(score)
    lengths = sorted({length for _, length in cells})
    mean = {place: sum(values) / len(values) for place, values in cells.items()}
    return lengths, [[mean.get((row, length)) for length in lengths] for row in range(DEPTHS)]


def draw(runs: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(1, len(runs), figsize=(3.2 * len(runs) + 1, 3.2), squeeze=False, layout="constrained")
    for axis, (title, run) in zip(axes[0], runs.items(), strict=True):
        lengths, rows = grid(run)
        shown = axis.imshow(np.array(rows, dtype=float), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set_xticks(range(len(lengths)), [f"{length / 1024:g}K" for length in lengths])
        axis.set_yticks(range(DEPTHS), [f"{(row + 0.5) / DEPTHS:.0%}" for row in range(DEPTHS)])
        axis.set_title(title, fontsize=9)
        axis.set(xlabel="length", ylabel="depth")
    figure.colorbar(shown, ax=axes[0].tolist(), label="recalled")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_report(results: Results, titles: dict[str, str], folder: Path) -> None:
    parts = ["# Results\n\nWritten by `run.py report` from `results.jsonl`.\n"]
    for size in sorted({result["size"] for result in results.values()}):
        short, long = (of_stage(results, size, stage, titles) for stage in ("short", "long"))
        if short:
            device = next(iter(short.values()))["device"]
            parts.append(f"## {size}, first stage\n\n{device}, {max(run['date'] for run in short.values())}.\n")
            parts.append(losses(short))
        if long:
            parts += [f"## {size}, RULER after the second stage\n", averages(long)]
            name = f"ruler-{size}.png"
            write_atomically(folder / name, lambda path, long=long: draw(long, path))
            parts.append(f"![]({name})\n")
    write_atomically(folder / "results.md", lambda path: path.write_text("\n".join(parts)))
    print(f"{folder / 'results.md'} has the tables.")
