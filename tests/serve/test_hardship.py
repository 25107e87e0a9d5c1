"""What docs/serving.md reports of long runs by hand, for a few seconds: crowds, mutations, kills."""

import random

from kills import MODEL, kill_and_look
from load import storm
from mutations import shake
from servers import fake


def test_a_crowd_half_of_which_leaves_is_answered_and_leaves_nothing_behind():
    with fake(slots=16, queue=100, step_us=1000) as server:
        outcomes = storm(server, clients=150, seconds=2)
    assert outcomes["done"] and outcomes["left"]


def test_mutated_requests_are_answered_and_the_memory_stays_level():
    with fake(slots=4, head_ms=300, body_ms=300) as server:
        outcomes = shake(server, count=1600)
    assert outcomes["200"] and outcomes["400"]


def test_a_memory_is_whole_or_not_there_after_a_kill(tmp_path):
    kill_and_look(MODEL, tmp_path, random.Random(0))
