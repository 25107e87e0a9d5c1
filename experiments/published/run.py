"""How near `gka eval` comes to published numbers of a real model: SmolLM2-135M-Instruct, quantised to 4 bits.

Each task's items are asked in an order that is drawn once, a piece of every task in turn, so whatever is done when it
is stopped is a fair sample of each task. Pieces are kept in --out/pieces.jsonl; the same command goes on behind them.

  run.py --minutes 35       asks; then prints the table of docs/evaluation.md
  run.py --draw             the table of what is there

scripts/smollm2.sh fetches the model, experiments/data/run.py --sources --no-enwik8 the tasks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import PROGRAM, read_lines, run_program  # noqa: E402

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Asked:
    """A task, the metric that is published, what it is there (None: nobody published it), and items of a piece."""

    title: str
    metric: str
    published: float | None
    piece: int


TASKS = {
    "piqa": Asked("PIQA", "acc_norm", 0.6692, 200),
    "arc_easy": Asked("ARC easy", "acc", 0.5412, 90),
    "arc_challenge": Asked("ARC challenge", "acc_norm", 0.2773, 70),
    "hellaswag": Asked("HellaSwag", "acc_norm", 0.4299, 35),
    "lambada": Asked("LAMBADA", "acc", None, 70),
}


def read_items(file: Path) -> tuple[str, list[str]]:
    """The line about the task, and its items in an order drawn once: neighbours in a file may be of one kind."""
    about, *items = read_lines(file)
    random.Random(0).shuffle(items)
    return about, items


def read_pieces(file: Path) -> list[dict]:
    return list(map(json.loads, read_lines(file))) if file.exists() else []


def pieces(options: argparse.Namespace, done: list[dict]) -> Iterator[tuple[str, int, str, list[str]]]:
    """What is left, a piece of every task in turn: (task, its first item, the line about it, items)."""
    files = {name: read_items(Path(options.data) / "tasks" / f"{name}.jsonl") for name in options.tasks}
    there = {(piece["task"], piece["first"]) for piece in done}
    turn = 0
    while any(turn * TASKS[name].piece < len(items) for name, (_, items) in files.items()):
        for name, (about, items) in files.items():
            first = turn * TASKS[name].piece
            part = items[first : first + TASKS[name].piece]
            if part and (name, first) not in there:
                yield name, first, about, part
        turn += 1


def ask(options: argparse.Namespace, name: str, about: str, items: list[str]) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        task, samples = Path(folder) / f"{name}.jsonl", Path(folder) / "samples.jsonl"
        task.write_text(about + "".join(items))
        command = [PROGRAM, "eval", options.model, "--tasks", str(task), "--samples", str(samples)]
        command += ["--device", options.device] + (["--weights", options.weights] if options.weights else [])
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"published: gka eval: {done.stderr.strip()[-300:]}")
        return list(map(json.loads, read_lines(samples)))


def right(sample: dict, metric: str) -> bool:
    return sample["greedy"] if "greedy" in sample else sample[metric]


def run(options: argparse.Namespace) -> None:
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "pieces.jsonl"
    ends = time.monotonic() + 60 * options.minutes
    for name, first, about, items in pieces(options, read_pieces(file)):
        if time.monotonic() > ends:
            return
        samples = ask(options, name, about, items)
        piece = {
            "task": name,
            "first": first,
            "right": [int(right(sample, TASKS[name].metric)) for sample in samples],
            "date": datetime.date.today().isoformat(),
            "weights": options.weights or "float32",
        }
        with file.open("a") as pieces_file:
            pieces_file.write(json.dumps(piece) + "\n")
        print(f"{name}: {first + len(items)} items", file=sys.stderr, flush=True)


def summary(done: list[dict], data: Path) -> dict[str, dict]:
    found = {}
    for name, asked in TASKS.items():
        parts = [piece for piece in done if piece["task"] == name]
        answers = [answer for piece in parts for answer in piece["right"]]
        if not answers:
            continue
        value = sum(answers) / len(answers)
        found[name] = {
            "metric": asked.metric,
            "items": len(answers),
            "of": len(read_lines(data / "tasks" / f"{name}.jsonl")) - 1,
            "value": value,
            "stderr": math.sqrt(value * (1 - value) / (len(answers) - 1)),
            "published": asked.published,
            "weights": sorted({piece["weights"] for piece in parts}),
            "date": max(piece["date"] for piece in parts),
        }
    return found


def unasked(one: dict) -> str:
    """What is published is of the very same items, all of them: only those not asked yet leave a doubt."""
    left = 1 - one["items"] / one["of"]
    return f" ± {one['stderr'] * math.sqrt(left):.3f}" if left else ""


def markdown(found: dict[str, dict]) -> str:
    lines = ["| | items | here | published | apart, ± for items not asked |", "|---|---:|---:|---:|---:|"]
    for name, one in found.items():
        here = f"{one['value']:.3f} ± {one['stderr']:.3f}"
        theirs, apart = "", ""
        if one["published"]:
            theirs, apart = f"{one['published']:.3f}", f"{one['value'] - one['published']:+.3f}{unasked(one)}"
        items = f"{one['items']:,} of {one['of']:,}" if one["items"] < one["of"] else f"all {one['items']:,}"
        lines.append(f"| {TASKS[name].title}, {one['metric']} | {items} | {here} | {theirs} | {apart} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="build/smollm2")
    parser.add_argument("--data", default="out/data", help="where experiments/data put its tasks")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument("--weights", help="as gka eval has it (as stored)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no piece after so many")
    parser.add_argument("--out", default=str(HERE), help="where pieces.jsonl is (here)")
    parser.add_argument("--draw", action="store_true", help="ask nothing")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if not options.draw:
        run(options)
    found = summary(read_pieces(Path(options.out) / "pieces.jsonl"), Path(options.data))
    print(markdown(found))
    return 0


if __name__ == "__main__":
    run_program(main)
