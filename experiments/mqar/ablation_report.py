"""ablations.md and its figures: recall of each variant, a dot a seed, and how smoothly a constant λ learns."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
from run import ROOT

from layers import Layer

matplotlib.use("Agg")
from matplotlib import pyplot as plt

sys.path.insert(0, str(ROOT / "experiments"))

from console import write_atomically

USUAL = "gka"
RIDGES = {USUAL: "#c21f1f", "constant": "#3f7fb5", "constant-0.02": "#7b5ea7", "constant-exact": "#9ab973"}
RATE_COLOURS = ("#c21f1f", "#3f7fb5", "#9ab973", "#c2a01e")

Runs = dict[str, list[dict]]  # of a variant, by seed


def cells_of(results: list[dict]) -> dict[tuple[int, int, int], list[dict]]:
    cells: dict[tuple[int, int, int], list[dict]] = {}
    for result in sorted(results, key=lambda r: (r["tokens"], r["pairs"], r["width"], -r["rate"], r["seed"])):
        cells.setdefault((result["tokens"], result["pairs"], result["width"]), []).append(result)
    return cells


def rates_of(runs: list[dict]) -> list[float]:
    """The one with the most runs first."""
    rates = sorted({run["rate"] for run in runs}, reverse=True)
    return sorted(rates, key=lambda rate: -sum(run["rate"] == rate for run in runs))


def at_rate(runs: list[dict], rate: float, names: list[str]) -> Runs:
    found = {name: [run for run in runs if (run["layer"], run["rate"]) == (name, rate)] for name in names}
    return {name: some for name, some in found.items() if some}


def recalled(runs: list[dict]) -> list[float]:
    return [run["accuracy"] for run in runs]


def against(runs: list[dict], usual: list[dict]) -> str:
    """Whether every seed lies on one side of every seed of GKA; one seed says nothing."""
    mine, its = recalled(runs), recalled(usual)
    if runs is usual or min(len(mine), len(its)) < 2:
        return ""
    if min(mine) > max(its):
        return "above"
    return "below" if max(mine) < min(its) else "among them"


def step_time(runs: list[dict]) -> str:
    """Of the quickest run: other work on a machine makes computing slower, too."""
    times = [1e3 * run["cpu_seconds"] / run["steps"] for run in runs if "cpu_seconds" in run]
    return f"{min(times):.1f}" if times else "–"


def recall_table(runs: Runs, variants: dict[str, Layer]) -> str:
    rows = []
    for name, some in runs.items():
        seeds = ", ".join(f"{run['accuracy']:.3f} ({run['seed']})" for run in some)
        place = against(some, runs.get(USUAL, []))
        rows.append([variants[name].title, seeds, f"{statistics.median(recalled(some)):.3f}", place, step_time(some)])
    return markdown(["variant", "recall (seed)", "median", "its seeds and those of GKA", "CPU, ms a step"], rows)


def gradient_table(runs: Runs, variants: dict[str, Layer]) -> str:
    """Of runs of which gradients were kept."""
    kept = {name: measured for name, some in runs.items() if (measured := [run for run in some if "gradient" in run])}
    rows = []
    for name, some in kept.items():
        of = [run["gradient"] for run in some]
        rows.append([variants[name].title, spread([one["median"] for one in of], 2),
                     spread([one["longest"] for one in of], 1), spread([one["furthest"] for one in of], 1),
                     *(str(sum(one["spikes"][times] for one in of)) for times in of[0]["spikes"]),
                     spread([run["learning"][-1][1] for run in some], 3), str(len(of))])  # fmt: skip
    if not rows:
        return ""
    factors = [f"steps over {times} ×" for times in next(iter(kept.values()))[0]["gradient"]["spikes"]]
    header = ["variant", "median length", "longest", "most × the usual", *factors, "loss at the end", "runs"]
    return markdown(header, rows)


def iterations_table(runs: list[dict]) -> str:
    asked = [run for run in runs if "with_iterations" in run]
    if not asked:
        return ""
    counts = list(asked[0]["with_iterations"])
    rows = [
        [f"{run['rate']:g}", str(run["seed"]), *(f"{run['with_iterations'][count]:.3f}" for count in counts),
         f"{run['accuracy']:.3f}"]
        for run in asked
    ]  # fmt: skip
    return markdown(["rate", "seed", *counts, "30, as trained"], rows)


def spread(values: list[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    rule = "|---|" + "---:|" * (len(header) - 1)
    return "\n".join(["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def draw_recall(runs: list[dict], variants: dict[str, Layer], path: Path) -> None:
    """A panel a rate; a dot a seed, a stroke for the median, and the seeds of GKA as a band behind all."""
    rates, names = rates_of(runs), [name for name in variants if any(run["layer"] == name for run in runs)]
    shape = {"figsize": (3.4 + 4.0 * len(rates), 0.9 + 0.32 * len(names)), "sharey": True, "squeeze": False}
    figure, panels = plt.subplots(1, len(rates), layout="constrained", **shape)
    for panel, rate, colour in zip(panels[0], rates, RATE_COLOURS, strict=False):
        found = at_rate(runs, rate, names)
        if USUAL in found:
            usual = recalled(found[USUAL])
            panel.axvspan(min(usual), max(usual), color="#c21f1f", alpha=0.12, linewidth=0)
        for name, some in found.items():
            place, accuracies = names.index(name), recalled(some)
            panel.plot(accuracies, [place] * len(accuracies), "o", color=colour, markersize=4.5, alpha=0.75)
            median = statistics.median(accuracies)
            panel.plot([median, median], [place - 0.3, place + 0.3], color="#333333", linewidth=1.6)
        panel.set(xlabel="recall accuracy", title=f"learning rate {rate:g}", xlim=(-0.02, None))
        panel.grid(alpha=0.25)
    panels[0][0].set_yticks(range(len(names)), [variants[name].title for name in names], fontsize=9)
    panels[0][0].invert_yaxis()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_ridges(runs: Runs, variants: dict[str, Layer], path: Path) -> None:
    """How the adaptive and the constant ridge learn: a thin line a seed."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for name, some in runs.items():
        for i, run in enumerate(some):
            steps, loss, gradient = zip(*run["learning"], strict=True)
            for panel, curve in zip(panels, (loss, gradient), strict=True):
                label = variants[name].title if i == 0 else None
                panel.plot(steps, curve, color=RIDGES[name], linewidth=0.9, alpha=0.8, label=label)
    together = next(iter(runs.values()))[0]["learning"][0][0]
    panels[0].set(xlabel="step", ylabel=f"training loss, mean of {together} steps")
    panels[1].set(xlabel="step", ylabel=f"longest gradient of {together} steps", yscale="log")
    for panel in panels:
        panel.grid(alpha=0.25)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs), fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def keep_figure(path: Path, draw: Callable[[Path], None]) -> str:
    write_atomically(path, draw)
    return f"![]({path.name})\n"


