"""The heads of a layer cut over ranks: q, k, v, gates, convolution and memory of a head lie on one rank, and so do the
channels of an MLP. A block's input is the same on all ranks; its output is the sum of theirs, one message per half.

Parameters are DTensors of their whole shapes, so checkpoints do not depend on the cut. A layer's own code runs on the
local parts.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.stateless import _reparametrize_module

from . import nn as layers
from ._collectives import copy, sum_parts
from ._ranks import Refusal
from .models import Decoder, Mlp


def _place(module: nn.Module, name: str) -> int | None:
    """The dimension along which a parameter is cut; None: it is whole, and each rank adds to its gradient."""
    if isinstance(module, Mlp):
        return 1 if name == "down_proj.weight" else 0
    if name == "o_proj.weight":
        return 1
    owner = module.get_submodule(name.rpartition(".")[0])
    low_rank = name.split(".")[-2:-1] == ["0"]  # the narrow half of a gate
    shared = isinstance(owner, layers.parts.Norm) or "feature_map" in name or low_rank or name == "o_proj.bias"
    return None if shared else 0


def _check(token: str, place: int, mixer: nn.Module, ranks: int) -> None:
    if isinstance(mixer, layers.Mamba2):
        raise Refusal(f"layer {place} is {token}, whose heads share their keys and are not cut over ranks.")
    if hasattr(mixer, "proj_k") or hasattr(mixer, "proj_v"):
        raise Refusal(f"layer {place} has kv_proj_rank, which mixes heads: they are not cut over ranks.")
    for name, size in (("q", "key_dim"), ("k", "key_dim"), ("v", "value_dim")):
        heads = getattr(mixer, f"{name}_proj").out_features // getattr(mixer, size, getattr(mixer, "head_dim", 1))
        if heads % ranks:
            raise Refusal(f"layer {place} has {heads} {name} heads, which {ranks} tensor-parallel ranks cannot share.")


class _Cut:
    """The forward pass of a module on this rank's part of its parameters."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module, self.group, self.first = module, mesh.get_group(), mesh.get_local_rank() == 0
        self.dims: dict[str, int | None] = {}
        for name, parameter in list(module.named_parameters()):
            dim = self.dims[name] = _place(module, name)
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
        if self.dims[name] is not None:
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
    ranks = mesh.size()
    for place, block in enumerate(model.model.layers):
        mixer = block.mixer
        _check(model.config["layer_types"][place], place, mixer, ranks)
        mixer.forward = _Cut(mixer, mesh)
        mixer.first_head = mesh.get_local_rank() * (mixer.heads // ranks)
        mixer.heads //= ranks
        if hasattr(mixer, "kv_heads"):
            mixer.kv_heads //= ranks
        if block.mlp is not None:
            width = model.config["intermediate_size"]
            if width % ranks:
                raise Refusal(f"intermediate_size is {width}, which {ranks} tensor-parallel ranks cannot share.")
            block.mlp.forward = _Cut(block.mlp, mesh)
    model.share = SharedHead(mesh)
