"""results.md and lm-SIZE-CORPUS.png from results.jsonl."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from sizes import LAYERS, SIZES
from sweep import ROOT, Results

sys.path.insert(0, str(ROOT / "experiments"))

from console import write_atomically
from palette import LOOKS

CHOICES = {  # the metric that the paper's table has
    "arc_challenge": "acc_norm", "arc_easy": "acc", "boolq": "acc", "copa": "acc", "hellaswag": "acc_norm",
    "lambada": "acc", "openbookqa": "acc_norm", "piqa": "acc", "sciq": "acc", "winogrande": "acc",
    "squad": "contains", "rfc_headers": "contains",
}  # fmt: skip
Group = tuple[str, str, str, int]  # size, corpus, match, millions of tokens
KINDS = {
    "seen within 64": "up to 64",
    "seen within 512": "65 to 512",
    "seen beyond 512": "beyond 512",
    "rest": "the rest",
}
FIRST = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16))  # positions


def measured(results: Results) -> dict[Group, dict[str, list[dict]]]:
    """The measured runs of each table, by layer, in the order of LAYERS."""
    groups: dict[Group, dict[str, list[dict]]] = {}
    for result in results.values():
        if result.get("stage") == "final" and "measures" in result:
            group = (result["size"], result["corpus"], result["match"], round(result["tokens"] / 1e6))
            groups.setdefault(group, {}).setdefault(result["layer"], []).append(result)
    return {
        group: {layer: groups[group][layer] for layer in LAYERS if layer in groups[group]} for group in sorted(groups)
    }


def finals(layers: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Those at the rate of a layer's first: its seeds."""
    return {layer: [run for run in runs if run["rate"] == runs[0]["rate"]] for layer, runs in layers.items()}


def other_rates(layers: dict[str, list[dict]]) -> str:
    """All tokens at another rate than the one that was chosen."""
    rows = [
        [LAYERS[layer].title, f"{run['rate']:g}", str(run["seed"]), number(run["measures"]["held_out"]["all"]["loss"])]
        for layer, runs in layers.items()
        for run in runs
        if run["rate"] != runs[0]["rate"]
    ]
    return "All tokens at other rates:\n\n" + markdown(["layer", "rate", "seed", "loss"], rows) if rows else ""


def average(runs: list[dict], value: Callable[[dict], float | None]) -> float | None:
    found = [v for run in runs if (v := value(run)) is not None]
    return statistics.fmean(found) if found else None


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def speed(runs: list[dict]) -> str:
    """Of runs that had the card to themselves."""
    alone = average([run for run in runs if run.get("jobs", 1) == 1], lambda run: run["tokens_per_second"])
    return "–" if alone is None else f"{alone / 1e3:,.0f}k"


def seeds(values: list[float]) -> str:
    """The mean, and how far apart seeds are."""
    apart = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{apart}"


def losses(layers: dict[str, list[dict]]) -> str:
    """By source, on what was seen and the rest, and what it cost."""
    first = next(iter(layers.values()))[0]["measures"]["held_out"]
    sources, kinds = list(first["source"]), list(first["kind"])
    rows = []
    for layer, runs in layers.items():
        held = [run["measures"]["held_out"] for run in runs]
        spread = held[0]["all"]["stderr"]
        rows.append([
            LAYERS[layer].title,
            f"{runs[0]['parameters'] / 1e6:.1f}M",
            f"{runs[0]['rate']:g}",
            str(len(runs)),
            f"{seeds([h['all']['loss'] for h in held])} ±{spread:.3f}",
            *(number(average(held, lambda h, s=s: h["source"][s]["loss"])) for s in sources),
            *(number(average(held, lambda h, k=k: h["kind"][k]["loss"])) for k in kinds),
            speed(runs),
        ])  # fmt: skip
    return markdown(["layer", "parameters", "rate", "seeds", "loss", *sources, *kinds, "tokens/s"], rows)


