"""Gated KalmaNet as a ``torch.nn.Module``, for training loops of one's own.

    layer = gka.nn.GatedKalmaNet(hidden_size=1024, head_dim=128, num_q_heads=8)
    y, state = layer(x)             # x [B, T, 1024]
    y, state = layer(more, state)   # goes on where the last call ended
    y = layer.step(token, state)    # one token [B, 1024]; the state is updated in place

Parameters have the names of published checkpoints (``model.layers.N.gka.*``), so a state dict goes either way, also to
and from the C++ block behind ``gka train`` and ``gka generate``.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ._block import gated_rms_norm, short_conv, short_conv_step
from ._ops import gated_kalmanet, gated_kalmanet_step, linear_memory, ridge_solve

_EPS = 1e-6  # of unit length and of β, as published


class State(NamedTuple):
    """What a layer remembers of each sequence; None for what its configuration has no use for."""

    conv_q: Tensor | None  # [N, channels, conv_size − 1]: the last inputs of each convolution
    conv_k: Tensor | None
    conv_v: Tensor | None
    h: Tensor | None  # [N, heads, D, D]
    u: Tensor  # [N, heads, D, V]


@dataclasses.dataclass(frozen=True)
class Config:
    """The choices of a block, named as in ``gka_config`` of a checkpoint."""

    num_iter: int = 30  #: 0: no solve, the query itself asks the memory
    ridge_strength: float = 0.02
    solver_type: str = "chebyshev"
    ridge_mode: str = "adaptive"  #: constant: λ = ridge_strength
    gradient: str = "implicit"
    bp_lambda: bool = True  #: False: no gradient through λ
    use_alpha_connection: bool = True
    use_beta_gate: bool = True
    beta_weight: str = "published"  #: published: tokens are written with weight β²; paper: with β
    use_forgetting_gate: bool = True
    use_forgetting_gate_kk: bool = True  #: False: H does not fade
    use_gate: bool = True  #: of the output
    gla_rescale: bool = True  #: answers times (size of a key)^−½
    conv_size: int = 4  #: 0: no convolution
    use_q_conv: bool = True
    use_k_conv: bool = True
    use_v_conv: bool = True
    norm_eps: float = 1e-6
    kv_proj_rank: int | None = None  #: grouped keys and values get a low-rank part of their own per query head
    kv_learnable_residual: bool = False
    expand_k: float = 1.0
    expand_v: float = 1.0
    sketch_dim: int = 0  #: > 0: the solve runs in so many learned dimensions

    def __post_init__(self) -> None:
        if self.beta_weight not in ("published", "paper"):
            raise ValueError(f"beta_weight is {self.beta_weight!r}; it takes 'published' or 'paper'.")


class _ShortConv(nn.Module):
    """A causal convolution per channel and SiLU, with unit-length heads where asked for."""

    def __init__(self, channels: int, width: int, head_dim: int, unit: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.options = {"l2_norm": "divide" if unit else "none", "head_dim": head_dim if unit else 0, "eps": _EPS}

    def forward(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return short_conv(
            x, self.weight, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, **self.options
        )

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        return short_conv_step(x, self.weight, state=state, **self.options)


class _LowRank(nn.Module):
    def __init__(self, inputs: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.linearA = nn.Linear(inputs, rank, bias=False)
        self.linearB = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linearB(functional.silu(self.linearA(x)))


class _Scale(nn.Module):
    """The weight of a norm, under its published name."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def _unit(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + _EPS)


def _whole(share: float, size: int, name: str) -> int:
    if not (share * size).is_integer() or share <= 0:
        raise ValueError(f"{name} is {share}, which of a head of {size} is not a whole number of at least 1.")
    return int(share * size)


