"""results.md and two figures (loss and length of the gradient) from results.jsonl."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT / "experiments" / "lm")]

from console import write_atomically  # noqa: E402
from palette import BLUE, GKA, GREY, LOOKS, OTHERS, Look  # noqa: E402
from report import KINDS, average, markdown, number, seeds, speed  # noqa: E402
from sweep import Results  # noqa: E402

Runs = dict[str, list[dict]]


def by_variant(results: Results, variants: dict) -> dict[tuple[str, str, int], Runs]:
    """(size, corpus, tokens) and variant to its seeds."""
    groups: dict[tuple[str, str, int], Runs] = {}
    for result in results.values():
        group = result["size"], result["corpus"], result["tokens"]
        groups.setdefault(group, {}).setdefault(result["variant"], []).append(result)
    return {group: {name: runs[name] for name in variants if name in runs} for group, runs in sorted(groups.items())}


def row(title: str, runs: list[dict]) -> list[str]:
    held = [run["measures"]["held_out"] for run in runs if "measures" in run]
    kinds = [kind for kind in (held[0]["kind"] if held else {}) if kind != "seen"]
    highest = max(point[2] for run in runs for point in run["curve"])
    early = next(iter(held[0]["position"])) if held else ""
    losses = (
        [seeds([h["all"]["loss"] for h in held]), number(average(held, lambda h: h["position"][early]))] if held else []
    )
    return [
        title,
        str(len(runs)),
        number(average(runs, lambda r: r["valid_loss"])),
        *losses,
        *(number(average(held, lambda h, k=k: h["kind"][k]["loss"])) for k in kinds),
        f"{highest:.1f}",
        speed(runs),
    ]


def table(runs: Runs, variants: dict) -> str:
    """Runs of one group are all measured, or none is (--loss-only)."""
    measured = [run["measures"] for many in runs.values() for run in many if "measures" in run]
    kinds = [kind for kind in measured[0]["held_out"]["kind"] if kind != "seen"] if measured else []
    losses = ["held-out loss", "its first 16 positions", *kinds] if measured else []
    header = ["variant", "seeds", "loss at the end of training", *losses, "longest gradient", "tokens/s"]
    return markdown(header, [row(variants[name].title, many) for name, many in runs.items()])


def differences(runs: Runs, variants: dict) -> str:
    """Against the released form on the same windows: a standard error over windows, without the seed's share."""
    kept = {name: [run for run in many if "windows" in run.get("measures", {}).get("held_out", {})]
            for name, many in runs.items()}  # fmt: skip
    if not kept.get("base"):
        return ""
    base = kept["base"][0]["measures"]["held_out"]["windows"]
    rows = []
    for name, many in kept.items():
        for run in many if name != "base" else []:
            apart = [mine - its for mine, its in zip(run["measures"]["held_out"]["windows"], base, strict=True)]
            error = statistics.stdev(apart) / math.sqrt(len(apart))
            rows.append([variants[name].title, str(run["seed"]), f"{statistics.fmean(apart):+.4f} ±{error:.4f}"])
    seed = kept["base"][0]["seed"]
    return (
        markdown(["variant", "seed", f"loss less that of the released form (seed {seed}), same windows"], rows)
        if rows
        else ""
    )


def inference_alone(runs: Runs) -> str:
    """The trained model with fewer solver steps than it was trained with."""
    rows = []
    for run in runs.get("base", []):
        if fewer := run.get("measures", {}).get("iterations", {}):
            held = fewer | {"30 (its own)": run["measures"]["held_out"]}
            rows += [[count, str(run["seed"]), number(one["all"]["loss"], 4)] for count, one in held.items()]
    return markdown(["iterations at inference", "seed", "loss"], rows) if rows else ""


