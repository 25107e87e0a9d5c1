"""What every benchmark here needs: the machine in words, two things timed in turns, a section of docs/benchmarks.md.

Clocks drift and neighbours come and go, so a ratio is only trusted when both sides were timed within moments of each
other: `race` measures the yardstick right before and right after each sample of the work. On a busy machine even that
misleads: one occupied core slows many small threaded products twentyfold and a long call little. So a race counts the
time other programs took meanwhile, and is run again when it was disturbed.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

from console import PROGRAM, write_atomically  # noqa: E402

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
    spread: float  # of the yardstick over the race: (max − min) / median, the extreme sample on either side left out
    others: float  # the share of the machine that other programs used meanwhile

    @property
    def undisturbed(self) -> bool:
        return self.others < 0.05 and self.spread < 0.3


def _race_once(work: Callable[[], object], yardstick: Callable[[], object], repetitions: int, least: float) -> Race:
    work_calls, yard_calls = calls_for(work, least), calls_for(yardstick, least)
    meter = OthersMeter()
    yards, times, ratios = [seconds(yardstick, yard_calls)], [], []
    for _ in range(max(3, repetitions)):
        times.append(seconds(work, work_calls))
        yards.append(seconds(yardstick, yard_calls))
        ratios.append(times[-1] / (0.5 * (yards[-1] + yards[-2])))
    inner = sorted(yards)[1:-1]
    yard = statistics.median(yards)
    spread = (inner[-1] - inner[0]) / yard
    return Race(statistics.median(times), yard, statistics.median(ratios), spread, meter.share())


def race(work: Callable[[], object], yardstick: Callable[[], object], repetitions: int, least: float = 0.05) -> Race:
    """Up to three races, until one was undisturbed; otherwise the least disturbed."""
    races: list[Race] = []
    while len(races) < 3 and not (races and races[-1].undisturbed):
        races.append(_race_once(work, yardstick, repetitions, least))
    return races[-1] if races[-1].undisturbed else min(races, key=lambda r: (r.others, r.spread))


class OthersMeter:
    """The share of the machine's time that went neither to this process nor to idling, since the meter was made; 0
    where /proc does not say."""

    def __init__(self) -> None:
        self.start = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        try:
            ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return None
        own = os.times()
        second = os.sysconf("SC_CLK_TCK")
        return sum(ticks) / second, (ticks[3] + ticks[4]) / second, own.user + own.system

    def share(self) -> float:
        now = self._read()
        if self.start is None or now is None:
            return 0.0
        total, idle, own = (after - before for after, before in zip(now, self.start, strict=True))
        return max(0.0, (total - idle - own) / total) if total > 0 else 0.0


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


def gka_json(arguments: list[str], source: str | None = None) -> dict:
    """What `gka ARGUMENTS` prints as JSON, its progress left on stderr; or what it printed before, in `source`."""
    if source is not None:
        return json.loads(Path(source).read_text())
    return json.loads(subprocess.run([PROGRAM, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout)


def gka_rows(arguments: list[str], source: str | None = None, keep: Path | None = None) -> dict:
    """What `gka ARGUMENTS --json-lines` measures: its rows, and beside them what they have in common. Each row is
    printed into `keep` as soon as it is there, so that a limit of time costs only what is being measured. Or the rows
    of an earlier run, in `source`: lines, or what --json printed."""
    if source is not None:
        told = [json.loads(line) for line in json_texts(Path(source).read_text())]
        return told[0] if len(told) == 1 and "rows" in told[0] else together(told)
    rows = []
    with subprocess.Popen([PROGRAM, *arguments, "--json-lines"], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            rows.append(json.loads(line))
            if keep is not None:
                with keep.open("a") as file:
                    file.write(line)
    if process.returncode:
        raise SystemExit(process.returncode)
    return together(rows)


def json_texts(text: str) -> list[str]:
    """One text of many lines, or one a line."""
    lines = text.strip().splitlines()
    return lines if lines and lines[0].endswith("}") else [text]


def together(rows: list[dict]) -> dict:
    if not rows:
        raise SystemExit("nothing was measured")
    return rows[0] | {"rows": rows}


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