class GatedKalmaNet(nn.Module):
    """The Gated KalmaNet block: projections, short convolutions, gates, the memory, a gated norm.

    Args:
        hidden_size: width of the stream.
        head_dim: size of a head's keys and values, before ``expand_k`` and ``expand_v``.
        num_q_heads: heads of the queries. Left out: hidden_size / head_dim.
        num_k_heads, num_v_heads: heads of the keys and of the values; fewer serve consecutive query heads in groups.
            Left out: as the queries.
        **gka_config: the fields of :class:`Config`.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int = 128,
        num_q_heads: int | None = None,
        num_k_heads: int | None = None,
        num_v_heads: int | None = None,
        **gka_config: object,
    ) -> None:
        super().__init__()
        unknown = sorted(set(gka_config) - {field.name for field in dataclasses.fields(Config)})
        if unknown:
            known = ", ".join(field.name for field in dataclasses.fields(Config))
            raise TypeError(f"GatedKalmaNet has no option {unknown[0]!r}; its options are {known}.")
        self.config = config = Config(**gka_config)
        q_heads = num_q_heads or max(hidden_size // head_dim, 1)
        k_heads, v_heads = num_k_heads or q_heads, num_v_heads or q_heads
        self.heads = heads = max(q_heads, k_heads, v_heads)
        for name, count in (("num_q_heads", q_heads), ("num_k_heads", k_heads), ("num_v_heads", v_heads)):
            if heads % count:
                raise ValueError(f"{name} is {count}, which does not divide the {heads} heads of the layer.")
        self.key_dim = _whole(config.expand_k, head_dim, "expand_k")
        self.value_dim = _whole(config.expand_v, head_dim, "expand_v")
        if config.sketch_dim > self.key_dim:
            raise ValueError(f"sketch_dim is {config.sketch_dim}; it must be at most a key's size, {self.key_dim}.")
        self.scale = self.key_dim**-0.5 if config.gla_rescale else 1.0

        rank = config.kv_proj_rank or 0
        self.q_proj = nn.Linear(hidden_size, q_heads * self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, k_heads * self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, v_heads * self.value_dim, bias=False)
        # Heads with a low-rank part have their length only after it is added.
        self._unit_keys = not (rank and k_heads < heads)
        self.q_conv1d = self._conv(config.use_q_conv, self.q_proj, self.key_dim, True)
        self.k_conv1d = self._conv(config.use_k_conv, self.k_proj, self.key_dim, self._unit_keys)
        self.v_conv1d = self._conv(config.use_v_conv, self.v_proj, self.value_dim, False)
        for name, count, size in (("k", k_heads, self.key_dim), ("v", v_heads, self.value_dim)):
            if rank and count < heads:
                self.add_module(f"proj_{name}", _LowRank(count * size, rank, heads * size))
                if config.kv_learnable_residual:
                    self.register_parameter(f"{name}_rep", nn.Parameter(torch.empty(heads, count)))
        if config.use_forgetting_gate:
            self.a_proj = nn.Linear(hidden_size, heads, bias=False)
            self.A_log = nn.Parameter(torch.empty(heads))
            self.dt_bias = nn.Parameter(torch.empty(heads))
            self.A_log._no_weight_decay = self.dt_bias._no_weight_decay = True
        if config.use_beta_gate:
            self.b_proj = nn.Linear(hidden_size, heads)
        if config.use_alpha_connection:
            self.alpha_proj = nn.Linear(hidden_size, heads)
        if config.sketch_dim:
            self.sketch = nn.Parameter(torch.empty(heads, config.sketch_dim, self.key_dim))
        if config.use_gate:
            self.g_proj = nn.Linear(hidden_size, heads * self.value_dim, bias=False)
        self.o_norm = _Scale(self.value_dim)
        self.o_proj = nn.Linear(heads * self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    def _conv(self, wanted: bool, projection: nn.Linear, head_dim: int, unit: bool) -> _ShortConv | None:
        width = self.config.conv_size if wanted else 0
        return _ShortConv(projection.out_features, width, head_dim, unit) if width else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The start the C++ block has: A in (0, 16), dt log-uniform in (0.001, 0.1), matrices normal(0.02)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=0.02)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, _ShortConv):
                bound = module.weight.shape[-1] ** -0.5
                module.weight.uniform_(-bound, bound)
            elif isinstance(module, _Scale):
                module.weight.fill_(1)
        for name in ("proj_k", "proj_v"):
            if hasattr(self, name):
                getattr(self, name).linearB.weight.zero_()  # at the start a head is the copy it would be without
        if self.config.use_forgetting_gate:
            self.A_log.uniform_(0, 16).clamp_(min=1e-6).log_()
            dt = torch.empty_like(self.dt_bias).uniform_(math.log(0.001), math.log(0.1)).exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        for name in ("k_rep", "v_rep"):
            if hasattr(self, name):
                mixture = getattr(self, name)
                copies = torch.eye(mixture.shape[1]).repeat_interleave(self.heads // mixture.shape[1], 0)
                mixture.copy_(copies)
        if self.config.sketch_dim:
            for head in self.sketch:
                nn.init.orthogonal_(head)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, hidden_size] -> (y, the state after it).

        With ``cu_seqlens`` [N+1] x is one row of N packed sequences, and the state has N entries.
        """
        before = state or State(None, None, None, None, None)
        q, conv_q = self._project(self.q_proj, self.q_conv1d, x, before.conv_q, cu_seqlens, self.key_dim, True)
        k, conv_k = self._project(
            self.k_proj, self.k_conv1d, x, before.conv_k, cu_seqlens, self.key_dim, self._unit_keys
        )
        v, conv_v = self._project(self.v_proj, self.v_conv1d, x, before.conv_v, cu_seqlens, self.value_dim, False)
        q, k, v = self._expand("q", q), self._expand("k", k), self._expand("v", v)
        if not self._unit_keys:
            k = _unit(k)
        o, h, u = self._remember(q, k, v, self._gates(x), before, cu_seqlens)
        return self._output(o, x), State(conv_q, conv_k, conv_v, h, u)

    @torch.no_grad()
    def step(self, x: Tensor, state: State) -> Tensor:
        """One token of each sequence, x [B, hidden_size] -> y; the state is updated in place."""
        if self.config.sketch_dim or not self.config.num_iter:
            y, after = self.forward(x.unsqueeze(1), state)
            for old, new in zip(state, after, strict=True):
                if old is not None:
                    old.copy_(new)
            return y.squeeze(1)
        tensors = []
        for projection, conv, kept, size, unit in (
            (self.q_proj, self.q_conv1d, state.conv_q, self.key_dim, True),
            (self.k_proj, self.k_conv1d, state.conv_k, self.key_dim, self._unit_keys),
            (self.v_proj, self.v_conv1d, state.conv_v, self.value_dim, False),
        ):
            heads = projection(x) if conv is None else conv.step(projection(x), kept)
            heads = heads.unflatten(-1, (-1, size))
            tensors.append(_unit(heads) if conv is None and unit else heads)
        q, k, v = (self._expand(name, t) for name, t in zip("qkv", tensors, strict=True))
        if not self._unit_keys:
            k = _unit(k)
        c = self.config
        o = gated_kalmanet_step(
            q,
            k,
            v,
            **self._gates(x),
            state=(state.h, state.u),
            scale=self.scale,
            ridge=c.ridge_strength,
            iterations=c.num_iter,
            solver=c.solver_type,
            ridge_mode=c.ridge_mode,
            decay_keys=c.use_forgetting_gate_kk,
        )
        return self._output(o, x)

    def _project(
        self,
        projection: nn.Linear,
        conv: _ShortConv | None,
        x: Tensor,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
        size: int,
        unit: bool,
    ) -> tuple[Tensor, Tensor | None]:
        y = projection(x)
        if conv is not None:
            y, state = conv(y, state, cu_seqlens)
            return y.unflatten(-1, (-1, size)), state
        y = y.unflatten(-1, (-1, size))
        return _unit(y) if unit else y, None

    def _expand(self, name: str, x: Tensor) -> Tensor:
        """Few heads for many: copies or a learned mixture, plus a low-rank part where there is one."""
        count = x.shape[-2]
        mixture, low_rank = getattr(self, f"{name}_rep", None), getattr(self, f"proj_{name}", None)
        if mixture is not None:
            heads = torch.einsum("eh,...hd->...ed", mixture.to(x.dtype), x)
        else:
            heads = x if count == self.heads else x.repeat_interleave(self.heads // count, -2)
        return heads if low_rank is None else heads + low_rank(x.flatten(-2)).unflatten(-1, (self.heads, -1))

    def _gates(self, x: Tensor) -> dict[str, Tensor | None]:
        """All in float32 (float64 for float64): decays near 1 have no room in 16 bits."""
        c, wide = self.config, torch.promote_types(x.dtype, torch.float32)
        gates: dict[str, Tensor | None] = {"log_decay": None, "beta": None, "alpha": None}
        if c.use_forgetting_gate:
            speed = functional.softplus(self.a_proj(x).to(wide) + self.dt_bias.to(wide))
            gates["log_decay"] = -self.A_log.to(wide).exp() * speed
        if c.use_beta_gate:
            beta = torch.sigmoid(self.b_proj(x).to(wide))
            gates["beta"] = (beta + _EPS).square() if c.beta_weight == "published" else beta
        if c.use_alpha_connection:
            gates["alpha"] = torch.sigmoid(self.alpha_proj(x).to(wide))
        return gates

    def _remember(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor | None], before: State, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        c = self.config
        solve = {
            "ridge": c.ridge_strength,
            "iterations": c.num_iter,
            "solver": c.solver_type,
            "gradient": c.gradient,
            "ridge_mode": c.ridge_mode,
            "ridge_gradient": c.bp_lambda,
        }
        if c.num_iter and not c.sketch_dim:
            o, (h, u) = gated_kalmanet(
                q,
                k,
                v,
                **gates,
                **solve,
                scale=self.scale,
                decay_keys=c.use_forgetting_gate_kk,
                initial_state=None if before.h is None else (before.h, before.u),
                output_final_state=True,
                cu_seqlens=cu_seqlens,
            )
            return o, h, u
        query, h, decay, beta = q, None, gates["log_decay"], gates["beta"]
        if c.num_iter:
            p = self.sketch.to(q.dtype)
            low_q, low_k = (torch.einsum("...hd,hsd->...hs", t, p) for t in (q, k))
            low_decay = decay if c.use_forgetting_gate_kk else None
            ends = {"initial_state": before.h, "output_final_state": True, "cu_seqlens": cu_seqlens}
            x, h = ridge_solve(low_q, low_k, low_decay, beta, **solve, **ends)
            x = torch.einsum("...hs,hsd->...hd", x, p)
            alpha = gates["alpha"]
            query = x if alpha is None else q + alpha.unsqueeze(-1).to(q.dtype) * (x - q)
        ends = {"initial_state": before.u, "output_final_state": True, "cu_seqlens": cu_seqlens}
        o, u = linear_memory(query, k, v, decay, beta, scale=self.scale, **ends)
        return o, h, u

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.g_proj(x).unflatten(-1, (self.heads, -1)) if self.config.use_gate else None
        return self.o_proj(gated_rms_norm(o, gate, self.o_norm.weight, eps=self.config.norm_eps).flatten(-2))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, key_dim={self.key_dim}, value_dim={self.value_dim}, {self.config}"
