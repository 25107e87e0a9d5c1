"""ablations.md and its figures: recall of each variant, a dot a seed, and how far it is from GKA's with the same seeds;
how smoothly a constant λ learns."""

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
from paired import Paired, compare
from palette import BLUE, GKA, GREEN, GREY, INK, PINK

USUAL = "gka"
RIDGES = {USUAL: GKA.colour, "constant": BLUE, "constant-0.02": PINK, "constant-exact": GREEN}

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


def by_seed(runs: list[dict]) -> dict[int, float]:
    return {run["seed"]: run["accuracy"] for run in runs}


def against(runs: list[dict], usual: list[dict]) -> Paired | None:
    """Its recall less that of GKA with the same seeds."""
    return None if runs is usual else compare(by_seed(runs), by_seed(usual))


def in_words(apart: Paired | None) -> list[str]:
    """Seeds, mean difference, its interval, how likely by chance; what too few seeds do not say is left open."""
    if not apart:
        return ["", "", "", ""]
    held, p = "–", "–"
    if apart.interval:
        held, p = f"{apart.interval[0]:+.3f} to {apart.interval[1]:+.3f}", f"{apart.p:.2f}"
    return [str(apart.seeds), f"{apart.mean:+.3f}", held, p]


def step_time(runs: list[dict]) -> str:
    """Of the quickest run: other work on a machine makes computing slower, too."""
    times = [1e3 * run["cpu_seconds"] / run["steps"] for run in runs if "cpu_seconds" in run]
    return f"{min(times):.1f}" if times else "–"


def recall_table(runs: Runs, variants: dict[str, Layer]) -> str:
    rows = []
    for name, some in runs.items():
        seeds = ", ".join(f"{run['accuracy']:.3f} ({run['seed']})" for run in some)
        apart = in_words(against(some, runs.get(USUAL, [])))
        rows.append([variants[name].title, seeds, f"{statistics.fmean(recalled(some)):.3f}", *apart, step_time(some)])
    compared = ["pairs of seeds", "less GKA's", "95% interval", "p"]
    return markdown(["variant", "recall (seed)", "mean", *compared, "CPU, ms a step"], rows)


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
    """Two panels a rate: a dot a seed with a stroke for their mean; how far from GKA with the same seeds."""
    rates, names = rates_of(runs), [name for name in variants if any(run["layer"] == name for run in runs)]
    shape = {"figsize": (3.3 + 7.2 * len(rates), 1.1 + 0.29 * len(names)), "sharey": True, "squeeze": False}
    figure, panels = plt.subplots(1, 2 * len(rates), layout="constrained", **shape)
    for i, rate in enumerate(rates):
        found, (left, right) = at_rate(runs, rate, names), panels[0][2 * i : 2 * i + 2]
        for name, some in found.items():
            place, colour = names.index(name), GKA.colour if name == USUAL else BLUE
            _seeds(left, place, recalled(some), colour)
            if apart := against(some, found.get(USUAL, [])):
                _difference(right, place, apart)
        left.set(xlabel="recall accuracy", title=f"each seed, and their mean (learning rate {rate:g})")
        left.set_xlim(left=-0.02)
        right.set(xlabel="recall less GKA's with the same seeds", title="mean, 95% interval (hollow: too few seeds)")
        right.axvline(0, color=GKA.colour, linewidth=1.2, zorder=0)
        for panel in (left, right):
            panel.grid(alpha=0.25)
            panel.title.set_fontsize(10)
    panels[0][0].set_yticks(range(len(names)), [variants[name].title for name in names], fontsize=9)
    panels[0][0].invert_yaxis()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _seeds(panel: plt.Axes, place: int, accuracies: list[float], colour: str) -> None:
    panel.plot(accuracies, [place] * len(accuracies), "o", color=colour, markersize=4.5, alpha=0.7)
    mean = statistics.fmean(accuracies)
    panel.plot([mean, mean], [place - 0.32, place + 0.32], color=INK, linewidth=1.8)


def _difference(panel: plt.Axes, place: int, apart: Paired) -> None:
    """Dark: the interval leaves 0 out. Its seeds in number, where they tell how much to believe."""
    colour = INK if apart.seen else GREY
    if apart.interval:
        panel.plot(apart.interval, [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
    hollow = {} if apart.interval else {"markerfacecolor": "white"}
    panel.plot([apart.mean], [place], "D", color=colour, markersize=5, **hollow)
    panel.annotate(f"n = {apart.seeds}", (1.02, place), xycoords=("axes fraction", "data"), fontsize=8, color=INK,
                   va="center")  # fmt: skip


def draw_ridges(runs: Runs, variants: dict[str, Layer], path: Path) -> None:
    """How the adaptive and each constant ridge learn: a column each, a line a seed; behind the others, faint, GKA's."""
    shape = {"figsize": (0.6 + 2.9 * len(runs), 5.0), "sharex": True, "sharey": "row", "squeeze": False}
    figure, rows = plt.subplots(2, len(runs), layout="constrained", **shape)
    for column, (name, some) in enumerate(runs.items()):
        behind = runs.get(USUAL, []) if name != USUAL else []
        for row, measure in zip(rows, (1, 2), strict=True):
            for run in behind:
                row[column].plot(*_curve(run, measure), color=GKA.colour, linewidth=0.7, alpha=0.25)
            for run in some:
                row[column].plot(*_curve(run, measure), color=RIDGES[name], linewidth=0.9, alpha=0.85)
            row[column].grid(alpha=0.25)
        rows[0][column].set_title(f"{variants[name].title}\n({len(some)} seeds)", fontsize=9)
        rows[1][column].set_xlabel("step")
    together = next(iter(runs.values()))[0]["learning"][0][0]
    rows[0][0].set_ylabel(f"loss, mean of {together} steps")
    rows[1][0].set(ylabel=f"longest gradient of {together} steps", yscale="log")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _curve(run: dict, measure: int) -> tuple[list[float], list[float]]:
    """Steps, and the mean loss (1) or the longest gradient (2) of those before each."""
    return [point[0] for point in run["learning"]], [point[measure] for point in run["learning"]]


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
