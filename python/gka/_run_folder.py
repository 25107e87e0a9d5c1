"""The folder of a run as `gka train` has it (docs/training.md), for ``python -m gka.train``; only rank 0 writes here.

A checkpoint is written under a temporary name and renamed once all of it is on the disk: it is there whole or not at
all.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch

UNFINISHED = ".unfinished-"


def write_text(path: Path, text: str) -> None:
    """There whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_empty(made: list[Path]) -> None:
    """Removes the folders that a run had to make and that are empty in the end, the deepest first."""
    for folder in made:
        with contextlib.suppress(OSError):
            folder.rmdir()


def is_run(run: Path) -> bool:
    return (run / "train.json").exists()


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:09d}"


def unfinished_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(UNFINISHED + checkpoint.name)


def list_checkpoints(run: Path) -> list[Path]:
    """Oldest first."""
    found = [p for p in (run / "checkpoints").glob("step-*") if p.is_dir() and p.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def begin_checkpoint(checkpoint: Path) -> Path:
    """An empty folder to fill."""
    unfinished = unfinished_path(checkpoint)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def finish_checkpoint(checkpoint: Path) -> None:
    unfinished = unfinished_path(checkpoint)
    torch.ops.gka.write_checksums(os.fspath(unfinished))
    flush_folder(unfinished)
    unfinished.rename(checkpoint)
    flush_folder(checkpoint.parent)


def tidy_checkpoints(run: Path, keep: int) -> None:
    """The rest of a save, repeatable at any time: sets `latest`, and removes what is older than `keep` allows."""
    saved = list_checkpoints(run)
    if saved:
        beside = run / ".latest"
        beside.unlink(missing_ok=True)
        beside.symlink_to(saved[-1].relative_to(run), target_is_directory=True)
        beside.rename(run / "latest")
    for old in saved[:-keep]:
        old.rename(unfinished_path(old))  # half of it removed must not look like a checkpoint
    for left in (run / "checkpoints").glob(UNFINISHED + "*"):
        shutil.rmtree(left)


def read_metrics(run: Path) -> list[dict]:
    lines = []
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:  # a kill may leave half a line at the end
            continue
    return lines


def has_begun(run: Path) -> bool:
    return bool(list_checkpoints(run)) or bool(read_metrics(run))


def is_finished(run: Path) -> bool:
    """Of what is trained just now run.json says that it is running."""
    try:
        return json.loads((run / "run.json").read_text())["state"] == "finished"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_state(run: Path, state: str, steps: int, message: str = "") -> None:
    said = {"state": state, "steps": steps} | ({"message": message} if message else {})
    write_text(run / "run.json", json.dumps(said, indent=2) + "\n")


class Metrics:
    """metrics.jsonl and TensorBoard's events from a step on, with the lines before it."""

    def __init__(self, run: Path, last_step: int) -> None:
        self._file = torch.classes.gka.MetricsFile(os.fspath(run), last_step)

    def append(self, values: dict) -> None:
        self._file.append(json.dumps(values))

    def flush(self) -> None:
        self._file.flush()


class Progress:
    """One line that is rewritten on a terminal, a plain line now and then anywhere else."""

    def __init__(self, log_every: int) -> None:
        self._out, self._every, self._live, self._shown = sys.stderr, log_every, False, 0.0
        self._terminal = self._out.isatty()

    def say(self, text: str) -> None:
        self._out.write(("\r\x1b[K" if self._live else "") + text + "\n")
        self._out.flush()
        self._live = False

    def step(self, report: dict) -> None:
        text = torch.ops.gka.describe_step(json.dumps(report))
        last = report["step"] == report["steps"]
        if "eval_loss" in report or (last and not self._terminal):
            return self.say(text)
        if not self._terminal:
            return self.say(text) if report["step"] % self._every == 0 else None
        if time.monotonic() - self._shown < 0.1 and not last:
            return None
        self._shown = time.monotonic()
        self._out.write("\r\x1b[K" + text[: shutil.get_terminal_size((120, 24)).columns - 1])
        self._out.flush()
        self._live = True
        return None

    def close(self) -> None:
        if self._live:
            self._out.write("\n")
