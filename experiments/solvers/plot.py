"""The figures: residuals against iterations, errors of gradients, and divisors of the reversed recurrences."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import NullLocator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from console import write_atomically
from palette import BLUE, GREEN, GREY, ORANGE, PINK, VERMILION

COLOURS = {
    "gradient descent": GREEN,
    "Nesterov": ORANGE,
    "conjugate gradient": BLUE,
    "conjugate gradient + 1e-6": PINK,
    "Chebyshev": VERMILION,  # GKA's
}
MARKERS = {"conjugate gradient": "s", "conjugate gradient + 1e-6": "X", "Chebyshev": "D"}
COUNTED = (1, 2, 5, 10, 20, 60)  # ticks on an axis of iterations
STYLES = {("implicit", "float32"): "-", ("unrolled", "float32"): ":", ("implicit", "bfloat16"): "--"}
WORDS = {
    ("implicit", "float32"): "implicit",
    ("unrolled", "float32"): "through the iterations",
    ("implicit", "bfloat16"): "implicit, bfloat16",
}


def _note(figure, results: dict) -> None:
    about = results["about"]
    sizes = about["sizes"]
    size = f"B{sizes['batch']} T{sizes['tokens']} H{sizes['heads']} D{sizes['width']}"
    figure.text(0.995, 0.985, f"{size}, {about['machine']}, {about['date']}", ha="right", fontsize=7.5, color=GREY)


def _legend(figure, panel, columns: int = 5) -> None:
    """Below all panels, where it hides no line."""
    handles, labels = panel.get_legend_handles_labels()
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.03), "frameon": False}
    figure.legend(handles, labels, ncols=columns, fontsize=9, **place)


def _save(figure, path: Path) -> None:
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def draw_residuals(results: dict, path: Path) -> None:
    lines = results.get("residuals", [])
    ridges = sorted({line["ridge"] for line in lines})
    shape = {"figsize": (3.1 * max(1, len(ridges)) + 1.4, 5.6), "sharex": True, "sharey": "row", "squeeze": False}
    figure, rows = plt.subplots(2, max(1, len(ridges)), **shape)
    for row, arithmetic in zip(rows, ("float32", "bfloat16"), strict=True):
        row[0].set_ylabel(f"{arithmetic}\nresidual norm")
        for panel, ridge in zip(row, ridges, strict=True):
            for line in lines:
                if (line["arithmetic"], line["ridge"]) != (arithmetic, ridge):
                    continue
                colour = COLOURS[line["method"]]
                panel.semilogy(line["mean"], color=colour, label=line["method"], linewidth=1.5)
                panel.semilogy(line["max"], color=colour, linewidth=0.7, alpha=0.5)
            panel.grid(alpha=0.25)
            panel.set_title(f"a = {ridge:g}", fontsize=10)
    for panel in rows[1]:
        panel.set_xlabel("iterations")
    _legend(figure, rows[0][-1])
    figure.suptitle("Residual of a random regression: the mean over tokens, and thin the worst", fontsize=11)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    _note(figure, results)
    _save(figure, path)


def draw_gradients(results: dict, path: Path) -> None:
    figure, panels = plt.subplots(1, 3, figsize=(12.4, 4.0), sharey=True)
    parts = [
        ("layer", "dq", "one layer: dq"),
        ("layer", "dk", "one layer: dk"),
        ("model", "weights", "five layers: weights"),
    ]
    for panel, (part, of, title) in zip(panels, parts, strict=True):
        lines: dict[tuple, list] = {}
        for line in results.get(part, []):
            if line["of"] == of and line["method"] != "exact":
                key = line["method"], line["gradient"], line["arithmetic"]
                lines.setdefault(key, []).append((line["iterations"], line["error"]))
            if line["of"] == of and line["method"] == "exact":
                panel.axhline(line["error"], color=GREY, linewidth=0.9)
                panel.annotate("exact, float32", (1, line["error"]), fontsize=7, color=GREY, va="bottom")
        for (method, gradient, arithmetic), points in lines.items():
            x, y = zip(*sorted(points), strict=True)
            label = f"{method}, {WORDS[gradient, arithmetic]}"
            style = {"linestyle": STYLES[gradient, arithmetic], "color": COLOURS[method]}
            panel.loglog(x, y, **style, marker=MARKERS[method], markersize=4, linewidth=1.4, label=label)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("iterations")
        panel.set_xticks(COUNTED, [str(count) for count in COUNTED])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("relative error against exact, float64")
    _legend(figure, panels[2], 3)
    figure.suptitle(f"Gradients, a = {results['about']['ridge']:g}", fontsize=11)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    _note(figure, results)
    _save(figure, path)


def draw_divisors(results: dict, path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 3.8))
    ridges = sorted({line["ridge"] for line in results.get("divisors", [])})
    shades = dict(zip(ridges, plt.cm.viridis([0.1, 0.35, 0.6, 0.85]), strict=False))
    for line in results.get("divisors", []):
        colour, label = shades.get(line["ridge"], GREY), f"a = {line['ridge']:g}"
        if line["method"] == "Chebyshev":
            panels[0].plot(range(1, len(line["divisors"]) + 1), line["divisors"], color=colour, label=label)
        else:
            x = range(1, len(line["low"]) + 1)
            low, high = ([float("nan") if v is None else v for v in line[key]] for key in ("low", "high"))
            panels[1].semilogy(x, high, color=colour, label=label)
            panels[1].semilogy(x, low, color=colour, linestyle="--")
    panels[0].set_title("Chebyshev: ω − 1", fontsize=10)
    panels[0].set_ylim(0, 1.05)
    panels[1].set_title("conjugate gradient: largest and smallest (dashed)", fontsize=10)
    for panel in panels:
        panel.set_xlabel("iteration")
        panel.grid(alpha=0.25)
    panels[0].legend(fontsize=8, frameon=False)
    figure.suptitle("What a reversed step divides by", fontsize=11)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    _note(figure, results)
    _save(figure, path)


PICTURES = {  # with the parts of the results that each is of
    "residuals": (draw_residuals, {"residuals"}),
    "gradients": (draw_gradients, {"layer", "model"}),
    "divisors": (draw_divisors, {"divisors"}),
}


def draw_all(results: dict, out: Path) -> None:
    """The figures of which a part is there."""
    for name, (draw, parts) in PICTURES.items():
        if parts & results.keys():
            write_atomically(out / f"{name}.png", lambda path, draw=draw: draw(results, path))