def report(results: list[dict], variants: dict[str, Layer], folder: Path) -> None:
    parts = ["# Ablations on MQAR\n\nWritten by `ablations.py --draw` from `ablations.jsonl`.\n"]
    for (tokens, pairs, width), runs in cells_of(results).items():
        where = f"{tokens}x{pairs}-{width}"
        dates = [run["date"] for run in runs if "date" in run]
        about = f"{runs[0]['steps']} steps; {min(dates)} to {max(dates)}."
        parts.append(f"## ({tokens}, {pairs}), width {width}\n\n{about}\n")
        parts.append(
            keep_figure(folder / f"ablations-{where}.png", lambda path, r=runs: draw_recall(r, variants, path))
        )
        for rate in rates_of(runs):
            found = at_rate(runs, rate, list(variants))
            parts += [f"### Learning rate {rate:g}\n", recall_table(found, variants), gradient_table(found, variants)]
            learned = {name: [run for run in found.get(name, []) if "learning" in run] for name in RIDGES}
            ridges = {name: some for name, some in learned.items() if some}
            if len(ridges) > 1:
                path = folder / f"ridges-{where}-lr{rate:g}.png"
                parts.append(keep_figure(path, lambda path, r=ridges: draw_ridges(r, variants, path)))
        if iterations := iterations_table(runs):
            parts += ["### Solver steps at inference alone\n", iterations]
    write_atomically(folder / "ablations.md", lambda path: path.write_text("\n".join(parts)))
    print(f"{folder / 'ablations.md'} has the tables.")
