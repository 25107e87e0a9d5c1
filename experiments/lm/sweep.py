"""Trains and measures runs of a plan, one after the other or a few side by side, within a budget of seconds.

A machine with a card is lent for minutes and keeps nothing: a run is trained and measured on it, and what comes back is
a line of JSON. So a run is begun only if it is expected to end within the budget, by the tokens a second of runs like
it; where that was wrong, it is stopped at the end of the budget with a checkpoint, and the next call with the same
--out goes on with it, if the machine still is the same. If not, that run is lost, and begins anew.

Small models leave a card idle: `jobs` processes take a run each. How fast one of them is says nothing of its layer, so
a result says how many there were, and a speed is that of as many.

A run that fails, or whose measurement does, is said and left out: the minutes belong to the others.
"""

from __future__ import annotations

import array
import concurrent.futures
import contextlib
import datetime
import json
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import PROGRAM, table  # noqa: E402
from trainings import Shared, outcome_of  # noqa: E402

POINTS = 100  # of a curve that is kept
START = 4.0  # seconds to begin and to end a run
MARGIN = 1.1  # on what a run is expected to take
GAIN = 1.4  # tokens a second of all runs that share a card to those of one alone, where it has not been measured


@dataclass(frozen=True)
class Run:
    """A training file without device and output, what to call it, and how fast it may be where nothing is measured."""

    name: str
    tags: dict[str, object]  # of the result: layer, size, rate, …
    settings: dict[str, object]
    alike: str  # runs that are as fast as this one
    speed: float  # tokens a second on the card, where no run like it has been measured
    measured: bool = False  # whether its weights are measured when it has ended
    start_from: str = ""  # the run whose weights it begins with; on the same machine
    shifts: dict[str, float] = field(default_factory=dict)  # what is added to first weights whose names end so
    scales: dict[str, float] = field(default_factory=dict)  # what they are multiplied by

    @property
    def tokens(self) -> int:
        settings = self.settings
        return settings["tokens"] if "tokens" in settings else settings["steps"] * settings["batch_tokens"]


Results = dict[str, dict]
Plan = Callable[[Results], Iterable[Run]]


def read_results(*files: Path) -> Results:
    """By name; of two with one name the later."""
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return {result["name"]: result for result in map(json.loads, lines)}


def write_results(file: Path, results: Results) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(result) + "\n" for result in results.values()))


def device_name(device: str) -> str:
    if device == "cpu":
        return "cpu"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, IndexError):
        return device


# ---- What a run is expected to take


def measured_speed(results: Results, run: Run, device: str, jobs: int = 1) -> float | None:
    """With as many side by side."""
    alike = [r for r in results.values() if (r["alike"], r["device"], r.get("jobs", 1)) == (run.alike, device, jobs)]
    return statistics.median(r["tokens_per_second"] for r in alike) if alike else None


def speed_of(results: Results, run: Run, device: str, jobs: int = 1) -> float:
    alone = measured_speed(results, run, device) or run.speed
    return measured_speed(results, run, device, jobs) or (alone if jobs == 1 else alone * GAIN / jobs)


def expected(results: Results, run: Run, device: str, evaluation: float, jobs: int = 1) -> float:
    """Seconds of a run, its evaluation included."""
    known = [r["evaluation_seconds"] for r in results.values() if r.get("evaluation_seconds") and r["device"] == device]
    measuring = (statistics.median(known) if known else evaluation) if run.measured else 0
    return MARGIN * run.tokens / speed_of(results, run, device, jobs) + START + measuring


def show_plan(runs: Iterable[Run], results: Results, device: str, evaluation: float, jobs: int = 1) -> None:
    rows, total = [], 0.0
    for run in runs:
        done = run.name in results
        seconds = expected(results, run, device, evaluation, jobs)
        total += 0 if done else seconds / jobs
        known = measured_speed(results, run, device, jobs) is not None
        rate = f"{speed_of(results, run, device, jobs) / 1e3:,.0f}k" + ("" if known else "?")
        rows.append([run.name, f"{run.tokens / 1e6:.1f}M", rate, "done" if done else f"{seconds:.0f}"])
    print(table(["run", "tokens", "tokens/s", "seconds"], rows))
    print(f"{total:.0f} s for what is not done. A ? is a guess: no run like it has been measured on {device}.")


# ---- Training