def paired(layers: dict[str, list[dict]], beside: str = "gka") -> str:
    """Differences on the same windows: their error is far below a loss's, and the seed's share is not in it."""
    found = {layer: [run["measures"]["held_out"] for run in runs] for layer, runs in layers.items()}
    found = {layer: [held for held in many if "windows" in held] for layer, many in found.items()}
    if not found.get(beside):
        return ""
    base = found[beside][0]["windows"]
    rows = []
    for layer, many in found.items():
        for held in many[: None if layer != beside else 0]:
            apart = [mine - theirs for mine, theirs in zip(held["windows"], base, strict=True)]
            error = statistics.stdev(apart) / math.sqrt(len(apart))
            rows.append([LAYERS[layer].title, f"{statistics.fmean(apart):+.4f} ±{error:.4f}"])
    return markdown(["layer", f"loss less that of {LAYERS[beside].title}, same windows"], rows) if rows else ""


def positions(layers: dict[str, list[dict]]) -> str:
    """Held-out loss by position, the first of them in finer steps where that was kept."""
    places = list(next(iter(layers.values()))[0]["measures"]["held_out"]["position"])
    rows = []
    for layer, runs in layers.items():
        held = [run["measures"]["held_out"] for run in runs]
        early = [h["first"] for h in held if "first" in h]
        fine = [average(early, lambda f, a=a, b=b: statistics.fmean(f[a - 1 : b])) for a, b in FIRST]
        wide = [average(held, lambda h, place=place: h["position"][place]) for place in places]
        rows.append([LAYERS[layer].title, *map(number, [*fine, *wide])])
    names = [f"{a}" if a == b else f"{a}–{b}" for a, b in FIRST]
    wide_names = [f"{int(a) + 1}–{int(b) + 1}" for a, b in (place.split("-") for place in places)]
    return markdown(["position", *names, *wide_names], rows)


def with_error(metric: dict | None) -> str:
    """A metric of gka eval; of a single text there is no error."""
    if not metric:
        return "–"
    return f"{metric['value']:.3f}" + ("" if metric["stderr"] is None else f" ±{metric['stderr']:.3f}")


def tasks(layers: dict[str, list[dict]]) -> str:
    found = [runs[0]["measures"].get("tasks") or {} for runs in layers.values()]
    names = [name for name in CHOICES if any(name in one for one in found)]
    rows = []
    for (layer, _), one in zip(layers.items(), found, strict=True):
        cells = []
        for name in names:
            metric = one.get(name, {}).get(CHOICES[name])
            cells.append(with_error(metric))
        bits = one.get("enwik8", {}).get("bits_per_byte")
        rows.append([LAYERS[layer].title, with_error(bits), *cells])
    return markdown(["layer", "enwik8, bits per byte", *names], rows)


def bits(layers: dict[str, list[dict]]) -> str:
    """enwik8 by bytes: bits of each of its last 5,000,000."""
    rows = []
    for layer, runs in layers.items():
        value = average(runs, lambda r: r["measures"]["held_out"]["all"]["loss"]) / math.log(2)
        cells = [f"{runs[0]['parameters'] / 1e6:.1f}M", f"{runs[0]['rate']:g}", str(len(runs)), f"{value:.3f}"]
        rows.append([LAYERS[layer].title, *cells])
    return markdown(["layer", "parameters", "rate", "seeds", "bits per byte"], rows)


def rates(results: Results, group: Group) -> str:
    """Loss on the last half percent of the training text after a fifth of the tokens."""
    tried: dict[str, dict[float, float | None]] = {}
    for result in results.values():
        if result.get("stage") == "rate" and (result["size"], result["corpus"], result["match"]) == group[:3]:
            tried.setdefault(result["layer"], {})[result["rate"]] = result["valid_loss"]
    columns = sorted({rate for found in tried.values() for rate in found})
    rows = [
        [LAYERS[layer].title, *(number(tried[layer].get(rate)) for rate in columns)]
        for layer in LAYERS
        if layer in tried
    ]
    return markdown(["layer", *(f"{rate:g}" for rate in columns)], rows)


