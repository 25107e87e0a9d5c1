"""Kernels on trial (docs/kernels.md) on this machine's GPU: each beside what it would replace, in one table.

    python bench/trials.py                       all of them
    python bench/trials.py --trial crowd_step    one of them
    python bench/trials.py --list                what would run; needs no GPU
    python bench/trials.py --names               the trials alone, a line each
    python bench/trials.py --dry                 the same on the CPU with small sizes: whether this script itself runs

Every row runs twice in one process, with GKA_TRIAL empty and with the trial's name in it. Errors are against float64
(of the engine: differences of log-probabilities from the CPU's), in the norm over all that is compared; "bits" says
whether both ways gave the same, which a trial that did not run does too. Times are medians of CUDA graphs where the
work can be captured, else of calls, with inputs in rotation; of the engine the median step of `gka bench serve`. A row
is printed as soon as it is measured, and where one fails that is said and the next one begins. Ends with status 1 where
one failed or an error is outside its bound. What brings down the process brings down its rows: scripts/card.sh gives
each trial a process of its own.

A new trial is a line in WORKS, or several.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from block import relative_error
from common import ROOT, gka_json, seconds
from console import GrowingTable, paint, run_program, table
from gpu import (
    ITERATIONS,
    NARROW,
    STRONG,
    USUAL,
    WEAK,
    Shape,
    inputs,
    leaves,
    median_time,
    number,
    ours,
    sketched,
)
from torch import Tensor

import gka
import gka.models


@dataclass(frozen=True)
class Where:
    """On the GPU, or for a dry run: small and on the CPU."""

    device: str = "cuda"

    @property
    def dry(self) -> bool:
        return self.device == "cpu"

    def size(self, full: int, small: int) -> int:
        return small if self.dry else full


@dataclass(frozen=True)
class Ran:
    """What a row found, with the trial or without it."""

    error: float | None
    bits: Tensor | None
    microseconds: float


@dataclass(frozen=True)
class Work:
    trial: str  # as GKA_TRIAL names it
    name: str
    bound: float | None  # of the error; None: it only takes time, and another row checks
    run: Callable[[Where], Ran]


# ---- How works are run ----------------------------------------------------------------------------------------------


@contextmanager
def asked_for(trial: str):
    """GKA_TRIAL, which the kernels' launches read at each call."""
    before = os.environ.get("GKA_TRIAL")
    os.environ["GKA_TRIAL"] = trial
    try:
        yield
    finally:
        if before is None:
            del os.environ["GKA_TRIAL"]
        else:
            os.environ["GKA_TRIAL"] = before


def microseconds(works: Sequence[Callable[[], object]], where: Where, captured: bool = True) -> float:
    """Of one of the works, which do the same with different inputs."""
    if where.dry:
        return 1e6 * statistics.median(seconds(work, 1) for work in works)
    if not captured:
        return 1e3 * median_time(list(works), 60)
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    return 1e3 * median_time([graph.replay], 60) / len(works)


def whole_sequences(
    batch: int,
    tokens: int,
    shape: Shape,
    backward: bool = False,
    decay: tuple[float, float] = WEAK,
    function: Callable[..., Tensor] = ours,
    **options: object,
) -> Callable[[Where], Ran]:
    """The operator over whole sequences; its error with two of 512 tokens, o and with `backward` all gradients."""

    def case(*args: object) -> list[Tensor]:
        return inputs(*args, decay, shape)

    made: dict[tuple, Tensor] = {}

    def arriving(o: Tensor) -> Tensor:
        """The same gradient for every call, made once: on the CPU that takes a hundred times as long as the call."""
        key = (o.shape, o.dtype, o.device)
        if key not in made:
            made[key] = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
        return made[key]

    def results(call: list[Tensor]) -> list[Tensor]:
        needed = leaves(call) if backward else call
        o = function(*needed, **options)
        return [o.detach(), *(torch.autograd.grad(o, needed, arriving(o)) if backward else [])]

    def run(where: Where) -> Ran:
        checked = case(2, where.size(512, 80), 0, where.device)
        got = [t.cpu() for t in results(checked)]
        exact = results([t.cpu().double() for t in checked])
        error = max(relative_error(a, b) for a, b in zip(got, exact, strict=True))
        sets = [case(batch, where.size(tokens, 80), s, where.device) for s in range(where.size(3, 1))]
        bits = torch.cat([t.float().flatten() for t in got])
        works = [lambda call=call: results(call) for call in sets]
        return Ran(error, bits, microseconds(works, where, captured=False))

    return run