class Trainer:
    """A process that trains one file after the other, so that starting torch and the card is paid once."""

    def __init__(self, log: Path):
        self.log = log
        self.process: subprocess.Popen | None = None
        self.stopping = False

    def _start(self, option: str) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "train", "-", option],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        if self.stopping:
            self.stop()

    def train(self, file: Path, folder: Path) -> str:
        """finished, stopped or diverged."""
        if (folder / "latest").exists():
            self.end()
            self._start("--resume")
            outcome = self._ask(folder)
            self.end()
            return outcome
        if self.process is None or self.process.poll() is not None:
            self._start("--no-verify")
        return self._ask(file)

    def _ask(self, file: Path) -> str:
        with contextlib.suppress(BrokenPipeError):  # it has just been stopped
            print(file, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().strip()
        if outcome := outcome_of(answer):
            return outcome
        if self.stopping:
            return "stopped"
        if not answer and self.process:
            self.process.wait()  # so that the next run gets a new one
        raise SystemExit(f"sweep: {answer or 'gka train ended'} ({file.name}; {self.log} has more)")

    def stop(self) -> None:
        self.stopping = True
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait()


def parameters_of(folder: Path) -> int:
    """Without the embedding, from the checkpoint's own list of tensors."""
    with (folder / "latest" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__" and "embed_tokens" not in name and "lm_head" not in name:
            count = 1
            for side in tensor["shape"]:
                count *= side
            total += count
    return total


def curve_of(lines: list[dict]) -> list[list[float]]:
    """[step, loss, length of the gradient]: means of neighbouring steps, the largest gradient of them."""
    width = max(1, -(-len(lines) // POINTS))
    curve = []
    for i in range(0, len(lines), width):
        piece = lines[i : i + width]
        loss = statistics.fmean(line["loss"] for line in piece)
        curve.append([piece[-1]["step"], round(loss, 4), round(max(line["gradient_norm"] for line in piece), 4)])
    return curve


def change_weights(file: Path, shifts: dict[str, float], scales: dict[str, float]) -> None:
    """Multiplies and adds to all numbers of the float32 tensors whose names end so, where they lie in the file."""
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    for ending in shifts | scales:
        scale, shift = scales.get(ending, 1.0), shifts.get(ending, 0.0)
        found = [tensor for name, tensor in header.items() if name.endswith(ending)]
        if not found:
            raise SystemExit(f"sweep: {file} has no weights whose name ends with {ending}")
        for tensor in found:
            first, end = (start + place for place in tensor["data_offsets"])
            numbers = array.array("f", raw[first:end])
            raw[first:end] = array.array("f", [scale * number + shift for number in numbers]).tobytes()
    file.write_bytes(raw)


@dataclass
class Sweep(Shared):
    """`measure` gets a run and its folder and returns what is to be kept."""

    plan: Plan
    measure: Callable[[Run, Path], dict]
    folder: Path
    results: Results
    device: str
    budget: float
    evaluation: float  # seconds of a measurement, where none is known
    keep_weights: bool = False
    jobs: int = 1  # trainings side by side
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        super().__init__()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / "results.jsonl"
        self.name = device_name(self.device)
        self.trainers = [Trainer(self.folder / "train.log") for _ in range(self.jobs)]
        self.trained: set[str] = set()  # to their end, in this process
        self.failed: dict[str, str] = {}  # and why

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.began)

    def _folder(self, run: Run) -> Path:
        return self.folder / "runs" / run.name

    def _weights(self, name: str) -> bool:
        """Whether a run's last weights are on this machine."""
        ended = name in self.results or name in self.trained
        return ended and (self.folder / "runs" / name / "latest").exists()

    def run(self) -> int:
        """The number of runs done."""
        before = len(self.results)
        evaluation = min(self.evaluation, self.budget / 2)
        alarm = threading.Timer(max(0.0, self.budget - evaluation), self.stop)
        alarm.daemon = True
        alarm.start()
        with (
            concurrent.futures.ThreadPoolExecutor(self.jobs) as measuring,  # beside the next trainings
            concurrent.futures.ThreadPoolExecutor(self.jobs) as training,
        ):
            workers = [training.submit(self._work, trainer, measuring) for trainer in self.trainers]
            try:
                measured = [one for worker in workers for one in worker.result()]
            finally:
                alarm.cancel()
                self.stop()
            for one in measured:
                one.result()
        return len(self.results) - before

    def stop(self) -> None:
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        for trainer in self.trainers:
            trainer.stop()

    def _work(
        self, trainer: Trainer, measuring: concurrent.futures.ThreadPoolExecutor
    ) -> list[concurrent.futures.Future]:
        """Trains what is next until nothing is; the measurements that it has begun."""
        begun = []
        try:
            while run := self.take(self._next):
                try:
                    result = self._train(trainer, run)
                except SystemExit as error:
                    self._give_up(run, error)
                    continue
                if result:
                    begun.append(measuring.submit(self._finish, run, result))
            trainer.end()
        except BaseException:
            self.stop()
            raise
        return begun

    def _next(self) -> Run | None:
        """The first of the plan that fits; one that is half done before all others."""
        known = self.results.keys() | self.busy | self.failed.keys()
        open_ones = [run for run in self.plan(self.results) if run.name not in known]
        open_ones = [run for run in open_ones if not run.start_from or self._weights(run.start_from)]
        open_ones.sort(key=lambda run: not (self._folder(run) / "latest").exists())
        for run in open_ones:
            if expected(self.results, run, self.name, self.evaluation, self.jobs) <= self.left():
                return run
        return None

    def _train(self, trainer: Trainer, run: Run) -> dict | None:
        folder = self._folder(run)
        if not (folder / "latest").exists():
            shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.parent / f"{run.name}.json"
        settings = {**run.settings, "device": self.device, "output": str(folder.resolve())}
        if run.start_from:
            settings["from"] = str((self.folder / "runs" / run.start_from).resolve())
        elif (run.shifts or run.scales) and not (folder / "latest").exists():
            settings["from"] = str(self._changed(trainer, run, settings))
        file.write_text(json.dumps(settings, indent=1))
        began = time.monotonic()
        outcome = trainer.train(file, folder)
        if outcome == "stopped":
            print(f"{run.name}: stopped at the end of the budget", file=sys.stderr)
            return None
        with self.changed:
            self.trained.add(run.name)
            self.changed.notify_all()
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        speeds = [line["tokens_per_second"] for line in lines[len(lines) // 4 :]] or [0.0]
        held = [line["eval_loss"] for line in lines if "eval_loss" in line]
        return {
            "name": run.name,
            **run.tags,
            "alike": run.alike,
            "tokens": lines[-1]["tokens"],
            "valid_loss": None if outcome == "diverged" else held[-1],
            "curve": curve_of(lines),
            "tokens_per_second": round(statistics.median(speeds)),
            "memory_bytes": max(line["memory_bytes"] for line in lines),
            "seconds": round(time.monotonic() - began, 1),
            "parameters": parameters_of(folder) if outcome == "finished" else None,
            "device": self.name,
            "jobs": self.jobs,
            "date": datetime.date.today().isoformat(),
        }

    def _changed(self, trainer: Trainer, run: Run, settings: dict[str, object]) -> Path:
        """A model of the weights the run would begin with, changed: a step that learns nothing leaves them as drawn."""
        model = self._folder(run).with_name(f"{run.name}-first")
        drawn = model.with_name(f"{run.name}-drawn")
        for folder in (model, drawn):
            shutil.rmtree(folder, ignore_errors=True)
        file = drawn.with_name(f"{drawn.name}.json")
        one = {"steps": 1, "learning_rate": 0, "eval_every": 0, "output": str(drawn.resolve())}
        file.write_text(json.dumps(settings | one))
        if trainer.train(file, drawn) == "finished":
            model.mkdir()
            for name in ("config.json", "model.safetensors"):
                shutil.copyfile(drawn / "latest" / name, model / name)
            change_weights(model / "model.safetensors", run.shifts, run.scales)
        return model.resolve()

    def _give_up(self, run: Run, error: BaseException) -> None:
        with self.changed:
            self.failed[run.name] = str(error)
            self.busy.discard(run.name)
            self.changed.notify_all()
        print(f"{run.name}: left out: {error}", file=sys.stderr, flush=True)

    def _finish(self, run: Run, result: dict) -> None:
        folder = self._folder(run)
        try:
            if run.measured and result["valid_loss"] is not None:
                began = time.monotonic()
                result["measures"] = self.measure(run, folder)
                result["evaluation_seconds"] = round(time.monotonic() - began, 1)
        except (Exception, SystemExit) as error:  # its weights stay: the same command measures them again
            return self._give_up(run, error)
        with self.changed:
            self.results[run.name] = result
            self.busy.discard(run.name)
            with self.file.open("a") as file:
                file.write(json.dumps(result) + "\n")
            self.changed.notify_all()
        if not self.keep_weights:
            shutil.rmtree(folder, ignore_errors=True)
        loss = "diverged" if result["valid_loss"] is None else f"{result['valid_loss']:.4f}"
        print(f"{run.name}: {loss}, {result['tokens_per_second']:,} tokens/s, {result['seconds']:.0f} s, "
              f"{self.left():.0f} s left", file=sys.stderr, flush=True)  # fmt: skip
