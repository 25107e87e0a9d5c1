"""experiments/palette.py: every layer of every figure has a look of its own, told by more than its colour."""

from __future__ import annotations

import re
import sys
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from palette import GKA, LOOKS, OTHERS, TITLES  # noqa: E402


def names(file: str, pattern: str) -> set[str]:
    found = set(re.findall(pattern, (ROOT / file).read_text()))
    assert len(found) > 3, file
    return found


def test_every_layer_that_is_drawn_has_a_look():
    drawn = names("experiments/mqar/layers.py", r'Layer\(\s*"([\w-]+)",')
    drawn |= names("experiments/vision/models.py", r'"([\w-]+)": Mixer\(')
    assert drawn <= LOOKS.keys()
    known = names("src/layers/kinds.h", r'\{"[*\w]+", "([^"]+)"')
    assert TITLES.keys() <= known and set(TITLES.values()) <= LOOKS.keys()


def test_no_two_layers_look_alike_and_nothing_else_has_the_colour_of_gka():
    for (one, mine), (other, its) in combinations(LOOKS.items(), 2):
        if not {one, other} <= {"gka-plain", "gka-paper", "gka-no-beta"}:
            assert mine.marker != its.marker and mine != its, (one, other)
    assert GKA.colour not in {look.colour for look in OTHERS}
