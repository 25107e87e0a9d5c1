"""flash-linear-attention's whole layers, timed as `gka bench layer` times ours: forward and backward of one layer of
the same width and heads, gradients of weights and input; the median of so many calls. Prints the same JSON.

    python3 beside.py FOLDER --lengths 1k,4k,16k,64k        FOLDER has the package `fla`

--json-lines prints every row by itself, as soon as it is measured. FLA's kernels are compiled and tuned at their first
call, which is not timed and takes most of the time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

WARMING = 3  # calls before those that count: compiling, tuning, memory

# By the names of `gka bench layer`: module, class, what differs from its defaults. Values of Gated DeltaNet are twice
# as wide as its keys there and here; GLA has half as many heads, with keys half as wide as all of them together.
LAYERS = {
    "DN": ("delta_net", "DeltaNet", lambda heads, dim: {"num_heads": heads}),
    "GDN": ("gated_deltanet", "GatedDeltaNet", lambda heads, dim: {"num_heads": heads, "head_dim": dim, "expand_v": 2}),
    "KDA": ("kda", "KimiDeltaAttention", lambda heads, dim: {"num_heads": heads, "head_dim": dim}),
    "GLA": ("gla", "GatedLinearAttention", lambda heads, dim: {"num_heads": max(1, heads // 2)}),
    "M2": ("mamba2", "Mamba2", lambda heads, dim: {"num_heads": 2 * heads * dim // 64, "head_dim": 64}),
}


def make(token: str, options: argparse.Namespace) -> torch.nn.Module:
    module, name, choices = LAYERS[token]
    layer = getattr(importlib.import_module(f"fla.layers.{module}"), name)
    width = options.heads * options.head_dim
    made = layer(hidden_size=width, layer_idx=0, **choices(options.heads, options.head_dim))
    return made.to(options.device, torch.bfloat16 if options.device != "cpu" else torch.float32)


def seconds(work: Callable[[], object], device: str) -> float:
    if device == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def measure(layer: torch.nn.Module, length: int, options: argparse.Namespace) -> float:
    """Milliseconds."""
    weight = next(layer.parameters())
    shape = (options.batch, length, options.heads * options.head_dim)
    x = torch.randn(shape, device=weight.device, dtype=weight.dtype).requires_grad_()
    d_y = torch.randn_like(x)

    def work() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).backward(d_y)

    for _ in range(WARMING):
        work()
    return 1e3 * statistics.median(seconds(work, options.device) for _ in range(options.repetitions))


def rows_of(token: str, options: argparse.Namespace) -> Iterator[dict]:
    """What cannot be imported or does not fit has its reason in place of a time."""
    name = f"FLA {token}"
    try:
        layer = make(token, options)
    except (ImportError, AttributeError, TypeError) as error:
        yield from ({"name": name, "length": length, "error": str(error)} for length in options.lengths)
        return
    for length in options.lengths:
        row = {"name": name, "length": length}
        try:
            row["milliseconds"] = measure(layer, length, options)
        except RuntimeError as error:  # out of memory among them
            row["error"] = str(error).splitlines()[0]
        print(row, file=sys.stderr, flush=True)
        yield row


def setting(options: argparse.Namespace) -> dict:
    gpu = options.device != "cpu"
    return {
        "machine": torch.cuda.get_device_name() if gpu else "cpu",
        "date": time.strftime("%Y-%m-%d"),
        "dtype": "bfloat16" if gpu else "float32",
        "fla": getattr(sys.modules.get("fla"), "__version__", None),
        "torch": torch.__version__,
        "batch": options.batch,
        "heads": options.heads,
        "head_dim": options.head_dim,
    }


def count(text: str) -> list[int]:
    return [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the package fla")
    parser.add_argument("--layers", default="DN,GDN,KDA,GLA,M2", help="any of DN, GDN, KDA, GLA, M2")
    parser.add_argument("--lengths", type=count, default=count("1k,2k,4k,8k,16k,32k,64k"))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json-lines", action="store_true")
    options = parser.parse_args()
    options.layers = options.layers.split(",")
    if unknown := [token for token in options.layers if token not in LAYERS]:
        parser.error(f"--layers got {unknown[0]}; it takes any of {', '.join(LAYERS)}, separated by commas")
    return options


def main() -> int:
    options = arguments()
    sys.path.insert(0, str(options.folder.resolve()))
    rows = []
    for token in options.layers:
        for row in rows_of(token, options):
            rows.append(row)
            if options.json_lines:
                print(json.dumps(setting(options) | row), flush=True)
    if not options.json_lines:
        print(json.dumps(setting(options) | {"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
