"""How exact and how fast the operators are on this machine's GPU, beside torch's attention, in one run.

Accuracy first: output and gradients of bfloat16 calls against float64 on the same rounded inputs. Then times by CUDA
events, medians of runs that last 60 ms together, at least ten, inputs in rotation through more memory than the
second-level cache holds: forward, and forward + backward, of 8 heads with D = V = 128 and 30 iterations, gates in
float32, gradients for all six inputs; causal attention of the same shape (flash and cuDNN); one token for a batch of
sequences, called from Python and inside a CUDA graph; the block's small operations. Queued for longer, what keeps the
tensor cores busy meets the card's limit of power and slows down by a few percent. Targets, and the figures of the
authors' Triton kernels ("quoted"), are those of the project's brief, measured on an H200 with torch 2.11; --beside
measures such kernels in this run.

Prints the tables and writes them to docs/benchmarks.md and out/bench-gpu.json.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from block import HEADER as BLOCK_HEADER
from block import measure as measure_block
from block import relative_error
from common import ROOT, markdown, write_section
from console import Progress, paint, run_program, table, write_json
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gka

HEADS, DIM, ITERATIONS = 8, 128, 30
NAMES = ("q", "k", "v", "log_decay", "beta", "alpha")
ATTENTION = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
BOUNDS = {"o": 5e-3} | {f"d{name}": 1e-2 for name in NAMES}


@dataclass(frozen=True)
class Row:
    work: str
    batch: int
    tokens: int  # 1: a step
    target: float
    quoted: float | None
    heads: int = HEADS

    @property
    def name(self) -> str:
        size = f" T{self.tokens}" if self.tokens > 1 else ""
        return f"{self.work}, B{self.batch}{size}" + (f", {self.heads} heads" if self.heads != HEADS else "")


ROWS = (
    Row("forward", 4, 2048, 0.35, 0.83),
    Row("forward", 4, 4096, 0.49, 1.43),
    Row("forward", 4, 8192, 1.10, 2.38),
    Row("forward", 4, 16384, 2.0, 4.34),
    Row("forward", 1, 65536, 2.4, 5.36),
    Row("forward + backward", 4, 2048, 0.95, 2.88),
    Row("forward + backward", 4, 4096, 1.5, 4.28),
    Row("forward + backward", 4, 8192, 2.8, 7.49),
    Row("forward + backward", 4, 16384, 4.6, 14.29),
    Row("forward + backward", 1, 65536, 6.0, 20.13),
    Row("one token", 1, 1, 0.03, 0.16),
    Row("one token", 32, 1, 0.08, 0.41),
    Row("one token", 256, 1, 0.22, 0.62),
    Row("one token", 256, 1, 0.60, None, heads=32),
)


@dataclass
class Measured:
    row: Row
    here: float
    in_graph: float | None = None
    attention: dict[str, float] | None = None
    beside: float | None = None

    @property
    def holds(self) -> bool:
        return self.here <= self.row.target


@dataclass(frozen=True)
class Beside:
    """Other kernels, from the file that --beside names."""

    name: str
    text: str
    function: Callable[..., Tensor]


# ---- Inputs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Of a call; the defaults are those of the rows above."""

    heads: int = HEADS
    dim: int = DIM
    values: int = DIM
    dtype: torch.dtype = torch.bfloat16
    keys: str = "silu"  # of a Gaussian; unit: anywhere on the sphere; shared: that plus 0.7 of one unit vector


USUAL = Shape()
WEAK, STRONG = (1e-3, 0.05), (0.1, 6.0)  # −log γ between the two


def inputs(
    batch: int,
    tokens: int,
    seed: int,
    device: str = "cuda",
    decay: tuple[float, float] = WEAK,
    shape: Shape = USUAL,
) -> list[Tensor]:
    """As a block gives them: q and k unit vectors of SiLU of a Gaussian, −log γ evenly drawn in its own logarithm. Or
    with other keys."""
    source = torch.Generator(device).manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(batch, tokens, shape.heads, size, generator=source, device=device)

    def uniform() -> Tensor:
        return torch.rand(batch, tokens, shape.heads, generator=source, device=device)

    q, k = (F.normalize(F.silu(normal(shape.dim)), dim=-1).to(shape.dtype) for _ in range(2))
    if shape.keys != "silu":
        common = F.normalize(torch.randn(shape.dim, generator=source, device=device), dim=-1)
        share = 0.7 if shape.keys == "shared" else 0.0
        k = F.normalize(F.normalize(normal(shape.dim), dim=-1) + share * common, dim=-1).to(shape.dtype)
    low, high = decay
    return [q, k, normal(shape.values).to(shape.dtype), -low * (high / low) ** uniform(), uniform(), uniform()]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


