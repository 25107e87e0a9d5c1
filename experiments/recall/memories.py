"""The memories of the recall experiment: what each does with a sequence of pairs, and how it answers.

    linear attention     S ← S + β k vᵀ                        o = Sᵀ q
    DeltaNet             S ← (I − β k kᵀ) S + β k vᵀ            o = Sᵀ q
    Gated DeltaNet       S ← γ (I − β k kᵀ) S + β k vᵀ          o = Sᵀ q
    Gated KalmaNet       H ← γH + β k kᵀ, U ← γU + β k vᵀ       o = Uᵀ (H + λI)⁻¹ q,  λ = 0.02 ‖H‖_F, 30 Chebyshev steps

All run in float32, all on unit-norm keys. Gated KalmaNet keeps H beside its D×V state, so each rival also comes in a
wide form whose keys have so many more dimensions that its state is as large as H and U together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import gka


@dataclass(frozen=True)
class Gates:
    """One setting per row of a tape: how strongly a pair is written, and what is kept from token to token."""

    beta: Tensor  # [rows]
    decay: Tensor  # [rows]


@dataclass(frozen=True)
class Tape:
    """What a memory lives through, one row per seed: tokens to store, then queries, which write nothing."""

    keys: Tensor  # [rows, tokens, D]
    values: Tensor  # [rows, tokens, V]
    strength: Tensor  # [tokens]: 1 for a pair, less for a distracting token; multiplies beta
    queries: Tensor  # [rows, queries, D]

    def repeat(self, times: int) -> Tape:
        keys, values, queries = (x.repeat(times, 1, 1) for x in (self.keys, self.values, self.queries))
        return Tape(keys=keys, values=values, strength=self.strength, queries=queries)


def _with_queries(tape: Tape, gates: Gates) -> tuple[Tensor, ...]:
    """The tape as the arguments of a gka operator, [rows, tokens + queries, 1 head, …]."""
    (rows, stored, _), asked = tape.keys.shape, tape.queries.shape[1]
    keys = torch.cat([tape.keys, tape.queries], dim=1)
    values = torch.cat([tape.values, tape.values.new_zeros(rows, asked, tape.values.shape[2])], dim=1)
    log_decay, beta = torch.zeros(rows, stored + asked), torch.zeros(rows, stored + asked)
    log_decay[:, :stored] = gates.decay.log()[:, None]
    beta[:, :stored] = gates.beta[:, None] * tape.strength
    return tuple(x.unsqueeze(2) for x in (keys, keys, values, log_decay, beta))


def linear_attention(tape: Tape, gates: Gates) -> Tensor:
    o, _ = gka.linear_memory(*_with_queries(tape, gates))
    return o[:, tape.keys.shape[1] :, 0]


def delta_rule(tape: Tape, gates: Gates) -> Tensor:
    """DeltaNet, and with decay < 1 Gated DeltaNet."""
    state = tape.keys.new_zeros(tape.keys.shape[0], tape.keys.shape[2], tape.values.shape[2])
    decay = gates.decay[:, None, None]
    fades = bool((gates.decay != 1).any())
    for t, strength in enumerate(tape.strength.tolist()):
        key, value, beta = tape.keys[:, t, :, None], tape.values[:, t, None, :], gates.beta[:, None, None] * strength
        state = decay * state if fades else state
        state = torch.baddbmm(state, key, beta * (value - key.mT @ state))
    return tape.queries @ state


def gated_kalmanet(tape: Tape, gates: Gates, solver: str = "chebyshev") -> Tensor:
    o, _ = gka.gated_kalmanet(*_with_queries(tape, gates), solver=solver)
    return o[:, tape.keys.shape[1] :, 0]


@dataclass(frozen=True)
class Memory:
    label: str
    recall: Callable[[Tape, Gates], Tensor]
    wide: bool = False  # keys so wide that the state is as large as Gated KalmaNet's H and U
    keeps_h: bool = False
    # The settings to choose from. A common factor on every β changes nothing for linear attention (every output gets
    # its best scale) and for Gated KalmaNet (its ridge follows ‖H‖), so those two have one.
    betas: tuple[float, ...] = (1.0,)
    decays: tuple[float, ...] = (1.0,)

    def settings(self) -> list[tuple[float, float]]:
        return [(beta, decay) for beta in self.betas for decay in self.decays]

    def key_dim(self, dim: int) -> int:
        return 2 * dim if self.wide else dim

    def state_numbers(self, dim: int) -> int:
        return self.key_dim(dim) * dim + (dim * dim if self.keeps_h else 0)


_BETAS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)  # towards 0: linear attention
_DECAYS = (1.0, 0.9995, 0.999, 0.99)

MEMORIES = {
    "linear": Memory("linear attention", linear_attention),
    "deltanet": Memory("DeltaNet", delta_rule, betas=_BETAS),
    "gdn": Memory("Gated DeltaNet", delta_rule, betas=_BETAS, decays=_DECAYS),
    "linear_wide": Memory("linear attention, wide keys", linear_attention, wide=True),
    "deltanet_wide": Memory("DeltaNet, wide keys", delta_rule, wide=True, betas=_BETAS),
    "gka": Memory("Gated KalmaNet", gated_kalmanet, keeps_h=True, decays=_DECAYS),
    "gka_exact": Memory("Gated KalmaNet, exact solve", partial(gated_kalmanet, solver="exact"), keeps_h=True),
}
