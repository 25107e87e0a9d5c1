"""Which mixer makes the better model for images? GKAVision (MambaVision with Gated KalmaNet) and its rivals.

  prepare   the images (experiments/data/images.py), unless they are there
  train     every mixer with every seed, all by the same recipe; one line of JSON each in --out/results.jsonl
  report    results.md and a figure for each size, from results.jsonl beside this file and in --out
  list      the runs that train would do, and how long each will take where that is known
  merge     results that came from other machines, into results.jsonl beside this file

Without a command: prepare, train and report. It can be stopped and started again: a run goes on from its last epoch.

  run.py --size small --jobs 2                                  Fashion-MNIST, on two cores
  run.py train --size cifar --device cuda --minutes 9           CIFAR-10, on a card
  run.py --size t --device cuda --data out/images/imagenet      the paper's size, on a set of your own
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from models import MIXERS, SIZES, config

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
sys.path.insert(0, str(ROOT / "experiments"))

from console import PROGRAM, read_lines, run_program, table, write_atomically, write_json  # noqa: E402
from trainings import Shared  # noqa: E402

Results = dict[str, dict]


@dataclass(frozen=True)
class Run:
    size: str
    mixer: str
    seed: int
    epochs: int
    data: str

    @property
    def name(self) -> str:
        """Says the images where they are not the size's own: on others it is another run."""
        other = "" if self.data == SIZES[self.size].data else f"-{self.data}"
        return f"{self.size}-{self.mixer}-e{self.epochs}-s{self.seed}{other}"


def plan(options: argparse.Namespace) -> Iterator[Run]:
    """A seed of all before the next, so that a part of it is a whole comparison."""
    epochs = options.epochs or SIZES[options.size].epochs
    for seed in options.seeds:
        for mixer in options.mixers:
            yield Run(options.size, mixer, seed, epochs, data_of(options).name)


def read_results(*paths: Path) -> Results:
    lines = [json.loads(line) for path in paths if path.exists() for line in read_lines(path)]
    return {line["name"]: line for line in lines}


def write_results(path: Path, results: Results) -> None:
    lines = "".join(json.dumps(results[name]) + "\n" for name in sorted(results))
    write_atomically(path, lambda target: target.write_text(lines))


def data_of(options: argparse.Namespace) -> Path:
    return options.data or ROOT / "out" / "images" / SIZES[options.size].data


# ---- Training


def recipe(run: Run) -> dict[str, object]:
    """What all mixers of a size have in common, as the options of `gka vision train`."""
    size = SIZES[run.size]
    return {"epochs": run.epochs, "batch": size.batch, "lr": size.rate, "weight-decay": size.weight_decay,
            "warmup": size.warmup, "augment": size.augment, "label-smoothing": size.label_smoothing}  # fmt: skip


