"""What every experiment with text shares: the text, the recipe, what is measured, and the commands `list` and `run`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import measure
import numpy as np
from pack import SOURCES
from sizes import SIZES, VOCABULARY, padded
from sweep import PROGRAM, Plan, Results, Run, Sweep, device_name, read_results, show_plan, write_results

# Tokens a second at first, until runs have been measured: on an H200, see README.md.
SPEEDS = {
    ("50m", "attention"): 660e3, ("50m", "mamba2"): 150e3, ("50m", ""): 400e3,
    ("12m", "attention"): 1400e3, ("12m", "mamba2"): 360e3, ("12m", ""): 980e3,
    ("toy", ""): 20e3,
}  # fmt: skip


def guessed_speed(size: str, layer: str) -> float:
    return SPEEDS.get((size, layer)) or SPEEDS[size, ""]


# ---- The text


def training_files(data: Path, corpus: str, packs: tuple[int, ...]) -> list[Path]:
    """Of the sources that were packed; every pack that is asked for must be there."""
    if corpus == "enwik8":
        return [data / "tokens" / "enwik8.train.tokens"]
    there = [source for source in SOURCES if (data / "tokens" / f"{source}.test.tokens").exists()]
    return [data / "tokens" / f"{source}.{part}.tokens" for part in packs for source in there or SOURCES]


def held_out_files(data: Path, corpus: str) -> dict[str, Path]:
    names = ["enwik8"] if corpus == "enwik8" else list(SOURCES)
    files = {name: data / "tokens" / f"{name}.test.tokens" for name in names}
    return {name: file for name, file in files.items() if file.exists()}


def text_of(options: argparse.Namespace) -> list[Path]:
    return training_files(Path(options.data), options.corpus, tuple(options.packs or SIZES[options.size].packs))


def vocabulary_of(options: argparse.Namespace) -> int:
    """The token files' own, padded; where there are none yet, GPT-2's."""
    first = text_of(options)[0]
    return padded(measure.read_header(first)["vocabulary"]) if first.exists() else VOCABULARY


def recipe(options: argparse.Namespace, tokens: int, rate: float, seed: int) -> dict[str, object]:
    """All of a training file but the model: the same batches in the same order for every layer."""
    chosen = SIZES[options.size]
    steps = max(1, tokens // chosen.batch_tokens)
    return {
        "data": {
            "kind": "tokens",
            "files": [str(file.resolve()) for file in text_of(options)],
            "seed": seed,
            "eval_fraction": 0.005,
        },
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
        "cuda_graph": options.cuda_graph,
    }


# ---- What a trained model is asked


class Measure:
    """Held-out text and tasks; with `iterations` the text once more with so many solver steps at inference alone."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.data = Path(options.data)
        self.vocabulary = vocabulary_of(options)
        self.frequent: np.ndarray | None = None
        self.counting = threading.Lock()

    def __call__(self, run: Run, folder: Path) -> dict[str, object]:
        options = self.options
        found: dict[str, object] = {"held_out": self.held_out(run, folder)}
        if options.corpus == "text" and options.items:
            tasks = sorted((self.data / "tasks").glob("*.jsonl"))
            where = [*self.where(), "--max-length", str(run.settings["length"])]
            found["tasks"] = measure.tasks(PROGRAM, folder, tasks, options.items, where)
        for count in run.tags.get("iterations", ()):
            changed = with_iterations(folder, count)
            found.setdefault("iterations", {})[str(count)] = self.held_out(run, changed)
            shutil.rmtree(changed)
        return found

    def where(self) -> list[str]:
        """Products in bfloat16 on a card, as in training; the weights of a run are float32."""
        return ["--device", self.options.device] + (["--dtype", "bfloat16"] if self.options.device != "cpu" else [])

    def held_out(self, run: Run, folder: Path) -> dict[str, object]:
        with self.counting:
            if self.frequent is None:
                files = [Path(file) for file in run.settings["data"]["files"]]
                self.frequent = measure.frequent_pairs(files, self.vocabulary)
        length = run.settings["length"]
        tests = held_out_files(self.data, self.options.corpus)
        most = self.options.windows if self.options.corpus == "text" else 10**9
        where = [*self.where(), "--packed", str(32 * length)]
        return measure.held_out(PROGRAM, folder, tests, self.frequent, length, self.vocabulary, where, most)


def with_iterations(run: Path, count: int) -> Path:
    """The run's model with another number of solver steps."""
    folder = run.parent / f"{run.name}-iterations-{count}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in (run / "latest").resolve().iterdir():
        if file.suffix == ".safetensors" and file.name.startswith("model"):
            (folder / file.name).symlink_to(file)
    config = json.loads((run / "latest" / "config.json").read_text())
    config["gka_config"] = config.get("gka_config", {}) | {"num_iter": count}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- The commands


def add_options(parser: argparse.ArgumentParser, out: str) -> None:
    """What `list` and `run` take in every experiment."""
    parser.add_argument("--size", choices=list(SIZES), default="12m")
    parser.add_argument("--corpus", choices=("text", "enwik8"), default="text")
    parser.add_argument("--tokens", type=int, help="of a final run (the size's own)")
    parser.add_argument("--packs", type=int, nargs="+", help="the packs that are trained on (the size's own)")
    parser.add_argument("--items", type=int, default=300, help="of a task (300; 0: no tasks)")
    parser.add_argument("--windows", type=int, default=measure.WINDOWS, help="of held-out text, of each source (128)")
    parser.add_argument("--evaluation", type=float, default=40, metavar="SECONDS",
                        help="of a measurement, until one is known (40)")  # fmt: skip
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, metavar="N",
                        help="trainings side by side (1): small models leave a card idle")  # fmt: skip
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS")
    parser.add_argument("--data", default="out/lm/data", help="what pack.py unpacked (out/lm/data)")
    parser.add_argument("--out", default=out, help=f"where runs and results.jsonl go ({out})")
    parser.add_argument("--keep-weights", action="store_true")
    parser.add_argument("--cuda-graph", action="store_true", help="steps recorded once and played: for small models")


def collected(options: argparse.Namespace, committed: Path, report: Callable[[Results], None]) -> bool:
    """Does `merge` or `report`; whether it was one of them."""
    if options.command == "merge":
        write_results(committed, read_results(committed, *options.files))
    elif options.command == "report":
        report(read_results(committed))
    else:
        return False
    return True


def list_runs(options: argparse.Namespace, results: Results, runs: Iterable[Run]) -> int:
    show_plan(runs, results, device_name(options.device), options.evaluation, options.jobs)
    return 0


def known_results(options: argparse.Namespace, committed: Path) -> Results:
    return read_results(committed, Path(options.out) / "results.jsonl")


def run_plan(
    options: argparse.Namespace, results: Results, plan: Plan, measure_run: Callable[[Run, Path], dict] | None = None
) -> int:
    for file in text_of(options):
        if not file.exists():
            raise SystemExit(f"lm: {file} is missing; pack.py unpack makes it (experiments/lm/README.md)")
    sweep = Sweep(
        plan=plan,
        measure=measure_run or Measure(options),
        folder=Path(options.out),
        results=results,
        device=options.device,
        budget=options.budget,
        evaluation=options.evaluation,
        keep_weights=options.keep_weights,
        jobs=options.jobs,
    )
    done = sweep.run()
    left = [run.name for run in plan(sweep.results) if run.name not in sweep.results]
    print(f"{done} runs done, {len(left)} left ({sweep.file} has what came out)", file=sys.stderr)
    return 1 if sweep.failed else 0
