"""How fast the CPU kernels are, against what this machine's own matrix product can do.

The yardstick is measured in the same run, before and after every sample. Forward, and forward + backward: the time of
T·H·r·2D² FLOP, the part no chunked Chebyshev can avoid, at the rate of a cache-resident float32 torch.bmm of [16,64,D]
with [16,D,D]. One-token step: r times torch.bmm of [8,D,D] with [8,D,1]. A ratio of 1 would mean that everything but
these products is free.

Batch 1, 8 heads, V = D, r = 30 Chebyshev steps, float32, decay, β and α all given, gradients for all six. Medians.
Memory is the peak of a fresh process above what it held with the inputs in place: outputs, gradients, what the
backward pass keeps, scratch.

Prints the tables and writes them to docs/benchmarks.md and out/bench-cpu.json. Run it on a machine with nothing else
to do: a row that other programs disturbed is measured again, gets "?" for a verdict if that did not help, and keeps the
document from being written.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import ROOT, Race, cpu_in_words, markdown, peak_bytes, race, write_section
from console import Progress, paint, run_program, table, write_json
from torch import Tensor
from torch.nn.functional import normalize

import gka

HEADS, ITERATIONS = 8, 30
TOKENS = (256, 1024, 2048, 4096, 8192, 16384)
GROWTH = (2048, 16384, 1.15)  # cost per token from … to … may grow by at most this factor
INPUTS = ("q", "k", "v", "log_decay", "beta", "alpha")

# How many times the yardstick each kind of work may take, by D (figures of the project's brief).
TARGETS = {"forward": {64: 2.6, 128: 2.2}, "forward + backward": {64: 6.5, 128: 5.5}, "step": {128: 0.25}}


def inputs(tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """As a trained block would give them: unit-norm q and k, decay near 1, β and α between 0 and 1."""
    source = torch.Generator().manual_seed(tokens + dim)

    def noise(*size: int) -> Tensor:
        return torch.randn(1, tokens, HEADS, *size, generator=source)

    q, k, v = normalize(noise(dim), dim=-1), normalize(noise(dim), dim=-1), noise(dim)
    log_decay, beta, alpha = -0.01 * noise().exp(), noise().sigmoid(), noise().sigmoid()
    return [x.to(dtype) for x in (q, k, v, log_decay, beta, alpha)]


def forward(tokens: int, dim: int, iterations: int = ITERATIONS) -> Callable[[], object]:
    arguments = inputs(tokens, dim)
    return lambda: gka.gated_kalmanet(*arguments, iterations=iterations)


def forward_backward(tokens: int, dim: int, iterations: int = ITERATIONS) -> Callable[[], object]:
    arguments = [x.requires_grad_() for x in inputs(tokens, dim)]
    d_o = torch.randn(1, tokens, HEADS, dim, generator=torch.Generator().manual_seed(1))

    def work() -> object:
        o, _ = gka.gated_kalmanet(*arguments, iterations=iterations)
        return torch.autograd.grad(o, arguments, d_o)

    return work


WORK = {"forward": forward, "forward + backward": forward_backward}


def product(rows: int, batch: int, dim: int) -> Callable[[], object]:
    """torch.bmm of [batch, rows, dim] with [batch, dim, dim] into memory that is already there."""
    a, b = torch.randn(batch, rows, dim), torch.randn(batch, dim, dim)
    out = torch.empty(batch, rows, dim)
    return lambda: torch.bmm(a, b, out=out)


@dataclass(frozen=True)
class Row:
    dim: int
    tokens: int
    work: str
    milliseconds: float
    ratio: float
    target: float | None
    gflops: float  # of the yardstick's product
    spread: float
    undisturbed: bool
    kib_per_token: float | None

    @property
    def microseconds_per_token(self) -> float:
        return self.milliseconds * 1e3 / self.tokens


def measure_row(work: str, tokens: int, dim: int, repetitions: int) -> Row:
    flops_per_call = 2 * 16 * 64 * dim * dim
    calls = tokens * HEADS * ITERATIONS * 2 * dim * dim / flops_per_call
    result: Race = race(WORK[work](tokens, dim), product(64, 16, dim), repetitions)
    peak = peak_in_fresh_process(work, tokens, dim)
    return Row(
        dim=dim,
        tokens=tokens,
        work=work,
        milliseconds=result.seconds * 1e3,
        ratio=result.ratio / calls,
        target=TARGETS[work].get(dim),
        gflops=flops_per_call / result.yardstick * 1e-9,
        spread=result.spread,
        undisturbed=result.undisturbed,
        kib_per_token=None if peak is None else peak / 1024 / tokens,
    )


@dataclass(frozen=True)
class Step:
    dim: int
    microseconds: float
    yardstick_microseconds: float
    ratio: float
    target: float | None
    undisturbed: bool


def measure_step(dim: int, repetitions: int) -> Step:
    q, k, v, log_decay, beta, alpha = (x[:, 0].contiguous() for x in inputs(1, dim))
    state = (torch.zeros(1, HEADS, dim, dim), torch.zeros(1, HEADS, dim, dim))
    a, x = torch.randn(8, dim, dim), torch.randn(8, dim, 1)
    out = torch.empty(8, dim, 1)

    def work() -> object:
        return gka.gated_kalmanet_step(q, k, v, log_decay, beta, alpha, state=state, iterations=ITERATIONS)

    result = race(work, lambda: torch.bmm(a, x, out=out), 3 * repetitions, least=0.03)
    return Step(
        dim=dim,
        microseconds=result.seconds * 1e6,
        yardstick_microseconds=ITERATIONS * result.yardstick * 1e6,
        ratio=result.ratio / ITERATIONS,
        target=TARGETS["step"].get(dim),
        undisturbed=result.undisturbed,
    )


@dataclass(frozen=True)
class Parts:
    """On one thread, in yardsticks: whole passes, and without iterations, which is everything but the solve."""

    dim: int
    gflops: float  # of the yardstick's product
    forward: float
    forward_rest: float
    backward: float
    backward_rest: float


def least_cpu_seconds(works: list[Callable[[], object]], repetitions: int) -> list[float]:
    """The smallest processor time of each over many short runs in turns: whatever else goes on can only add."""
    best = [math.inf] * len(works)
    for _ in range(repetitions):
        for i, work in enumerate(works):
            start = time.process_time()
            work()
            best[i] = min(best[i], time.process_time() - start)
    return best


def measure_parts(tokens: int, dim: int, repetitions: int) -> Parts:
    calls, multiply = 10, product(64, 16, dim)
    works = [work(tokens, dim, r) for work in (forward, forward_backward) for r in (ITERATIONS, 0)]
    *times, yard = least_cpu_seconds([*works, lambda: [multiply() for _ in range(calls)]], repetitions)
    flops_per_second = calls * 2 * 16 * 64 * dim * dim / yard
    unit = tokens * HEADS * ITERATIONS * 2 * dim * dim / flops_per_second
    whole, rest, both, both_rest = (t / unit for t in times)
    return Parts(dim, flops_per_second * 1e-9, whole, rest, both - whole, both_rest - rest)


def show_parts(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    header = ["D", "product, GFLOP/s", "forward", "of it the solve", "backward", "of it the solve", "both"]
    body = []
    with Progress(len(args.dims), "parts") as progress:
        for dim in args.dims:
            p = measure_parts(256, dim, args.repetitions)
            passes = [p.forward, p.forward - p.forward_rest, p.backward, p.backward - p.backward_rest]
            numbers = [*passes, p.forward + p.backward]
            body.append([str(dim), f"{p.gflops:.0f}", *(f"{x:.2f}" for x in numbers)])
            progress.step(f"D = {dim}")
    print(f"{setting(args)}\nTimes the yardstick, T = 256, least processor time:\n{table(header, body, left=0)}")


def peak_in_fresh_process(work: str, tokens: int, dim: int) -> int | None:
    """An allocator that has served other sizes hides what a call needs; a new process has not."""
    command = [sys.executable, __file__, "--peak-of", work, str(tokens), str(dim), str(torch.get_num_threads())]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode != 0:
        raise RuntimeError(f"measuring the memory of {work}, T = {tokens}, D = {dim} failed:\n{answer.stderr}")
    return json.loads(answer.stdout)


def print_peak(work: str, tokens: str, dim: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    WORK[work](32, int(dim))()  # starts threads and loads code, and is too small to leave room for what follows
    print(json.dumps(peak_bytes(WORK[work](int(tokens), int(dim)))))


def accuracy(tokens: int, dim: int) -> dict[str, float]:
    """‖float32 − float64‖ / ‖float64‖ of the output and every gradient, on the same inputs."""
    d_o = torch.randn(1, tokens, HEADS, dim, generator=torch.Generator().manual_seed(1))
    results = {}
    for dtype in (torch.float32, torch.float64):
        arguments = [x.to(dtype).requires_grad_() for x in inputs(tokens, dim)]
        o, _ = gka.gated_kalmanet(*arguments, iterations=ITERATIONS)
        results[dtype] = [o.detach(), *torch.autograd.grad(o, arguments, d_o.to(dtype))]
    pairs = zip(["o", *(f"d{name}" for name in INPUTS)], *results.values(), strict=True)
    return {name: ((single.double() - double).norm() / double.norm()).item() for name, single, double in pairs}


def growth(rows: list[Row], work: str, dim: int) -> float | None:
    """Of the cost per token over GROWTH's range, each measured against the yardstick of its own moment."""
    first, last, _ = GROWTH
    ratios = {row.tokens: row.ratio for row in rows if row.work == work and row.dim == dim}
    return ratios[last] / ratios[first] if {first, last} <= ratios.keys() else None