def command(run: Run, options: argparse.Namespace, folder: Path) -> list[str]:
    """`gka vision train`, which goes on where a run of that folder was stopped."""
    if (folder / "latest").exists():
        return [PROGRAM, "vision", "train", "--out", str(folder), "--resume"]
    shutil.rmtree(folder, ignore_errors=True)  # one that was stopped before its first epoch
    file = folder.with_name(run.name + ".json")
    write_json(file, config(run.size, run.mixer, data_of(options)))
    train = json.loads((data_of(options) / "about.json").read_text())["parts"]["train"]["images"]
    every = -(-train // (SIZES[run.size].batch * SIZES[run.size].looks))
    settings = recipe(run) | {"data": data_of(options).resolve(), "seed": run.seed, "device": options.device}
    settings |= {"eval-every": every}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return [PROGRAM, "vision", "train", str(file), "--out", str(folder), *words]


def result_of(run: Run, options: argparse.Namespace, folder: Path) -> dict:
    lines = [json.loads(line) for line in read_lines(folder / "metrics.jsonl")]
    curve = [
        {"epoch": round(line["epoch"], 2), "accuracy": line["eval_accuracy"], "loss": round(line["eval_loss"], 5)}
        for line in lines
        if "eval_accuracy" in line
    ]
    about = json.loads((data_of(options) / "about.json").read_text())
    return {
        "name": run.name,
        "size": run.size,
        "mixer": run.mixer,
        "seed": run.seed,
        "data": run.data,
        "test_images": about["parts"]["test"]["images"],
        "parameters": parameters(folder / "latest" / "model.safetensors"),
        "recipe": recipe(run),
        "accuracy": curve[-1]["accuracy"],
        "loss": curve[-1]["loss"],
        "curve": curve,
        "seconds": round(lines[-1]["seconds"], 1),
        "device": options.device,
        "date": datetime.date.today().isoformat(),
    }


def parameters(path: Path) -> int:
    """Weights of a model, without the statistics of its batch norms."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = {name: about["shape"] for name, about in header.items() if name != "__metadata__"}
    return sum(math.prod(shape) for name, shape in shapes.items() if ".running_" not in f".{name}")


class Sweep(Shared):
    """Runs that are left, taken by --jobs threads, each with a process of its own."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.options, self.file = options, options.out / "results.jsonl"
        self.results = read_results(RESULTS, self.file) if not options.again else {}
        self.left = [run for run in plan(options) if run.name not in self.results]
        self.total, self.done, self.began = len(self.left), 0, time.monotonic()
        self.processes: set[subprocess.Popen] = set()
        self.failures: list[str] = []

    def _next(self) -> Run | None:
        return self.left.pop(0) if self.left else None

    def work(self) -> None:
        while run := self.take(self._next):
            try:
                self._train(run)
            except (OSError, ValueError, LookupError) as error:  # the others go on
                self._fail(run, str(error))
            with self.changed:
                self.busy.discard(run.name)
                self.changed.notify_all()

    def _train(self, run: Run) -> None:
        options, folder = self.options, self.options.out / "runs" / run.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // options.jobs)
        log = folder.with_name(run.name + ".log")
        with log.open("a") as said:
            process = subprocess.Popen(
                command(run, options, folder), stdout=said, stderr=said,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip
            with self.changed:
                self.processes.add(process)
                if self.stopping:
                    process.terminate()
            code = process.wait()
        with self.changed:
            self.processes.discard(process)
            if code == 0 and is_finished(folder, run):
                self._keep(result_of(run, options, folder))
            elif not self.stopping:
                self._fail(run, (log.read_text().strip().splitlines() or ["no message"])[-1])

    def _fail(self, run: Run, why: str) -> None:
        self.failures.append(run.name)
        print(f"vision: {run.name}: {why}", file=sys.stderr, flush=True)

    def _keep(self, result: dict) -> None:
        self.results[result["name"]] = result
        with self.file.open("a") as file:
            file.write(json.dumps(result) + "\n")
        self.done += 1
        said = f"{result['name']}: {result['accuracy']:.4f} after {result['seconds']:.0f} s"
        print(f"vision: {self.done} of {self.total}, {said}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Runs that are under way save what they have."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
            for process in self.processes:
                process.terminate()


def is_finished(folder: Path, run: Run) -> bool:
    lines = read_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    return bool(lines) and json.loads(lines[-1])["epoch"] >= run.epochs


def train(options: argparse.Namespace) -> int:
    if not (data_of(options) / "about.json").exists():
        print(f"vision: there are no images in {data_of(options)}; `run.py prepare` makes them", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(options)
    print(f"vision: {sweep.total} runs to do, {options.jobs} at a time", file=sys.stderr, flush=True)
    threads = [threading.Thread(target=sweep.work) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60 * options.minutes if options.minutes else None
    try:
        for thread in threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
            if thread.is_alive():
                sweep.stop()
    except KeyboardInterrupt:
        print("\nvision: saving what is under way", file=sys.stderr)
        sweep.stop()
    for thread in threads:
        thread.join()
    left = sweep.total - sweep.done - len(sweep.failures)
    if left:
        print(f"vision: {left} runs are left; the same command goes on", file=sys.stderr)
    return 1 if sweep.failures else 0


# ---- The other commands


def prepare(options: argparse.Namespace) -> int:
    name = SIZES[options.size].data
    if options.data or (data_of(options) / "about.json").exists():
        return 0
    program = ROOT / "experiments" / "data" / "images.py"
    if name == "imagenet":
        said = f"ImageNet is in no package; {program} --folder PICTURES makes a set of your own, and --data names it"
        print(f"vision: {said}", file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, program, name, "--out", data_of(options).parent]).returncode


def show_list(options: argparse.Namespace) -> int:
    known = read_results(RESULTS, options.out / "results.jsonl")
    rows = []
    for run in plan(options):
        alike = [r for r in known.values() if (r["size"], r["mixer"], r["data"]) == (run.size, run.mixer, run.data)
                 and r["device"] == options.device]  # fmt: skip
        epoch = min((r["seconds"] / r["recipe"]["epochs"] for r in alike), default=None)
        seconds = "not known" if epoch is None else f"{epoch * run.epochs:.0f} s"
        rows.append([run.name, MIXERS[run.mixer].title, "done" if run.name in known else seconds])
    print(table(["run", "mixer", "time"], rows, left=2))
    return 0


def merge(options: argparse.Namespace) -> int:
    write_results(RESULTS, read_results(RESULTS, *options.files))
    return 0


def report(options: argparse.Namespace) -> int:
    from report import write_report  # here: it draws, and a machine that only trains may have no matplotlib

    results = read_results(RESULTS, options.out / "results.jsonl")
    if not results:
        print("vision: there are no results yet", file=sys.stderr)
        return 1
    print(write_report(list(results.values()), HERE if options.here else options.out))
    return 0


STEPS = {"prepare": prepare, "train": train, "report": report, "list": show_list, "merge": merge}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", choices=list(STEPS), help="one of them (prepare, train and report)")
    parser.add_argument("files", nargs="*", type=Path, help="of merge")
    parser.add_argument(
        "--size", choices=list(SIZES), default="small", help="of the models, and with it the images (small)"
    )
    parser.add_argument("--mixers", nargs="+", choices=list(MIXERS), default=list(MIXERS), metavar="MIXER",
                        help=f"any of {', '.join(MIXERS)} (all)")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=0, help="of every run (the size's own)")
    parser.add_argument("--data", type=Path, help="a set that images.py made (out/images/…, by the size)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1); on the CPU they share its cores")
    parser.add_argument("--minutes", type=float, help="after so many, runs under way are saved and no other begins")
    parser.add_argument("--again", action="store_true", help="also what results.jsonl has already")
    parser.add_argument("--here", action="store_true", help="write the report beside this file, not into --out")
    parser.add_argument("--out", type=Path, default=Path("out/vision"))
    return parser.parse_args()


def main() -> int:
    options = arguments()
    for step in [options.step] if options.step else ["prepare", "train", "report"]:
        if code := STEPS[step](options):
            return code
    return 0


if __name__ == "__main__":
    run_program(main)
