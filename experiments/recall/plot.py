"""The picture of the recall experiment: two panels, lines labelled at their ends, one sentence on top."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from palette import FAINT, GKA, LOOKS

INK, QUIET, PAPER = "#1b1f24", "#6b7280", "#ffffff"

# Memory, label, colour, line, width: drawn in this order, the subject last and strongest.
LINES = (
    ("linear", "linear attention", LOOKS["linear"].colour, "-", 1.8),
    ("deltanet", "DeltaNet", LOOKS["deltanet"].colour, "-", 2.6),
    ("gdn", "Gated DeltaNet", LOOKS["gdn"].colour, (0, (2, 3)), 2.0),
    ("deltanet_wide", "DeltaNet, wide keys", LOOKS["deltanet"].colour, (0, (5, 2)), 1.6),
    ("gka", "Gated KalmaNet", GKA.colour, "-", 3.2),
)

COUNTED = ("deltanet", "deltanet_wide", "gka")  # lines with a dot and a number where they reach the blur


def headline(data: dict) -> str:
    held = data["held"]["pairs alone"]
    ours, theirs, wide = held["gka"], held["deltanet"], held["deltanet_wide"]
    if None in (ours, theirs, wide) or not theirs < wide < ours:
        return "Recall error against the number of pairs stored"
    return (
        f"Gated KalmaNet holds {ours:.0f} pairs where DeltaNet holds {theirs:.0f}, or {wide:.0f} with as large a state"
    )


def spread(positions: list[float], gap: float) -> list[float]:
    """The positions moved apart to at least `gap`, each as little as a single pass from the top allows."""
    order = sorted(range(len(positions)), key=lambda i: -positions[i])
    placed = list(positions)
    for above, below in pairwise(order):
        placed[below] = min(placed[below], placed[above] - gap)
    shift = (sum(positions) - sum(placed)) / len(positions)
    return [p + shift for p in placed]


def mark_held(ax: Axes, held: float, blur: float, colour: str) -> None:
    ax.plot(held, blur, "o", color=colour, markersize=7, markeredgecolor=PAPER, markeredgewidth=1.4, zorder=5)
    ax.annotate(
        f"{held:.0f}",
        xy=(held, blur),
        xytext=(4.5, -6.5),
        textcoords="offset points",
        color=colour,
        fontsize=9.5,
        fontweight="bold",
        path_effects=[withStroke(linewidth=2, foreground=PAPER)],
        zorder=6,
    )


def draw_panel(ax: Axes, data: dict, panel: str, title: str) -> None:
    pairs, dim = data["pairs"], data["dim"]
    ax.axvline(dim, color=FAINT, linewidth=1, zorder=0)
    ax.axhline(data["blur"], color=FAINT, linewidth=1, zorder=0)
    for key, _, colour, dashes, width in LINES:
        rows = data["panels"][panel][key]
        ax.fill_between(pairs, [r["low"] for r in rows], [r["high"] for r in rows], color=colour, alpha=0.12, lw=0)
        ax.plot(pairs, [r["error"] for r in rows], color=colour, linestyle=dashes, linewidth=width)
    for key, _, colour, *_ in LINES:
        held = data["held"][panel][key]
        if held is not None and key in COUNTED:
            mark_held(ax, held, data["blur"], colour)
    ax.set_title(title, loc="left", fontsize=11.5, color=INK, pad=10)
    ax.set_xlim(0, pairs[-1])
    ax.set_ylim(0, 1)
    ax.set_xticks([0, dim // 2, dim, 3 * dim // 2, 2 * dim])
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    ax.set_xlabel("pairs stored", color=INK, fontsize=10.5)
    ax.tick_params(length=0, colors=QUIET, labelsize=10)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color("#c4c9d1")


def label_ends(ax: Axes, data: dict, panel: str) -> None:
    ends = [data["panels"][panel][key][-1]["error"] for key, *_ in LINES]
    last = data["pairs"][-1]
    leader = {"arrowstyle": "-", "linewidth": 0.8, "shrinkA": 1, "shrinkB": 2, "relpos": (0, 0.5)}
    for (_, label, colour, *_), end, y in zip(LINES, ends, spread(ends, 0.066), strict=True):
        ax.annotate(
            label,
            xy=(last, end),
            xytext=(last * 1.045, y),
            color=colour,
            fontsize=10.5,
            fontweight="bold" if label == "Gated KalmaNet" else "normal",
            va="center",
            annotation_clip=False,
            arrowprops=leader | {"color": colour},
        )


def caption(data: dict) -> str:
    dim = data["dim"]
    decays = {row["decay"] for rows in data["panels"].values() for row in rows["gdn"]}
    overlap = "; the best decay here is none, so Gated DeltaNet lies on DeltaNet" if decays == {1.0} else ""
    return (
        f"State: {dim}×{dim} numbers; Gated KalmaNet keeps as many again for H, and DeltaNet with wide keys is given "
        f"the same {data['memories']['gka']['state']:,} (keys of dimension {2 * dim}).\n"
        f"Write strength and decay of each memory tuned on other seeds{overlap}. "
        f"Mean of {data['seeds']} seeds, band: 80% of them."
    )


def draw(data: dict, path: Path) -> None:
    with plt.rc_context({"font.family": "DejaVu Sans", "axes.facecolor": PAPER, "figure.facecolor": PAPER}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11.6, 5.6), sharey=True)
        figure.subplots_adjust(left=0.065, right=0.838, top=0.775, bottom=0.2, wspace=0.09)
        draw_panel(left, data, "pairs alone", "Asked right after the pairs")
        after = f"Asked after {data['distractors']} distracting tokens, {data['distractor_strength']:g}× as strong"
        draw_panel(right, data, "distracting tokens after", after)
        left.set_ylabel("recall error", color=INK, fontsize=10.5)
        label_ends(right, data, "distracting tokens after")
        left.text(data["dim"], 1.0, " one pair per key dimension", fontsize=8.8, color=QUIET, va="top")
        figure.text(0.02, 0.948, headline(data), fontsize=15.5, fontweight="bold", color=INK, va="center")
        subtitle = (
            "Recall error (0: perfect, 1: forgotten) of random key-value pairs, by how many are stored. "
            f"Dots: where the error reaches {data['blur']:g}."
        )
        figure.text(0.02, 0.888, subtitle, fontsize=10.8, color=QUIET, va="center")
        figure.text(0.02, 0.05, caption(data), fontsize=8.8, color=QUIET, va="center", linespacing=1.55)
        figure.savefig(path, dpi=200, format="png")
        plt.close(figure)
