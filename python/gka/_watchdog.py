"""Ends a run in which some rank has stopped answering, and says which.

Every rank notes in the store where its main thread is, and a second thread notes that the process is alive. A rank that
has stood still for too long reads the others' notes. A rank that is not alive, or is behind the rest, is the one they
wait for.
"""

import os
import sys
import threading
import time

import torch.distributed as dist

LONG = {"starting": 1800.0, "saving": 1800.0}  # reading and writing a large model takes its time


class Watchdog:
    """Watches as long as it exists. ``seconds`` is how long a rank may stand still in a step."""

    def __init__(self, rank: int, size: int, seconds: float) -> None:
        self.rank, self.size, self.seconds = rank, size, seconds
        self._place, self._moved, self._beats = (0, "starting"), time.monotonic(), 0
        self._ended = threading.Event()
        self._store = None
        if size > 1:
            self._store = dist.PrefixStore("gka.train", dist.distributed_c10d._get_default_store().clone())
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def at(self, step: int, doing: str) -> None:
        self._place, self._moved = (step, doing), time.monotonic()

    def close(self) -> None:
        self._ended.set()
        if self._store is not None:
            self._thread.join()

    def _note(self) -> None:
        self._beats += 1
        self._store.set(f"rank{self.rank}", f"{self._beats}|{self._place[0]}|{self._place[1]}")

    def _read(self, rank: int) -> tuple[int, int, str]:
        if not self._store.check([f"rank{rank}"]):
            return 0, 0, "starting"
        beats, step, doing = self._store.get(f"rank{rank}").decode().split("|")
        return int(beats), int(step), doing

    def _watch(self) -> None:
        pause = min(1.0, self.seconds / 10)
        while not self._ended.wait(pause):
            try:
                self._note()
                if time.monotonic() - self._moved > max(self.seconds, LONG.get(self._place[1], 0.0)):
                    self._end()
            except (RuntimeError, ConnectionError):  # the store went away: whoever started us is ending us
                return

    def _end(self) -> None:
        before = [self._read(rank) for rank in range(self.size)]
        if self._ended.wait(max(2.0, 3 * min(1.0, self.seconds / 10))):
            return
        self._note()
        now = [self._read(rank) for rank in range(self.size)]
        silent = [r for r in range(self.size) if r != self.rank and now[r][0] == before[r][0]]
        here = self._place
        behind = [r for r in range(self.size) if (now[r][1], now[r][2]) != here and now[r][1] <= here[0]]
        alive = [r for r in range(self.size) if r not in silent and r not in behind]
        if self.rank == min(alive, default=self.rank):
            sys.stderr.write(f"gka.train: {self._sentence(silent, behind, now)}\n")
            sys.stderr.flush()
        os._exit(1)

    def _sentence(self, silent: list[int], behind: list[int], now: list[tuple[int, int, str]]) -> str:
        if silent:
            who = "rank " + ", ".join(map(str, silent)) + " has not given a sign of life"
        elif behind:
            rank = behind[0]
            who = f"rank {rank} is still {now[rank][2]} (step {now[rank][1]}), and the others wait for it"
        else:
            who = f"all ranks are {self._place[1]} (step {self._place[0]}) and none goes on"
        return f"{who} for {self.seconds:g} s; the run ends here and goes on from its last checkpoint with --resume."
