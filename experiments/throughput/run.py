"""Training throughput of large models: the paper's table of 8B and 14B at 16K, 32K and 64K tokens, on one card.

  list       what is missing of the parts, and how long each will take
  measure    --part layer: one layer of each kind against the length
             --part fla --fla FOLDER: the layers of flash-linear-attention in the same way
             --part 2.8b: the whole model, activations checkpointed
             --part 8b, --part 14b: the first 4 and the first 8 blocks, embedding and head as they are
             writes a line of JSON into --out/results.jsonl for every row, as soon as it is measured; the same command
             later measures what is missing
  merge      results that came back from other machines, into results.jsonl beside this file
  report     results.md, from results.jsonl

A whole 8B model with its optimiser (16 bytes a parameter) does not fit one card. A step's time is a part that does not
depend on the number of blocks (embedding, head, loss) and a part that every block adds: from 4 and 8 blocks both
follow, and with them the time of all blocks. That is a slope, not a measurement of the whole, and is called so. It
leaves out what several cards cost one another, which the paper's numbers, per card of many, have in them.

Where attention was measured with 4 blocks alone, its time follows from GKA's slope: all but the mixers is the same in
both models, so what 36 blocks differ by is nine times what 4 differ by. That is inferred, and is called so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT / "experiments" / "lm")]

from console import PROGRAM, run_program, table, write_atomically  # noqa: E402
from sweep import device_name  # noqa: E402

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
FEW, MORE = 4, 8  # blocks that are measured
BLOCKS = {"8b": 36, "14b": 40, "tiny": 12}  # of the whole model; tiny: to try the command on a CPU
WHOLE = {"2.8b": 32}
MODELS = ("gka", "attention")
TOKENS = {"gka": "GKA", "attention": "*"}
LENGTHS = (16384, 32768, 65536)
LAYER_LENGTHS = tuple(2**n for n in range(10, 17))
FLA_LAYERS = ("DN", "GDN", "KDA", "GLA", "M2")
PARTS = ("layer", "fla", *WHOLE, *BLOCKS)
PAPER = {  # tokens a second and card, of which there were many: length to (GKA, attention)
    "8b": {16384: (6898.53, 6096.37), 32768: (6808.94, 4766.25), 65536: (6721.64, 3382.50)},
    "14b": {16384: (3318.28, 2833.99), 32768: (3256.45, 2221.56), 65536: (3256.45, 1485.24)},
}

# What a step of 65,536 tokens takes on an H200, in seconds: without a block, and what each adds; for attention at no
# length, and what 64K tokens add to that. 8B as measured; the others in proportion to its parameters and heads.
STEP = {
    "8b": {"fixed": 0.41, "gka": 0.221, "attention": 0.168, "attends": 0.282},
    "14b": {"fixed": 0.52, "gka": 0.376, "attention": 0.287, "attends": 0.353},
    "2.8b": {"fixed": 0.05, "gka": 0.088, "attention": 0.072, "attends": 0.176},
}
START = 12.0  # seconds until a model's first step
WARMING = 2  # steps that do not count beside those that do: one at first, one in a turn
OTHER = {"layer": 40.0, "fla": 35.0}  # seconds of programs that measure layers: all of ours, one of the others'


# ---- Results


def key_of(row: dict) -> tuple:
    """What a row is of; kernels on trial are GKA's own."""
    trial = row.get("trial", "") if row.get("model") == "gka" else ""
    return (row["part"], row.get("config") or row["name"], row["length"], row.get("batch_tokens"), trial)


def read_rows(*files: Path) -> list[dict]:
    """Of two of the same the later."""
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return list({key_of(row): row for row in map(json.loads, lines)}.values())


def write_rows(file: Path, rows: list[dict]) -> None:
    write_atomically(file, lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in rows)))


def of_part(rows: list[dict], part: str) -> dict:
    """A part's rows, with what the last of them was measured with; rows of another number of tokens are left out."""
    found = [row for row in rows if row["part"] == part]
    if not found:
        return {"rows": []}
    newest: dict[tuple, dict] = {}
    for row in found:
        if row.get("batch_tokens") == found[-1].get("batch_tokens"):
            newest[row.get("config") or row["name"], row["length"]] = row
    return found[-1] | {"rows": list(newest.values())}


# ---- What is measured


@dataclass(frozen=True)
class Work:
    """One program: a model or layers at some lengths."""

    part: str
    name: str
    model: str = ""
    blocks: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def tags(self) -> dict[str, object]:
        return {"part": self.part} | ({"model": self.model, "blocks": self.blocks} if self.model else {})


