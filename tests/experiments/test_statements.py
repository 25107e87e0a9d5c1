"""What is said of the ablations on recall is what their table has: every interval in prose is one of its rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERVAL = re.compile(r"([−+-]0\.\d{3}) \(([−+-]0\.\d{3} to [−+-]0\.\d{3})\)")


def rows() -> dict[str, str]:
    """Interval to mean difference, as ablations.md has them."""
    found = {}
    for line in (ROOT / "experiments/mqar/ablations.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 6 and " to " in cells[6]:
            found[cells[6]] = cells[5]
    return found


@pytest.mark.parametrize("file", ["docs/results.md", "experiments/mqar/README.md"])
def test_every_interval_that_is_stated_is_in_the_table(file):
    stated = INTERVAL.findall((ROOT / file).read_text().replace("−", "-"))
    assert len(stated) >= 4, "means are stated with their intervals"
    known = rows()
    assert {(known.get(interval), interval) for _, interval in stated} == set(stated)
