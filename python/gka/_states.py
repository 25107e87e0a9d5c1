"""What tokens leave in an empty memory, without answering any query, and what they leave of an older state."""

from typing import Literal

import torch
from torch import Tensor

from ._memory import memory


def _after(log_decay: Tensor) -> Tensor:
    """Σ of the tokens after each, float64; from the end, so that a token that forgets everything (−inf) leaves what
    follows it."""
    after = log_decay[:, 1:].double().flip(1).cumsum(1).flip(1)
    return torch.cat([after, torch.zeros_like(log_decay[:, :1], dtype=torch.double)], 1)


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values that neighbouring heads share, for each of them."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def gated_kalmanet_states(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    decay_keys: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """H_T = Σ_t (Π_{i>t} γ_i) β_t k_t k_tᵀ and U_T = Σ_t (Π_{i>t} γ_i) β_t k_t v_tᵀ: the final state of
    :func:`gka.gated_kalmanet` from a zero state, and how much an older state fades meanwhile.

    Two matrix products per head; differentiable in every argument, any number of times. The state after T tokens from
    an older state (h₀, u₀) is (e^g h₀ + h, e^g u₀ + u), so pieces of a sequence can be summed up separately.

    Args:
        k, v, log_decay, beta, decay_keys: as in :func:`gka.gated_kalmanet`.

    Returns:
        h [B, H, D, D], u [B, H, D, V] and g = Σ_t log γ_t [B, H], float32 (float64 for float64 inputs).
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    heads = max(tensor.shape[2] for tensor in (k, v, log_decay, beta) if tensor is not None)
    keys, values = (_of_heads(each.to(dtype), heads) for each in (k, v))
    weight = torch.ones(keys.shape[:3], dtype=dtype, device=k.device) if beta is None else beta.to(dtype)
    total = torch.zeros((k.shape[0], heads), dtype=dtype, device=k.device)
    faded = weight
    if log_decay is not None:
        total = log_decay.double().sum(1).to(dtype)
        faded = weight * _after(log_decay).exp().to(dtype)
    h = torch.einsum("bthd,bthe->bhde", keys * (faded if decay_keys else weight).unsqueeze(-1), keys)
    u = torch.einsum("bthd,bthe->bhde", keys * faded.unsqueeze(-1), values)
    return h, u, total


def memory_states(
    k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, *, rule: Literal["add", "delta"]
) -> tuple[Tensor, Tensor]:
    """The same for :func:`gka.memory`: (B, A), so that the state after these tokens from an older one S is A S + B.

    A is a factor [B, H], one per key channel [B, H, K], or, for the delta rule, the matrix Π(I − βkkᵀ)diag(γ)
    [B, H, K, K]: what the memory makes of the identity when nothing is written.
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    if rule == "delta":
        through = {"rule": rule, "output_final_state": True}
        written = memory(k, k, v, log_decay, beta, **through)[1]
        one = torch.eye(k.shape[-1], dtype=dtype, device=k.device).expand(k.shape[0], k.shape[2], -1, -1)
        return written, memory(k, k, torch.zeros_like(k), log_decay, beta, initial_state=one.contiguous(), **through)[1]
    keys = k.to(dtype) if beta is None else k.to(dtype) * beta.to(dtype).unsqueeze(-1)
    left = torch.ones((k.shape[0], k.shape[2]), dtype=dtype, device=k.device)
    if log_decay is not None:
        left = log_decay.double().sum(1).exp().to(dtype)
        faded = _after(log_decay).exp().to(dtype)
        keys = keys * (faded if log_decay.dim() == 4 else faded.unsqueeze(-1))
    return torch.einsum("bthd,bthe->bhde", keys, v.to(dtype)), left
