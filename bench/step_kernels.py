"""What a training step on a GPU consists of, kernel by kernel: reads what NVIDIA's Nsight Compute measured.

    ncu --clock-control none --cache-control none --metrics gpu__time_duration.sum,dram__bytes.sum \\
        --csv --log-file step.csv gka bench train two-layers.json --against none --lengths 4k --steps 1
    python bench/step_kernels.py step.csv

prints the time of each part of one step (the launches between the optimiser's of two steps) and the kernels that take
most of it. Kernels run one by one under ncu, at the clock of a cool card: shares are to be trusted more than sums.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from common import markdown

UNITS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "byte": 1e-9, "Kbyte": 1e-6, "Mbyte": 1e-3, "Gbyte": 1.0}
OPTIMISER = "FusedAdam"
STEP = 20  # launches that lie at least between the optimisers of two steps
# In the order in which they are tried: the first that is found in a kernel's name says where it belongs.
PARTS = [
    ("optimiser, clipping", r"multi_tensor_apply"),
    ("GKA's operator", r"hopper::"),
    ("attention", r"fmha|flash|cudnn.*sdpa|sdpa"),
    ("short convolutions", r"convolve_runs|differentiate_runs|sum_taps"),
    ("norms of heads (GKA: gated)", r"vectors::norm_rows|vectors::differentiate_rows"),
    ("rotary embedding", r"turn_rows"),
    ("gates", r"open_gates|differentiate_gates"),
    ("SwiGLU", r"multiply_gated|differentiate_gated"),
    ("residual sums and their norms", r"add_norm|sum_kept|layer_norm|GammaBeta"),
    ("cross entropy", r"cross_entropy"),
    ("matrix products", r"nvjet|gemm|splitK|cutlass|cublas"),
]
OTHER = "casts, embedding and other operations of torch"


@dataclass
class Launch:
    name: str
    ms: float = 0.0
    gigabytes: float = 0.0


@dataclass
class Total:
    ms: float = 0.0
    gigabytes: float = 0.0
    launches: int = 0

    def add(self, launch: Launch) -> None:
        self.ms += launch.ms
        self.gigabytes += launch.gigabytes
        self.launches += 1


@dataclass
class Step:
    launches: list[Launch] = field(default_factory=list)

    def by(self, key) -> dict[str, Total]:
        totals: dict[str, Total] = defaultdict(Total)
        for launch in self.launches:
            totals[key(launch.name)].add(launch)
        return dict(sorted(totals.items(), key=lambda item: -item[1].ms))


def read_launches(path: Path) -> list[Launch]:
    launches: dict[int, Launch] = {}
    with path.open() as file:
        for row in csv.DictReader(line for line in file if line.startswith('"')):
            launch = launches.setdefault(int(row["ID"]), Launch(row["Kernel Name"]))
            value = float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"].replace("second", "s")]
            if row["Metric Name"].startswith("gpu__time"):
                launch.ms = value
            else:
                launch.gigabytes = value
    return [launches[i] for i in sorted(launches)]


def one_step(launches: list[Launch]) -> Step:
    """The launches after the optimiser's of one step, up to and with those of the next."""
    places = [i for i, launch in enumerate(launches) if OPTIMISER in launch.name]
    ends = [a for a, b in itertools.pairwise([*places, 10**9]) if b - a > STEP]
    if len(ends) < 2:
        raise SystemExit("the file has no whole step: it needs the optimiser of two; profile more launches")
    return Step(launches[ends[0] + 1 : ends[1] + 1])


def part_of(name: str) -> str:
    return next((part for part, pattern in PARTS if re.search(pattern, name)), OTHER)


def table(totals: dict[str, Total], whole: float, what: str) -> str:
    rows = [
        [name, f"{t.ms:.2f}", f"{t.ms / whole:.1%}", str(t.launches), f"{t.gigabytes / t.ms * 1e3:,.0f}"]
        for name, t in totals.items()
        if t.ms > 0
    ]
    return markdown([what, "ms", "share", "launches", "GB/s"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="ncu's CSV")
    parser.add_argument("--kernels", type=int, default=30, help="how many of them to list")
    options = parser.parse_args()
    step = one_step(read_launches(options.file))
    whole = sum(launch.ms for launch in step.launches)
    print(f"One step: {whole:.1f} ms in {len(step.launches)} launches\n")
    print(table(step.by(part_of), whole, "part") + "\n")
    print(table(dict(list(step.by(lambda name: name[:100]).items())[: options.kernels]), whole, "kernel"))


if __name__ == "__main__":
    main()
