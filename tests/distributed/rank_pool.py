"""Four processes that wait for work, so that a check on several ranks costs no start of its own.

A check is a function of rank_checks.py. `pool.run("name", ranks=2, …)` calls it on that many ranks, joined by gloo for
that call alone, and gives what each returned.
"""

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

PATIENCE = 180.0  # a busy machine is no failure


def serve(rank, pipe):
    os.environ["OMP_NUM_THREADS"] = "1"
    import rank_checks
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (work := pipe.recv()) is not None:
        name, ranks, place, arguments = work
        try:
            limit = timedelta(seconds=PATIENCE / 2)
            store = dist.FileStore(str(place), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
            dist.barrier()  # a rank that is soon done must not hang up while another is still dialling
            pipe.send((True, getattr(rank_checks, name)(**arguments)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Pool:
    def __init__(self, size=4):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["gka.train", "rank_checks"])
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, name, ranks, **arguments):
        """What the check returned on each rank; a failure shows every rank's."""
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self.pipes[:ranks]:
                pipe.send((name, ranks, Path(folder) / "store", arguments))
            answers = []
            for rank, pipe in enumerate(self.pipes[:ranks]):
                assert pipe.poll(PATIENCE), f"rank {rank} of {name} has not answered in {PATIENCE} s"
                answers.append(pipe.recv())
        failures = [answer for fine, answer in answers if not fine]
        assert not failures, "\n".join(failures)
        return [answer for _, answer in answers]

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(PATIENCE)