def verdict(value: float, target: float | None, undisturbed: bool) -> str:
    if not undisturbed:
        return f"{value:.2f} ?"
    return f"{value:.2f}" + ("" if target is None else " ✓" if value <= target else " ✗")


def row_cells(rows: list[Row], dim: int) -> tuple[list[str], list[list[str]]]:
    header = ["T"]
    for work in WORK:
        header += [f"{work}, ms", "µs/token", f"× yardstick (≤ {TARGETS[work].get(dim, '–')})", "KiB/token"]
    body = []
    for tokens in sorted({row.tokens for row in rows if row.dim == dim}):
        cells = [f"{tokens:,}"]
        for work in WORK:
            row = next(r for r in rows if (r.dim, r.tokens, r.work) == (dim, tokens, work))
            memory = "–" if row.kib_per_token is None else f"{row.kib_per_token:.1f}"
            cells += [
                f"{row.milliseconds:.1f}",
                f"{row.microseconds_per_token:.1f}",
                verdict(row.ratio, row.target, row.undisturbed),
            ]
            cells.append(memory)
        body.append(cells)
    return header, body


def growth_sentence(rows: list[Row], dim: int) -> str:
    first, last, most = GROWTH
    parts = []
    for work in WORK:
        factor = growth(rows, work, dim)
        if factor is not None:
            parts.append(f"{work} {factor - 1:+.0%} {'✓' if factor <= most else '✗'}")
    if not parts:
        return ""
    return f"Cost per token from T = {first:,} to {last:,} (at most {most - 1:+.0%}): {', '.join(parts)}."