def step_seconds(work: Work, length: int, batch_tokens: int) -> float:
    guess = STEP.get(work.part, STEP["2.8b"])
    block = guess[work.model] + (guess["attends"] * length / 65536 if work.model == "attention" else 0)
    return (guess["fixed"] + work.blocks * block) * batch_tokens / 65536


def expected(work: Work, options: argparse.Namespace) -> float:
    if not work.model:
        return OTHER[work.part]
    tokens = batch_tokens_of(options)
    steps = options.steps + WARMING
    return START + sum(steps * step_seconds(work, length, tokens) for length in work.lengths)


def batch_tokens_of(options: argparse.Namespace) -> int:
    return options.batch_tokens or max(options.lengths)


def plan(options: argparse.Namespace) -> Iterator[Work]:
    for part in options.part:
        if part == "layer":
            yield Work(part, part, lengths=LAYER_LENGTHS)
        if part == "fla":
            yield from (Work(part, f"FLA {token}", lengths=LAYER_LENGTHS) for token in FLA_LAYERS)
        if part in OTHER:
            continue
        for blocks in [WHOLE[part]] if part in WHOLE else (FEW, MORE):
            for model in options.models:
                folder = part if part in WHOLE else f"{part}-{blocks}"
                yield Work(part, f"{folder}/{model}", model, blocks, tuple(options.lengths))


def missing(work: Work, known: set[tuple], options: argparse.Namespace) -> Work | None:
    """With the lengths that are not measured yet; None: there is nothing left."""
    if work.model:
        trial = os.environ.get("GKA_TRIAL", "")
        row = work.tags | {"config": work.name, "batch_tokens": batch_tokens_of(options), "trial": trial}
        left = tuple(length for length in work.lengths if key_of(row | {"length": length}) not in known)
    else:  # our layers are measured together at each length
        there = {key[2] for key in known if key[0] == work.part and work.name in (work.part, key[1])}
        left = tuple(length for length in work.lengths if length not in there)
    return replace(work, lengths=left) if left else None


def cut(size: str, model: str, blocks: int, folder: Path) -> Path:
    """A configuration with so many blocks; the folder names it in what `gka bench` prints."""
    config = json.loads((ROOT / "configs" / size / f"{model}.json").read_text())
    config["hybrid_override_pattern"] = f"{blocks}x{TOKENS[model]}"
    config.pop("num_hidden_layers", None)
    path = folder / f"{size}-{blocks}" / f"{model}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return path


def command_of(work: Work, options: argparse.Namespace, folder: Path) -> list[str]:
    lengths = ["--lengths", ",".join(map(str, work.lengths))]
    if work.part == "layer":
        where = ["--layers", options.layers, "--device", options.device]
        return [PROGRAM, "bench", "layer", *where, *lengths, "--json-lines"]
    if work.part == "fla":
        if options.fla is None:
            raise SystemExit("throughput: --part fla needs --fla, the folder that holds flash-linear-attention's fla")
        device = [] if options.device == "auto" else ["--device", options.device]
        layer = ["--layers", work.name.split()[1]]
        return [sys.executable, str(HERE / "beside.py"), options.fla, *layer, *lengths, "--json-lines", *device]
    config = ROOT / "configs" / work.part / f"{work.model}.json"
    if work.part in BLOCKS:
        config = cut(work.part, work.model, work.blocks, folder)
    return [PROGRAM, "bench", "train", str(config), "--against", "none", "--checkpoint-activations", "--json-lines",
            *lengths, "--batch-tokens", str(batch_tokens_of(options)), "--steps", str(options.steps),
            "--device", options.device, "--attention", options.attention]  # fmt: skip


