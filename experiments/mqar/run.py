"""Multi-query associative recall: how wide must a model be to hold n key-value pairs?

Trains two-layer models on MQAR (a mixture of sizes up to the tested one, random filler) for every layer, width and
size: once per learning rate until one of them has done well (a further one would add little), leaving out rates towards
which accuracy already falls; then with further seeds at the best. Where one of them ended at chance (--longer-below),
all are trained three times as long, and stand for that layer whether that helped or not. --jobs processes
(`gka train -`) take the runs one after the other. What is finished is kept in --out/results.jsonl, so the sweep can be
stopped and started again at any time.

  accuracy   the share of answers that are right when training ends, on sequences never trained on, at the tested size
  figure     accuracy against width, a panel per (T, n), a line per layer, the median over seeds and a dot for each
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from layers import LAYERS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import PROGRAM, Progress, table, write_atomically  # noqa: E402
from trainings import Shared, outcome_of  # noqa: E402

RATES = (1e-2, 5e-3, 2e-2, 2.5e-3)  # the likeliest first
EVALUATIONS = 20  # of a run
INITIAL = 0.1  # the deviation of the first weights; the usual 0.02 is for models that are far wider
WELL = 0.97  # an accuracy with which no other learning rate is tried
FALLS = 0.05  # in accuracy, from one learning rate to the next: further in that direction nothing better is expected
CHANCE = 0.1  # below it a run has not begun to recall
LONGER = 3  # times as many steps for a layer that no learning rate took beyond --longer-below


@dataclass(frozen=True)
class Run:
    layer: str
    width: int
    tokens: int  # T, the tested length
    pairs: int  # n
    rate: float
    seed: int
    long: bool = False

    @property
    def name(self) -> str:
        name = f"{self.layer}-w{self.width}-t{self.tokens}-n{self.pairs}-lr{self.rate:g}-s{self.seed}"
        return name + ("-long" if self.long else "")

    def model(self, vocabulary: int) -> dict[str, object]:
        return LAYERS[self.layer].model(self.width, vocabulary)


def mixture(tokens: int, pairs: int) -> list[dict[str, object]]:
    """Smaller sizes first in number, the tested one most often: alone it leaves every layer but attention at chance."""
    sizes = []
    t, n = 32, 2
    while t < tokens or n < pairs:
        sizes.append({"tokens": max(t, 4 * n), "pairs": n, "weight": 1})
        t, n = min(2 * t, tokens), min(2 * n, pairs)
    return [*sizes, {"tokens": tokens, "pairs": pairs, "weight": 2}]


def steps_of(options: argparse.Namespace, long: bool) -> int:
    return options.steps * (LONGER if long else 1)


def recipe(options: argparse.Namespace, long: bool = False) -> str:
    """What all runs of a call have in common. Results of another recipe do not belong into the same panel."""
    parts = [
        f"{steps_of(options, long)} steps of {options.batch} sequences",
        f"vocabulary {options.vocabulary}",
        f"stop at {options.stop:g}",
        *options.set,
    ]
    return ", ".join(parts)


def settings(run: Run, options: argparse.Namespace, output: Path) -> dict[str, object]:
    task = {"kind": "task", "task": "mqar", "vocab_size": options.vocabulary, "filler": "random"}
    steps = steps_of(options, run.long)
    return apply(
        options.set,
        {
            "model": run.model(options.vocabulary) | {"initializer_range": INITIAL},
            "data": {**task, "seed": run.seed, "sizes": mixture(run.tokens, run.pairs)},
            "eval_data": {**task, "seed": 1_000_003, "sizes": [{"tokens": run.tokens, "pairs": run.pairs}]},
            "length": run.tokens,
            "batch_tokens": options.batch * run.tokens,
            "steps": steps,
            "learning_rate": run.rate,
            "final_learning_rate": 0.1,
            "warmup": 0.1,
            "weight_decay": 0.1,
            "seed": run.seed,
            "device": options.device,
            "dtype": "bfloat16" if options.bfloat16 else "float32",
            "cuda_graph": True,
            "eval_every": max(1, steps // EVALUATIONS),
            "eval_batches": options.eval_batches,
            "checkpoint_every": 0,
            "stop_accuracy": options.stop,
            "output": str(output),
        },
    )


def apply(assignments: list[str], values: dict[str, object]) -> dict[str, object]:
    """KEY=VALUE, a dot reaching into an object, as `gka train --set` has them."""
    for assignment in assignments:
        key, value = assignment.split("=", 1)
        *path, last = key.split(".")
        place = values
        for name in path:
            place = place[name]
        place[last] = json.loads(value)
    return values


class Worker:
    """A process that trains one file after the other, so that starting torch and the GPU is paid once."""

    def __init__(self, threads: int, log: Path):
        self.log = log
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [PROGRAM, "train", "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            )

    def train(self, file: Path) -> bool:
        """Whether it came to its end; False where the loss was not finite."""
        print(file, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().strip()
        if outcome := outcome_of(answer):
            return outcome == "finished"
        raise RuntimeError(answer or f"gka train ended in the middle of {file.name}; {self.log} may say why")

    def cpu_seconds(self) -> float:
        """What it has computed so far, whatever else the machine does meanwhile; of the system's calls, too."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)


