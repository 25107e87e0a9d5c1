"""The heads of a layer cut over ranks: q, k, v, gates, convolution and memory of a head lie on one rank, and so do the
channels of an MLP. A block's input is the same on all ranks; its output is the sum of theirs, one message per half.

Parameters are DTensors of their whole shapes, so checkpoints do not depend on the cut. A layer's own code runs on the
local parts. Mamba2 has z, x, B, C and Δ in one matrix, in which a head's rows are not neighbours: its ranks keep equal
parts of it, gather it where it is used, and take the rows of their heads.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.stateless import _reparametrize_module

from . import nn as layers
from ._collectives import copy, gather_parts, sum_for_each, sum_parts
from ._ranks import Refusal
from .models import Decoder, Mlp


class Peers:
    """The ranks that share a layer's heads, for the layers that ask (``layer.peers``)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """What all of them have, in their order."""
        return gather_parts(x, dim, self.group)

    def total(self, x: Tensor) -> Tensor:
        return sum_for_each(x, self.group)


def _place(module: nn.Module, name: str, rows: int, ranks: int) -> int | None:
    """The dimension along which a parameter is cut; None: it is whole, and each rank adds to its gradient."""
    if isinstance(module, Mlp):
        return 1 if name == "down_proj.weight" else 0
    if name in ("o_proj.weight", "out_proj.weight"):
        return 1
    if isinstance(module, layers.Mamba2):
        return None if name.startswith("conv1d.") or rows % ranks else 0
    owner = module.get_submodule(name.rpartition(".")[0])
    low_rank = name.split(".")[-2:-1] in (["0"], ["linearA"])  # the narrow half of a gate, or of keys and values
    shared = isinstance(owner, layers.parts.Norm) or "feature_map" in name or low_rank or name == "o_proj.bias"
    return None if shared else 0


def _rows(module: nn.Module, rank: int, ranks: int) -> dict[str, list[slice]]:
    """Of parameters in which the rows of a rank's heads are not neighbours: which they are."""
    if not isinstance(module, layers.Mamba2):
        return {}
    inner, states, heads = module.inner, module.groups * module.state_size, module.heads

    def share(size: int) -> tuple[int, int]:
        return rank * size // ranks, size // ranks

    keys = share(states)
    if module.groups < ranks:  # several ranks have heads of the same group
        keys = rank * module.groups // ranks * module.state_size, module.state_size
    rows, at = [], 0
    for size, (first, count) in (
        (inner, share(inner)),  # z
        (inner, share(inner)),  # x
        (states, keys),  # B
        (states, keys),  # C
        (heads, share(heads)),  # Δ
    ):
        rows.append(slice(at + first, at + first + count))
        at += size
    mixed = [slice(part.start - inner, part.stop - inner) for part in rows[1:4]]
    return {"in_proj.weight": rows, "conv1d.weight": mixed, "conv1d.bias": mixed}


def _check_mamba2(place: int, mixer: nn.Module, ranks: int) -> None:
    if mixer.heads % ranks:
        raise Refusal(f"layer {place} has {mixer.heads} heads, which {ranks} tensor-parallel ranks cannot share.")
    if mixer.groups % ranks and ranks % mixer.groups:
        raise Refusal(
            f"layer {place} has n_groups {mixer.groups}, which {ranks} tensor-parallel ranks cannot share; "
            "one of the two has to divide the other."
        )


def _check(place: int, mixer: nn.Module, ranks: int) -> None:
    if isinstance(mixer, layers.Mamba2):
        return _check_mamba2(place, mixer, ranks)
    for name, size in (("q", "key_dim"), ("k", "key_dim"), ("v", "value_dim")):
        heads = getattr(mixer, f"{name}_proj").out_features // getattr(mixer, size, getattr(mixer, "head_dim", 1))
        if heads % ranks:
            raise Refusal(f"layer {place} has {heads} {name} heads, which {ranks} tensor-parallel ranks cannot share.")


class _Cut:
    """The forward pass of a module on this rank's part of its parameters."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module, self.group, self.first = module, mesh.get_group(), mesh.get_local_rank() == 0
        self.rows = _rows(module, mesh.get_local_rank(), mesh.size())
        self.dims: dict[str, int | None] = {}
        for name, parameter in list(module.named_parameters()):
            dim = self.dims[name] = _place(module, name, len(parameter), mesh.size())
            if dim is None:
                continue
            owner, leaf = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            shape = list(parameter.shape)
            shape[dim] //= mesh.size()
            part = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            cut = nn.Parameter(DTensor.from_local(part, mesh, [Shard(dim)], run_check=False))
            cut.__dict__.update(parameter.__dict__)
            setattr(owner, leaf, cut)

    def _local(self, name: str, parameter: Tensor) -> Tensor:
        cut = self.dims[name] is not None
        if name in self.rows:
            whole = gather_parts(parameter.to_local(), 0, self.group) if cut else copy(parameter, self.group)
            return torch.cat([whole[rows] for rows in self.rows[name]])
        if cut:
            return parameter.to_local()
        shared = copy(parameter, self.group)
        return shared if name != "o_proj.bias" or self.first else shared * 0  # added once

    def __call__(self, x: Tensor, *rest: object, **options: object) -> object:
        values = {name: self._local(name, parameter) for name, parameter in self.module.named_parameters()}
        with _reparametrize_module(self.module, values):
            out = type(self.module).forward(self.module, copy(x, self.group), *rest, **options)
        if isinstance(out, tuple):
            return sum_parts(out[0], self.group), *out[1:]
        return sum_parts(out, self.group)


class SharedHead:
    """Each rank takes its tokens through the head."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, targets = copy(hidden, self.group).flatten(0, 1), targets.flatten()
        first, last = (len(targets) * place // self.size for place in (self.rank, self.rank + 1))
        return hidden[first:last], copy(weight, self.group), targets[first:last]


def cut_heads(model: Decoder, mesh: DeviceMesh) -> None:
    """Every block of a decoder on ``meta`` computes its rank's heads from here on."""
    ranks, peers = mesh.size(), Peers(mesh)
    for place, block in enumerate(model.model.layers):
        mixer = block.mixer
        _check(place, mixer, ranks)
        mixer.forward, mixer.peers = _Cut(mixer, mesh), peers
        mixer.first_head = peers.rank * (mixer.heads // ranks)
        if isinstance(mixer, layers.Mamba2):
            mixer.sharers = max(ranks // mixer.groups, 1)
            mixer.groups = max(mixer.groups // ranks, 1)
        for name in ("heads", "kv_heads", "inner"):
            if hasattr(mixer, name):
                setattr(mixer, name, getattr(mixer, name) // ranks)
        if block.mlp is not None:
            width = model.config["intermediate_size"]
            if width % ranks:
                raise Refusal(f"intermediate_size is {width}, which {ranks} tensor-parallel ranks cannot share.")
            block.mlp.forward = _Cut(block.mlp, mesh)
    model.share = SharedHead(mesh)
