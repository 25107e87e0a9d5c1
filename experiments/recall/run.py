"""How many key-value pairs can a memory of fixed size give back?

Stores n random pairs (unit-norm random keys, Gaussian values), then asks for the value of every key, for n from a few
to twice the key dimension D: once right after the pairs, and once after a stretch of distracting tokens, random pairs
nobody asks for, that the write gate lets through at a tenth of the strength.

  recall error   sqrt(1 − cos²) between all that came back and all that was stored: ‖c·o − v‖ / ‖v‖ with the best
                 single scale c, since each of these layers is followed by a norm. 0 is perfect, 1 is forgotten.
  gates          β and γ of every memory are tuned, for each n and each panel, on seeds that are not reported.
  state          rivals hold D×V numbers; Gated KalmaNet holds H (D×D) as well. "Wide keys" doubles a rival's key
                 dimension, so that its state has as many numbers as Gated KalmaNet's H and U together.

Writes recall.png and recall.json to --out, and prints a table.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from pathlib import Path

import torch
from memories import MEMORIES, Gates, Memory, Tape
from torch import Tensor
from torch.nn.functional import normalize

import gka

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import Progress, paint, run_program, table, write_atomically, write_json  # noqa: E402

# n in sixty-fourths of the key dimension.
COUNTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128)
TUNING_SEEDS = 8
TUNING_OFFSET = 1_000_000  # seeds from here on choose gates and are not reported
BLUR = 0.25  # the error at which the summary counts pairs


def tapes(dim: int, most: int, distractors: int, weight: float, seeds: range):
    """A function that builds the tape of n pairs for a memory with keys of a given size; n pairs are the first n of
    `most`, so that curves over n are smooth, and distractors are the same for every n."""
    pools: dict[int, tuple[Tensor, ...]] = {}

    def draw(key_dim: int) -> tuple[Tensor, ...]:
        rows = []
        for seed in seeds:
            source = torch.Generator().manual_seed(seed * 4096 + key_dim)
            sizes = ((most, key_dim), (most, dim), (distractors, key_dim), (distractors, dim))
            rows.append([torch.randn(size, generator=source) for size in sizes])
        return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))

    def tape(n: int, key_dim: int) -> Tape:
        if key_dim not in pools:
            pools[key_dim] = draw(key_dim)
        keys, values, other_keys, other_values = pools[key_dim]
        pairs = normalize(keys[:, :n], dim=-1)
        return Tape(
            keys=torch.cat([pairs, normalize(other_keys, dim=-1)], dim=1),
            values=torch.cat([values[:, :n], other_values], dim=1),
            strength=torch.cat([torch.ones(n), torch.full((distractors,), weight)]),
            queries=pairs,
        )

    return tape


def recall_error(answers: Tensor, values: Tensor) -> Tensor:
    """Per seed, with the best single scale on the answers."""
    o, v = answers.flatten(1).double(), values.flatten(1).double()
    cosine = torch.linalg.vecdot(o, v) / (o.norm(dim=1) * v.norm(dim=1)).clamp_min(1e-300)
    return (1 - cosine.clamp(0, 1) ** 2).sqrt()


def recognised(answers: Tensor, values: Tensor) -> Tensor:
    """Per seed, the share of answers whose direction is nearest to that of the value asked for."""
    similarity = answers @ normalize(values, dim=-1).mT
    return (similarity.argmax(dim=2) == torch.arange(values.shape[1])).double().mean(dim=1)


def tune(memory: Memory, tape: Tape) -> tuple[float, float]:
    """The (β, γ) with the least mean error on the tape, all candidates side by side as rows of one batch."""
    settings, (rows, n, _) = memory.settings(), tape.queries.shape
    if len(settings) == 1:
        return settings[0]
    beta, decay = torch.tensor(settings).repeat_interleave(rows, dim=0).T
    many = tape.repeat(len(settings))
    error = recall_error(memory.recall(many, Gates(beta, decay)), many.values[:, :n])
    return settings[error.view(len(settings), rows).mean(dim=1).argmin()]


def measure(memory: Memory, tape: Tape, tuning: Tape) -> dict:
    """Errors with the gates that do best on the tuning tape."""
    beta, decay = tune(memory, tuning)
    rows, n, _ = tape.queries.shape
    answers, values = memory.recall(tape, Gates(torch.full((rows,), beta), torch.full((rows,), decay))), tape.values
    error = recall_error(answers, values[:, :n])
    low, high = error.quantile(torch.tensor([0.1, 0.9], dtype=error.dtype)).tolist()
    return {
        "error": error.mean().item(),
        "low": low,
        "high": high,
        "recognised": recognised(answers, values[:, :n]).mean().item(),
        "beta": beta,
        "decay": decay,
    }


def sweep(args: argparse.Namespace) -> dict:
    counts = sorted({max(1, round(args.dim * count / 64)) for count in COUNTS})
    panels = {"pairs alone": 0, "distracting tokens after": args.distractors}
    results: dict[str, dict[str, list]] = {name: {key: [] for key in MEMORIES} for name in panels}
    with Progress(len(panels) * len(counts) * len(MEMORIES), "recall") as progress:
        for name, distractors in panels.items():
            common = (args.dim, counts[-1], distractors, args.distractor_strength)
            tape = tapes(*common, range(args.seed, args.seed + args.seeds))
            tuning = tapes(*common, range(args.seed + TUNING_OFFSET, args.seed + TUNING_OFFSET + TUNING_SEEDS))
            for n in counts:
                for key, memory in MEMORIES.items():
                    width = memory.key_dim(args.dim)
                    results[name][key].append(measure(memory, tape(n, width), tuning(n, width)))
                    progress.step(f"n = {n}: {memory.label}")
    return {
        "dim": args.dim,
        "distractors": args.distractors,
        "distractor_strength": args.distractor_strength,
        "seeds": args.seeds,
        "first_seed": args.seed,
        "pairs": counts,
        "blur": BLUR,
        "memories": {key: {"label": m.label, "state": m.state_numbers(args.dim)} for key, m in MEMORIES.items()},
        "panels": results,
        "held": {name: {key: held(counts, rows) for key, rows in r.items()} for name, r in results.items()},
        "made": {
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "gka": getattr(gka, "__version__", "?"),
            "machine": platform.machine(),
        },
    }


def held(counts: list[int], rows: list[dict]) -> float | None:
    """How many pairs a memory holds before its error reaches BLUR, between the measured n by interpolation; None if it
    never does."""
    before_n, before_error = 0.0, 0.0
    for n, row in zip(counts, rows, strict=True):
        if row["error"] >= BLUR:
            return before_n + (n - before_n) * (BLUR - before_error) / (row["error"] - before_error)
        before_n, before_error = float(n), row["error"]
    return None


def print_tables(data: dict) -> None:
    wanted = {max(1, round(data["dim"] * count / 64)) for count in (4, 8, 16, 32, 48, 64, 96, 128)}
    columns = [i for i, n in enumerate(data["pairs"]) if n in wanted]
    for name, results in data["panels"].items():
        best = [min(rows[i]["error"] for rows in results.values()) for i in columns]
        body: list[list[str] | None] = []
        for key, rows in results.items():
            pairs_held = data["held"][name][key]
            cells = [f"{rows[i]['error']:.3f}" for i in columns]
            cells = [
                paint(cell, "1;32") if math.isclose(rows[i]["error"], low, abs_tol=5e-4) else cell
                for cell, i, low in zip(cells, columns, best, strict=True)
            ]
            count = f"> {data['pairs'][-1]}" if pairs_held is None else f"{pairs_held:.0f}"
            memory = data["memories"][key]
            body.append([memory["label"], f"{memory['state']:,}", *cells, paint(count, "1")])
        extra = "" if name == "pairs alone" else f": {data['distractors']} at {data['distractor_strength']:g} of β"
        print(f"\n{paint(f'Recall error, {name}{extra}', '1')}")
        header = ["memory", "state", *(f"n={data['pairs'][i]}" for i in columns), f"held at {BLUR:.0%}"]
        print(table(header, body))
    gdn = {row["decay"] for rows in data["panels"].values() for row in rows["gdn"]}
    print(
        f"\nD = V = {data['dim']}, mean of {data['seeds']} seeds, float32. 'held': pairs before the error reaches "
        f"{BLUR:.0%}.\nGates tuned on other seeds; the decays Gated DeltaNet chose: {sorted(gdn, reverse=True)} "
        "(1 makes it DeltaNet)."
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    def whole(least: int):
        def convert(text: str) -> int:
            if not text.isascii() or not text.isdigit() or int(text) < least:
                raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
            return int(text)

        return convert

    def share(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
        return value

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python experiments/recall/run.py                              the picture of the README\n"
        "  python experiments/recall/run.py --dim 32 --seeds 4           a quick look\n"
        "  python experiments/recall/run.py --distractor-strength 1      distractors as strong as the pairs",
    )
    parser.add_argument("--dim", type=whole(4), default=64, help="key and value dimension, at most 128 (default 64)")
    parser.add_argument("--seeds", type=whole(1), default=16, help="repetitions; the band spans 80%% of them (16)")
    parser.add_argument("--seed", type=whole(0), default=0, help="the first seed (0)")
    parser.add_argument("--distractors", type=whole(1), help="distracting tokens after the pairs (2·dim)")
    parser.add_argument(
        "--distractor-strength", type=share, default=0.1, help="their β, as a share of a pair's (default 0.1)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for recall.png and recall.json (out/)")
    parser.add_argument("--readme", action="store_true", help="also write docs/images/recall.png, the README's copy")
    args = parser.parse_args(argv)
    if args.dim > 128:
        parser.error(f"--dim is {args.dim}; the wide rivals need twice as much and the operator takes up to 256")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out} is no folder to write to: {error.strerror}")
    if args.distractors is None:
        args.distractors = 2 * args.dim
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from plot import draw  # after the options, so that --help needs no matplotlib

    data = sweep(args)
    print_tables(data)
    picture, numbers = args.out / "recall.png", args.out / "recall.json"
    write_json(numbers, data)
    write_atomically(picture, lambda path: draw(data, path))
    written = [picture, numbers]
    if args.readme:
        copy = ROOT / "docs" / "images" / "recall.png"
        write_atomically(copy, lambda path: draw(data, path))
        written.append(copy)
    print("\nwrote " + ", ".join(str(path) for path in written))
    return 0


if __name__ == "__main__":
    run_program(main)
