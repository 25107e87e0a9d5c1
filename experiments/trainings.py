"""What sweeps of trainings share: the answers of `gka train -`, and threads that take one run after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyRun = TypeVar("AnyRun", bound=Named)


def outcome_of(answer: str) -> str:
    """finished or diverged; empty: the answer is why it failed, or there is none."""
    word = answer.partition(" ")[0]
    return word if word in ("finished", "diverged") else ""


class Shared:
    """Which runs are under way, for threads that look for the next one."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # guards what threads share; told of every run that has ended
        self.stopping = False
        self.busy: set[str] = set()  # the names of runs

    def take(self, find: Callable[[], AnyRun | None]) -> AnyRun | None:
        """What `find` gives; where that depends on runs that are under way, waits for them. None: there is no more."""
        with self.changed:
            while not self.stopping:
                if run := find():
                    self.busy.add(run.name)
                    return run
                if not self.busy:
                    return None
                self.changed.wait()
        return None
