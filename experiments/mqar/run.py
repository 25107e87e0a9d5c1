"""Multi-query associative recall: how wide must a model be to hold n key-value pairs?

Trains two-layer models on MQAR (a mixture of sizes up to the tested one, random filler) for every layer, width and
size: first once per learning rate, then at the best of them with further seeds. Every run is a `gka train` of its own;
as many run at once as --jobs says. What is finished is kept in --out/results.jsonl, so the sweep can be stopped and
started again at any time.

  accuracy   the share of sequences' answers that are right, on sequences never trained on, at the tested size
  figure     accuracy against width, a panel per (T, n), a line per layer, a band from the worst to the best seed
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from plot import draw

from layers import LAYERS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import Progress, table, write_atomically  # noqa: E402

PROGRAM = os.environ.get("GKA_PROGRAM") or str(Path(sys.executable).parent / "gka")
RATES = (1e-4, 4.6e-4, 2.2e-3, 1e-2)  # four logarithmic steps


@dataclass(frozen=True)
class Run:
    layer: str
    width: int
    tokens: int  # T, the tested length
    pairs: int  # n
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.layer}-w{self.width}-t{self.tokens}-n{self.pairs}-lr{self.rate:g}-s{self.seed}"

    @property
    def cell(self) -> tuple[str, int, int, int]:
        return (self.layer, self.width, self.tokens, self.pairs)


def mixture(tokens: int, pairs: int) -> list[dict[str, object]]:
    """Smaller sizes first in number, the tested one most often: alone it leaves every layer but attention at chance."""
    sizes = []
    t, n = 32, 2
    while t < tokens or n < pairs:
        sizes.append({"tokens": max(t, 4 * n), "pairs": n, "weight": 1})
        t, n = min(2 * t, tokens), min(2 * n, pairs)
    return [*sizes, {"tokens": tokens, "pairs": pairs, "weight": 2}]


def settings(run: Run, options: argparse.Namespace, output: Path) -> dict[str, object]:
    task = {"kind": "task", "task": "mqar", "vocab_size": options.vocabulary, "filler": "random"}
    steps = max(1, round(options.tokens / options.batch_tokens))
    return {
        "model": LAYERS[run.layer].model(run.width, options.vocabulary),
        "data": {**task, "seed": run.seed, "sizes": mixture(run.tokens, run.pairs)},
        "eval_data": {**task, "seed": 1_000_003, "sizes": [{"tokens": run.tokens, "pairs": run.pairs}]},
        "length": run.tokens,
        "batch_tokens": options.batch_tokens,
        "steps": steps,
        "learning_rate": run.rate,
        "final_learning_rate": 0.1,
        "warmup": 0.1,
        "weight_decay": 0.1,
        "seed": run.seed,
        "device": options.device,
        "dtype": "float32" if options.float32 else "auto",
        "eval_every": max(1, steps // 20),
        "eval_batches": options.eval_batches,
        "checkpoint_every": 0,
        "stop_accuracy": options.stop,
        "output": str(output),
    }


class Sweep:
    """The runs that are done, and the processes that are not."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.folder = Path(options.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / "results.jsonl"
        self.lock = threading.Lock()
        self.processes: set[subprocess.Popen] = set()
        self.stopping = False
        self.results: dict[str, dict] = {}
        if self.file.exists():
            for line in self.file.read_text().splitlines():
                result = json.loads(line)
                self.results[result["name"]] = result

    def run(self, run: Run) -> dict:
        if run.name in self.results:
            return self.results[run.name]
        output = self.folder / "runs" / run.name
        shutil.rmtree(output, ignore_errors=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        file = output.parent / f"{run.name}.json"  # the name has dots: no with_suffix
        file.write_text(json.dumps(settings(run, self.options, output), indent=1))
        began = time.monotonic()
        process = self._start([PROGRAM, "train", str(file)])
        _, said = process.communicate()
        with self.lock:
            self.processes.discard(process)
        if self.stopping:
            raise KeyboardInterrupt
        if process.returncode != 0:
            raise RuntimeError(f"{run.name}: {said.strip().splitlines()[-1] if said.strip() else 'gka train failed'}")
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        accuracies = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
        result = {
            "name": run.name,
            **asdict(run),
            "accuracy": max(accuracies),
            "last_accuracy": accuracies[-1],
            "train_tokens": lines[-1]["tokens"],
            "seconds": round(time.monotonic() - began, 1),
        }
        self._keep(result)
        shutil.rmtree(output)
        file.unlink()
        return result

    def _start(self, command: list[str]) -> subprocess.Popen:
        with self.lock:
            if self.stopping:
                raise KeyboardInterrupt
            threads = max(1, (os.cpu_count() or 1) // self.options.jobs)
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
            )
            self.processes.add(process)
            return process

    def _keep(self, result: dict) -> None:
        with self.lock:
            self.results[result["name"]] = result
            with self.file.open("a") as file:
                file.write(json.dumps(result) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def stop(self) -> None:
        with self.lock:
            self.stopping = True
            for process in self.processes:
                process.send_signal(signal.SIGTERM)


def best_rate(results: list[dict]) -> float:
    """The highest accuracy; among equals the one that needed the fewest tokens."""
    return max(results, key=lambda r: (r["accuracy"], -r["train_tokens"]))["rate"]


def in_parallel(sweep: Sweep, runs: list[Run], title: str) -> None:
    left = [run for run in runs if run.name not in sweep.results]
    if not left:
        return
    with Progress(len(left), title) as progress, ThreadPoolExecutor(sweep.options.jobs) as pool:
        waiting = {pool.submit(sweep.run, run): run for run in left}
        try:
            for done in as_completed(waiting):
                result = done.result()
                progress.step(f"{result['name']}: {result['accuracy']:.3f}")
        except BaseException:
            sweep.stop()
            pool.shutdown(cancel_futures=True)
            raise


def summarise(results: list[dict], out: Path) -> None:
    """Every cell's best rate and its seeds, to summary.json, a table and the figure."""
    cells: dict[tuple, list[dict]] = {}
    for result in results:
        cells.setdefault((result["layer"], result["width"], result["tokens"], result["pairs"]), []).append(result)
    summary = []
    for (layer, width, tokens, pairs), runs in sorted(cells.items(), key=lambda c: (c[0][2], c[0][3], c[0][1])):
        rate = best_rate([r for r in runs if r["seed"] == 0] or runs)
        at_best = sorted(r["accuracy"] for r in runs if r["rate"] == rate)
        summary.append(
            {
                "layer": layer,
                "width": width,
                "tokens": tokens,
                "pairs": pairs,
                "rate": rate,
                "seeds": len(at_best),
                "mean": sum(at_best) / len(at_best),
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
    write_atomically(out / "mqar.png", lambda path: draw(summary, path))
    print(f"{out / 'mqar.png'} has the figure, {out / 'summary.json'} its data.")


def size(text: str) -> tuple[int, int]:
    try:
        tokens, pairs = (int(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; it takes T x n, such as 128x32") from None
    if 4 * pairs > tokens:
        raise argparse.ArgumentTypeError(f"{pairs} pairs need {4 * pairs} tokens, and '{text}' has {tokens}")
    return tokens, pairs


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=list(LAYERS),
        default=list(LAYERS),
        metavar="LAYER",
        help=f"any of {', '.join(LAYERS)}",
    )
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=size,
        default=[(128, 32), (256, 64)],
        metavar="TxN",
        help="tested sizes (128x32 256x64)",
    )
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=3, help="runs at the best rate, the first included (3)")
    parser.add_argument("--tokens", type=float, default=100e6, help="training tokens a run, at most (1e8)")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--stop", type=float, default=0.99, help="a run ends at this accuracy (0.99)")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--float32", action="store_true", help="no bfloat16 on the GPU")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1)")
    parser.add_argument("--out", default="out/mqar")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="start no run after so long; call again to go on"
    )
    parser.add_argument("--draw", action="store_true", help="train nothing: summarise and draw what is there")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    sweep = Sweep(options)
    if options.limit:
        timer = threading.Timer(options.limit, sweep.stop)
        timer.daemon = True
        timer.start()
    cells = [(layer, width, *size) for size in options.sizes for width in options.widths for layer in options.layers]
    status = 0
    try:
        if not options.draw:
            in_parallel(sweep, [Run(*cell, rate, 0) for cell in cells for rate in options.rates], "Learning rates")
            chosen = {
                cell: best_rate([sweep.results[Run(*cell, rate, 0).name] for rate in options.rates]) for cell in cells
            }
            in_parallel(
                sweep, [Run(*cell, chosen[cell], seed) for cell in cells for seed in range(1, options.seeds)], "Seeds"
            )
    except KeyboardInterrupt:
        print("Stopped. The same command goes on where this one ended.", file=sys.stderr)
        status = 130
    except RuntimeError as error:
        print(f"mqar: {error}", file=sys.stderr)
        status = 1
    if sweep.results:
        summarise(list(sweep.results.values()), sweep.folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
