"""Language models from scratch: the same text in the same order through every layer.

  list     the runs of a plan, and how long each will take
  run      those that fit into --budget seconds: trained, measured, and one line of JSON each in --out/results.jsonl
  merge    results that came back from other machines, into results.jsonl beside this file
  report   results.md and the figures, from results.jsonl

For every layer each of three learning rates on a fifth of the tokens, then the best of them on all: by the loss on the
last half percent of the training text, which no table shows. Tables are of held-out documents.

  run.py list --size 12m
  run.py run --size 12m --device cuda --budget 540 --data /root/lm/data --out /root/lm/out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from sizes import FIRST_THREE, LAYERS, MATCHES, SIZES, USUAL, model
from sweep import ROOT, Results, Run, read_results
from trials import add_options, collected, guessed_speed, known_results, list_runs, recipe, run_plan, vocabulary_of

sys.path.insert(0, str(ROOT / "experiments"))

from console import run_program

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
FIFTH = 5
ABLATIONS = HERE.parent / "ablations" / "results.jsonl"
SAME = {  # variants of experiments/ablations that are layers of this one
    "base": "gka", "norm-eps": "gka-eps", "eps-1e-4": "gka-eps-1e-4", "eps-1e-3": "gka-eps-1e-3",
    "gdn-eps-1e-5": "gdn-narrow", "gdn-eps-1e-4": "gdn-narrow-eps-1e-4", "gdn-eps-1e-3": "gdn-narrow-eps-1e-3",
    "gdn-wide-eps-1e-3": "gdn-eps-1e-3",
}  # fmt: skip


def make(options: argparse.Namespace, layer: str, rate: float, seed: int, tokens: int, stage: str) -> Run:
    size, match, corpus = options.size, options.match, options.corpus
    tags = {"size": size, "layer": layer, "match": match, "corpus": corpus, "rate": rate, "seed": seed, "stage": stage}
    return Run(
        name="-".join([size, layer, match, corpus, f"{tokens / 1e6:g}M", f"lr{rate:g}", f"s{seed}", stage]),
        tags=tags,
        settings={"model": model(size, layer, match, vocabulary_of(options))} | recipe(options, tokens, rate, seed),
        alike=f"{size}-{layer}-{match}-{corpus}",
        speed=guessed_speed(size, layer),
        measured=stage == "final",
    )


def best_rate(results: Results, tries: list[Run]) -> float | None:
    """Of those tried, once all have been; None before."""
    if not all(run.name in results for run in tries):
        return None
    losses = {run.tags["rate"]: results[run.name]["valid_loss"] for run in tries}
    losses = {rate: loss for rate, loss in losses.items() if loss is not None}
    if not losses:
        raise SystemExit(f"lm: every learning rate of {tries[0].tags['layer']} diverged; give lower --rates")
    return min(losses, key=losses.get)


def plan(options: argparse.Namespace, results: Results, unknown: float | None = None) -> Iterator[Run]:
    """Rates of every layer first, for they are short; then what they lead to, the layers that matter most first. Final
    runs whose rate is not known yet are left out, or have the rate `unknown`."""
    size = SIZES[options.size]
    tokens = options.tokens or size.tokens
    rates = options.rates or size.rates
    tries = {
        layer: [make(options, layer, rate, 0, tokens // FIFTH, "rate") for rate in rates] for layer in options.only
    }
    if not options.rate:
        for runs in tries.values():
            yield from runs
    for seed in range(options.seeds):
        for layer in sorted(options.only, key=lambda layer: layer not in FIRST_THREE):
            rate = options.rate or best_rate(results, tries[layer]) or unknown
            if rate is not None and (seed == 0 or layer in options.second_seed):
                yield make(options, layer, rate, seed, tokens, "final")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    for name in ("list", "run"):
        add_plan(commands.add_parser(name))
    merging = commands.add_parser("merge")
    merging.add_argument("files", nargs="+", type=Path)
    commands.add_parser("report")
    return parser.parse_args()


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "out/lm")
    parser.add_argument("--only", nargs="+", choices=list(LAYERS), default=list(USUAL), metavar="LAYER",
                        help=f"any of {', '.join(LAYERS)} (all up to {USUAL[-1]})")  # fmt: skip
    parser.add_argument("--match", choices=MATCHES, default="parameters",
                        help="what layers have in common (parameters)")  # fmt: skip
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates to try (the size's own)")
    parser.add_argument("--rate", type=float, help="the final runs' rate; nothing is tried")
    parser.add_argument("--seeds", type=int, default=1, help="of final runs (1)")
    parser.add_argument("--second-seed", nargs="+", default=list(FIRST_THREE), metavar="LAYER",
                        help=f"layers that get further seeds ({' '.join(FIRST_THREE)})")  # fmt: skip


def from_ablations() -> Results:
    """What experiments/ablations has measured of the same models."""
    those = {name: run for name, run in read_results(ABLATIONS).items() if run["variant"] in SAME and "measures" in run}
    tags = {"stage": "final", "match": "parameters"}
    return {name: run | tags | {"layer": SAME[run["variant"]]} for name, run in those.items()}


def report(results: Results) -> None:
    from report import write_report  # here: it draws, and a machine that only trains may have no matplotlib

    write_report(results | from_ablations(), HERE)


def main() -> int:
    options = arguments()
    if collected(options, RESULTS, report):
        return 0
    results = known_results(options, RESULTS)
    if options.command == "list":
        return list_runs(options, results, plan(options, results, unknown=0.0))
    return run_plan(options, results, lambda results: plan(options, results))


if __name__ == "__main__":
    run_program(main)
