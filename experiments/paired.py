"""Variants trained with the same seeds as the usual form: what their differences say, exactly, of a few seeds.

A seed gives both the same data in the same order, so what is compared is the difference seed by seed. If a variant
changed nothing, each difference could as well have had the other sign: the test counts in how many of the 2ⁿ ways of
choosing signs the mean lies as far from 0, and the interval holds every change that this test, at 5%, does not refuse.
Nothing is taken for granted but that differences lie evenly to either side of their middle, and nothing is drawn at
random. Five seeds have too few ways to choose signs for an interval of 95%: it takes LEAST.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

LEVEL = 0.95
LEAST = 6  # seeds, for an interval at that level
MOST = 16  # seeds of which all ways are counted
SAME = 1e-12  # sums that are equal but for rounding


@dataclass(frozen=True)
class Paired:
    seeds: int
    mean: float
    interval: tuple[float, float] | None
    p: float  # two-sided

    @property
    def seen(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


def compare(variant: Mapping[int, float], usual: Mapping[int, float]) -> Paired | None:
    """Values by seed; of the seeds that both have. None: they share none."""
    shared = sorted(variant.keys() & usual.keys())[:MOST]
    if not shared:
        return None
    differences = [variant[seed] - usual[seed] for seed in shared]
    return Paired(len(shared), statistics.fmean(differences), interval(differences), flipped(differences))


def flipped(differences: Sequence[float]) -> float:
    """The share of all choices of signs with which the sum lies as far from 0."""
    sums = [sum(signs) for signs in product(*((one, -one) for one in differences))]
    return sum(abs(one) >= abs(sum(differences)) - SAME for one in sums) / len(sums)


def interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """The means of all subsets but the outermost: turning the signs of a subset makes a sum larger where the change
    that is asked about lies above the subset's mean, so those means are where the test's answer changes."""
    subsets = [some for some in product((False, True), repeat=len(differences)) if any(some)]
    means = sorted(
        statistics.fmean(one for one, taken in zip(differences, some, strict=True) if taken) for some in subsets
    )
    outermost = math.floor((1 - LEVEL) / 2 * 2 ** len(differences))
    return (means[outermost - 1], means[-outermost]) if outermost else None
