"""The whole grid of MQAR: every layer at every learning rate with every seed, all for as many steps, none ended early.

The rate of a layer is chosen by the median over seeds on one set of sequences and reported on another: after training,
the weights are asked once more, by a run of one step at a learning rate of zero. Results go to --out/grid.jsonl, so the
grid can be stopped and started again; --minutes stops it.

  grid.py --cells 128x32:16,32,64,128 256x64:32,64,128 512x128:32,64,128 --jobs 24 --minutes 9
  grid.py --cells 128x32:32,64 --heads 2 4 --jobs 24
  grid.py --draw
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from run import ROOT, Run, Sweep, Worker, settings, size, sweep_parser, train_all

from layers import LAYERS

sys.path.insert(0, str(ROOT / "experiments"))

from console import table, write_atomically

REPORTED = 2_000_003  # the seed of the sequences that are reported; 1,000,003 of those that choose
CELLS = "128x32:16,32,64,128", "256x64:32,64,128", "512x128:32,64,128"


@dataclass(frozen=True)
class GridRun(Run):
    heads: int = 1

    @property
    def name(self) -> str:
        return f"{super().name}-h{self.heads}"

    def model(self, vocabulary: int) -> dict[str, object]:
        return LAYERS[self.layer].model(self.width, vocabulary, self.heads)


def cell(text: str) -> tuple[int, int, list[int]]:
    """TxN:W,W,… to (T, n, widths)."""
    what, _, widths = text.partition(":")
    tokens, pairs = size(what)
    try:
        return tokens, pairs, [int(width) for width in widths.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no cell; it takes TxN:W,W,… such as 128x32:32,64") from None


class Grid(Sweep):
    """What is left of the grid: all of a rate before the next, so that a part of it is a whole comparison."""

    KEPT = "grid.jsonl"

    def _load(self) -> None:
        self.file = self.folder / self.KEPT
        if self.file.exists():
            results = map(json.loads, self.file.read_text().splitlines())
            wanted = [result for result in results if self.options.draw or result["steps"] == self.options.steps]
            self.results = {result["name"]: result for result in wanted}

    def order(self) -> Iterator[Run]:
        options = self.options
        for tokens, pairs, widths in options.cells:
            for heads in options.heads:
                for seed in range(options.seeds):
                    for rate in options.rates:
                        for width in widths:
                            for layer in options.layers:
                                yield GridRun(layer, width, tokens, pairs, rate, seed, heads=heads)

    def _train(self, worker: Worker, run: GridRun) -> dict:
        output = self.folder / "runs" / run.name
        shutil.rmtree(output, ignore_errors=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        training = grid_settings(run, self.options, output)
        began, computed = time.monotonic(), worker.cpu_seconds()
        finished = train_file(worker, output, training)
        computed = worker.cpu_seconds() - computed
        curve = accuracies(output)
        result = {
            "name": run.name,
            **asdict(run),
            "chosen_by": curve[-1] if finished else 0.0,
            "accuracy": self._ask(worker, training, output) if finished else 0.0,
            "curve": curve,
            "seconds": round(time.monotonic() - began, 1),
            "cpu_seconds": round(computed, 1),  # of the training alone
            "steps": self.options.steps,
            **self._further(worker, run, training, output, finished),
        }
        self._keep(result)
        shutil.rmtree(output)
        return result

    def _ask(self, worker: Worker, training: dict, output: Path) -> float:
        """What the trained weights answer of the sequences that are reported."""
        asked = output.with_name(output.name + "-asked")
        shutil.rmtree(asked, ignore_errors=True)
        train_file(worker, asked, asking(training, output, asked))
        accuracy = accuracies(asked)[-1]
        shutil.rmtree(asked)
        return accuracy

    def _further(self, worker: Worker, run: GridRun, training: dict, output: Path, finished: bool) -> dict:
        """What else is kept of a run, whose metrics and weights are still there."""
        return {}


def grid_settings(run: GridRun, options: argparse.Namespace, output: Path) -> dict[str, object]:
    return settings(run, options, output) | {"stop_accuracy": None}


def asking(training: dict, weights: Path, output: Path) -> dict[str, object]:
    """The trained weights on other sequences: one step that changes nothing."""
    changed = {"from": str(weights.resolve()), "steps": 1, "learning_rate": 0.0, "eval_every": 1,
               "eval_batches": 4 * training["eval_batches"], "output": str(output), "cuda_graph": False}  # fmt: skip
    return training | changed | {"eval_data": training["eval_data"] | {"seed": REPORTED}}


def train_file(worker: Worker, output: Path, training: dict) -> bool:
    file = output.with_name(output.name + ".json")
    file.write_text(json.dumps(training | {"output": str(output)}))
    finished = worker.train(file)
    file.unlink()
    return finished


def accuracies(output: Path) -> list[float]:
    return [round(line["eval_accuracy"], 5) for line in metrics(output) if "eval_accuracy" in line]


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def summary(results: list[dict], heads: int) -> list[dict]:
    """For each cell the rate with the best median where it is chosen, and what its seeds have where it is reported."""
    cells: dict[tuple, dict[float, list[dict]]] = {}
    for result in results:
        if result["heads"] == heads:
            place = (result["layer"], result["width"], result["tokens"], result["pairs"])
            cells.setdefault(place, {}).setdefault(result["rate"], []).append(result)
    found = []
    for (layer, width, tokens, pairs), by_rate in sorted(cells.items(), key=lambda c: (c[0][2], c[0][3], c[0][1])):
        rate = max(by_rate, key=lambda r: statistics.median(result["chosen_by"] for result in by_rate[r]))
        reported = sorted(result["accuracy"] for result in by_rate[rate])
        found.append({"layer": layer, "width": width, "tokens": tokens, "pairs": pairs, "rate": rate,
                      "rates": len(by_rate), "median": statistics.median(reported),
                      "accuracies": reported})  # fmt: skip
    return found


def summarise(grid: Grid) -> None:
    from plot import draw  # here: it needs matplotlib, which a machine that only trains may not have

    for heads in sorted({result["heads"] for result in grid.results.values()}):
        cells = summary(list(grid.results.values()), heads)
        rows = [
            [f"T {c['tokens']}, n {c['pairs']}", str(c["width"]), LAYERS[c["layer"]].title, f"{c['median']:.4f}",
             " ".join(f"{a:.3f}" for a in c["accuracies"]), f"{c['rate']:g}", str(c["rates"])]
            for c in cells
        ]  # fmt: skip
        print(table(["size", "width", "layer", "median", "seeds", "rate", "of"], rows, left=3))
        path = grid.folder / f"grid-{heads}.png"
        write_atomically(path, lambda target, cells=cells, heads=heads: draw(cells, target, heads))
        write_atomically(path.with_suffix(".json"), lambda target, cells=cells: target.write_text(json.dumps(cells)))
        print(f"{path} has the figure for {heads} head{'s' if heads > 1 else ''}.")


def arguments() -> argparse.Namespace:
    parser = sweep_parser(__doc__)
    parser.add_argument("--cells", nargs="+", type=cell, default=[cell(text) for text in CELLS], metavar="TxN:W,W",
                        help=f"sizes and their widths ({' '.join(CELLS)})")  # fmt: skip
    parser.add_argument("--heads", nargs="+", type=int, default=[1], help="of a block (1)")
    parser.add_argument("--seeds", type=int, default=3, help="runs at every rate (3)")
    options = parser.parse_args()
    options.stop = None  # nothing ends early
    return options


def main() -> int:
    grid = Grid(arguments())
    most = len(list(grid.order()))
    status = 0 if grid.options.draw else train_all(grid, most)
    if grid.results and grid.options.draw:
        summarise(grid)
    return status


if __name__ == "__main__":
    sys.exit(main())