class Sweep(Shared):
    """Which runs are done, which go on, and which comes next."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.options = options
        self.folder = Path(options.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / "results.jsonl"
        self.workers: list[Worker] = []
        self.failure = ""
        self.results: dict[str, dict] = {}
        self._load()

    def _load(self) -> None:
        if not self.file.exists():
            return
        for line in self.file.read_text().splitlines():
            result = json.loads(line)
            other_size = (result["tokens"], result["pairs"]) not in self.options.sizes
            same = result["recipe"] == recipe(self.options, result["long"])
            if self.options.draw or other_size or same:
                self.results[result["name"]] = result
            else:
                print(f"{result['name']} was trained otherwise ({result['recipe']}): left out", file=sys.stderr)

    def work(self, progress: Progress) -> None:
        """Trains until nothing is left; one thread per worker."""
        fair = max(1, (os.cpu_count() or 1) // self.options.jobs) if self.options.device == "cpu" else 1
        threads = int(os.environ.get("OMP_NUM_THREADS") or fair)
        try:
            worker = Worker(threads, self.folder / "train.log")
            with self.changed:
                self.workers.append(worker)
                if self.stopping:
                    worker.stop()
            while run := self.take(self._next):
                result = self._train(worker, run)
                with self.changed:
                    if not self.stopping:
                        progress.step(f"{result['name']}: {result['accuracy']:.3f}")
        except Exception as error:
            with self.changed:
                if not self.stopping:
                    self.failure = str(error)
            self.stop()
            return
        worker.stop()

    def _next(self) -> Run | None:
        return next((run for run in self.order() if run.name not in self.results and run.name not in self.busy), None)

    def order(self) -> Iterator[Run]:
        """All that is known to be needed, the most informative first: rates, then seeds, of long runs at last."""
        options = self.options
        cells = [
            (layer, width, *size) for size in options.sizes for width in options.widths for layer in options.layers
        ]
        for rate in options.rates:
            for cell in cells:
                if rate in self.open_rates(cell):
                    yield Run(*cell, rate, 0)
        known = [(cell, best(self._first_seed(cell))["rate"]) for cell in cells if not self.open_rates(cell)]
        seeds = [
            Run(*cell, rate, seed, long=self._falls_short(cell, rate))
            for seed in range(options.seeds)
            for cell, rate in known
        ]
        yield from sorted(seeds, key=lambda run: (run.long and run.seed > 0, run.seed))

    def _falls_short(self, cell: tuple, rate: float) -> bool:
        """Whether one of its seeds did not get far in the usual number of steps."""
        names = [Run(*cell, rate, seed).name for seed in range(self.options.seeds)]
        done = [self.results[name] for name in names if name in self.results]
        return any(result["accuracy"] < self.options.longer_below for result in done)

    def open_rates(self, cell: tuple) -> list[float]:
        """The learning rates that have to be tried next; none once the best is known."""
        found = {result["rate"]: result["accuracy"] for result in self._first_seed(cell)}
        highest = max(found.values(), default=CHANCE)
        if highest >= min(WELL, self.options.stop):
            return []
        left = [rate for rate in self.options.rates if rate not in found and not falls(found, rate)]
        return left if highest < CHANCE else left[:1]  # runs at chance say nothing about other rates

    def _first_seed(self, cell: tuple) -> list[dict]:
        names = [Run(*cell, rate, 0).name for rate in self.options.rates]
        return [self.results[name] for name in names if name in self.results]

    def _train(self, worker: Worker, run: Run) -> dict:
        output = self.folder / "runs" / run.name
        shutil.rmtree(output, ignore_errors=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        file = output.parent / f"{run.name}.json"  # the name has dots: no with_suffix
        file.write_text(json.dumps(settings(run, self.options, output), indent=1))
        began = time.monotonic()
        diverged = not worker.train(file)
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        accuracies = [round(line["eval_accuracy"], 4) for line in lines if "eval_accuracy" in line]
        result = {
            "name": run.name,
            **asdict(run),
            "accuracy": 0.0 if diverged else accuracies[-1],
            "curve": accuracies,
            "train_tokens": lines[-1]["tokens"],
            "seconds": round(time.monotonic() - began, 1),
            "recipe": recipe(self.options, run.long),
        }
        self._keep(result)
        shutil.rmtree(output)
        file.unlink()
        return result

    def _keep(self, result: dict) -> None:
        with self.changed:
            self.results[result["name"]] = result
            self.busy.discard(result["name"])
            with self.file.open("a") as file:
                file.write(json.dumps(result) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopping = True
            for worker in self.workers:
                worker.stop()
            self.changed.notify_all()


def falls(found: dict[float, float], rate: float) -> bool:
    """Whether accuracy clearly falls towards this rate: of the two nearest on one side, the nearer is the worse."""
    for side in (sorted(r for r in found if r > rate), sorted((r for r in found if r < rate), reverse=True)):
        if len(side) >= 2 and found[side[0]] < found[side[1]] - FALLS:
            return True
    return False


def best(results: list[dict]) -> dict:
    """The highest accuracy; among equals the one that needed the fewest tokens."""
    return max(results, key=lambda r: (r["accuracy"], -r["train_tokens"]))


def train_all(sweep: Sweep, most: int) -> int:
    """The exit status; `most` runs are to be done."""
    options, interrupted = sweep.options, False
    with Progress(most, "Runs, at most") as progress:
        threads = [threading.Thread(target=sweep.work, args=(progress,)) for _ in range(options.jobs)]
        for thread in threads:
            thread.start()
        try:
            ends = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.1)
                if time.monotonic() > ends:
                    sweep.stop()
        except KeyboardInterrupt:
            interrupted = True
            sweep.stop()
        for thread in threads:
            thread.join()
    if sweep.failure:
        print(f"mqar: {sweep.failure}", file=sys.stderr)
        return 1
    if sweep.stopping:
        print("Stopped. The same command goes on where this one ended.", file=sys.stderr)
    return 130 if interrupted else 0


def summarise(results: list[dict], out: Path) -> None:
    """Every cell's best rate and its seeds, to summary.json, a table and the figure."""
    from plot import draw  # here: it needs matplotlib, which a machine that only trains may not have

    cells: dict[tuple, list[dict]] = {}
    for result in results:
        cells.setdefault((result["layer"], result["width"], result["tokens"], result["pairs"]), []).append(result)
    summary = []
    for (layer, width, tokens, pairs), runs in sorted(cells.items(), key=lambda c: (c[0][2], c[0][3], c[0][1])):
        longer = [r for r in runs if r["long"]]  # whether they did better or not
        chosen = best([r for r in longer or runs if r["seed"] == 0] or runs)  # of those there are so far
        alike = [r for r in runs if (r["rate"], r["long"]) == (chosen["rate"], chosen["long"])]
        at_best = sorted(r["accuracy"] for r in alike)
        summary.append(
            {
                "layer": layer,
                "width": width,
                "tokens": tokens,
                "pairs": pairs,
                "rate": chosen["rate"],
                "long": chosen["long"],
                "seeds": len(at_best),
                "mean": sum(at_best) / len(at_best),
                "median": statistics.median(at_best),
                "accuracies": at_best,
                "low": at_best[0],
                "high": at_best[-1],
            }
        )
    write_atomically(out / "summary.json", lambda path: path.write_text(json.dumps(summary, indent=1)))
    order = list(LAYERS)
    rows, last = [], None
    for cell in sorted(summary, key=lambda c: (c["tokens"], c["pairs"], c["width"], order.index(c["layer"]))):
        group = (cell["tokens"], cell["pairs"], cell["width"])
        if last not in (None, group):
            rows.append(None)
        last = group
        spread = f"{cell['low']:.3f}–{cell['high']:.3f}"
        size = f"T {cell['tokens']}, n {cell['pairs']}"
        layer = LAYERS[cell["layer"]].title
        rows.append(
            [size, str(cell["width"]), layer, f"{cell['mean']:.3f}", spread, str(cell["seeds"]), f"{cell['rate']:g}"]
        )
    print(table(["size", "width", "layer", "accuracy", "over seeds", "seeds", "rate"], rows, left=3))
    write_atomically(out / "mqar.md", lambda path: path.write_text(markdown(summary)))
    write_atomically(out / "mqar.png", lambda path: draw(summary, path))
    print(f"{out / 'mqar.png'} has the figure, {out / 'mqar.md'} the table, {out / 'summary.json'} its data.")


