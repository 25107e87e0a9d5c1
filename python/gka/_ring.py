"""Causal attention over a sequence that is cut over ranks, by the ring of torch's own context parallel.

`torch.distributed.tensor.experimental.context_parallel` puts a ring in the place of scaled_dot_product_attention, but
knows the CUDA kernels alone: on the CPU it ends with "aten._scaled_dot_product_flash_attention_for_cpu.default does not
have a sharding strategy registered". Its ring takes any kernel; here it is given the one of the device. Its load
balancing is off: that deals out tokens in another order than the one memories read them in.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

try:  # a prototype of torch's, whose names may change
    from torch.distributed.tensor.experimental._context_parallel._attention import (
        _cp_options,
        _templated_ring_attention,
        _templated_ring_attention_backward,
    )
except ImportError:
    _cp_options = None

_aten = torch.ops.aten


class _Kernel(NamedTuple):
    forward: Callable
    backward: Callable
    dtypes: tuple[torch.dtype, ...]
    kept: tuple[
        str, ...
    ] = ()  # what the forward pass gives beside output and log-sum, by its name in the backward pass


_KERNELS = {
    "cpu": _Kernel(
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward,
        (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    ),
    "cuda": _Kernel(
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_flash_attention_backward,
        (torch.bfloat16, torch.float16),
        ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
    ),
}


def fits(q: Tensor) -> bool:
    """Whether torch has the ring and a kernel for it; q [B, T, heads, head_dim]."""
    kernel = _KERNELS.get(q.device.type)
    whole_words = q.device.type == "cpu" or (q.shape[-1] % 8 == 0 and q.shape[-1] <= 256)
    return _cp_options is not None and kernel is not None and q.dtype in kernel.dtypes and whole_words


@contextlib.contextmanager
def _in_order(dtype: torch.dtype) -> Iterator[None]:
    """Pieces in their order, sums in float32 or better."""
    before = _cp_options.enable_load_balance, _cp_options.convert_to_f32
    _cp_options.enable_load_balance, _cp_options.convert_to_f32 = False, dtype != torch.float64
    try:
        yield
    finally:
        _cp_options.enable_load_balance, _cp_options.convert_to_f32 = before


class _Ring(Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        kernel = _KERNELS[q.device.type]
        with _in_order(q.dtype):
            out, log_sum, *rest = _templated_ring_attention(
                group, 2, kernel.forward, query=q, key=k, value=v, is_causal=True, dropout_p=0.0
            )
        ctx.group, ctx.kept = group, dict(zip(kernel.kept, rest, strict=False))
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, log_sum = ctx.saved_tensors
        with _in_order(q.dtype):
            dq, dk, dv, *_ = _templated_ring_attention_backward(
                ctx.group,
                2,
                _KERNELS[q.device.type].backward,
                grad_out=gradient.contiguous(),
                grad_out_name="grad_out",
                query=q,
                key=k,
                value=v,
                out=out,
                logsumexp=log_sum,
                is_causal=True,
                dropout_p=0.0,
                **ctx.kept,
            )
        return dq, dk, dv, None


def attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's queries over all keys up to theirs: q [B, T, heads, head_dim], k and v of as many heads or fewer."""
    return _Ring.apply(*(t.transpose(1, 2) for t in (q, k, v)), group).transpose(1, 2)
