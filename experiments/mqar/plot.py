"""The figure: accuracy against width, a panel per size, a line per layer."""

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
    widths = sorted({cell["width"] for cell in summary})
    figure, panels = plt.subplots(1, len(sizes), figsize=(4.2 * len(sizes) + 2.2, 3.9), sharey=True, squeeze=False)
    for panel, (tokens, pairs) in zip(panels[0], sizes, strict=True):
        for name, layer in LAYERS.items():
            cells = [c for c in summary if c["layer"] == name and (c["tokens"], c["pairs"]) == (tokens, pairs)]
            if not cells:
                continue
            cells.sort(key=lambda c: c["width"])
            x = [c["width"] for c in cells]
            ours = name.startswith("gka")
            panel.plot(
                x,
                [c["mean"] for c in cells],
                color=COLOURS[name],
                label=layer.title,
                linewidth=2.4 if ours else 1.5,
                linestyle="-" if layer.constant_memory else "--",
                marker="o",
                markersize=5 if ours else 3.5,
                zorder=3 if ours else 2,
            )
            panel.fill_between(
                x, [c["low"] for c in cells], [c["high"] for c in cells], color=COLOURS[name], alpha=0.15
            )
        panel.axvline(pairs, color="#bbbbbb", linewidth=0.8, linestyle=":")
        panel.set_title(f"T = {tokens}, n = {pairs} pairs", fontsize=11)
        panel.set_xscale("log", base=2)
        panel.set_xticks(widths, [str(w) for w in widths])
        panel.set_xlabel("model width")
        panel.set_xlim(0.9 * widths[0], 1.1 * widths[-1])
        panel.set_ylim(-0.03, 1.03)
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("recall accuracy")
    shown = {}
    for panel in panels[0]:
        shown |= {title: line for line, title in zip(*panel.get_legend_handles_labels(), strict=True)}
    titles = [layer.title for layer in LAYERS.values() if layer.title in shown]
    panels[0][-1].legend(
        [shown[title] for title in titles],
        titles,
        loc="center left",
        bbox_to_anchor=(1.02, 0.5),
        frameon=False,
        fontsize=9,
    )
    figure.suptitle("Multi-query associative recall, two layers of one head", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
