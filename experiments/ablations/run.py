"""What each part of Gated KalmaNet is worth: one model, one thing changed at a time.

list, run, merge, report   as in experiments/lm, whose text, recipe, measures and budget these runs have

run.py run --device cuda --budget 540 --data /root/lm/data --out /root/ablations
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT / "experiments" / "lm")]

from choices import CHANGED  # noqa: E402
from console import run_program  # noqa: E402
from sizes import SIZES, common  # noqa: E402
from sweep import Results, Run, read_results  # noqa: E402
from trials import (  # noqa: E402
    add_options,
    collected,
    guessed_speed,
    known_results,
    list_runs,
    recipe,
    run_plan,
    vocabulary_of,
)

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
LM_RESULTS = ROOT / "experiments" / "lm" / "results.jsonl"
USUAL_RATE = 2e-3  # where experiments/lm has not found GKA's best one yet


@dataclass(frozen=True)
class Variant:
    """`choices` are keys of the layer's configuration, `settings` of the training file; `iterations`: solver steps it
    is measured with besides its own; `scales`, `shifts`: what the first weights whose names end so are multiplied by,
    and what is added to them."""

    title: str
    choices: dict[str, object] = field(default_factory=dict)
    iterations: tuple[int, ...] = ()
    fits_as: str = ""
    settings: dict[str, object] = field(default_factory=dict)
    shifts: dict[str, float] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    layer: str = "gka"  # or a rival that is asked the same question
    rate: float = 0.0  # its own, in place of --rate


FAST_DECAY, SLOW_DECAY = {"dt_bias": 2.303}, {"dt_bias": -2.303}
SMALL = {"o_proj.weight": 0.1}
TOKENS = {"gka": "GKA", "gdn": "GDN", "kda": "KDA", "deltanet": "DN", "attention": "*"}  # of the pattern


def short(eps: float) -> str:
    return f"{eps:.0e}".replace("e-0", "e-")


def narrow_gdn(eps: float) -> Variant:
    """Gated DeltaNet of GKA's parameters and size of values."""
    title = f"Gated DeltaNet, values as wide as keys, ε {short(eps)}"
    return Variant(title, {"expand_v": 1.0, "norm_eps": eps}, layer="gdn")


def rival(layer: str, title: str, eps: float, **choices: object) -> Variant:
    """As experiments/lm has it, but for the ε of its norm."""
    return Variant(f"{title}, ε {short(eps)}", {"norm_eps": eps} | choices, fits_as=layer, layer=layer)


VARIANTS = {
    "base": Variant("as released: β², a = 0.02, 30 iterations", iterations=(5, 10, 15)),
    **{name: Variant(changed.title, changed.choices) for name, changed in CHANGED.items()},
    "sketch-32": Variant("solved in 32 learned dimensions", {"sketch_dim": 32}),
    "no-rescale": Variant("answers not scaled by (size of a key)^−½", {"gla_rescale": False}),
    "fixed-ridge": Variant("no gradient through λ", {"bp_lambda": False}),
    "wide-values": Variant("values twice as wide, as GDN's", {"expand_v": 2.0}, fits_as="gdn"),
    "norm-eps": Variant("ε of the output's norm 1e-5, as GDN's", {"norm_eps": 1e-5}),
    "eps-1e-4": Variant("ε of the output's norm 1e-4", {"norm_eps": 1e-4}),
    "eps-1e-3": Variant("ε of the output's norm 1e-3", {"norm_eps": 1e-3}),
    "eps-1e-2": Variant("ε of the output's norm 1e-2", {"norm_eps": 1e-2}),
    "eps-1e-1": Variant("ε of the output's norm 1e-1", {"norm_eps": 1e-1}),
    "eps-1e-3-fast": Variant("ε 1e-3 and decay that begins ten times as fast", {"norm_eps": 1e-3}, shifts=FAST_DECAY),
    "eps-1e-3-slow": Variant("ε 1e-3 and decay that begins a tenth as fast", {"norm_eps": 1e-3}, shifts=SLOW_DECAY),
    "small-out": Variant("output projection that begins a tenth as large", scales=SMALL),
    "small-both": Variant("the same, and that of the MLP", scales=SMALL | {"down_proj.weight": 0.1}),
    "eps-1e-5-wide": Variant(
        "ε 1e-5 and values twice as wide, as GDN's", {"norm_eps": 1e-5, "expand_v": 2.0}, fits_as="gdn"
    ),
    "eps-1e-5-fast": Variant("ε 1e-5 and decay that begins ten times as fast", {"norm_eps": 1e-5}, shifts=FAST_DECAY),
    "gdn-eps-1e-6": narrow_gdn(1e-6),
    "gdn-eps-1e-5": narrow_gdn(1e-5),
    "gdn-eps-1e-4": narrow_gdn(1e-4),
    "gdn-eps-1e-3": narrow_gdn(1e-3),
    "gdn-eps-1e-2": narrow_gdn(1e-2),
    "gdn-wide-eps-1e-3": rival("gdn", "Gated DeltaNet, values twice as wide", 1e-3, expand_v=2.0),
    "kda-eps-1e-3": rival("kda", "KDA", 1e-3),
    "deltanet-eps-1e-3": rival("deltanet", "DeltaNet", 1e-3),
    "gdn-small": Variant(
        "Gated DeltaNet, values as wide as keys, small output at first", {"expand_v": 1.0}, layer="gdn", scales=SMALL
    ),
    "gdn-wide-small": Variant(
        "Gated DeltaNet, values twice as wide, small output at first",
        {"expand_v": 2.0},
        fits_as="gdn",
        layer="gdn",
        scales=SMALL,
    ),
    "kda-small": Variant("KDA, small output at first", fits_as="kda", layer="kda", scales=SMALL),
    "attention-small": Variant(
        "attention, rate 0.002, small output at first", fits_as="attention", layer="attention", scales=SMALL, rate=2e-3
    ),
    "deltanet-small": Variant(  # it begins ten times as large as the others
        "DeltaNet, rate 0.002, small output at first (a fiftieth)",
        fits_as="deltanet",
        layer="deltanet",
        scales={"o_proj.weight": 0.02},
        rate=2e-3,
    ),
    "slow-start": Variant("warm-up three times as long", settings={"warmup": 0.15}),
    "low-alpha": Variant("α begins at 0.12, not at 0.5", shifts={"alpha_proj.bias": -2.0}),
    "fast-decay": Variant("decay begins ten times as fast", shifts=FAST_DECAY),
}