def setting(args: argparse.Namespace) -> str:
    cpu = next((b for b in gka.backends() if getattr(b, "name", "") == "cpu"), None)
    kernels = f", kernels: {cpu.detail}" if cpu is not None else ""
    options = "".join(f" {word}" for word in args.argv)
    return (
        f"`python bench/cpu.py{options}` on {time.strftime('%Y-%m-%d')}: {cpu_in_words()}; "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, gka {gka.__version__}{kernels}."
    )


STEP_HEADER = ["D", "step, µs", "30 products, µs", "× yardstick"]


def step_cells(steps: list[Step]) -> list[list[str]]:
    cells = []
    for s in steps:
        bound = "" if s.target is None else f" (≤ {s.target})"
        numbers = [
            f"{s.microseconds:.1f}",
            f"{s.yardstick_microseconds:.1f}",
            verdict(s.ratio, s.target, s.undisturbed) + bound,
        ]
        cells.append([str(s.dim), *numbers])
    return cells


def document(args: argparse.Namespace, rows: list[Row], steps: list[Step], errors: dict) -> str:
    parts = ["## CPU", setting(args), __doc__.split("\n\n")[1].replace("\n", " ")]
    parts.append(__doc__.split("\n\n")[2].replace("\n", " "))
    for dim in args.dims:
        mine = [row for row in rows if row.dim == dim]
        if mine:
            low, high = min(r.gflops for r in mine), max(r.gflops for r in mine)
            wobble = max(r.spread for r in mine)
            parts += [
                f"### D = V = {dim}",
                f"The yardstick's product ran at {low:.0f} to {high:.0f} GFLOP/s; within one row its samples lay at "
                f"most {wobble:.0%} apart.",
                markdown(*row_cells(rows, dim)),
                growth_sentence(rows, dim),
            ]
    parts += ["### One token", markdown(STEP_HEADER, step_cells(steps))]
    if errors:
        names = list(next(iter(errors.values())))
        body = [[str(dim), *(f"{error[name]:.1e}" for name in names)] for dim, error in errors.items()]
        parts += [
            "### Accuracy",
            f"float32 against float64 on the same inputs, T = {args.accuracy_tokens:,}, ‖a − b‖ / ‖b‖:",
            markdown(["D", *names], body),
        ]
    return "\n\n".join(part for part in parts if part)


