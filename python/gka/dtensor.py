"""Sharding strategies for gka's operators: after ``import gka.dtensor`` they take ``torch.distributed.tensor.DTensor``.

The memory and the operators around it are cut over sequences of a batch (dimension 0) or over heads. A tensor that is
cut in another way is redistributed first, as torch does for its own operators. Packed batches are cut over heads only.
"""

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.ops import gka as _ops

WHOLE = Replicate()
#: Where batch and heads lie: q k v log_decay beta alpha, h0 u0, the ridge's diagonal.
_INPUTS = {"batch": [0] * 6 + [0, 0], "heads": [2] * 6 + [1, 1]}


def _here(value: object, placement: object) -> object:
    return None if value is None else placement


def _inputs(cut: str, tensors: tuple) -> list:
    """For (q … u0, ridge_diagonal, cu_seqlens), those that are there."""
    places = [_here(t, Shard(dim)) for t, dim in zip(tensors[:8], _INPUTS[cut], strict=True)]
    diagonal = Shard(0) if cut == "heads" else WHOLE
    return [*places, _here(tensors[8], diagonal), _here(tensors[9], WHOLE)]


def _cuts(cu_seqlens: object) -> tuple[str, ...]:
    return ("batch", "heads") if cu_seqlens is None else ("heads",)


@register_sharding(_ops.gated_kalmanet_forward.default)
def _forward(part, *args):
    tensors, options = args[:10], args[10:]
    final, save = options[-2:]
    has_h, has_u = part != "memory", part != "solve"
    wanted = [True, final and has_h, final and has_u, save and has_h, save and has_h, save and has_h, save and has_u]
    rules = []
    for cut in _cuts(tensors[9]):
        across, states = (0, 0) if cut == "batch" else (2, 1)
        places = [across, states, states, across, across, states, states]
        outputs = [Shard(dim) if there else WHOLE for dim, there in zip(places, wanted, strict=True)]
        rules.append((outputs, [None, *_inputs(cut, tensors), *[None] * len(options)]))
    whole = [None, *[_here(t, WHOLE) for t in tensors], *[None] * len(options)]
    return [([WHOLE] * 7, whole), *rules]


@register_sharding(_ops.gated_kalmanet_backward.default)
def _backward(part, *args):
    tensors, options, saved, needs = args[:10], args[10:19], args[19:26], args[26]
    rules = []
    for cut in _cuts(tensors[9]):
        across, states = (0, 0) if cut == "batch" else (2, 1)
        kept = [across, across, states, states, across, states, states]
        kept = [_here(t, Shard(dim)) for t, dim in zip(saved, kept, strict=True)]
        of_diagonal = Shard(0) if cut == "heads" else Partial()
        places = [*[Shard(dim) for dim in _INPUTS[cut]], of_diagonal]
        outputs = [place if asked else WHOLE for place, asked in zip(places, needs, strict=True)]
        rules.append((outputs, [None, *_inputs(cut, tensors), *[None] * len(options), *kept, None]))
    whole = [_here(t, WHOLE) for t in tensors], [_here(t, WHOLE) for t in saved]
    return [([WHOLE] * 9, [None, *whole[0], *[None] * len(options), *whole[1], None]), *rules]