class Measurement:
    """Programs one after the other, each row kept as soon as it is there, until the budget ends."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.file = Path(options.out) / "results.jsonl"
        self.began = time.monotonic()
        self.process: subprocess.Popen | None = None
        self.stopped = False

    def left(self) -> float:
        return self.options.budget - (time.monotonic() - self.began)

    def stop(self) -> None:
        self.stopped = True
        if self.process and self.process.poll() is None:
            self.process.kill()  # it holds nothing that would have to be saved

    def run(self, work: Work, folder: Path) -> bool:
        """Whether the program ended well, or was stopped at the end of the budget."""
        began = time.monotonic()
        command = command_of(work, self.options, folder)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        alarm = threading.Timer(max(0.0, self.left()), self.stop)
        alarm.daemon = True
        alarm.start()
        try:
            for line in self.process.stdout:
                with contextlib.suppress(json.JSONDecodeError):  # it was cut off in the middle
                    self.keep(work, json.loads(line), time.monotonic() - began)
        finally:
            alarm.cancel()
            if self.process.poll() is None:
                self.process.kill()
        return self.process.wait() == 0 or self.stopped

    def keep(self, work: Work, row: dict, seconds: float) -> None:
        row = work.tags | row | {"steps": self.options.steps, "after_seconds": round(seconds, 1)}
        if trial := os.environ.get("GKA_TRIAL"):
            row["trial"] = trial
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def known_rows(options: argparse.Namespace) -> set[tuple]:
    """What was measured into --out, and, on the same card, what this repository has, unless --again."""
    card = device_name(options.device)
    rows = [row for row in read_rows(RESULTS) if options.device != "cpu" and row["machine"].startswith(card)]
    rows = [] if options.again else rows
    return {key_of(row) for row in rows + read_rows(Path(options.out) / "results.jsonl") if "error" not in row}


def left_over(options: argparse.Namespace) -> list[Work]:
    known = known_rows(options)
    return [left for work in plan(options) if (left := missing(work, known, options))]


def list_work(options: argparse.Namespace) -> int:
    rows, total = [], 0.0
    for work in left_over(options):
        seconds = expected(work, options)
        total += seconds
        rows.append([work.name, " ".join(f"{length:,}" for length in work.lengths) or "all", f"{seconds:.0f}"])
    print(table(["program", "lengths", "seconds"], rows))
    print(f"{total:.0f} s for what is not measured yet.")
    return 0


def measure(options: argparse.Namespace) -> int:
    measurement = Measurement(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the program that runs is ended too
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for work in left_over(options):
            seconds, left = expected(work, options), measurement.left()
            if seconds > left:
                say(f"{work.name}: left out, it takes about {seconds:.0f} s of the {left:.0f} that are left")
                continue
            say(f"{work.name}: begins, about {seconds:.0f} s")
            if not measurement.run(work, Path(folder)):
                failed.append(work.name)
                say(f"{work.name}: failed")
    rows = read_rows(measurement.file)
    say(f"{len(rows)} rows in {measurement.file}, {len(left_over(options))} programs left")
    return 1 if failed else 0


def say(text: str) -> None:
    print(f"throughput: {text}", file=sys.stderr, flush=True)


# ---- What follows from it


def step_of(told: dict, part: str, model: str, length: int, blocks: int) -> float | None:
    """Seconds."""
    for row in told["rows"]:
        if (row["config"], row["length"]) == (f"{part}-{blocks}/{model}", length) and "seconds_per_step" in row:
            return row["seconds_per_step"]
    return None


def seconds_of_all(told: dict, part: str, model: str, length: int) -> float | None:
    """A step of all blocks, from the steps of few and more of them; nothing where one is not there."""
    few, more = (step_of(told, part, model, length, blocks) for blocks in (FEW, MORE))
    return None if few is None or more is None else few + (BLOCKS[part] - FEW) * (more - few) / (MORE - FEW)


def whole(told: dict, part: str, model: str, length: int) -> float | None:
    """Tokens a second."""
    seconds = seconds_of_all(told, part, model, length)
    return None if seconds is None else told["batch_tokens"] / seconds


def inferred(told: dict, part: str, length: int) -> float | None:
    """Tokens a second of attention, from GKA's slope and what the two differ by with few blocks."""
    gka = seconds_of_all(told, part, "gka", length)
    few = {model: step_of(told, part, model, length, FEW) for model in MODELS}
    if gka is None or None in few.values():
        return None
    return told["batch_tokens"] / (gka + BLOCKS[part] / FEW * (few["attention"] - few["gka"]))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def ratio(above: float | None, below: float | None) -> str:
    return "–" if above is None or below is None else f"{above / below:.2f}"


def slopes(told: dict, part: str) -> str:
    rows = []
    for length in sorted({row["length"] for row in told["rows"]}):
        gka, attention = (whole(told, part, model, length) for model in MODELS)
        guess = inferred(told, part, length)
        theirs = PAPER.get(part, {}).get(length, (None, None))
        rows.append([f"{length:,}", number(gka), number(attention), ratio(gka, attention), number(guess),
                     ratio(gka, guess), *map(number, theirs), ratio(*theirs)])  # fmt: skip
    header = ["T", "GKA, slope", "attention, slope", "ratio", "attention, inferred", "ratio", "GKA, paper",
              "attention, paper", "ratio"]  # fmt: skip
    return markdown(header, rows)