# ---- What is asked of them ------------------------------------------------------------------------------------------


def ours(*tensors: Tensor, **options: object) -> Tensor:
    return gka.gated_kalmanet(*tensors, **({"iterations": ITERATIONS} | options))[0]


def with_certainty(*tensors: Tensor) -> Tensor:
    return gka.gated_kalmanet_certainty(*tensors, iterations=ITERATIONS)[0]


def solved(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
    """Neither v nor alpha has a part in it."""
    return gka.ridge_solve(q, k, log_decay, beta, iterations=ITERATIONS)[0]


SKETCH = 32


@functools.cache
def sketch_of(heads: int, dim: int, like: tuple[torch.device, torch.dtype]) -> Tensor:
    """Orthonormal rows for every head, rounded to bfloat16."""
    columns = torch.linalg.qr(torch.randn(heads, dim, SKETCH, generator=torch.Generator().manual_seed(5)))[0]
    return columns.mT.bfloat16().to(*like).contiguous()


def sketched(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
    """What a layer with `sketch_dim` has in the operator's place (src/layers/gka.cpp)."""
    p = sketch_of(*q.shape[-2:], (q.device, q.dtype))
    low_q, low_k, q, k = torch.ops.gka.to_sketch(q, k, p)
    query = torch.ops.gka.from_sketch(q, solved(low_q, low_k, v, log_decay, beta, alpha), p, alpha)
    if not q.is_cuda:
        return gka.linear_memory(query, k, v, log_decay, beta)[0]
    named = {"log_decay": log_decay, "beta": beta, "delta": False, "scale": 1.0}
    return torch.ops.gka.chunked_delta_rule(query, k, v, **named)[0]


@dataclass(frozen=True)
class Asked:
    """A kind of call; γ lies between exp of minus `decay`."""

    name: str
    shape: Shape = USUAL
    decay: tuple[float, float] = WEAK
    options: tuple[tuple[str, object], ...] = ()
    group: int = 1  # how many heads share a key and a value
    function: Callable[..., Tensor] = ours  # takes the arguments of gka.gated_kalmanet
    solve: tuple[tuple[str, object], ...] = ()  # for gka.choose_kernel, where the call is not gka.gated_kalmanet
    has_gradients: bool = True

    def inputs(self, batch: int, tokens: int, seed: int, device: str = "cuda") -> list[Tensor]:
        q, k, v, *gates = inputs(batch, tokens, seed, device, self.decay, self.shape)
        return [q, *(tensor[:, :, :: self.group].contiguous() for tensor in (k, v)), *gates]

    def run(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors, **dict(self.options))

    def kernel(self) -> str:
        sizes = {"key_dim": self.shape.dim, "value_dim": self.shape.values}
        return gka.choose_kernel("cuda", self.shape.dtype, **sizes | dict(self.options) | dict(self.solve))[0]


CONSTANT = (("ridge_mode", "constant"), ("ridge", 0.25))
NARROW, WIDE = Shape(heads=32, dim=32, values=32), Shape(heads=4, dim=256, values=256)


# ---- Accuracy -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case(Asked):
    """Of accuracy. The first one is the brief's."""

    batch: int = 1
    tokens: int = 256
    published: bool = False  # whether others' kernels are asked too; they would compile everything anew for a length


CASES = (
    Case("T256, γ 0.95 to 0.999", published=True),
    Case("T256, γ 0.002 to 0.9", decay=STRONG, published=True),
    Case("128 sequences of 2 tokens", batch=128, tokens=2),
    Case("T256, keys that share a direction", shape=Shape(keys="shared"), published=True),
    Case("T256, 32 heads of 32", NARROW),
    Case("T256, 4 heads of 256", WIDE),
    Case("T256, constant λ = 0.25", options=CONSTANT),
    Case("T256, constant λ = 0.02", options=(("ridge_mode", "constant"), ("ridge", 0.02))),
    Case("T256, 2 key heads of 8", group=4),
    Case("T256, ridge_solve of 32 channels", Shape(dim=32), function=solved),
)


def errors_of(function: Callable[..., Tensor], case: Case) -> dict[str, float]:
    """‖got − want‖ / ‖want‖ of the output and of each gradient that exists."""
    rounded = case.inputs(case.batch, case.tokens, seed=3, device="cpu")
    wide = leaves([tensor.double() for tensor in rounded])
    here = leaves([tensor.cuda() for tensor in rounded])
    o = function(*here)
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    got = [o, *torch.autograd.grad(o, here, d_o.cuda(), allow_unused=True)]
    if got[1 + NAMES.index("beta")] is None:  # a layer without β
        wide[NAMES.index("beta")] = torch.ones_like(wide[NAMES.index("beta")]).requires_grad_()
    exact = case.run(*wide)
    want = [exact, *torch.autograd.grad(exact, wide, d_o.double(), allow_unused=True)]
    names = ["o", *(f"d{name}" for name in NAMES)]
    return {
        name: relative_error(mine.cpu(), theirs)
        for name, mine, theirs in zip(names, got, want, strict=True)
        if mine is not None
    }


# ---- Times ----------------------------------------------------------------------------------------------------------


def between(works: list[Callable[[], object]], count: int, calls: int) -> list[float]:
    """Milliseconds per call, `works` in turn, in `count` runs of `calls` calls. All are queued before the first is
    waited for: it is the GPU's time, unless Python cannot keep up, and then it is Python's."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    turn = itertools.cycle(works)
    events[0].record()
    for event in events[1:]:
        for _ in range(calls):
            next(turn)()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) / calls for before, after in itertools.pairwise(events)]


def median_time(works: list[Callable[[], object]], budget: float, calls: int = 1) -> float:
    """The median time of a call in milliseconds: at least ten runs, else as many as take `budget` milliseconds."""
    warm = between(works, len(works) + 2, 1)
    return statistics.median(between(works, min(300, max(10, int(budget / max(calls * warm[-1], 1e-3)))), calls))


def rotation(batch: int, tokens: int) -> int:
    """How many sets of inputs are more than any cache holds."""
    return max(2, min(8, 200_000_000 // (6 * batch * tokens * HEADS * DIM) + 1))


def passes(function: Callable[..., Tensor], sets: list[list[Tensor]], backward: bool) -> list[Callable[[], object]]:
    def forward_of(tensors: list[Tensor]) -> Callable[[], object]:
        return lambda: function(*tensors)

    def both_of(tensors: list[Tensor]) -> Callable[[], object]:
        needed = leaves(tensors)
        with torch.no_grad():
            d_o = torch.randn_like(function(*needed))
        return lambda: torch.autograd.grad(function(*needed), needed, d_o, allow_unused=True)

    return [(both_of if backward else forward_of)(tensors) for tensors in sets]


# What is asked for less often: where it runs, and how long it takes at B4 T4096.
# `refine=False` takes all thirty steps, where the others take those that a bound proves to be enough (docs/kernels.md).
OTHERS = (
    Asked("as above"),
    Asked("thirty plain steps (refine=False)", options=(("refine", False),)),
    Asked("12 iterations", options=(("iterations", 12),)),
    Asked("γ 0.002 to 0.9: every chunk refined", decay=STRONG),
    Asked("keys anywhere on the sphere", Shape(keys="unit")),
    Asked("keys that share a direction", Shape(keys="shared")),
    Asked("2 key heads of 8", group=4),
    Asked("7 heads to a key, D = V = 64, 14 heads", Shape(heads=14, dim=64, values=64), group=7),
    Asked("constant λ = 0.25", options=CONSTANT),
    Asked(
        "sketched: solved in 32 channels of 128",
        function=sketched,
        solve=(("key_dim", SKETCH), ("part", "solve")),
    ),
    Asked("certainty too", function=with_certainty, has_gradients=False),
    Asked("D = V = 64, 16 heads", Shape(heads=16, dim=64, values=64)),
    Asked("D = V = 32, 32 heads", NARROW),
    Asked("D = V = 32, 32 heads, every chunk refined", NARROW, STRONG),
    Asked("V = 256", Shape(values=256)),
    Asked("D = V = 256, 4 heads", WIDE),
    Asked("D = V = 256, 4 heads, every chunk refined", WIDE, STRONG),
    Asked("float32", Shape(dtype=torch.float32)),
)


def measure_others() -> list[list[str]]:
    rows = []
    for other in OTHERS:
        sets = [other.inputs(4, 4096, seed) for seed in range(3)]
        times = [
            median_time(passes(other.run, sets, backward), 30) for backward in (False, True)[: 1 + other.has_gradients]
        ]
        rows.append([other.name, other.kernel(), *map(number, [*times, None][:2])])
        torch.cuda.empty_cache()
    return rows


def attention(backend: SDPBackend) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def measure_pass(row: Row, budget: float, beside: Beside | None) -> Measured:
    backward = "backward" in row.work
    sets = [inputs(row.batch, row.tokens, seed) for seed in range(rotation(row.batch, row.tokens))]
    measured = Measured(row, median_time(passes(ours, sets, backward), budget))
    if backward:
        heads_first = [[tensor.transpose(1, 2).contiguous() for tensor in tensors[:3]] for tensors in sets]
        measured.attention = {
            name: median_time(passes(attention(backend), heads_first, True), budget)
            for name, backend in ATTENTION.items()
        }
    if beside is not None:
        measured.beside = median_time(passes(beside.function, sets, backward), budget)
    return measured


def measure_step(row: Row, budget: float) -> Measured:
    """States of 128 KiB per sequence and head, in rotation through at least 256 MiB."""
    count, heads = max(2, 256 // row.batch), row.heads
    tokens = [[t[:, 0] for t in inputs(row.batch, 1, seed, shape=Shape(heads=heads))] for seed in range(count)]
    states = []
    for _ in range(count):
        root = torch.randn(row.batch, heads, DIM, 2 * DIM, device="cuda")
        states.append(((root @ root.mT) / DIM, torch.randn(row.batch, heads, DIM, DIM, device="cuda")))

    def step_of(i: int) -> Callable[[], object]:
        return lambda: gka.gated_kalmanet_step(*tokens[i], state=states[i], iterations=ITERATIONS)

    works = [step_of(i) for i in range(count)]
    here = median_time(works, budget, calls=16)
    captured = works[: min(count, 32)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in captured:
            work()
    in_graph = median_time([graph.replay], budget) / len(captured)
    return Measured(row, here, in_graph=in_graph)


# ---- What is shown and written --------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def cells_of(measured: list[Measured], beside: Beside | None) -> tuple[list[str], list[list[str]]]:
    header = ["work", "gka, ms", "at most", "in a graph", "attention, cuDNN", "attention, flash", "Triton GKA, quoted"]
    header += [f"{beside.name}, in this run"] if beside else []
    body = []
    for m in measured:
        verdict = f"{number(m.here)} {'✓' if m.holds else '✗'}"
        cells = [m.row.name, verdict, number(m.row.target), number(m.in_graph)]
        cells += [number((m.attention or {}).get(name)) for name in ATTENTION]
        body.append(cells + [number(m.row.quoted)] + ([number(m.beside)] if beside else []))
    return header, body


def accuracy_cells(errors: dict[str, dict[str, float]]) -> tuple[list[str], list[list[str]]]:
    names = list(BOUNDS)
    body = []
    for case, of in errors.items():
        marks = [f"{of[n]:.1e} {'✓' if of[n] <= BOUNDS[n] else '✗'}" if n in of else "" for n in names]
        body.append([case, *marks])
    return ["against float64", *(f"{name} (≤ {BOUNDS[name]:g})" for name in names)], body


def driver() -> str:
    """The version of NVIDIA's driver."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.split("\n", 1)[0].strip()


def setting(args: argparse.Namespace) -> str:
    kernel, _ = gka.choose_kernel("cuda", torch.bfloat16)
    given = {
        "--quick": args.quick,
        f"--row '{args.row}'": args.row,
        f"--beside {args.beside and args.beside.name}": args.beside,
    }
    options = "".join(f" {option}" for option, is_given in given.items() if is_given)
    forced = f"GKA_GPU={os.environ['GKA_GPU']} " if os.environ.get("GKA_GPU") else ""
    return (
        f"`{forced}python bench/gpu.py{options}` on {time.strftime('%Y-%m-%d %H:%M')}: "
        f"{torch.cuda.get_device_name()}, driver {driver()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}, gka {gka.__version__}, kernels: {kernel}."
    )


OTHERS_HEADER = ["B4 T4096", "kernels", "forward, ms", "forward + backward, ms"]


@dataclass
class Report:
    """Everything that is shown and written."""

    said: str
    beside: Beside | None
    errors: dict[str, dict[str, float]]
    measured: list[Measured]
    others: list[list[str]]
    block: list[list[str]]


def document(report: Report) -> str:
    beside = report.beside
    parts = ["## GPU", report.said, *(text.replace("\n", " ") for text in __doc__.split("\n\n")[1:2])]
    parts += ["### Accuracy", "bfloat16, ‖a − b‖ / ‖b‖ over all tokens; rounding o alone is 1.7e-3:"]
    parts += [markdown(*accuracy_cells(report.errors))]
    parts += ["### Times", markdown(*cells_of(report.measured, beside))]
    if beside:
        parts.append(f"{beside.name}, in this run: {beside.text}")
    if report.others:
        parts += ["### Other sizes and types", markdown(OTHERS_HEADER, report.others)]
    if report.block:
        parts += ["### The block's small operations", markdown(BLOCK_HEADER, report.block)]
    return "\n\n".join(parts)


def coloured(rows: list[list[str]]) -> list[list[str]]:
    return [[paint(c, "32") if "✓" in c else paint(c, "1;31") if "✗" in c else c for c in row] for row in rows]


def show(report: Report) -> None:
    measured = report.measured
    print(f"\n{report.said}\n")
    for header, body in (
        accuracy_cells(report.errors),
        cells_of(measured, report.beside),
        (OTHERS_HEADER, report.others),
        (BLOCK_HEADER, report.block),
    ):
        if body:
            print(table(header, coloured(body)))
    beyond = [m.row.name for m in measured if not m.holds]
    print(
        f"{len(measured) - len(beyond)} of {len(measured)} targets hold"
        + (f"; not: {', '.join(beyond)}" * bool(beyond))
    )


# ---- The command ----------------------------------------------------------------------------------------------------


def load_beside(path: Path) -> Beside:
    spec = importlib.util.spec_from_file_location("beside", path)
    if spec is None or spec.loader is None or not path.exists():
        sys.exit(f"bench/gpu.py: --beside takes a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    if not callable(getattr(module, "gated_kalmanet", None)):
        sys.exit(f"bench/gpu.py: {path} has no function gated_kalmanet(q, k, v, log_decay, beta, alpha) that returns o")
    text = " ".join((module.__doc__ or "").split())
    return Beside(getattr(module, "NAME", path.stem), text, module.gated_kalmanet)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python bench/gpu.py                           everything; about a minute\n"
        "  python bench/gpu.py --quick                   fewer samples, no small operations; writes nothing\n"
        "  python bench/gpu.py --row 'B4 T4096'          the rows whose name has this in it; writes nothing\n"
        "  GKA_GPU=plain python bench/gpu.py --no-write  without the Hopper kernels\n"
        "  python bench/gpu.py --beside other.py         other kernels too, see --beside\n",
    )
    parser.add_argument("--quick", action="store_true", help="a short look: few samples, nothing written")
    parser.add_argument("--row", help="only the rows whose name contains this; nothing written")
    parser.add_argument(
        "--beside",
        type=Path,
        help="a Python file whose gated_kalmanet(q, k, v, log_decay, beta, alpha) is checked and timed in this run",
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--doc", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the document to update")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for bench-gpu.json (out/)")
    args = parser.parse_args(argv)
    args.budget = 30.0 if args.quick else 60.0
    args.rows = [row for row in ROWS if args.row is None or args.row in row.name]
    args.write = not (args.quick or args.row or args.no_write)
    if not args.rows:
        parser.error(f"--row {args.row!r} is in none of: {'; '.join(row.name for row in ROWS)}")
    return args


def check_gpu() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench/gpu.py: torch sees no GPU on this machine; run it where torch.cuda.is_available()")
    cuda = {backend.name: backend for backend in gka.backends()}["cuda"]
    if not cuda.available:
        sys.exit(f"bench/gpu.py: gka has no kernels for this GPU: {cuda.detail}")


def main(argv: list[str]) -> int:
    args = parse(argv)
    check_gpu()
    beside = load_beside(args.beside) if args.beside else None
    errors = {f"gka, {case.name}": errors_of(case.run, case) for case in CASES}
    if beside:
        errors |= {f"{beside.name}, {c.name}": errors_of(beside.function, c) for c in CASES if c.published}
    measured: list[Measured] = []
    with Progress(len(args.rows), "bench") as progress:
        for row in args.rows:
            step = row.tokens == 1
            measured.append(measure_step(row, args.budget) if step else measure_pass(row, args.budget, beside))
            torch.cuda.empty_cache()
            progress.step(row.name)
    everything = not (args.quick or args.row)
    others = measure_others() if everything else []
    block = measure_block("cuda", 30) if everything else []
    report = Report(setting(args), beside, errors, measured, others, block)
    show(report)
    if args.write:
        write_section(args.doc, "bench/gpu.py", document(report))
        rows = [asdict(m) for m in measured]
        numbers = {"setting": report.said, "rows": rows, "errors": errors, "others": others, "block": block}
        write_json(args.out / "bench-gpu.json", numbers)
        print(f"wrote {args.doc} and {args.out / 'bench-gpu.json'}")
    return 0


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
