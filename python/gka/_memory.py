"""The memories of the layers GKA is compared with, as one operator."""

from typing import Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import _func
from ._calls import call
from ._library import load_floors


def memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    rule: Literal["add", "delta"] = "delta",
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """S ← diag(γ)S + βkvᵀ (add) or S ← (I − βkkᵀ)diag(γ)S + βkvᵀ (delta), and o = scale · Sᵀq.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        log_decay: log γ ≤ 0, [B, T, H], or [B, T, H, K] for one per key channel. Left out: 0.
        beta: [B, T, H]. Left out: 1.
        initial_state: S [N, H, K, V] in float32 (float64 for float64 inputs). Left out: zero.
        cu_seqlens: packed sequences, as in :func:`gka.gated_kalmanet`.

    Returns:
        o [B, T, H, V] in the type of q, and S or None.
    """
    load_floors()
    # One operator for whoever watches operators (a flop counter, fake tensors), traces them, or has no numbers.
    meta = isinstance(q, Tensor) and q.is_meta
    whole = meta or torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    if isinstance(q, Tensor) and not meta and torch.is_autocast_enabled(q.device.type):
        # As for gated_kalmanet: these three are cast, and what the memory is made of computes in float32.
        kind, dtype = q.device.type, torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        given = {"initial_state": initial_state, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
        with torch.autocast(kind, enabled=False):
            return memory(q, k, v, log_decay, beta, rule=rule, scale=scale, **given)
    tensors = (q, k, v, log_decay, beta, initial_state, cu_seqlens)
    if _func.active():
        o, state = _func.rival(tensors, rule, scale, output_final_state)
        return o, state if output_final_state else None
    if whole:
        o, state = call(torch.ops.gka.memory_forward, *tensors, rule, scale, output_final_state)
        return o, state if output_final_state else None
    o, state = call(
        torch.ops.gka.memory,
        q,
        k,
        v,
        log_decay,
        beta,
        rule=rule,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return o, state if output_final_state else None
