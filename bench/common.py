"""What every benchmark here needs: the machine in words, two things timed in turns, a section of docs/benchmarks.md.

Clocks drift and neighbours come and go, so a ratio is only trusted when both sides were timed within moments of each
other: `race` measures the yardstick right before and right after each sample of the work.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

from console import write_atomically  # noqa: E402

INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def seconds(work: Callable[[], object], calls: int) -> float:
    """Per call, over `calls` of them."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def calls_for(work: Callable[[], object], least: float) -> int:
    """How many calls take at least `least` seconds. Warms up as well; a long call is not run twice for it."""
    first = seconds(work, 1)
    again = first if first > 4 * least else seconds(work, 1)
    return max(1, math.ceil(least / max(again, 1e-7)))


@dataclass(frozen=True)
class Race:
    seconds: float  # median of the work
    yardstick: float  # median of the yardstick
    ratio: float  # median of the ratios of neighbours, which is not the ratio of the medians
    spread: float  # of the yardstick over the race: (max − min) / median


def race(work: Callable[[], object], yardstick: Callable[[], object], repetitions: int, least: float = 0.05) -> Race:
    work_calls, yard_calls = calls_for(work, least), calls_for(yardstick, least)
    yards, times, ratios = [seconds(yardstick, yard_calls)], [], []
    for _ in range(repetitions):
        times.append(seconds(work, work_calls))
        yards.append(seconds(yardstick, yard_calls))
        ratios.append(times[-1] / (0.5 * (yards[-1] + yards[-2])))
    yard = statistics.median(yards)
    return Race(statistics.median(times), yard, statistics.median(ratios), (max(yards) - min(yards)) / yard)


def cpu_in_words() -> str:
    """Model, cores and the instruction sets that matter here."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    present = [name for name in INSTRUCTION_SETS if name in flags]
    return (
        f"{fields.get('model name', 'unknown CPU')}, {os.cpu_count()} cores, {' '.join(present) or 'no vector units'}"
    )


def others_share(period: float = 1.0) -> float | None:
    """The share of the machine that other programs use while this one sleeps for `period` seconds."""

    def idle_and_total() -> tuple[int, int]:
        ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)

    try:
        idle, total = idle_and_total()
        time.sleep(period)
        idle_after, total_after = idle_and_total()
    except OSError:
        return None
    return 1 - (idle_after - idle) / max(1, total_after - total)


def status_bytes(field: str) -> int | None:
    """VmRSS, VmHWM, … of this process."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def peak_bytes(work: Callable[[], object]) -> int | None:
    """How far the resident memory of this process rises above its start while `work` runs; Linux only."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    except OSError:
        return None
    before = status_bytes("VmRSS")
    work()
    peak = status_bytes("VmHWM")
    return None if before is None or peak is None else max(0, peak - before)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def write_section(document: Path, name: str, text: str) -> None:
    """Replaces the section of `document` between the markers that carry `name`, or adds it at the end."""
    begin, end = f"<!-- {name}: begin, do not edit -->", f"<!-- {name}: end -->"
    old = (
        document.read_text()
        if document.exists()
        else "# Benchmarks\n\nEach section is written by the command it names.\n"
    )
    section = f"{begin}\n{text.strip()}\n{end}\n"
    if begin in old and end in old:
        head, rest = old.split(begin, 1)
        new = head + section + rest.split(end, 1)[1].removeprefix("\n")
    else:
        new = old.rstrip("\n") + "\n\n" + section
    write_atomically(document, lambda path: path.write_text(new))
