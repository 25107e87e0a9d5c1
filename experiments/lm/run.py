"""Language models from scratch: the same text in the same order through every layer.

  list     the runs of a plan, and how long each will take
  run      those that fit into --budget seconds: trained, measured, and one line of JSON each in --out/results.jsonl
  merge    results that came back from other machines, into results.jsonl beside this file
  report   results.md and the figure, from results.jsonl

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

import measure
import numpy as np
from pack import SOURCES
from sizes import FIRST_THREE, LAYERS, MATCHES, SIZES, VOCABULARY, model, padded
from sweep import PROGRAM, ROOT, Results, Run, Sweep, device_name, read_results, show_plan, write_results

sys.path.insert(0, str(ROOT / "experiments"))

from console import run_program

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
FIFTH = 5
# Tokens a second at first, until runs have been measured: on an H200, see README.md.
SPEEDS = {
    ("50m", "attention"): 660e3, ("50m", "mamba2"): 300e3, ("50m", ""): 400e3,
    ("12m", "attention"): 1200e3, ("12m", "mamba2"): 600e3, ("12m", ""): 800e3,
    ("toy", ""): 20e3,
}  # fmt: skip


# ---- The text


def training_files(data: Path, corpus: str, packs: tuple[int, ...]) -> list[Path]:
    """Of the sources that were packed; every pack that is asked for must be there."""
    if corpus == "enwik8":
        return [data / "tokens" / "enwik8.train.tokens"]
    there = [source for source in SOURCES if (data / "tokens" / f"{source}.test.tokens").exists()]
    return [data / "tokens" / f"{source}.{part}.tokens" for part in packs for source in there or SOURCES]


def check_files(files: list[Path]) -> None:
    for file in files:
        if not file.exists():
            raise SystemExit(f"lm: {file} is missing; pack.py unpack makes it (README.md has the commands)")


def held_out_files(data: Path, corpus: str) -> dict[str, Path]:
    names = ["enwik8"] if corpus == "enwik8" else list(SOURCES)
    files = {name: data / "tokens" / f"{name}.test.tokens" for name in names}
    return {name: file for name, file in files.items() if file.exists()}


def recipe(options: argparse.Namespace, size: str, tokens: int, rate: float, seed: int) -> dict[str, object]:
    """All of a training file but the model: the same batches in the same order for every layer."""
    chosen = SIZES[size]
    files = [str(file.resolve()) for file in text_of(options)]
    steps = max(1, tokens // chosen.batch_tokens)
    return {
        "data": {"kind": "tokens", "files": files, "seed": seed, "eval_fraction": 0.005},
        "length": chosen.length,
        "batch_tokens": chosen.batch_tokens,
        "steps": steps,
        "learning_rate": rate,
        "seed": seed,
        "eval_every": max(1, -(-steps // 4)),
        "eval_batches": 4,
        "checkpoint_every": 0,
        "keep": 1,
        "log_every": 50,
        "cuda_graph": options.device != "cpu",
    }


# ---- The runs


def text_of(options: argparse.Namespace) -> list[Path]:
    return training_files(Path(options.data), options.corpus, tuple(options.packs or SIZES[options.size].packs))


def vocabulary_of(options: argparse.Namespace) -> int:
    """The token files' own, padded; where there are none yet, GPT-2's."""
    first = text_of(options)[0]
    return padded(measure.read_header(first)["vocabulary"]) if first.exists() else VOCABULARY


def make(options: argparse.Namespace, layer: str, rate: float, seed: int, tokens: int, stage: str) -> Run:
    size = options.size
    parts = [size, layer, options.match, options.corpus, f"{tokens / 1e6:g}M", f"lr{rate:g}", f"s{seed}", stage]
    tags = {"size": size, "layer": layer, "match": options.match, "corpus": options.corpus, "rate": rate, "seed": seed,
            "stage": stage}  # fmt: skip
    return Run(
        name="-".join(parts),
        tags=tags,
        settings={"model": model(size, layer, options.match, vocabulary_of(options))}
        | recipe(options, size, tokens, rate, seed),
        alike=f"{size}-{layer}-{options.match}-{options.corpus}",
        speed=SPEEDS.get((size, layer)) or SPEEDS[size, ""],
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


def plan(options: argparse.Namespace, results: Results) -> Iterator[Run]:
    """Rates of every layer first, for they are short; then what they lead to."""
    size = SIZES[options.size]
    tokens = options.tokens or size.tokens
    rates = options.rates or list(size.rates)
    tries = {
        layer: [make(options, layer, rate, 0, tokens // FIFTH, "rate") for rate in rates] for layer in options.only
    }
    for runs in tries.values():
        yield from runs
    for seed in range(options.seeds):
        for layer in options.only:
            rate = options.rate or best_rate(results, tries[layer])
            if rate is not None and (seed == 0 or layer in options.second_seed):
                yield make(options, layer, rate, seed, tokens, "final")


def expected_plan(options: argparse.Namespace, results: Results) -> Iterator[Run]:
    """For the list: final runs whose rate is not known yet, at a rate that stands for it."""
    known = list(plan(options, results))
    yield from known
    size = SIZES[options.size]
    tokens = options.tokens or size.tokens
    for seed in range(options.seeds):
        for layer in options.only:
            there = any(
                run.tags["stage"] == "final" and run.tags["layer"] == layer and run.tags["seed"] == seed
                for run in known
            )
            if not there and (seed == 0 or layer in options.second_seed):
                yield make(options, layer, 0.0, seed, tokens, "final")


# ---- What a trained model is asked


class Measure:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.data = Path(options.data)
        self.vocabulary = vocabulary_of(options)
        self.frequent: np.ndarray | None = None

    def __call__(self, run: Run, folder: Path) -> dict[str, object]:
        options = self.options
        where = ["--device", options.device] + (["--dtype", "bfloat16"] if options.device != "cpu" else [])
        if self.frequent is None:
            files = run.settings["data"]["files"]
            self.frequent = measure.frequent_pairs([Path(file) for file in files], self.vocabulary)
        tests = held_out_files(self.data, options.corpus)
        most = options.windows if options.corpus == "text" else 10**9
        length = run.settings["length"]
        packed = ["--packed", str(32 * length)]
        found = {
            "held_out": measure.held_out(
                PROGRAM, folder, tests, self.frequent, length, self.vocabulary, [*where, *packed], most
            )
        }
        if options.corpus == "text" and options.items:
            names = sorted((self.data / "tasks").glob("*.jsonl"))
            found["tasks"] = measure.tasks(PROGRAM, folder, names, options.items, [*where, "--max-length", str(length)])
        return found


# ---- The command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    for name in ("list", "run"):
        add_plan(commands.add_parser(name))
    merging = commands.add_parser("merge")
    merging.add_argument("files", nargs="+", type=Path)
    commands.add_parser("report")
    options = parser.parse_args()
    if options.command in ("list", "run"):
        options.only = options.only or [name for name, layer in LAYERS.items() if layer.kernels]
    return options


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=list(SIZES), default="12m")
    parser.add_argument("--only", nargs="+", choices=list(LAYERS), metavar="LAYER",
                        help="any of " + ", ".join(LAYERS) + " (all that have kernels)")  # fmt: skip
    parser.add_argument(
        "--match", choices=MATCHES, default="parameters", help="what layers have in common (parameters)"
    )
    parser.add_argument("--corpus", choices=("text", "enwik8"), default="text")
    parser.add_argument("--tokens", type=int, help="of a final run (the size's own)")
    parser.add_argument("--packs", type=int, nargs="+", help="the packs that are trained on (the size's own)")
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates to try (the size's own)")
    parser.add_argument("--rate", type=float, help="the final runs' rate, whatever was tried")
    parser.add_argument("--seeds", type=int, default=1, help="of final runs (1)")
    parser.add_argument("--second-seed", nargs="+", default=list(FIRST_THREE), metavar="LAYER",
                        help=f"layers that get further seeds ({' '.join(FIRST_THREE)})")  # fmt: skip
    parser.add_argument("--items", type=int, default=300, help="of a task (300; 0: no tasks)")
    parser.add_argument("--windows", type=int, default=measure.WINDOWS, help="of held-out text, of each source (128)")
    parser.add_argument(
        "--evaluation", type=float, default=40, help="seconds of a measurement, until one is known (40)"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS")
    parser.add_argument("--data", default="out/lm/data")
    parser.add_argument("--out", default="out/lm")
    parser.add_argument("--keep-weights", action="store_true")


def main() -> int:
    options = arguments()
    if options.command == "merge":
        write_results(RESULTS, read_results(RESULTS, *options.files))
        return 0
    if options.command == "report":
        from report import write_report  # here: it draws, and a machine that only trains may have no matplotlib

        write_report(read_results(RESULTS), HERE)
        return 0
    results = read_results(RESULTS, Path(options.out) / "results.jsonl")
    if options.command == "list":
        show_plan(expected_plan(options, results), results, device_name(options.device), options.evaluation)
        return 0
    check_files(text_of(options))
    sweep = Sweep(
        plan=lambda results: plan(options, results),
        measure=Measure(options),
        folder=Path(options.out),
        results=results,
        device=options.device,
        budget=options.budget,
        evaluation=options.evaluation,
        keep_weights=options.keep_weights,
    )
    done = sweep.run()
    left = [run.name for run in plan(options, sweep.results) if run.name not in sweep.results]
    print(f"{done} runs done, {len(left)} left ({sweep.file} has what came out)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_program(main)