def markdown(summary: list[dict]) -> str:
    """A row per layer, a column per size and width: the mean accuracy, * after longer runs, and of how many seeds."""
    columns = sorted({(c["tokens"], c["pairs"], c["width"]) for c in summary})
    cells = {(c["layer"], c["tokens"], c["pairs"], c["width"]): c for c in summary}

    def shown(cell: dict | None) -> str:
        if not cell:
            return "–"
        seeds = f" ({cell['seeds']})" if cell["seeds"] > 1 else ""
        return f"{cell['mean']:.3f}" + ("*" if cell["long"] else "") + seeds

    lines = ["| layer | " + " | ".join(f"({t}, {n}), width {w}" for t, n, w in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for name, layer in LAYERS.items():
        if any((name, *column) in cells for column in columns):
            lines.append(f"| {layer.title} | " + " | ".join(shown(cells.get((name, *c))) for c in columns) + " |")
    return "\n".join(lines) + "\n"


def size(text: str) -> tuple[int, int]:
    try:
        tokens, pairs = (int(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; it takes T x n, such as 128x32") from None
    if 4 * pairs > tokens:
        raise argparse.ArgumentTypeError(f"{pairs} pairs need {4 * pairs} tokens, and '{text}' has {tokens}")
    return tokens, pairs


def sweep_parser(
    description: str | None, layers: Iterable[str] = LAYERS, rates: Sequence[float] = RATES
) -> argparse.ArgumentParser:
    """The options that this sweep, the grid and the ablations have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=list(layers), default=list(layers), metavar="LAYER",
                        help=f"any of {', '.join(layers)}")  # fmt: skip
    parser.add_argument("--rates", nargs="+", type=float, default=list(rates))
    parser.add_argument("--steps", type=int, default=3000, help="of a run, at most (3000)")
    parser.add_argument("--batch", type=int, default=32, help="sequences a step (32)")
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bfloat16", action="store_true", help="on a GPU: products in bfloat16, not in float32")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1)")
    parser.add_argument("--out", default="out/mqar")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of every run")
    parser.add_argument("--minutes", type=float, help="stop after so long; call again to go on")
    parser.add_argument("--draw", action="store_true", help="train nothing: summarise and draw what is there")
    return parser


def arguments() -> argparse.Namespace:
    parser = sweep_parser(__doc__)
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=size,
        default=[(128, 32), (256, 64)],
        metavar="TxN",
        help="tested sizes (128x32 256x64)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs at the best rate, the first included (3)")
    parser.add_argument("--stop", type=float, default=0.99, help="a run ends at this accuracy (0.99)")
    parser.add_argument(
        "--longer-below",
        type=float,
        default=CHANCE,
        metavar="ACCURACY",
        help=f"where a seed at the best learning rate ends below this ({CHANCE:g}): {LONGER} times the steps for all",
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    sweep = Sweep(options)
    cells = len(options.sizes) * len(options.widths) * len(options.layers)
    status = 0 if options.draw else train_all(sweep, cells * (len(options.rates) + options.seeds))
    if sweep.results:
        summarise(list(sweep.results.values()), sweep.folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
