"""The figure: accuracy against width, against what a block remembers, and 1 − accuracy against width on a log scale,
where curves that touch 1 part; a panel per size, a line per layer through the medians, a dot for each seed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
from run import ROOT

from layers import LAYERS

matplotlib.use("Agg")
from matplotlib import pyplot as plt

sys.path.insert(0, str(ROOT / "experiments"))

from palette import FAINT, LOOKS

LEAST_MISSED = 1e-4  # answers of which so few are wrong are too few to tell apart


def draw(summary: list[dict], path: Path, heads: int = 1) -> None:
    sizes = sorted({(cell["tokens"], cell["pairs"]) for cell in summary})
    shape = {"figsize": (4.4 * len(sizes), 11.0), "sharey": "row", "squeeze": False}
    figure, rows = plt.subplots(3, len(sizes), layout="constrained", **shape)
    for i, (tokens, pairs) in enumerate(sizes):
        of_size = [c for c in summary if (c["tokens"], c["pairs"]) == (tokens, pairs)]
        above, below, last = rows[0][i], rows[1][i], rows[2][i]
        above.set_title(f"T = {tokens}, n = {pairs} pairs", fontsize=11)
        for name, layer in LAYERS.items():
            cells = sorted((c for c in of_size if c["layer"] == name), key=lambda c: c["width"])
            if not cells:
                continue
            _line(above, name, [c["width"] for c in cells], cells)
            _line(last, name, [c["width"] for c in cells], cells, missed)
            if layer.memory:
                _line(below, name, [layer.memory(c["width"], heads) for c in cells], cells)
        above.axvline(pairs, color=FAINT, linewidth=0.8, linestyle=":")
        widths = sorted({cell["width"] for cell in summary})
        for panel in (above, last):
            panel.set_xscale("log", base=2)
            panel.set_xticks(widths, [str(w) for w in widths])
            panel.set_xlabel("model width")
            panel.set_xlim(0.9 * widths[0], 1.1 * widths[-1])
        below.set_xscale("log", base=2)
        below.set_xlabel("numbers a block remembers")
    for row in rows[:2]:
        row[0].set_ylabel("recall accuracy")
        row[0].set_ylim(-0.03, 1.03)
    rows[2][0].set(ylabel="1 − accuracy", yscale="log", ylim=(1.2, LEAST_MISSED / 1.3))
    for panel in rows.flat:
        panel.grid(alpha=0.25)
    shown = {}
    for panel in rows[0]:
        shown |= {title: line for line, title in zip(*panel.get_legend_handles_labels(), strict=True)}
    titles = [layer.title for layer in LAYERS.values() if layer.title in shown]
    place = {"loc": "outside lower center", "ncols": 3 if len(sizes) > 1 else 2, "frameon": False, "fontsize": 9}
    figure.legend([shown[title] for title in titles], titles, **place)
    number = "one head" if heads == 1 else f"{heads} heads"
    figure.suptitle(f"Multi-query associative recall, two layers of {number}", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def missed(accuracy: float) -> float:
    return max(1 - accuracy, LEAST_MISSED)


def _line(
    panel: plt.Axes, name: str, x: list[float], cells: list[dict], shown: Callable[[float], float] = float
) -> None:
    look = LOOKS[name]
    width = 2.4 if name == "gka" else 1.5
    order = 3 if name.startswith("gka") else 2
    medians = [shown(cell["median"]) for cell in cells]
    panel.plot(x, medians, **look.style, label=LAYERS[name].title, linewidth=width, markersize=5, zorder=order)
    dots = [(place, shown(accuracy)) for place, cell in zip(x, cells, strict=True) for accuracy in cell["accuracies"]]
    panel.plot(*zip(*dots, strict=True), color=look.colour, marker=".", markersize=4, linestyle="", alpha=0.6)
