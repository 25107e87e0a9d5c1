"""Training throughput of large models: the paper's table of 8B and 14B at 16K, 32K and 64K tokens, on one card.

  measure    --part layer: one layer of each kind against the length
             --part fla --fla FOLDER: the layers of flash-linear-attention in the same way
             --part 2.8b: the whole model, activations checkpointed
             --part 8b, --part 14b: the first 4 and the first 8 blocks, embedding and head as they are
             writes --out/PART.json
  report     results.md, from the files beside this one

A whole 8B model with its optimiser (16 bytes a parameter) does not fit one card. A step's time is a part that does not
depend on the number of blocks (embedding, head, loss) and a part that every block adds: from 4 and 8 blocks both
follow, and with them the time of all blocks. That is a slope, not a measurement of the whole, and is called so. It
leaves out what several cards cost one another, which the paper's numbers, per card of many, have in them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import PROGRAM, run_program, write_atomically, write_json  # noqa: E402

HERE = Path(__file__).resolve().parent
FEW, MORE = 4, 8  # blocks that are measured
BLOCKS = {"8b": 36, "14b": 40, "tiny": 12}  # of the whole model; tiny: to try the command on a CPU
MODELS = ("gka", "attention")
TOKENS = {"gka": "GKA", "attention": "*"}
LENGTHS = "16k,32k,64k"
PAPER = {  # tokens a second and card, of which there were many: length to (GKA, attention)
    "8b": {16384: (6898.53, 6096.37), 32768: (6808.94, 4766.25), 65536: (6721.64, 3382.50)},
    "14b": {16384: (3318.28, 2833.99), 32768: (3256.45, 2221.56), 65536: (3256.45, 1485.24)},
}


def bench(*arguments: str) -> dict:
    done = subprocess.run([PROGRAM, "bench", *arguments, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"throughput: gka bench {arguments[0]} failed")
    return json.loads(done.stdout)


def beside(options: argparse.Namespace) -> dict:
    if options.fla is None:
        raise SystemExit(
            "throughput: --part fla needs --fla, the folder that holds flash-linear-attention's package fla"
        )
    command = [sys.executable, str(HERE / "beside.py"), options.fla]
    command += [] if options.device == "auto" else ["--device", options.device]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit("throughput: beside.py failed")
    return json.loads(done.stdout)


def training(configs: list[Path], options: argparse.Namespace) -> dict:
    """One program for each model: two of them with their optimisers would not always fit beside each other."""
    where = ["--device", options.device, "--lengths", options.lengths, "--steps", str(options.steps)]
    if options.batch_tokens:
        where += ["--batch-tokens", str(options.batch_tokens)]
    all_told: dict = {}
    for config in configs:
        told = bench("train", str(config), "--against", "none", "--checkpoint-activations", *where)
        all_told = {**told, "rows": all_told.get("rows", []) + told["rows"]}
    return all_told


def cut(size: str, model: str, blocks: int, folder: Path) -> Path:
    """A configuration with so many blocks; the folder names it in what `gka bench` prints."""
    config = json.loads((ROOT / "configs" / size / f"{model}.json").read_text())
    config["hybrid_override_pattern"] = f"{blocks}x{TOKENS[model]}"
    config.pop("num_hidden_layers", None)
    path = folder / f"{size}-{blocks}" / f"{model}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return path


def measure_part(part: str, options: argparse.Namespace) -> dict:
    if part == "layer":
        return bench("layer", "--layers", options.layers, "--device", options.device)
    if part == "fla":
        return beside(options)
    if part == "2.8b":
        return training([ROOT / "configs" / part / f"{model}.json" for model in MODELS], options)
    with tempfile.TemporaryDirectory() as folder:
        return training([cut(part, model, n, Path(folder)) for n in (FEW, MORE) for model in MODELS], options)


def measure(options: argparse.Namespace) -> int:
    for part in options.part:
        told = measure_part(part, options)
        write_json(Path(options.out) / f"{part}.json", told)
        print(f"{part}: {len(told['rows'])} rows in {Path(options.out) / part}.json", file=sys.stderr, flush=True)
    return 0


# ---- What follows from it


def whole(told: dict, part: str, model: str, length: int) -> float | None:
    """Tokens a second of all blocks, from the steps of few and more of them; nothing where one did not fit."""
    seconds = {}
    for row in told["rows"]:
        if row["length"] == length and row["config"].endswith(f"/{model}") and "seconds_per_step" in row:
            seconds[int(row["config"].split("/")[0].rsplit("-", 1)[1])] = row["seconds_per_step"]
    if set(seconds) != {FEW, MORE}:
        return None
    block = (seconds[MORE] - seconds[FEW]) / (MORE - FEW)
    return told["batch_tokens"] / (seconds[FEW] + (BLOCKS[part] - FEW) * block)


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
        theirs = PAPER.get(part, {}).get(length, (None, None))
        rows.append([f"{length:,}", number(gka), number(attention), ratio(gka, attention),
                     *map(number, theirs), ratio(*theirs)])  # fmt: skip
    header = ["T", "GKA, slope", "attention, slope", "ratio", "GKA, paper", "attention, paper", "ratio"]
    return markdown(header, rows)


def measured(told: dict) -> str:
    rows = []
    for row in told["rows"]:
        speed = row.get("tokens_per_second")
        memory = f"{row['memory_bytes'] / 1e9:.1f}" if "memory_bytes" in row else row.get("error", "–")
        rows.append([row["config"], f"{row['length']:,}", number(speed), memory])
    return markdown(["model", "T", "tokens/s", "memory, GB"], rows)


def layers(told: dict) -> str:
    names = list(dict.fromkeys(row["name"] for row in told["rows"]))
    times = {(row["name"], row["length"]): row.get("milliseconds") for row in told["rows"]}
    rows = [
        [f"{length:,}", *(f"{times[name, length]:.2f}" if times.get((name, length)) else "–" for name in names)]
        for length in sorted({row["length"] for row in told["rows"]})
    ]
    return markdown(["T", *(f"{name}, ms" for name in names)], rows)


def report(options: argparse.Namespace) -> int:
    parts = ["# Results\n\nWritten by `run.py report` from the JSON files beside it.\n"]
    for part in PARTS:
        file = Path(options.out) / f"{part}.json"
        if not file.exists():
            continue
        told = json.loads(file.read_text())
        about = f"{told['machine']}, {told['date']}, {told['dtype']}"
        if "batch_tokens" in told:
            about += f", {told['batch_tokens']:,} tokens a step"
        parts.append(f"## {part}\n\n{about}.\n")
        parts += [layers(told)] if part in ("layer", "fla") else [measured(told)]
        parts += [slopes(told, part)] if part in BLOCKS else []
    write_atomically(Path(options.out) / "results.md", lambda path: path.write_text("\n".join(parts)))
    print(f"{Path(options.out) / 'results.md'} has the tables.")
    return 0


PARTS = ("layer", "fla", "2.8b", *BLOCKS)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure")
    measuring.set_defaults(command=measure)
    measuring.add_argument("--part", nargs="+", choices=PARTS, required=True)
    measuring.add_argument("--layers", default="*,DN,GDN,M2,GKA", help="of --part layer, as gka bench layer takes them")
    measuring.add_argument("--fla", metavar="FOLDER", help="of --part fla: holds the package fla")
    measuring.add_argument("--lengths", default=LENGTHS)
    measuring.add_argument("--batch-tokens", type=int, help="a step (the longest length)")
    measuring.add_argument("--steps", type=int, default=3)
    measuring.add_argument("--device", default="auto")
    measuring.add_argument("--out", default=str(HERE))
    reporting = commands.add_parser("report")
    reporting.set_defaults(command=report)
    reporting.add_argument("--out", default=str(HERE))
    return parser.parse_args()


def main() -> int:
    options = arguments()
    return options.command(options)


if __name__ == "__main__":
    run_program(main)