def show(args: argparse.Namespace, rows: list[Row], steps: list[Step], errors: dict) -> None:
    def coloured(cells: list[str]) -> list[str]:
        return [paint(c, "32") if "✓" in c else paint(c, "1;31") if "✗" in c else c for c in cells]

    print(f"\n{setting(args)}")
    for dim in args.dims:
        header, body = row_cells(rows, dim)
        print(f"\n{paint(f'D = V = {dim}', '1')}\n{table(header, [coloured(cells) for cells in body], left=0)}")
        print(growth_sentence(rows, dim))
    print(
        f"\n{paint('One token', '1')}\n{table(STEP_HEADER, [coloured(cells) for cells in step_cells(steps)], left=0)}"
    )
    for dim, error in errors.items():
        print(f"float32 against float64, D = {dim}: " + "  ".join(f"{name} {e:.1e}" for name, e in error.items()))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python bench/cpu.py                          everything; some minutes\n"
        "  python bench/cpu.py --quick                  T up to 2,048, three repetitions; writes nothing\n"
        "  python bench/cpu.py --parts                  one thread, the solve and the rest; for busy machines too\n"
        "  GKA_CPU=avx2 python bench/cpu.py --no-write  another instruction set\n",
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="key and value dimensions (64 128)")
    parser.add_argument("--tokens", type=int, nargs="+", help=f"sequence lengths ({' '.join(map(str, TOKENS))})")
    parser.add_argument(
        "--repetitions", type=int, help="samples of each; the median counts (5; with --parts the least of 60)"
    )
    parser.add_argument("--threads", type=int, help="threads for torch and the kernels (torch's own choice)")
    parser.add_argument("--quick", action="store_true", help="a short look: T ≤ 2,048, 3 repetitions, nothing written")
    parser.add_argument("--parts", action="store_true", help="where the time goes on one thread; nothing written")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--force", action="store_true", help="write even if other programs disturbed the run")
    parser.add_argument("--doc", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the document to update")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for bench-cpu.json (out/)")
    parser.add_argument("--peak-of", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.argv = argv
    args.tokens = sorted(args.tokens or [t for t in TOKENS if not args.quick or t <= 2048])
    args.repetitions = args.repetitions or (60 if args.parts else 3 if args.quick else 5)
    args.write = not (args.quick or args.no_write)
    args.accuracy_tokens = min(2048, args.tokens[-1])
    if min([*args.tokens, *args.dims, args.repetitions]) < 1:
        parser.error("--dims, --tokens and --repetitions are whole numbers from 1 up")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.peak_of:
        print_peak(*args.peak_of)
        return 0
    if args.parts:
        show_parts(args)
        return 0
    if args.threads:
        torch.set_num_threads(args.threads)

    rows, steps, errors = [], [], {}
    with Progress(len(args.dims) * (len(args.tokens) * len(WORK) + 2), "bench") as progress:
        for dim in args.dims:
            steps.append(measure_step(dim, args.repetitions))
            progress.step(f"step, D = {dim}")
            for tokens in args.tokens:
                for work in WORK:
                    rows.append(measure_row(work, tokens, dim, args.repetitions))
                    progress.step(f"{work}, D = {dim}, T = {tokens}")
            errors[dim] = accuracy(args.accuracy_tokens, dim)
            progress.step(f"accuracy, D = {dim}")

    show(args, rows, steps, errors)
    disturbed = sum(not entry.undisturbed for entry in [*rows, *steps])
    if disturbed:
        print(f"\nother programs disturbed {disturbed} of the measurements (marked ?)", file=sys.stderr)
    if args.write and disturbed and not args.force:
        print("nothing written; --force writes all the same", file=sys.stderr)
    elif args.write:
        write_section(args.doc, "bench/cpu.py", document(args, rows, steps, errors))
        numbers = {
            "setting": setting(args),
            "rows": [asdict(r) for r in rows],
            "steps": [asdict(s) for s in steps],
        }
        numbers["errors"] = errors
        write_json(args.out / "bench-cpu.json", numbers)
        print(f"\nwrote {args.doc} and {args.out / 'bench-cpu.json'}")
    return 0


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
