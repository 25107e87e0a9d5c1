"""The figure: accuracy against width and, below, against what a block remembers; a panel per size, a line per layer."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from layers import LAYERS

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {
    "attention": "#555555",
    "mamba2": "#c2a01e",
    "mamba2-narrow": "#e3d08a",
    "gla": "#9ab973",
    "deltanet": "#7fb2d6",
    "gdn": "#3f7fb5",
    "kda": "#7b5ea7",
    "mesanet": "#d98c5f",
    "gka-plain": "#e06666",
    "gka": "#c21f1f",
}


def draw(summary: list[dict], path: Path) -> None:
    sizes = sorted({(cell["tokens"], cell["pairs"]) for cell in summary})
    shape = {"figsize": (4.2 * len(sizes) + 2.2, 7.4), "sharey": True, "squeeze": False}
    figure, rows = plt.subplots(2, len(sizes), **shape)
    for i, (tokens, pairs) in enumerate(sizes):
        of_size = [c for c in summary if (c["tokens"], c["pairs"]) == (tokens, pairs)]
        above, below = rows[0][i], rows[1][i]
        above.set_title(f"T = {tokens}, n = {pairs} pairs", fontsize=11)
        for name, layer in LAYERS.items():
            cells = sorted((c for c in of_size if c["layer"] == name), key=lambda c: c["width"])
            if not cells:
                continue
            _line(above, name, [c["width"] for c in cells], cells)
            if layer.memory:
                _line(below, name, [layer.memory(c["width"]) for c in cells], cells)
        above.axvline(pairs, color="#bbbbbb", linewidth=0.8, linestyle=":")
        widths = sorted({cell["width"] for cell in summary})
        above.set_xscale("log", base=2)
        above.set_xticks(widths, [str(w) for w in widths])
        above.set_xlabel("model width")
        above.set_xlim(0.9 * widths[0], 1.1 * widths[-1])
        below.set_xscale("log", base=2)
        below.set_xlabel("numbers a block remembers")
    for row in rows:
        row[0].set_ylabel("recall accuracy")
        row[0].set_ylim(-0.03, 1.03)
        for panel in row:
            panel.grid(alpha=0.25)
    shown = {}
    for panel in rows[0]:
        shown |= {title: line for line, title in zip(*panel.get_legend_handles_labels(), strict=True)}
    titles = [layer.title for layer in LAYERS.values() if layer.title in shown]
    place = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "frameon": False, "fontsize": 9}
    rows[0][-1].legend([shown[title] for title in titles], titles, **place)
    figure.suptitle("Multi-query associative recall, two layers of one head", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _line(panel: plt.Axes, name: str, x: list[float], cells: list[dict]) -> None:
    ours = name.startswith("gka")
    panel.plot(
        x,
        [c["mean"] for c in cells],
        color=COLOURS[name],
        label=LAYERS[name].title,
        linewidth=2.4 if ours else 1.5,
        linestyle="-" if LAYERS[name].constant_memory else "--",
        marker="o",
        markersize=5 if ours else 3.5,
        zorder=3 if ours else 2,
    )
    panel.fill_between(x, [c["low"] for c in cells], [c["high"] for c in cells], color=COLOURS[name], alpha=0.15)