def measured(told: dict) -> str:
    rows = []
    for row in told["rows"]:
        memory = f"{row['memory_bytes'] / 1e9:.1f}" if "memory_bytes" in row else row.get("error", "–")
        seconds = f"{row['seconds_per_step']:.3f}" if "seconds_per_step" in row else "–"
        about = [row.get("attention_kernel", ""), row.get("trial", "") if row.get("model") == "gka" else "",
                 row.get("date", "")]  # fmt: skip
        rows.append(
            [row["config"], f"{row['length']:,}", number(row.get("tokens_per_second")), seconds, memory, *about]
        )
    return markdown(
        ["model", "T", "tokens/s", "s/step", "memory, GB", "attention by", "kernels on trial", "date"], rows
    )


def layers(told: dict) -> str:
    names = list(dict.fromkeys(row["name"] for row in told["rows"]))
    times = {(row["name"], row["length"]): row.get("milliseconds") for row in told["rows"]}
    rows = [
        [f"{length:,}", *(f"{times[name, length]:.2f}" if times.get((name, length)) else "–" for name in names)]
        for length in sorted({row["length"] for row in told["rows"]})
    ]
    return markdown(["T", *(f"{name}, ms" for name in names)], rows)


def report(options: argparse.Namespace) -> int:
    results = read_rows(Path(options.out) / "results.jsonl")
    parts = ["# Results\n\nWritten by `run.py report` from the results.jsonl beside it.\n"]
    for part in PARTS:
        told = of_part(results, part)
        if not told["rows"]:
            continue
        about = f"{told['machine']}, {told['date']}, {told['dtype']}"
        if "batch_tokens" in told:
            about += f", {told['batch_tokens']:,} tokens a step"
        parts.append(f"## {part}\n\n{about}.\n")
        parts += [layers(told)] if part in OTHER else [measured(told)]
        parts += [slopes(told, part)] if part in BLOCKS else []
    write_atomically(Path(options.out) / "results.md", lambda path: path.write_text("\n".join(parts)))
    print(f"{Path(options.out) / 'results.md'} has the tables.")
    return 0


def merge(options: argparse.Namespace) -> int:
    write_rows(RESULTS, read_rows(RESULTS, *options.files))
    return 0


# ---- The command


def lengths_of(text: str) -> list[int]:
    try:
        return sorted(int(word[:-1]) * 1024 if word[-1:] in "kK" else int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text}; it takes numbers of tokens, such as 16k,32k") from None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    work: dict[str, Callable[[argparse.Namespace], int]] = {"list": list_work, "measure": measure}
    for name, command in work.items():
        one = commands.add_parser(name)
        one.set_defaults(command=command)
        one.add_argument("--part", nargs="+", choices=PARTS, required=True)
        one.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
        one.add_argument(
            "--layers", default="*,DN,GDN,M2,KDA,GLA,GKA", help="of --part layer, as gka bench layer takes them"
        )
        one.add_argument("--fla", metavar="FOLDER", help="of --part fla: holds the package fla")
        one.add_argument("--lengths", type=lengths_of, default=list(LENGTHS))
        one.add_argument("--batch-tokens", type=int, help="a step (the longest length)")
        one.add_argument("--steps", type=int, default=3)
        one.add_argument("--attention", choices=("auto", "cuDNN", "flash"), default="cuDNN",
                         help="torch's kernel; auto tries both, with five steps at each length (cuDNN, which was the "
                         "faster one wherever both were tried)")  # fmt: skip
        one.add_argument("--budget", type=float, default=1e9, metavar="SECONDS",
                         help="what would not end before is not begun, what has not is stopped")  # fmt: skip
        one.add_argument("--again", action="store_true", help="also what this repository has results of")
        one.add_argument("--device", default="auto")
        one.add_argument("--out", default=str(HERE))
    merging = commands.add_parser("merge")
    merging.set_defaults(command=merge)
    merging.add_argument("files", nargs="+", type=Path)
    reporting = commands.add_parser("report")
    reporting.set_defaults(command=report)
    reporting.add_argument("--out", default=str(HERE))
    return parser.parse_args()


def main() -> int:
    options = arguments()
    return options.command(options)


if __name__ == "__main__":
    run_program(main)