# The paper's ablations once more with an output projection that begins small, where recall is learned early.
BEGUN_SMALL = ("no-decay", "no-alpha", "no-beta", "beta", "a-0.01", "a-0.05", "a-0.1", "constant", "sketch-32",
               "no-solve", "iterations-5", "iterations-10", "iterations-15")  # fmt: skip
VARIANTS |= {
    f"small-{name}": replace(VARIANTS[name], title=f"{VARIANTS[name].title}, small output at first", scales=SMALL)
    for name in BEGUN_SMALL
}


def gka_rate(size: str) -> float:
    """The one that experiments/lm chose for GKA at this size."""
    for result in read_results(LM_RESULTS).values():
        if (result["size"], result["layer"], result["stage"]) == (size, "gka", "final"):
            return result["rate"]
    return USUAL_RATE


def as_released(results: Results) -> Results:
    """What experiments/lm has of such models on as much text: the released form, Gated DeltaNet with narrow values."""
    asked = {(r["size"], r["corpus"], r["tokens"], r["rate"]) for r in results.values() if "measures" in r}
    found: Results = {}
    for layer, variant in (("gka", "base"), ("gdn-narrow", "gdn-eps-1e-5")):
        for name, result in read_results(LM_RESULTS).items():
            alike = (result["size"], result["corpus"], result["tokens"], result["rate"]) in asked
            if alike and (result["layer"], result["stage"], result["match"]) == (layer, "final", "parameters"):
                found[name] = result | {"variant": variant, "iterations": ()}
    return found


def make(options: argparse.Namespace, variant: str, seed: int) -> Run:
    size = SIZES[options.size]
    what = VARIANTS[variant]
    tokens, rate = options.tokens or size.tokens, what.rate or options.rate or gka_rate(options.size)
    model = common(options.size, vocabulary_of(options)) | {
        "hybrid_override_pattern": f"{size.blocks}x{TOKENS[what.layer]}",
        f"{what.layer}_config": what.choices,
        "intermediate_size": size.fitted.get(what.fits_as, size.mlp),
    }
    tags = {"size": options.size, "variant": variant, "corpus": options.corpus, "rate": rate, "seed": seed,
            "iterations": what.iterations}  # fmt: skip
    return Run(
        name=f"{options.size}-{variant}-{options.corpus}-{tokens / 1e6:g}M-lr{rate:g}-s{seed}",
        tags=tags,
        settings={"model": model} | recipe(options, tokens, rate, seed) | what.settings,
        alike=f"{options.size}-{variant}-{options.corpus}",
        speed=guessed_speed(options.size, what.layer),
        measured=not options.loss_only,
        shifts=what.shifts,
        scales=what.scales,
    )


def asked(text: str) -> tuple[str, int | None]:
    """VARIANT or VARIANT:SEED."""
    variant, colon, seed = text.partition(":")
    if variant not in VARIANTS or (colon and not seed.isdigit()):
        raise argparse.ArgumentTypeError(f"got {text}; it takes VARIANT or VARIANT:SEED, any of {', '.join(VARIANTS)}")
    return variant, int(seed) if colon else None


def plan(options: argparse.Namespace) -> Iterator[Run]:
    """As they are named; a variant without a seed of its own once for each of --seeds."""
    for seed in range(options.seeds):
        for variant, own in options.only:
            if own is None or seed == 0:
                yield make(options, variant, seed if own is None else own)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    for name in ("list", "run"):
        one = commands.add_parser(name)
        add_options(one, "out/ablations")
        one.add_argument("--only", nargs="+", type=asked, default=[(name, None) for name in VARIANTS],
                         metavar="VARIANT[:SEED]", help=f"any of {', '.join(VARIANTS)} (all)")  # fmt: skip
        one.add_argument("--rate", type=float, help=f"of all runs (what experiments/lm chose, or {USUAL_RATE:g})")
        one.add_argument("--seeds", type=int, default=1)
        one.add_argument(
            "--loss-only", action="store_true", help="the loss on training's own held-out part, no measures"
        )
    merging = commands.add_parser("merge")
    merging.add_argument("files", nargs="+", type=Path)
    commands.add_parser("report")
    return parser.parse_args()


def report(results: Results) -> None:
    from table import write_report  # here: it draws, and a machine that only trains may have no matplotlib

    write_report(as_released(results) | results, VARIANTS, HERE)


def main() -> int:
    options = arguments()
    if collected(options, RESULTS, report):
        return 0
    results = known_results(options, RESULTS)
    if options.command == "list":
        return list_runs(options, results, plan(options))
    return run_plan(options, results, lambda _: plan(options))


if __name__ == "__main__":
    run_program(main)
