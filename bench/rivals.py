"""The rivals' memories on this machine's GPU: how exact and how fast, beside flash-linear-attention where it is there.

Gated DeltaNet, DeltaNet, and linear attention with one decay per head (the memory of Mamba2 and RetNet); with a decay
per channel Kimi Delta Attention and gated linear attention; 8 heads, keys of 128, values of 128 and 256, bfloat16,
gates in float32, gradients for all inputs. Accuracy against the recurrence in float64, T = 256, on the same rounded
inputs; times as bench/gpu.py takes them, both sides in one run. --beside names a checkout of flash-linear-attention.

Prints the tables and writes them to docs/benchmarks.md; with --only into a section of their own.

FLA's kernels are compiled for each of their configurations at the first call, some 400 of them for the two memories
with a decay per channel, one after the other. --compilers N lets N processes compile a share each first;
--configurations N takes at most N for a kernel, evenly from FLA's list, and the tables say so. What is needed beside
torch: triton, einops, packaging.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from block import relative_error
from common import ROOT, markdown, write_section
from console import Progress, run_program, table
from gpu import driver, leaves, median_time, number, passes
from torch import Tensor
from torch.nn import functional as F

import gka

HEADS, KEYS = 8, 128
SHAPES = ((4, 4096), (4, 16384), (1, 65536))
VALUES = (128, 256)
SCALE = KEYS**-0.5


@dataclass(frozen=True)
class Memory:
    name: str
    delta: bool
    decay: bool
    beta: bool
    per_channel: bool = False


MEMORIES = (
    Memory("Gated DeltaNet", delta=True, decay=True, beta=True),
    Memory("DeltaNet", delta=True, decay=False, beta=True),
    Memory("decayed linear attention", delta=False, decay=True, beta=False),
    Memory("Kimi Delta Attention", delta=True, decay=True, beta=True, per_channel=True),
    Memory("gated linear attention", delta=False, decay=True, beta=False, per_channel=True),
)


def inputs(memory: Memory, batch: int, tokens: int, values: int, seed: int, device: str = "cuda") -> list[Tensor]:
    """q, k, v and the gates the memory has."""
    source = torch.Generator(device).manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(batch, tokens, HEADS, size, generator=source, device=device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(batch, tokens, HEADS, *size, generator=source, device=device)

    q, k = (F.normalize(F.silu(normal(KEYS)), dim=-1).bfloat16() for _ in range(2))
    channels = [KEYS] * memory.per_channel
    gates = [-1e-3 * 50 ** uniform(*channels)] * memory.decay + [uniform()] * memory.beta
    return [q, k, normal(values).bfloat16(), *gates]


def ours(memory: Memory) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        named = dict(zip(["log_decay"] * memory.decay + ["beta"] * memory.beta, gates, strict=True))
        return torch.ops.gka.chunked_delta_rule(q, k, v, scale=SCALE, delta=memory.delta, **named)[0]

    return run


def theirs(memory: Memory) -> Callable[..., Tensor]:
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    if memory.per_channel and memory.delta:
        return lambda q, k, v, g, beta: chunk_kda(q, k, v, g=g, beta=beta, scale=SCALE)[0]
    if memory.per_channel:
        return lambda q, k, v, g: chunk_gla(q, k, v, g=g, scale=SCALE)[0]
    if memory.delta and memory.decay:
        return lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g=g, beta=beta, scale=SCALE)[0]
    if memory.delta:
        return lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta=beta, scale=SCALE)[0]
    return lambda q, k, v, g: chunk_simple_gla(q, k, v, g=g, scale=SCALE)[0]


def recurrence(memory: Memory, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    """Token by token."""
    rest = list(gates)
    decay = rest.pop(0).exp() if memory.decay else None
    beta = rest.pop(0) if memory.beta else None
    state = q.new_zeros(q.shape[0], HEADS, KEYS, v.shape[-1])
    answers = []
    for t in range(q.shape[1]):
        if decay is not None:
            state = decay[:, t].reshape(q.shape[0], HEADS, -1, 1) * state
        write = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state) if memory.delta else v[:, t]
        write = write * beta[:, t, :, None] if beta is not None else write
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        answers.append(SCALE * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(answers, 1)


def names_of(memory: Memory) -> list[str]:
    return ["o", "dq", "dk", "dv"] + ["dlog_decay"] * memory.decay + ["dbeta"] * memory.beta


def errors_of(function: Callable[..., Tensor], memory: Memory) -> dict[str, float]:
    rounded = inputs(memory, 1, 256, 128, seed=3)
    d_o = torch.randn(rounded[2].shape, generator=torch.Generator("cuda").manual_seed(4), device="cuda").bfloat16()
    here, wide = leaves(rounded), leaves([tensor.double() for tensor in rounded])
    o = function(*here)
    exact = recurrence(memory, *wide)
    got = [o, *torch.autograd.grad(o, here, d_o)]
    want = [exact, *torch.autograd.grad(exact, wide, d_o.double())]
    return dict(zip(names_of(memory), map(relative_error, got, want), strict=True))


def measure(memory: Memory, batch: int, tokens: int, values: int, beside: bool) -> list[str]:
    sets = [inputs(memory, batch, tokens, values, seed) for seed in range(2)]
    cells = [f"{memory.name}, V{values}, B{batch} T{tokens}"]
    for backward in (False, True):
        here = median_time(passes(ours(memory), sets, backward), 60)
        if not beside:
            cells.append(number(here))
            continue
        there = median_time(passes(theirs(memory), sets, backward), 60)
        cells += [f"{number(here)} {'✓' if here <= there else '✗'}", number(there), f"{there / here:.2f}"]
    return cells


# ---- What FLA compiles


def some_of(configurations: list, most: int, share: tuple[int, int], kernel: int) -> list:
    """At most so many, evenly from the list; of those the share of one of several processes, never none."""
    step = -(-len(configurations) // most) if most else 1
    chosen = configurations[::step]
    i, processes = share
    return chosen[(i + kernel) % processes :: processes] or [chosen[(i + kernel) % len(chosen)]]


def limit_tuning(most: int, share: tuple[int, int] = (0, 1)) -> None:
    """Before FLA is imported: all of its tuners are Triton's."""
    from triton.runtime.autotuner import Autotuner

    begin, kernels = Autotuner.__init__, itertools.count()

    def begin_with_some(self, function, names, configurations, *rest, **named):
        begin(self, function, names, some_of(configurations, most, share, next(kernels)), *rest, **named)

    Autotuner.__init__ = begin_with_some