def draw(runs: Runs, variants: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for name, colour in (("base", GKA.colour), ("constant", BLUE)):
        for run in runs.get(name, [])[:1]:
            steps = [point[0] for point in run["curve"]]
            for axis, place in zip(axes, (1, 2), strict=True):
                axis.plot(
                    steps,
                    [point[place] for point in run["curve"]],
                    color=colour,
                    label=variants[name].title,
                    linewidth=1,
                )
    axes[0].set(xlabel="step", ylabel="training loss")
    axes[1].set(xlabel="step", ylabel="length of the gradient, the largest of neighbouring steps", yscale="log")
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def eps_of(variant) -> float | None:
    """Of a variant in which nothing but the ε of the output's norm differs from its layer's usual form."""
    only = {"gka": {}, "gdn": {"expand_v": 1.0}}.get(variant.layer)
    others = {key: value for key, value in variant.choices.items() if key != "norm_eps"}
    if others != only or variant.settings or variant.shifts or variant.scales:
        return None
    return variant.choices.get("norm_eps", 1e-6)


def kinds_of(held_out: dict) -> list[str]:
    """Those that some token is of."""
    return [kind for kind, one in held_out["kind"].items() if kind != "seen" and one["loss"] is not None]


def draw_eps(runs: Runs, variants: dict, path: Path) -> None:
    """Loss against the ε of the output's norm, in all and by kind of token; a dot a seed, a line of their means;
    dashed, with the published ε, what an output projection gives that begins small."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {"gka": "GKA", "gdn": "Gated DeltaNet of the same state"}
    small = {"gka": "small-out", "gdn": "gdn-small"}
    kinds = kinds_of(next(run for run in runs["base"] if "measures" in run)["measures"]["held_out"])
    figure, axes = plt.subplots(1, 1 + len(kinds), figsize=(13, 3.6), layout="constrained")
    for axis, kind in zip(axes, (None, *kinds), strict=True):
        for layer, title in titles.items():
            colour, marker = LOOKS[layer].colour, LOOKS[layer].marker
            points: dict[float, list[float]] = {}
            for name, many in runs.items():
                if variants[name].layer == layer and (eps := eps_of(variants[name])) is not None:
                    held = [run["measures"]["held_out"] for run in many if "measures" in run]
                    points[eps] = [(h["kind"][kind] if kind else h["all"])["loss"] for h in held]
            where = sorted(points)
            axis.plot(where, [statistics.fmean(points[eps]) for eps in where], color=colour, label=title)
            for eps in where:
                axis.plot([eps] * len(points[eps]), points[eps], marker, color=colour, markersize=5)
            held = [run["measures"]["held_out"] for run in runs.get(small[layer], []) if "measures" in run]
            if held:
                beside = average(held, lambda h, kind=kind: (h["kind"][kind] if kind else h["all"])["loss"])
                axis.axhline(beside, color=colour, linestyle="--", label=f"{title}, small output projection at first")
        axis.set(xscale="log", xlabel="ε of the output's norm", title=kind or "all tokens")
        axis.grid(alpha=0.25)
    axes[0].set(ylabel="held-out loss, nats a token")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_positions(runs: Runs, variants: dict, path: Path) -> None:
    """What each variant gains or loses against the released form, by position and by kind of token."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    held = {name: [run["measures"]["held_out"] for run in many if "measures" in run] for name, many in runs.items()}
    held = {name: many for name, many in held.items() if many}
    places = list(held["base"][0]["position"])
    kinds = kinds_of(held["base"][0])

    def apart(name: str, part: str, key: str) -> float:
        def loss(one: dict) -> float:
            return one[part][key]["loss"] if part == "kind" else one[part][key]

        return average(held[name], loss) - average(held["base"], loss)

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 6.2), layout="constrained", width_ratios=(1, 1.2))
    others = [name for name in held if eps_of(variants[name]) is None]
    ends = [int(place.split("-")[1]) + 1 for place in places]
    for i, name in enumerate(others):
        title = f"{variants[name].title}: {average(held[name], lambda h: h['all']['loss']):.3f}"
        look = looks(variants, others)[name]
        left.plot(ends, [apart(name, "position", p) for p in places], **look.style, markersize=5, label=title)
        beside = [place + 0.75 * ((i + 0.5) / len(others) - 0.5) for place in range(len(kinds))]
        losses = [apart(name, "kind", kind) for kind in kinds]
        right.plot(beside, losses, **(look.style | {"linestyle": ""}), markersize=7)
    own = average(held["base"], lambda h: h["all"]["loss"])
    left.axhline(0, color=GKA.colour, linewidth=1.4, label=f"{variants['base'].title}: {own:.3f}")
    right.axhline(0, color=GKA.colour, linewidth=1.4)
    left.set(xlabel="position in the context, up to", ylabel="held-out loss less the released form's, nats a token")
    left.set_xscale("log", base=2)
    right.set(xlabel="how many tokens back the pair stood before")
    right.set_xticks(range(len(kinds)), [KINDS.get(kind, kind) for kind in kinds])
    for axis in (left, right):
        axis.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def looks(variants: dict, names: list[str]) -> dict[str, Look]:
    """Another layer has its own look, the first of its kind alone; variants of GKA, and what is left, the others."""
    found: dict[str, Look] = {}
    free = [look for look in OTHERS if look.colour not in {LOOKS[variants[name].layer].colour for name in names}]
    for name in names:
        own = LOOKS[variants[name].layer]
        found[name] = own if own is not GKA and own not in found.values() else free.pop(0) if free else Look(GREY, "o")
    return found


def write_report(results: Results, variants: dict, folder: Path) -> None:
    parts = ["# Results\n\nWritten by `run.py report` from `results.jsonl`.\n"]
    for (size, corpus, tokens), runs in by_variant(results, variants).items():
        every = [run for many in runs.values() for run in many]
        about = f"{tokens / 1e6:.0f}M tokens, rate {every[0]['rate']:g}; {every[0]['device']}"
        parts += [f"## {size}, {corpus}\n\n{about}, {max(run['date'] for run in every)}.\n", table(runs, variants)]
        parts += [differences(runs, variants), inference_alone(runs)]
        if len([many for many in runs.values() if "measures" in many[0]]) > 1 and "base" in runs:
            name = f"variants-{size}-{corpus}-{round(tokens / 1e6)}M.png"
            write_atomically(folder / name, lambda path, runs=runs: draw_positions(runs, variants, path))
            parts.append(f"![]({name})\n")
            name = f"eps-{size}-{corpus}-{round(tokens / 1e6)}M.png"
            write_atomically(folder / name, lambda path, runs=runs: draw_eps(runs, variants, path))
            parts.append(f"![]({name})\n")
        if "constant" not in runs:
            continue
        name = f"ridge-{size}-{corpus}-{tokens // 10**6}M.png"
        write_atomically(folder / name, lambda path, runs=runs: draw(runs, variants, path))
        parts.append(f"![]({name})\n")
    write_atomically(folder / "results.md", lambda path: path.write_text("\n".join(parts)))
    print(f"{folder / 'results.md'} has the tables.")
