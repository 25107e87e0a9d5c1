"""How fast the block's small operations are, against the same by torch's own operations (eager) and a plain copy.

The convolution with SiLU and L2 norm and the gated RMS norm, 8 heads of 128 channels, forward, forward + backward and
one token, on the CPU in float32 and, where there is one, on the GPU in bfloat16. Accuracy against float64 first. The
copy moves what the operation has to read and write and no more: the floor. On the GPU medians of CUDA events over
rotated inputs; on the CPU medians of the wall clock. Prints a table; `--write` puts it into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import ROOT, cpu_in_words, markdown, write_section
from console import table
from torch import Tensor
from torch.nn import functional as F

import gka

HEADS, DIM, WIDTH = 8, 128, 4
CHANNELS = HEADS * DIM
SIZES = {"cpu": [(1, 2048), (4, 2048)], "cuda": [(4, 2048), (4, 8192), (1, 65536)]}
BATCHES = {"cpu": [1, 32], "cuda": [1, 32, 256]}
HEADER = ["work", "size", "gka, ms", "eager torch, ms", "times faster", "copy, ms", "error"]
COPIES = {"cpu": 1, "cuda": 4}  # of the inputs, used in turn: more than the second-level cache holds


def eager_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Padding, conv1d, SiLU, L2 norm."""
    line = F.pad(x.transpose(1, 2), (WIDTH - 1, 0))
    y = F.silu(F.conv1d(line, weight, groups=CHANNELS)).transpose(1, 2).unflatten(-1, (HEADS, DIM))
    return (y / (y.norm(dim=-1, keepdim=True) + 1e-6)).flatten(-2)


def fused_conv(x: Tensor, weight: Tensor) -> Tensor:
    return gka.short_conv(x, weight, l2_norm="divide", head_dim=DIM)[0]


def eager_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    y = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    return (y * F.silu(gate.float())).to(x.dtype)


def eager_step(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    window = torch.cat([state, x[:, :, None]], -1)
    state.copy_(window[:, :, 1:])
    y = F.silu((window * weight[:, 0]).sum(-1)).unflatten(-1, (HEADS, DIM))
    return (y / (y.norm(dim=-1, keepdim=True) + 1e-6)).flatten(-2)


def fused_step(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    return gka.short_conv_step(x, weight, l2_norm="divide", head_dim=DIM, state=state)


def milliseconds(device: str, works: list[Callable[[], object]], repetitions: int) -> float:
    for work in works:
        work()
    times = []
    for i in range(repetitions):
        work = works[i % len(works)]
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def trained(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    """Forward + backward."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    weights = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(function(*leaves), leaves, weights)


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def measure(device: str, repetitions: int) -> list[list[str]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def row(name: str, size: str, fused, eager, sets: list[list[Tensor]], moved: int, wrap=None) -> list[str]:
        wrap = wrap or (lambda function, inputs: lambda: function(*inputs))
        doubles = [tensor.double().clone() for tensor in sets[0]]
        error = relative_error(fused(*[tensor.clone() for tensor in sets[0]]), eager(*doubles))
        ours = milliseconds(device, [wrap(fused, inputs) for inputs in sets], repetitions)
        theirs = milliseconds(device, [wrap(eager, inputs) for inputs in sets], repetitions)
        source = [torch.empty(max(moved // 2, 1), dtype=torch.uint8, device=device).fill_(1) for _ in sets]
        floor = milliseconds(device, [lambda s=s: s.clone() for s in source], repetitions)
        return [name, size, f"{ours:.3f}", f"{theirs:.3f}", f"{theirs / ours:.1f}", f"{floor:.3f}", f"{error:.1e}"]

    rows = []
    copies, bytes_each = COPIES[device], dtype.itemsize
    for batch, tokens in SIZES[device]:
        size, numbers = f"B{batch} T{tokens}", batch * tokens * CHANNELS
        weight = draw(CHANNELS, 1, WIDTH)
        sets = [[draw(batch, tokens, CHANNELS), weight] for _ in range(copies)]
        rows.append(row("short_conv", size, fused_conv, eager_conv, sets, 2 * numbers * bytes_each))
        rows.append(row("short_conv + backward", size, fused_conv, eager_conv, sets, 5 * numbers * bytes_each, trained))
        shape = (batch, tokens, HEADS, DIM)
        sets = [[draw(*shape), draw(*shape), draw(DIM)] for _ in range(copies)]
        rows.append(row("gated_rms_norm", size, gka.gated_rms_norm, eager_norm, sets, 3 * numbers * bytes_each))
        rows.append(
            row(
                "gated_rms_norm + backward",
                size,
                gka.gated_rms_norm,
                eager_norm,
                sets,
                8 * numbers * bytes_each,
                trained,
            )
        )
    for batch in BATCHES[device]:
        weight = draw(CHANNELS, 1, WIDTH)
        sets = [[draw(batch, CHANNELS), weight, draw(batch, CHANNELS, WIDTH - 1)] for _ in range(copies)]
        moved = batch * CHANNELS * (2 + 2 * (WIDTH - 1)) * bytes_each
        rows.append(row("short_conv_step", f"B{batch}", fused_step, eager_step, sets, moved))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one, and cpu")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    options = parser.parse_args()
    gpu = torch.cuda.is_available() and {b.name: b.available for b in gka.backends()}["cuda"]
    devices = [options.device] if options.device else (["cuda"] if gpu else []) + ["cpu"]
    for device in devices:
        name = torch.cuda.get_device_name() if device == "cuda" else cpu_in_words()
        rows = measure(device, options.repetitions)
        title = f"The block's small operations on {name}, {'bfloat16' if device == 'cuda' else 'float32'}"
        print(title)
        print(table(HEADER, rows))
        if options.write:
            command = "python bench/block.py --write"
            text = f"## {title}\n\n`{command}`, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}."
            document = Path(ROOT) / "docs" / "benchmarks.md"
            write_section(document, f"block {device}", text + "\n\n" + markdown(HEADER, rows))


if __name__ == "__main__":
    main()
