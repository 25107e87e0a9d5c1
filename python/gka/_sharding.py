"""A decoder over many ranks: each holds its part of the weights (FSDP2) and sees a block's whole only while it is used.

Small vectors (norms, decays) stay whole on every rank and in float32, whatever the blocks compute in: a decay near 1
has no room in 16 bits.
"""

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ._adamw import local
from ._ranks import Ranks
from .models import Decoder


def is_small(module: nn.Module, parameter: nn.Parameter) -> bool:
    return parameter.dim() <= 1 and not isinstance(module, nn.Linear)


class Sharded:
    """The model of a run on its ranks: its type of computation, the sums of its gradients, its whole weights.

    Args:
        model: on ``meta``; its parameters are allocated here.
        compute: what the blocks compute in; parameters and their gradients have ``dtype``.
    """

    def __init__(self, model: Decoder, ranks: Ranks, compute: torch.dtype, dtype: torch.dtype) -> None:
        self.model, self.ranks = model, ranks
        self.small = {
            f"{prefix}.{name}" if prefix else name: parameter
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if is_small(module, parameter)
        }
        policy = MixedPrecisionPolicy(param_dtype=None if compute == dtype else compute, reduce_dtype=dtype)
        options = {"mesh": ranks.shard, "mp_policy": policy, "ignored_params": set(self.small.values())}
        for block in model.model.layers:
            fully_shard(block, **options)
        fully_shard(model, **options)
        register_fsdp_forward_method(model, "loss")
        for module in [model, *model.model.layers]:
            module.set_gradient_divide_factor(1.0)  # losses are shares of the whole: gradients add up
            module.set_force_sum_reduction_for_comms(True)
        model.to_empty(device=ranks.device)
        self.parameters = dict(model.named_parameters())
        self.small = {name: self.parameters[name] for name in self.small}

    @torch.no_grad()
    def sum_small_gradients(self) -> None:
        """Sums the gradients of the vectors that FSDP leaves alone, in one message."""
        for parameter in self.small.values():
            if parameter.grad is None:  # a rank whose targets were all ignored
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(parameter.grad) for parameter in self.small.values()]
        if not gradients or self.ranks.shard.size() == 1:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.ranks.group("shard"))
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def gradients(self) -> list[Tensor]:
        """This rank's parts of the gradients that exist."""
        return [local(parameter.grad) for parameter in self.parameters.values() if parameter.grad is not None]

    def _copies(self, name: str) -> int:
        """On how many ranks the same numbers of a parameter lie."""
        parameter, copies = self.parameters[name], 1
        if name in self.small:
            copies *= self.ranks.shard.size()
        if not any(kind == "tensor" for kind, _ in cuts_of(parameter)):
            copies *= self.ranks.tensor
        return copies

    @torch.no_grad()
    def gradient_square(self) -> Tensor:
        """This rank's share of the squared length of the gradient, float64: the shares of all ranks add up to it."""
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        by_copies: dict[int, list[Tensor]] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and local(parameter.grad).numel() > 0:
                by_copies.setdefault(self._copies(name), []).append(local(parameter.grad))
        for copies, gradients in by_copies.items():
            norms = torch._foreach_norm(gradients, 2, torch.float64)
            total += torch.stack(norms).square().sum() / copies
        return total

    @torch.no_grad()
    def load_whole(self, weights: dict[str, Tensor] | None, into: dict[str, Tensor] | None = None) -> None:
        """Fills every parameter (or the tensors of ``into``) with its part of what rank 0 has."""
        for name, tensor in (into or self.parameters).items():
            dtype, place = tensor.dtype, self.ranks.device
            whole = torch.empty(tensor.shape, dtype=dtype, device=place)
            if self.ranks.first:
                whole.copy_(weights[name])
            dist.broadcast(whole, src=0)
            part = part_of(whole, tensor)
            local(tensor).copy_(part)

    @torch.no_grad()
    def whole(self) -> dict[str, Tensor] | None:
        """All weights in this process's memory, on rank 0; None elsewhere. Every rank takes part."""
        weights = {}
        for name, parameter in self.parameters.items():
            full = whole_of(parameter)
            if self.ranks.first:
                weights[name] = full.cpu() if full.device.type != "cpu" else full.clone()
        return weights if self.ranks.first else None


def cuts_of(tensor: Tensor) -> list[tuple[str, int]]:
    """(kind of ranks, dimension) of every cut, in the order in which they are made: heads first, then FSDP's."""
    if not isinstance(tensor, DTensor):
        return []
    names = tensor.device_mesh.mesh_dim_names
    cuts = [(name, p.dim) for name, p in zip(names, tensor.placements, strict=True) if hasattr(p, "dim")]
    return sorted(cuts, key=lambda cut: cut[0] != "tensor")


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut as ``like`` is; empty where ranks outnumber rows."""
    for name, dim in cuts_of(like):
        mesh = like.device_mesh[name] if like.device_mesh.ndim > 1 else like.device_mesh
        pieces = whole.chunk(mesh.size(), dim)
        place = mesh.get_local_rank()
        whole = pieces[place] if place < len(pieces) else whole.narrow(dim, 0, 0)
    return whole


logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # of two gathers where one would do


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
