"""experiments/paired.py: the test counts all ways of choosing signs; the interval is what the test does not refuse."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from paired import LEAST, compare, flipped, interval


def test_six_differences_of_one_sign_are_two_ways_of_sixty_four_and_their_range_the_interval():
    differences = [-0.1, -0.3, -0.2, -0.25, -0.15, -0.05]
    assert flipped(differences) == 2 / 64
    assert interval(differences) == pytest.approx((-0.3, -0.05))


def test_fewer_seeds_have_no_interval_however_far_apart_they_are():
    assert interval([1.0] * (LEAST - 1)) is None
    assert flipped([1.0] * (LEAST - 1)) > 0.05


@pytest.mark.parametrize("count", [6, 7, 9])
def test_the_interval_holds_just_those_changes_that_the_test_does_not_refuse(count):
    draw = random.Random(count)
    differences = [draw.gauss(0.2, 1.0) for _ in range(count)]
    low, high = interval(differences)
    for change, held in ((low - 1e-6, False), (low + 1e-6, True), (high - 1e-6, True), (high + 1e-6, False)):
        assert (flipped([one - change for one in differences]) > 0.05) == held, change


def test_only_seeds_that_both_have_are_compared_and_each_with_its_own():
    usual = {seed: 0.1 * seed for seed in range(8)}
    variant = {seed: usual[seed] - 0.02 for seed in range(2, 8)} | {9: 5.0}
    apart = compare(variant, usual)
    assert (apart.seeds, apart.mean) == (6, pytest.approx(-0.02))
    assert apart.seen and apart.interval == pytest.approx((-0.02, -0.02)) and apart.p == 2 / 64
    assert compare({9: 1.0}, usual) is None


def test_a_difference_that_seeds_disagree_about_is_not_seen():
    usual = dict.fromkeys(range(6), 0.5)
    apart = compare(dict(enumerate([0.6, 0.55, 0.7, 0.4, 0.45, 0.52])), usual)
    assert not apart.seen and apart.interval[0] < 0 < apart.interval[1]
    assert not compare(dict.fromkeys(range(5), 0.9), usual).seen, "five seeds do not say"
