"""The rivals' memories for torch.compile and torch.export.

`gka::memory` consists of many small operations whose indices depend on the lengths of the sequences, which a tracer
does not know. So a graph has one node in their place, `gka::memory_forward`, and `gka::memory_backward` for its
gradient, which computes the memory again.
"""

import torch
from torch import Tensor

from . import _vmap
from ._flops import count_rivals


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@torch.library.register_fake("gka::memory_forward")
def _(q, k, v, log_decay, beta, initial_state, cu_seqlens, rule, scale, output_final_state):
    if not output_final_state:
        return v.new_empty(v.shape), q.new_empty(0)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return v.new_empty(v.shape), q.new_empty(sequences, q.shape[2], q.shape[3], v.shape[3], dtype=_wide(q))


@torch.library.register_fake("gka::memory_backward")
def _(q, k, v, log_decay, beta, initial_state, cu_seqlens, rule, scale, output_final_state, d_o, d_state, needs):
    inputs = (q, k, v, log_decay, beta, initial_state)
    return tuple(
        tensor.new_empty(tensor.shape) if tensor is not None and needed else q.new_empty(0)
        for tensor, needed in zip(inputs, needs, strict=True)
    )


def _keep(ctx, inputs, output):
    *tensors, ctx.rule, ctx.scale, ctx.want_state = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, d_o, d_state):
    needs = list(ctx.needs_input_grad[:6])
    options = (ctx.rule, ctx.scale, ctx.want_state, d_o.contiguous(), d_state if ctx.want_state else None, needs)
    gradients = torch.ops.gka.memory_backward(*ctx.saved_tensors, *options)
    given = (gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))
    return (*given, None, None, None, None)


torch.library.register_autograd("gka::memory_forward", _backward, setup_context=_keep)
_vmap.register_rivals()
count_rivals()
