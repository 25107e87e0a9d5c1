"""The small operations around the memory in a block, fused. All checks are in the library."""

import torch
from torch import Tensor

from . import _func
from ._calls import call

_ops = torch.ops.gka


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    l2_norm: str = "none",
    head_dim: int = 0,
    eps: float = 1e-6,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution, activation and norm: y_t = norm(act(bias + Σ_j weight[:, 0, j] ⊙ x_{t-W+1+j})).

    Differentiable once, in x, weight, bias and initial_state.

    Args:
        x: [B, T, C] in float64, float32, bfloat16 or float16. Each of the other tensors may have any of these types.
        weight: [C, 1, W] with W from 1 to 8, the last tap on the token itself, as in torch's conv1d.
        bias: [C]. Left out: 0.
        activation: silu or none.
        l2_norm: over each head's channels, after the activation: none, divide, z/(‖z‖ + eps), or rsqrt,
            z/√(‖z‖² + eps).
        head_dim: channels of a head, from 1 to 256, a divisor of C; used with l2_norm only.
        eps: of l2_norm.
        initial_state: [N, C, W-1], the last W - 1 inputs before the first token, oldest first. N is B or the number of
            packed sequences. Left out: zero.
        output_final_state: whether to return the last W - 1 inputs.
        cu_seqlens: packed sequences: B is 1, and sequence n is the tokens cu_seqlens[n] to cu_seqlens[n+1] - 1. int32
            or int64 [N+1], from 0 to T, never decreasing.

    Returns:
        y [B, T, C] and the final state [N, C, W-1] (or None), both in the type of x.

    Raises:
        ValueError, TypeError: one sentence that names the argument, what it takes and what it got.
    """
    if _func.active():
        options = (activation, l2_norm, head_dim, eps)
        y, state = _func.short_conv(x, weight, bias, initial_state, cu_seqlens, options, output_final_state)
        return y, state if output_final_state else None
    y, state = call(
        _ops.short_conv,
        x,
        weight,
        bias,
        activation=activation,
        l2_norm=l2_norm,
        head_dim=head_dim,
        eps=eps,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return y, state if output_final_state else None


def short_conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor,
    state_indices: Tensor | None = None,
    activation: str = "silu",
    l2_norm: str = "none",
    head_dim: int = 0,
    eps: float = 1e-6,
) -> Tensor:
    """One token for each of B sequences, for decoding. The state is updated in place; there is no gradient.

    Args:
        x: [B, C].
        state: [N, C, W-1], contiguous. N is B, or more: a pool.
        state_indices: int32 or int64 [B], distinct: which slot of the state each sequence has. Left out: sequence b
            has slot b.
        weight, bias, activation, l2_norm, head_dim, eps: as in :func:`short_conv`.

    Returns:
        y [B, C] in the type of x.
    """
    return call(
        _ops.short_conv_step,
        x,
        weight,
        bias,
        state=state,
        state_indices=state_indices,
        activation=activation,
        l2_norm=l2_norm,
        head_dim=head_dim,
        eps=eps,
    )


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    activation: str = "silu",
    eps: float = 1e-6,
) -> Tensor:
    """y = x / √(mean(x²) + eps) ⊙ weight ⊙ act(gate), over the last dimension.

    Differentiable once, in x, gate and weight.

    Args:
        x: [..., D] of one to four dimensions, D from 1 to 8192: float64, float32, bfloat16 or float16.
        gate: as x, in any of these types. Left out: 1.
        weight: [D], in any of these types. Left out: 1.
        activation: on the gate: silu, sigmoid or none.
        eps: added to the mean of the squares.

    Returns:
        y as x.
    """
    if _func.active():
        return _func.gated_rms_norm(x, gate, weight, activation, eps)
    return call(_ops.gated_rms_norm, x, gate, weight, activation=activation, eps=eps)
