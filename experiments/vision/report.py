"""results.md and a figure for each size: test accuracy against the epoch, a line per mixer."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import matplotlib

from models import MIXERS, SIZES

matplotlib.use("Agg")
from console import write_atomically
from matplotlib import pyplot as plt
from palette import LOOKS


def of_images(share: float, images: int) -> float:
    """The standard error that comes from having so many test images."""
    return math.sqrt(share * (1 - share) / images)


def of_seeds(values: list[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def grouped(results: list[dict]) -> dict[tuple, dict[str, list[dict]]]:
    """By size, data, epochs and device, then by mixer: only what was trained alike is compared."""
    groups: dict[tuple, dict[str, list[dict]]] = {}
    for result in sorted(results, key=lambda r: (list(SIZES).index(r["size"]), r["seed"])):
        place = (result["size"], result["data"], result["recipe"]["epochs"], result["device"])
        groups.setdefault(place, {}).setdefault(result["mixer"], []).append(result)
    return {
        place: {mixer: by_mixer[mixer] for mixer in MIXERS if mixer in by_mixer} for place, by_mixer in groups.items()
    }


def rows(by_mixer: dict[str, list[dict]]) -> list[list[str]]:
    """The best first."""
    found = []
    for mixer, runs in by_mixer.items():
        accuracies = [run["accuracy"] for run in runs]
        mean, error = statistics.mean(accuracies), of_seeds(accuracies)
        seeds = "one seed" if error is None else f"{100 * error:.2f}"
        images = f"{100 * of_images(mean, runs[0]['test_images']):.2f}"
        every = " ".join(f"{100 * accuracy:.2f}" for accuracy in accuracies)
        seconds = statistics.mean(run["seconds"] for run in runs)
        parameters = f"{runs[0]['parameters'] / 1e3:,.0f}K"
        loss = f"{statistics.mean(run['loss'] for run in runs):.4f}"
        row = [MIXERS[mixer].title, f"{100 * mean:.2f}", seeds, images, every, loss, parameters, f"{seconds:.0f}"]
        found.append((mean, row))
    return [row for _, row in sorted(found, key=lambda pair: -pair[0])]


HEADER = ["mixer", "test accuracy, %", "± seeds", "± images", "each seed", "test loss", "parameters", "seconds"]


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines)) + "\n"


def draw(place: tuple, by_mixer: dict[str, list[dict]], path: Path) -> None:
    """Thin: a seed; thick: their mean. The right panel leaves out the first epochs, where curves fall together."""
    figure, panels = plt.subplots(1, 2, figsize=(11.5, 4.4))
    last = place[2]
    for panel in panels:
        for mixer, runs in by_mixer.items():
            _curves(panel, mixer, runs)
        panel.set(xlabel="epoch")
        panel.grid(alpha=0.25)
    shown = [100 * p["accuracy"] for runs in by_mixer.values() for r in runs for p in late(r["curve"], last)]
    room = max(0.1, 0.08 * (max(shown) - min(shown)))
    panels[1].set_ylim(min(shown) - room, max(shown) + room)
    panels[1].set_xlim(last / 2 - 0.02 * last, last + 0.02 * last)
    panels[1].set_title("the last half", fontsize=10)
    panels[0].set(ylabel="test accuracy, %", title="from the first epoch on")
    panels[0].title.set_fontsize(10)
    panels[0].legend(frameon=False, fontsize=8.5, loc="lower right")
    size, data, epochs, device = place
    seeds = max(len(runs) for runs in by_mixer.values())
    number = "one seed" if seeds == 1 else f"up to {seeds} seeds (thin), their mean (thick)"
    figure.suptitle(f"{data}, size {size}, {epochs} epochs, {device}: {number}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)


def late(curve: list[dict], last: float) -> list[dict]:
    return [point for point in curve if point["epoch"] >= last / 2] or curve[-1:]


def _curves(panel: plt.Axes, mixer: str, runs: list[dict]) -> None:
    look = LOOKS[mixer]
    style = {"color": look.colour, "zorder": 3 if mixer == "gka" else 2}
    curves = [{point["epoch"]: 100 * point["accuracy"] for point in run["curve"]} for run in runs]
    for curve in curves if len(curves) > 1 else []:
        panel.plot(list(curve), list(curve.values()), linewidth=0.7, alpha=0.35, **style)
    shared = [epoch for epoch in curves[0] if all(epoch in curve for curve in curves)]
    means = [statistics.mean(curve[epoch] for curve in curves) for epoch in shared]
    width = 2.4 if mixer == "gka" else 1.6
    marked = {"marker": look.marker, "markersize": 5, "linestyle": look.line}
    panel.plot(shared, means, linewidth=width, label=MIXERS[mixer].title, **style, **marked)


def write_report(results: list[dict], folder: Path) -> str:
    """results.md and figures in `folder`; what results.md says."""
    text = ["Written by `experiments/vision/run.py report`. ± seeds: standard error of the mean over seeds; ± images: "
            "standard error that so many test images leave.\n"]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for place, by_mixer in grouped(results).items():
        size, data, epochs, device = place
        first = next(iter(by_mixer.values()))[0]
        dates = sorted({run["date"] for runs in by_mixer.values() for run in runs})
        settings = ", ".join(f"{key} {value}" for key, value in first["recipe"].items())
        text.append(f"## {data}, size {size}, {epochs} epochs, {device}, {' and '.join(dates)}\n\n{settings}\n")
        text.append(markdown(HEADER, rows(by_mixer)))
        picture = folder / f"{size}-{data}-e{epochs}-{device}.png"
        write_atomically(picture, lambda target, place=place, by_mixer=by_mixer: draw(place, by_mixer, target))
        text.append(f"![Test accuracy against epoch]({picture.name})\n")
    said = "\n".join(text)
    write_atomically(folder / "results.md", lambda target: target.write_text(said))
    return said