def compile_share(memories: list[Memory], args: argparse.Namespace) -> None:
    """Every kernel once, for the shapes that will be asked for; Triton keeps what it has compiled on the disk."""
    limit_tuning(args.configurations, tuple(map(int, args.share.split("/"))))
    for memory in memories:
        function = theirs(memory)
        for batch, tokens in ((1, 256), *args.shapes):
            for values in {128, *args.values}:
                tensors = leaves(inputs(memory, batch, tokens, values, seed=0))
                o = function(*tensors)
                torch.autograd.grad(o, tensors, torch.ones_like(o))


def compile_before(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    command = [sys.executable, __file__, *sys.argv[1:]]
    shares = [
        subprocess.Popen([*command, "--share", f"{i}/{args.compilers}"], stdout=subprocess.DEVNULL)
        for i in range(args.compilers)
    ]
    failed = sum(process.wait() != 0 for process in shares)
    print(f"compiled by {args.compilers} processes in {time.perf_counter() - began:.0f} s, {failed} failed", flush=True)


# ---- The command


def setting(args: argparse.Namespace) -> str:
    given = f" --beside {args.beside.name}" if args.beside else ""
    given += f" --only {' '.join(map(repr, args.only))}" if args.only != [""] else ""
    limited = (
        f" Of FLA's configurations of a kernel at most {args.configurations} were tried, evenly from its list."
        if args.beside and args.configurations
        else ""
    )
    return (
        f"`python bench/rivals.py{given}` on {time.strftime('%Y-%m-%d %H:%M')}: {torch.cuda.get_device_name()}, "
        f"driver {driver()}, torch {torch.__version__}, gka {gka.__version__}"
        + (f", flash-linear-attention {version_beside()}." if args.beside else ".")
        + limited
    )


def version_beside() -> str:
    import fla

    return fla.__version__


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        sys.exit("bench/rivals.py: torch sees no GPU here")
    if args.beside is not None:
        sys.path.insert(0, str(args.beside.resolve()))
    memories = [memory for memory in MEMORIES if any(word in memory.name for word in args.only)]
    if args.share:
        compile_share(memories, args)
        return 0
    if args.beside and args.compilers:
        compile_before(args)
    if args.beside:
        limit_tuning(args.configurations)
    header = ["against float64", *names_of(MEMORIES[0])]
    exact = []
    for memory in memories:
        sides = {"gka": ours(memory)} | ({"FLA": theirs(memory)} if args.beside else {})
        for side, function in sides.items():
            errors = errors_of(function, memory)
            exact.append([f"{side}, {memory.name}", *(f"{errors[n]:.1e}" if n in errors else "" for n in header[1:])])
    print(table(header, exact), flush=True)
    work = [(m, b, t, v) for m in memories for v in args.values for b, t in args.shapes]
    rows = []
    with Progress(len(work), "bench") as progress:
        for memory, batch, tokens, values in work:
            rows.append(measure(memory, batch, tokens, values, args.beside is not None))
            print("  ".join(rows[-1]), flush=True)  # what a limit of time does not take away
            progress.step(rows[-1][0])
            torch.cuda.empty_cache()
    sides = ["{}, gka ms", "FLA", "times"] if args.beside else ["{}, ms"]
    times = ["8 heads, keys of 128", *(s.format(work) for work in ("forward", "forward + backward") for s in sides)]
    print(table(times, rows))
    said = __doc__.split("\n\n")[1].replace("\n", " ")
    parts = [
        "## The rivals' memories, GPU" + (f": {', '.join(m.name for m in memories)}" if args.only != [""] else ""),
        setting(args),
        said,
        markdown(header, exact),
        markdown(times, rows),
    ]
    if args.write:
        name = " ".join(["bench/rivals.py", *(word for word in args.only if word)])
        write_section(ROOT / "docs" / "benchmarks.md", name, "\n\n".join(parts))
    return 0


def shape(text: str) -> tuple[int, int]:
    batch, _, tokens = text.partition("x")
    if not (batch.isdigit() and tokens.isdigit()):
        raise argparse.ArgumentTypeError(f"got {text}; it takes sequences x tokens, such as 4x4096")
    return int(batch), int(tokens)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="a checkout of flash-linear-attention to measure in the same run")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="memories whose name contains one")
    parser.add_argument("--values", nargs="+", type=int, choices=VALUES, default=list(VALUES))
    parser.add_argument(
        "--shapes", nargs="+", type=shape, default=list(SHAPES), metavar="BxT", help="4x4096, say (all)"
    )
    parser.add_argument("--configurations", type=int, default=0, metavar="N", help="of an FLA kernel (0: all)")
    parser.add_argument("--compilers", type=int, default=0, metavar="N", help="processes that compile FLA's first (0)")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave docs/benchmarks.md as it is")
    return parser.parse_args()


if __name__ == "__main__":
    run_program(lambda: run(parse()))