def in_halves(batch: int, tokens: int, backward: bool = False) -> Callable[[Where], Ran]:
    """Calls one after another; on trial the halves of each on two streams, so that one half's passes, which memory
    bounds, may run beside the other's solve. By the clock over many calls: which passes meet is left to the card."""

    def call_of(tensors: list[Tensor]) -> Callable[[], object]:
        needed = leaves(tensors) if backward else tensors
        d_o = torch.ones_like(tensors[2])

        def call() -> None:
            o = gka.gated_kalmanet(*needed, iterations=ITERATIONS)[0]
            if backward:
                torch.autograd.grad(o, needed, d_o)

        return call

    def run(where: Where) -> Ran:
        on_trial = bool(os.environ.get("GKA_TRIAL"))
        sets = [inputs(batch, where.size(tokens, 80), seed, where.device) for seed in range(where.size(3, 1))]
        if not on_trial or where.dry:
            return Ran(None, None, 1e6 * clocked([call_of(case) for case in sets], where))
        streams = [torch.cuda.Stream() for _ in range(2)]
        halves = [[call_of([t[i * batch // 2 :][: batch // 2] for t in case]) for i in range(2)] for case in sets]

        def both(calls: list[Callable[[], object]]) -> None:
            for stream, call in zip(streams, calls, strict=True):
                with torch.cuda.stream(stream):
                    call()

        return Ran(None, None, 1e6 * clocked([lambda calls=calls: both(calls) for calls in halves], where))

    return run


def clocked(works: Sequence[Callable[[], object]], where: Where) -> float:
    """Seconds of one of the works, of all streams together."""

    def rounds(count: int) -> None:
        for _ in range(count):
            for work in works:
                work()
        if not where.dry:
            torch.cuda.synchronize()

    count = where.size(20, 1)
    rounds(1)
    return statistics.median(seconds(lambda: rounds(count), 1) for _ in range(where.size(5, 1))) / (count * len(works))


def engine(config: str, batch: int, *arguments: str) -> Callable[[Where], Ran]:
    """A step of the engine with random weights, all layers of the model."""

    def run(where: Where) -> Ran:
        name, count = ("tiny/gka", 2) if where.dry else (config, batch)
        call = ["bench", "serve", str(ROOT / f"configs/{name}.json"), "--batches", str(count), "--prefill", "0"]
        call += [*arguments, "--json", "--device", where.device, *(["--tokens", "4"] if where.dry else [])]
        rows = gka_json(call)["rows"]
        return Ran(None, None, 1e3 * next(row["milliseconds"] for row in rows if row["what"] == "decode"))

    return run


def trained(config: str) -> Callable[[Where], Ran]:
    """A step of training on random tokens with weights as they are initialised, whose chunks are mostly refined."""

    def run(where: Where) -> Ran:
        name, length, tokens = ("tiny/gka", "64", "128") if where.dry else (config, "4k", "65536")
        call = ["bench", "train", str(ROOT / f"configs/{name}.json"), "--against", "none", "--lengths", length]
        call += ["--batch-tokens", tokens, "--steps", str(where.size(6, 1)), "--device", where.device, "--json"]
        return Ran(None, None, 1e6 * gka_json(call)["rows"][0]["seconds_per_step"])

    return run


def decoded(sequences: int, key_heads: int = 8) -> Callable[[Where], Ran]:
    """Log-probabilities of what the engine draws step by step from two GKA blocks of 8 heads, beside those of the same
    texts in float64; and how long a token of all takes."""
    drawn, prompt = 16, 8
    own = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": key_heads, "head_dim": 128}

    def run(where: Where) -> Ran:
        config = json.loads((ROOT / "configs/tiny/gka.json").read_text()) | own | {"initializer_range": 0.1}
        torch.manual_seed(0)
        prompts = torch.randint(256, (where.size(sequences, 2), prompt)).tolist()
        with tempfile.TemporaryDirectory() as folder:
            gka.models.Decoder(config).save(folder)
            with gka.Engine(folder, device=where.device) as model:

                def draw() -> list:
                    return model.generate(prompts, max_tokens=drawn, temperature=0, ignore_eos=True)

                answers = draw()
                took = seconds(draw, 3)
            exact = gka.models.load(folder, dtype=torch.float64)
        texts = torch.tensor([text + answer.ids for text, answer in zip(prompts, answers, strict=True)])
        got = torch.tensor([[token.logprob for token in answer.tokens] for answer in answers])
        return Ran((got - exact.score(texts)[:, -drawn:]).abs().mean().item(), got, 1e6 * took / drawn)

    return run


# ---- The table ------------------------------------------------------------------------------------------------------

# Errors with bfloat16 inputs: o rounded to bfloat16 is 1.7e-3 off by itself.
LOGPROBS = 0.05
OUTPUTS, GRADIENTS = 5e-3, 1e-2
SKETCHED, SKETCHED_BACK = 2e-2, 6e-2  # P q and P k are rounded, and then solved with

SMALL = Shape(heads=16, dim=64, values=64)


def refined(shape: Shape, backward: bool = False) -> Callable[[Where], Ran]:
    """Of a decay so strong that every chunk is."""
    return whole_sequences(4, 4096, shape, backward=backward, decay=STRONG)


# What a solve of another kind changes.
SOLVES = (
    ("no chunk refined, B4 T4096", OUTPUTS, whole_sequences(4, 4096, USUAL)),
    ("every chunk refined, B4 T4096", OUTPUTS, refined(USUAL)),
    ("with backward", GRADIENTS, refined(USUAL, backward=True)),
    ("D = V = 64, 16 heads, with backward", GRADIENTS, refined(SMALL, backward=True)),
    ("D = V = 32, 32 heads, with backward", GRADIENTS, refined(NARROW, backward=True)),
    ("no chunk refined, with backward", GRADIENTS, whole_sequences(4, 4096, USUAL, backward=True)),
    ("a step of training, 440M, T4096", None, trained("440m/gka")),
    (
        "no chunk refined, B4 T16384, with backward",
        GRADIENTS,
        whole_sequences(4, 16384, USUAL, backward=True),
    ),
)

WORKS = (
    *(Work(trial, *work) for trial in ("conjugate", "increments") for work in SOLVES),
    Work("crowd_step", "a GKA block's token, 64 sequences", LOGPROBS, decoded(64)),
    Work("crowd_step", "the same, 2 key heads of 8", LOGPROBS, decoded(64, key_heads=2)),
    Work("crowd_step", "engine, 440M, 64 sequences", None, engine("440m/gka", 64)),
    Work("crowd_step", "engine, 440M, 128 sequences", None, engine("440m/gka", 128)),
    Work("lesser_solve", "alone, B4 T4096", OUTPUTS, whole_sequences(4, 4096, USUAL)),
    Work("lesser_solve", "alone, forward + backward", GRADIENTS, whole_sequences(4, 4096, USUAL, backward=True)),
    Work("lesser_solve", "two halves at once, B4 T4096", None, in_halves(4, 4096)),
    Work("lesser_solve", "the same, B4 T16384", None, in_halves(4, 16384)),
    Work("lesser_solve", "the same, forward + backward", None, in_halves(4, 16384, backward=True)),
    Work("sketch", "solved in 32 channels of 128", SKETCHED, whole_sequences(4, 4096, USUAL, function=sketched)),
    Work("sketch", "with backward", SKETCHED_BACK, whole_sequences(4, 4096, USUAL, backward=True, function=sketched)),
)

HEADER = ["trial", "work", "error before", "after", "at most", "bits", "µs before", "after", "times as fast"]


def name_of(work: Work) -> list[str]:
    return [work.trial, work.name]


def row_of(work: Work, before: Ran, after: Ran) -> list[str]:
    def error(ran: Ran) -> str:
        if ran.error is None or work.bound is None:
            return ""
        return f"{ran.error:.1e} {'✓' if ran.error <= work.bound else '✗'}"

    bits = "" if before.bits is None else "same" if torch.equal(before.bits, after.bits) else "other"
    times = [number(ran.microseconds) for ran in (before, after)]
    bound = "" if work.bound is None else f"{work.bound:g}"
    ratio = f"{before.microseconds / after.microseconds:.2f}"
    return [*name_of(work), error(before), error(after), bound, bits, *times, ratio]


def failed_row(work: Work, error: Exception) -> list[str]:
    """Says why as well."""
    print(f"bench/trials.py: {work.trial}, {work.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return [*name_of(work), "", "failed ✗", *[""] * (len(HEADER) - 4)]


def measure(work: Work, where: Where) -> list[str]:
    ran = []
    for trial in ("", work.trial):
        with asked_for(trial):
            ran.append(work.run(where))
        if not where.dry:
            torch.cuda.empty_cache()
    return row_of(work, *ran)


def measure_all(works: Sequence[Work], where: Where) -> bool:
    """Prints their table, row by row; whether all is as it should be."""
    colours = {"✓": "32", "✗": "1;31"}
    widest = [[*name_of(work), *["0.0e-00 ✓"] * 2, "0.005", "other", *["000000.0"] * 2, "00.00"] for work in works]
    good = True
    with GrowingTable(HEADER, widest, left=2) as rows:
        for work in works:
            try:
                row = measure(work, where)
            except Exception as error:  # the rest go on
                row = failed_row(work, error)
            rows.add([paint(cell, colours.get(cell[-1:], "0")) for cell in row])
            good &= not any("✗" in cell for cell in row)
    return good


def main(argv: list[str]) -> int:
    names = list(dict.fromkeys(work.trial for work in WORKS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trial", choices=names, help="only this one")
    parser.add_argument("--list", action="store_true", help="what would run")
    parser.add_argument("--names", action="store_true", help="the trials there are, a line each")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, where no trial applies")
    args = parser.parse_args(argv)
    works = [work for work in WORKS if args.trial in (None, work.trial)]
    if args.names:
        print("\n".join(names))
        return 0
    if args.list:
        print(table(HEADER[:2], [name_of(work) for work in works], left=2))
        return 0
    if not args.dry and not torch.cuda.is_available():
        sys.exit("bench/trials.py: torch sees no GPU on this machine; --list, --names and --dry need none")
    return int(not measure_all(works, Where("cpu" if args.dry else "cuda")))


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
