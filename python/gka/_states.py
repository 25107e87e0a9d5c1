"""What tokens leave in an empty memory, without answering any query: the plain decayed sums H and U."""

import torch
from torch import Tensor


def gated_kalmanet_states(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    decay_keys: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """H_T = Σ_t (Π_{i>t} γ_i) β_t k_t k_tᵀ and U_T = Σ_t (Π_{i>t} γ_i) β_t k_t v_tᵀ: the final state of
    :func:`gka.gated_kalmanet` from a zero one, and how much an older state fades meanwhile.

    Two matrix products per head; differentiable in every argument, any number of times. The state after T tokens from
    an older one (h₀, u₀) is (e^g h₀ + h, e^g u₀ + u), so pieces of a sequence can be summed up apart from each other.

    Args:
        k, v, log_decay, beta, decay_keys: as in :func:`gka.gated_kalmanet`.

    Returns:
        h [B, H, D, D], u [B, H, D, V] and g = Σ_t log γ_t [B, H], float32 (float64 for float64 inputs).
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    keys, values = k.to(dtype), v.to(dtype)
    weight = torch.ones(k.shape[:3], dtype=dtype, device=k.device) if beta is None else beta.to(dtype)
    total = torch.zeros((k.shape[0], k.shape[2]), dtype=dtype, device=k.device)
    faded = weight
    if log_decay is not None:
        total = log_decay.double().sum(1).to(dtype)
        # Of the tokens after each; from the end, so that a token that forgets everything (−inf) leaves what follows it.
        after = log_decay[:, 1:].double().flip(1).cumsum(1).flip(1)
        after = torch.cat([after, after.new_zeros(after.shape[0], 1, after.shape[2])], 1) if k.shape[1] else after
        faded = weight * after.exp().to(dtype)
    h = torch.einsum("bthd,bthe->bhde", keys * (faded if decay_keys else weight).unsqueeze(-1), keys)
    u = torch.einsum("bthd,bthe->bhde", keys * faded.unsqueeze(-1), values)
    return h, u, total
