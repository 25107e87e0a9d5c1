"""What ranks of the pool are asked to do; each function runs on every rank of a group."""

import os

import torch

from gka import train
from gka._library import load_floors
from gka._ranks import Ranks, Refusal


def train_run(folder, file, assignments=(), resume=False, stop_after=0, **cut):
    """A run of gka.train in this group; its outcome, or the sentence of a refusal. ``stop_after``: a signal comes in
    that step, to the last rank alone."""
    load_floors()
    os.chdir(folder)
    ranks = None
    try:
        plan = train.Plan(train.read_plan(file, list(assignments)))
        ranks = Ranks(torch.device("cpu"), **cut)
        if stop_after and ranks.rank == ranks.size - 1:
            take = train.Trainer._take_step

            def take_and_stop(self):
                self.signals.received = self.step == stop_after
                return take(self)

            train.Trainer._take_step = take_and_stop
        return train.train(plan, ranks, resume=resume)
    except Refusal as error:
        return str(error)
    finally:
        if stop_after and ranks is not None and ranks.rank == ranks.size - 1:
            train.Trainer._take_step = take