def draw(layers: dict[str, list[dict]], title: str, path: Path) -> None:
    """Layers as published, means over their seeds; other ε have a figure in experiments/ablations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.8), layout="constrained")
    published = {layer: runs for layer, runs in layers.items() if layer in LOOKS}
    for i, (layer, runs) in enumerate(published.items()):
        held = [run["measures"]["held_out"] for run in runs]
        look, label = LOOKS[layer], LAYERS[layer].title
        wide = {"linewidth": 2.2 if layer == "gka" else 1.3, "zorder": 3 if layer == "gka" else 2}
        curve = runs[0]["curve"]
        axes[0].plot([point[0] for point in curve], [point[1] for point in curve],
                     color=look.colour, linestyle=look.line, linewidth=wide["linewidth"] / 1.6)  # fmt: skip
        places = list(held[0]["position"])
        losses = [average(held, lambda h, place=place: h["position"][place]) for place in places]
        ends = [int(place.split("-")[1]) + 1 for place in places]
        axes[1].plot(ends, losses, **look.style, **wide, markersize=5, label=label)
        kinds = [kind for kind in held[0]["kind"] if kind != "seen" and held[0]["kind"][kind]["loss"] is not None]
        beside = [place + 0.7 * ((i + 0.5) / len(published) - 0.5) for place in range(len(kinds))]  # dots hide no dots
        seen = [average(held, lambda h, kind=kind: h["kind"][kind]["loss"]) for kind in kinds]
        axes[2].plot(beside, seen, **(look.style | {"linestyle": ""}), markersize=7)
        axes[2].set_xticks(range(len(kinds)), [KINDS.get(kind, kind) for kind in kinds])
    axes[0].set(xlabel="step", ylabel="training loss, nats a token")
    axes[1].set(xlabel="position in the context, up to", ylabel="held-out loss, nats a token")
    axes[1].set_xscale("log", base=2)
    axes[2].set(ylabel="held-out loss, nats a token", xlabel="how many tokens back the pair stood before")
    for axis in axes:
        axis.grid(alpha=0.25)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def slope(groups: dict[Group, dict[str, list[dict]]]) -> str:
    """Loss by size, of layers that were trained on as much text at two sizes and more."""
    found: dict[tuple[str, str, int], dict[str, dict[str, str]]] = {}
    for (size, corpus, match, millions), layers in groups.items():
        for layer, runs in finals(layers).items():
            losses = [run["measures"]["held_out"]["all"]["loss"] for run in runs]
            found.setdefault((corpus, match, millions), {}).setdefault(layer, {})[size] = seeds(losses)
    parts = []
    for (corpus, match, millions), layers in found.items():
        both = {layer: by_size for layer, by_size in layers.items() if len(by_size) > 1}
        sizes = [size for size in reversed(SIZES) if any(size in by_size for by_size in both.values())]
        rows = [[LAYERS[layer].title, *(by_size.get(size, "–") for size in sizes)] for layer, by_size in both.items()]
        if rows:
            parts.append(
                f"## By size: {corpus}, same {match}, {millions}M tokens\n\n{markdown(['layer', *sizes], rows)}"
            )
    return "\n".join(parts)


def write_report(results: Results, folder: Path) -> None:
    parts = ["# Results\n\nWritten by `run.py report` from `results.jsonl`.\n"]
    groups = measured(results)
    for group, every in groups.items():
        size, corpus, match, millions = group
        layers = finals(every)
        runs = [run for many in layers.values() for run in many]
        device, date = runs[0]["device"], max(run["date"] for run in runs)
        parts.append(f"## {size}, {corpus}, same {match}\n\n{millions}M tokens; {device}, {date}.\n")
        if corpus == "enwik8":
            parts.append(bits(layers))
        else:
            parts += [losses(layers), paired(layers), positions(layers), tasks(layers)]
        parts += ["Learning rates, a fifth of the tokens:\n", rates(results, group), other_rates(every)]
        usual = millions == round(SIZES[size].tokens / 1e6)
        name = f"lm-{size}-{corpus}-{match}{'' if usual else f'-{millions}M'}.png"
        title = f"{size}, {corpus}, same {match}, {millions}M tokens"
        write_atomically(folder / name, lambda path, those=layers, title=title: draw(those, title, path))
        parts.append(f"![]({name})\n")
    parts.append(slope(groups))
    write_atomically(folder / "results.md", lambda path: path.write_text("\n".join(parts)))
    print(f"{folder / 'results.md'} has the tables.")
