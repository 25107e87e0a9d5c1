"""What each part of Gated KalmaNet is worth for recall: the paper's ablations on MQAR, one choice changed at a time.

Width 16 at (128, 32), where the layers part (README.md); everything else as grid.py has it: the same steps for all,
none ended early, seeds on the same sequences, and other sequences for the report. All variants with one seed come
first, so whatever is done when it is stopped is a whole comparison. Results go to --out/ablations.jsonl; call it again
to go on.

  ablations.py --minutes 60
  ablations.py --out experiments/mqar --draw      tables and figures of what is kept here
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grid import Grid, GridRun, cell, metrics
from run import ROOT, Worker, sweep_parser, train_all

from layers import Layer

sys.path.insert(0, str(ROOT / "experiments"))

from choices import CHANGED

HERE = Path(__file__).resolve().parent
CELL = "128x32:16"
RATES = (1e-2, 5e-3)  # the two best of GKA in grid.jsonl; the better one with all seeds before the other
FEWER = (5, 10, 15)  # solver steps with which GKA, trained with 30, is asked as well
BEFORE = 100  # steps that say how long a gradient usually is
USUAL = 0.9  # so many of them are no longer: a third has the hardest size, and easy ones that are learned next to none
SPIKES = (3, 10)  # times as long as that
POINTS = 100  # of a curve that is kept


def changed(name: str, title: str, **choices: object) -> Layer:
    return Layer(name, title, "GKA", {"gka_config": choices})


def half(width: int, heads: int) -> dict[str, object]:
    return {"sketch_dim": width // heads // 2}


# The paper's first, then what the released form adds; the more telling ones before the others.
VARIANTS = {
    layer.name: layer
    for layer in [
        Layer("gka", "GKA: a = 0.02, β², 30 iterations", "GKA"),
        *(changed(name, CHANGED[name].title, **CHANGED[name].choices)
          for name in ("no-decay", "no-alpha", "constant", "no-solve", "no-beta", "beta", "no-gate")),
        Layer("sketch-half", "solved in half the dimensions, learned", "GKA", {"gka_config": half}),
        *(changed(name, CHANGED[name].title, **CHANGED[name].choices)
          for name in ("a-0.01", "a-0.05", "a-0.1", "iterations-5", "iterations-10", "iterations-15")),
        changed("constant-0.02", "constant λ = 0.02", ridge_mode="constant", ridge_strength=0.02),
        changed("constant-exact", "constant λ = 0.02, solved exactly", ridge_mode="constant", ridge_strength=0.02,
                solver_type="exact"),
        changed("conjugate", "conjugate gradient", solver_type="conjugate_gradient"),
    ]
}  # fmt: skip


@dataclass(frozen=True)
class AblationRun(GridRun):
    def model(self, vocabulary: int) -> dict[str, object]:
        return VARIANTS[self.layer].model(self.width, vocabulary, self.heads)


class Ablations(Grid):
    KEPT = "ablations.jsonl"

    def order(self) -> Iterator[AblationRun]:
        options = self.options
        for tokens, pairs, widths in options.cells:
            for rate in options.rates:
                for seed in range(options.seeds):
                    for width in widths:
                        for layer in options.layers:
                            yield AblationRun(layer, width, tokens, pairs, rate, seed)

    def _further(self, worker: Worker, run: GridRun, training: dict, output: Path, finished: bool) -> dict:
        lines = metrics(output)
        further = {
            "finished": finished,
            "date": datetime.date.today().isoformat(),
            "gradient": lengths([line["gradient_norm"] for line in lines]),
            "learning": curve(lines),
        }
        if finished and run.layer == "gka":
            further["with_iterations"] = {
                str(count): self._ask(worker, with_iterations(training, count), output) for count in FEWER
            }
        return further


def with_iterations(training: dict, count: int) -> dict:
    return training | {"model": training["model"] | {"gka_config": {"num_iter": count}}}


def lengths(norms: list[float]) -> dict[str, object]:
    """The longest gradient (before it is clipped), and how many are far longer than those just before them."""
    usual = [sorted(norms[step - BEFORE : step])[round(USUAL * BEFORE)] for step in range(BEFORE, len(norms))]
    later = list(zip(norms[BEFORE:], usual, strict=True))
    return {
        "longest": round(max(norms), 4),
        "median": round(statistics.median(norms), 4),
        "furthest": round(max((norm / before for norm, before in later), default=0.0), 2),
        "spikes": {str(times): sum(norm > times * before for norm, before in later) for times in SPIKES},
    }


def curve(lines: list[dict]) -> list[list[float]]:
    """[step, mean loss, longest gradient] of neighbouring steps."""
    many = max(1, len(lines) // POINTS)
    groups = [lines[first : first + many] for first in range(0, len(lines), many)]
    return [
        [group[-1]["step"], round(statistics.fmean(line["loss"] for line in group), 4),
         round(max(line["gradient_norm"] for line in group), 4)]
        for group in groups
    ]  # fmt: skip


def as_it_is(results: dict[str, dict]) -> dict[str, dict]:
    """What the grid has of GKA at the same places and rates: the same runs, whose gradients were not kept."""
    wanted = {place(result) for result in results.values()}
    grid = map(json.loads, (HERE / Grid.KEPT).read_text().splitlines())
    return {run["name"]: run for run in grid if (run["layer"], run["heads"]) == ("gka", 1) and place(run) in wanted}


def place(run: dict) -> tuple:
    return run["width"], run["tokens"], run["pairs"], run["rate"], run["steps"]


def summarise(sweep: Ablations) -> None:
    from ablation_report import report  # here: it needs matplotlib, which a machine that only trains may not have

    report(list((as_it_is(sweep.results) | sweep.results).values()), VARIANTS, sweep.folder)


def arguments() -> argparse.Namespace:
    parser = sweep_parser(__doc__, VARIANTS, RATES)
    parser.add_argument("--cells", nargs="+", type=cell, default=[cell(CELL)], metavar="TxN:W,W",
                        help=f"sizes and their widths ({CELL})")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="runs at every rate (3)")
    options = parser.parse_args()
    options.stop = None  # nothing ends early
    return options


def main() -> int:
    sweep = Ablations(arguments())
    status = 0 if sweep.options.draw else train_all(sweep, len(list(sweep.order())))
    if sweep.results and sweep.options.draw:
        summarise(sweep)
    return status


if __name__ == "__main__":
    sys.exit(main())
