"""The ranks of a training run: which of them share a batch, a sequence or the heads of a layer, and what each gets.

Three ways to cut the work, one mesh: *data* (rows of a batch), *context* (tokens of a sequence), *tensor* (heads of a
layer). Weights and optimiser are cut over data × context, whatever else is.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Result = TypeVar("Result")


class Refusal(RuntimeError):
    """A sentence that every rank has been told; rank 0 says it."""


class Ranks:
    """This process among the others. Starts torch's process groups if nobody has."""

    def __init__(self, device: torch.device, *, context: int = 1, tensor: int = 1, timeout: float = 600.0) -> None:
        limit = timedelta(seconds=timeout)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            if "RANK" in os.environ:
                dist.init_process_group(backend, timeout=limit)
            else:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        if context < 1 or tensor < 1 or self.size % (context * tensor):
            dist.all_reduce(torch.zeros(()))  # a rank that hangs up while another is dialling would be its error
            raise Refusal(
                f"{self.size} processes cannot be cut into groups of context × tensor = {context} × {tensor}; "
                "their number takes a multiple of that."
            )
        shape = (self.size // (context * tensor), context, tensor)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context", "tensor"))
        self.shard: DeviceMesh = self.mesh["data", "context"]._flatten("shard")
        self.data, self.context, self.tensor = shape

    def place(self, name: str) -> int:
        return self.mesh.get_local_rank(name)

    def group(self, name: str) -> dist.ProcessGroup:
        return (self.shard if name == "shard" else self.mesh[name]).get_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def on_first(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on rank 0 and returns its result on every rank. If it fails, every rank raises its sentence."""
        answer: list = [None, None]
        if self.first:
            try:
                answer[1] = work()
            except (RuntimeError, ValueError, OSError) as error:
                answer[0] = sentence_of(error)
        dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
        if answer[0] is not None:
            raise Refusal(answer[0])
        return answer[1]

    def sum(self, tensor: Tensor, name: str | None = None) -> Tensor:
        """Over all ranks, or over those of one kind; in place."""
        dist.all_reduce(tensor, group=None if name is None else self.group(name))
        return tensor


def sentence_of(error: BaseException) -> str:
    """The first line of an error: torch's errors have many. Out of memory, it adds what to do."""
    lines = str(error).splitlines() or [type(error).__name__]
    text = lines[0]
    if "out of memory" in text or "allocate memory" in text:
        text += " Raise accumulation, set checkpoint_activations=true, or train on more ranks."
    return text
