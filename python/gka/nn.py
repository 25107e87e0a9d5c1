"""Gated KalmaNet and the layers it is compared with as ``torch.nn.Module``, for your own training loop.

    layer = gka.nn.GatedKalmaNet(hidden_size=1024, head_dim=128, num_q_heads=8)
    y, state = layer(x)             # x [B, T, 1024]
    y, state = layer(more, state)   # continues where the last call ended
    y = layer.step(token, state)    # one token [B, 1024]; the state is updated in place

Parameters have the names of published checkpoints (``model.layers.N.gka.*``), so state dicts can be exchanged with
them, and with the C++ block behind ``gka train`` and ``gka generate``. The other layers (docs/layers.md) are called
alike: ``Attention``, ``GatedDeltaNet``, ``DeltaNet``, ``KimiDeltaAttention``, ``MesaNet``, ``GatedLinearAttention``,
``RetNet``, ``LinearAttention``, ``Mamba2``. ``parameter_groups`` tells an optimiser which parameters must not decay:
those marked ``_no_weight_decay``.
"""

import dataclasses
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from . import _parts as parts
from ._mixers import (
    Attention,
    AttentionState,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LinearAttention,
    Mamba2,
    Mamba2State,
    MemoryState,
    MesaNet,
    MesaState,
    Mixer,
    RetNet,
)
from ._ops import gated_kalmanet, gated_kalmanet_step, linear_memory, ridge_solve
from ._parts import Norm, ShortConv

__all__ = [
    "Attention",
    "AttentionState",
    "Config",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedKalmaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LinearAttention",
    "Mamba2",
    "Mamba2State",
    "MemoryState",
    "MesaNet",
    "MesaState",
    "Mixer",
    "RetNet",
    "State",
    "parameter_groups",
]

Solver = Literal["chebyshev", "conjugate_gradient", "gradient_descent", "nesterov", "exact"]
RidgeMode = Literal["adaptive", "constant"]
Gradient = Literal["implicit", "unrolled"]
BetaWeight = Literal["published", "paper"]


class State(NamedTuple):
    """What a layer remembers of each sequence; None for fields that its configuration does not use."""

    conv_q: Tensor | None  # [N, channels, conv_size − 1]: the last inputs of each convolution
    conv_k: Tensor | None
    conv_v: Tensor | None
    h: Tensor | None  # [N, heads, D, D]
    u: Tensor  # [N, heads, D, V]


for _state in (State, MemoryState, AttentionState, MesaState, Mamba2State):
    # For torch.export and its files, and for torch.load, which takes known types alone.
    _pytree._register_namedtuple(_state, serialized_type_name=f"gka.nn.{_state.__name__}")
    torch.serialization.add_safe_globals([_state])


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of a block, named as in ``gka_config`` of a checkpoint. GatedKalmaNet has their defaults."""

    num_iter: int  #: 0: no solve, the query itself asks the memory
    ridge_strength: float
    solver_type: Solver
    ridge_mode: RidgeMode  #: constant: λ = ridge_strength
    gradient: Gradient
    bp_lambda: bool  #: False: no gradient through λ
    use_alpha_connection: bool
    use_beta_gate: bool
    beta_weight: BetaWeight  #: published: tokens are written with weight β²; paper: with β
    use_forgetting_gate: bool
    use_forgetting_gate_kk: bool  #: False: H does not fade
    use_gate: bool  #: of the output
    gla_rescale: bool  #: answers times (size of a key)^−½
    conv_size: int  #: 0: no convolution
    use_q_conv: bool
    use_k_conv: bool
    use_v_conv: bool
    norm_eps: float
    kv_proj_rank: int | None  #: grouped keys and values get a low-rank part of their own per query head
    kv_learnable_residual: bool
    expand_k: float
    expand_v: float
    sketch_dim: int  #: > 0: the solve runs in so many learned dimensions

    def __post_init__(self) -> None:
        names = {"beta_weight": BetaWeight, "solver_type": Solver, "ridge_mode": RidgeMode, "gradient": Gradient}
        for name, choices in names.items():
            parts.one_of(name, getattr(self, name), choices.__args__)
        parts.check_arguments(Config.__annotations__, vars(self), ("num_iter", "conv_size", "sketch_dim"))


class GatedKalmaNet(Mixer):
    """The Gated KalmaNet block: projections, short convolutions, gates, the memory, a gated norm.

    Args:
        hidden_size: width of the stream.
        head_dim: size of a head's keys and values, before ``expand_k`` and ``expand_v``.
        num_q_heads: heads of the queries. Left out: hidden_size / head_dim.
        num_k_heads, num_v_heads: heads of the keys and of the values; fewer serve consecutive query heads in groups.
            Left out: as the queries.
        device, dtype: of the parameters.
        the rest: the fields of :class:`Config`, which explains each.
    """

    _kind = State

    def __init__(
        self,
        hidden_size: int,
        head_dim: int = 128,
        num_q_heads: int | None = None,
        num_k_heads: int | None = None,
        num_v_heads: int | None = None,
        *,
        num_iter: int = 30,
        ridge_strength: float = 0.02,
        solver_type: Solver = "chebyshev",
        ridge_mode: RidgeMode = "adaptive",
        gradient: Gradient = "implicit",
        bp_lambda: bool = True,
        use_alpha_connection: bool = True,
        use_beta_gate: bool = True,
        beta_weight: BetaWeight = "published",
        use_forgetting_gate: bool = True,
        use_forgetting_gate_kk: bool = True,
        use_gate: bool = True,
        gla_rescale: bool = True,
        conv_size: int = 4,
        use_q_conv: bool = True,
        use_k_conv: bool = True,
        use_v_conv: bool = True,
        norm_eps: float = 1e-6,
        kv_proj_rank: int | None = None,
        kv_learnable_residual: bool = False,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        sketch_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: object,
    ) -> None:
        super().__init__()
        fields = [field.name for field in dataclasses.fields(Config)]
        if unknown:
            raise TypeError(f"GatedKalmaNet has no option {min(unknown)!r}; its options are {', '.join(fields)}.")
        given = locals()
        self.config = config = Config(**{name: given[name] for name in fields})
        factory = {"device": device, "dtype": dtype}
        parts.whole_numbers(1, hidden_size=hidden_size, head_dim=head_dim)
        parts.whole_numbers(0, num_q_heads=num_q_heads, num_k_heads=num_k_heads, num_v_heads=num_v_heads)
        q_heads = num_q_heads or max(hidden_size // head_dim, 1)
        k_heads, v_heads = num_k_heads or q_heads, num_v_heads or q_heads
        self.heads = heads = max(q_heads, k_heads, v_heads)
        for name, count in (("num_q_heads", q_heads), ("num_k_heads", k_heads), ("num_v_heads", v_heads)):
            if heads % count:
                raise ValueError(f"{name} is {count}, which does not divide the {heads} heads of the layer.")
        self.key_dim = parts.head_size("a key", parts.whole(config.expand_k, head_dim, "expand_k"))
        self.value_dim = parts.head_size("a value", parts.whole(config.expand_v, head_dim, "expand_v"))
        if config.sketch_dim > self.key_dim:
            raise ValueError(f"sketch_dim is {config.sketch_dim}; it must be at most a key's size, {self.key_dim}.")
        self.scale = self.key_dim**-0.5 if config.gla_rescale else 1.0

        rank = config.kv_proj_rank or 0
        self.q_proj = nn.Linear(hidden_size, q_heads * self.key_dim, bias=False, **factory)
        self.k_proj = nn.Linear(hidden_size, k_heads * self.key_dim, bias=False, **factory)
        self.v_proj = nn.Linear(hidden_size, v_heads * self.value_dim, bias=False, **factory)
        # Heads with a low-rank part have their length only after it is added.
        self._unit_keys = not (rank and k_heads < heads)
        norms = ("divide", "divide" if self._unit_keys else "none", "none")
        wanted = (config.use_q_conv, config.use_k_conv, config.use_v_conv)
        for name, size, norm, with_conv in zip(
            "qkv", (self.key_dim, self.key_dim, self.value_dim), norms, wanted, strict=True
        ):
            width = config.conv_size if with_conv else 0
            channels = getattr(self, f"{name}_proj").out_features
            self.add_module(f"{name}_conv1d", ShortConv(channels, width, size, norm, **factory) if width else None)
        learned = config.kv_learnable_residual
        parts.add_expansion(self, "k", k_heads, self.key_dim, heads, rank, learned, **factory)
        parts.add_expansion(self, "v", v_heads, self.value_dim, heads, rank, learned, **factory)
        if config.use_forgetting_gate:
            self.a_proj = nn.Linear(hidden_size, heads, bias=False, **factory)
            self.A_log, self.dt_bias = parts.fresh((heads,), **factory), parts.fresh((heads,), **factory)
        if config.use_beta_gate:
            self.b_proj = nn.Linear(hidden_size, heads, **factory)
        if config.use_alpha_connection:
            self.alpha_proj = nn.Linear(hidden_size, heads, **factory)
        if config.sketch_dim:
            self.sketch = parts.fresh((heads, config.sketch_dim, self.key_dim), **factory)
        if config.use_gate:
            self.g_proj = nn.Linear(hidden_size, heads * self.value_dim, bias=False, **factory)
        self.o_norm = Norm(self.value_dim, config.norm_eps, **factory)
        self.o_proj = nn.Linear(heads * self.value_dim, hidden_size, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Starts as the C++ block does: A in (0, 16), dt log-uniform in (0.001, 0.1), matrices normal(0.02)."""
        parts.reset(self, std)
        if self.config.use_forgetting_gate:
            parts.reset_decay(self.A_log, self.dt_bias)
        if self.config.sketch_dim and not self.sketch.is_meta:
            for head in self.sketch:
                nn.init.orthogonal_(head)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x [B, T, hidden_size] -> (y, the state after it).

        With ``cu_seqlens`` [N+1] x is one row of N packed sequences, and the state has N entries.
        """
        before = self._begin(x, state, cu_seqlens)
        sizes = {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim}
        heads, convs = self._heads(sizes, x, before[:3], cu_seqlens)
        q, k, v = self._shape(heads)
        gates = self._gates(x)
        if self.context is not None:
            before = before._replace(**self._past(k, v, gates))
        o, h, u = self._solve(q, k, v, gates, before, cu_seqlens)
        return self._output(o, x), State(*convs, h, u)

    @torch.no_grad()
    def _step(self, x: Tensor, state: State) -> Tensor:
        if self.config.sketch_dim or not self.config.num_iter:
            y, after = self.forward(x.unsqueeze(1), state)
            for old, new in zip(state, after, strict=True):
                if old is not None:
                    old.copy_(new)
            return y.squeeze(1)
        heads = []
        for name, kept, size in zip("qkv", state[:3], (self.key_dim, self.key_dim, self.value_dim), strict=True):
            y, conv = getattr(self, f"{name}_proj")(x), getattr(self, f"{name}_conv1d")
            heads.append((y if conv is None else conv.step(y, kept)).unflatten(-1, (-1, size)))
        q, k, v = self._shape(heads)
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

    def _shape(self, heads: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Scales queries and keys to unit length (unless a convolution has done it), and expands heads where needed:
        the operators read shared keys and values in place."""
        q, k, v = heads
        q = parts.unit(q, "divide") if self.q_conv1d is None else q
        k = parts.unit(k, "divide") if self.k_conv1d is None and self._unit_keys else k
        q = parts.expand_heads(self, "q", q, self.heads)
        share = not self.config.sketch_dim and self.context is None
        k, v = (
            y if share and not hasattr(self, f"proj_{name}") else parts.expand_heads(self, name, y, self.heads)
            for name, y in (("k", k), ("v", v))
        )
        return q, k if self._unit_keys else parts.unit(k, "divide"), v

    def _past(self, k: Tensor, v: Tensor, gates: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The memory where this rank's tokens begin."""
        c, low = self.config, None
        if c.sketch_dim and c.num_iter:
            low = torch.einsum("...hd,hsd->...hs", k, self.sketch.to(k.dtype))
        options = {"decay_keys": c.use_forgetting_gate_kk, "low": low, "solves": c.num_iter > 0}
        h, u = self.context.past_kalmanet(k, v, gates["log_decay"], gates["beta"], **options)
        return {"h": h, "u": u}

    def _gates(self, x: Tensor) -> dict[str, Tensor | None]:
        """All gates in float32 (float64 for float64): 16 bits cannot represent decays near 1."""
        c, wide = self.config, parts.wide(x)
        gates: dict[str, Tensor | None] = {"log_decay": None, "beta": None, "alpha": None}
        if c.use_forgetting_gate:
            gates["log_decay"] = parts.log_decay(self.a_proj(x), self.A_log, self.dt_bias)
        if c.use_beta_gate:
            beta = torch.sigmoid(self.b_proj(x).to(wide))
            gates["beta"] = (beta + parts.EPS).square() if c.beta_weight == "published" else beta
        if c.use_alpha_connection:
            gates["alpha"] = torch.sigmoid(self.alpha_proj(x).to(wide))
        return gates

    def _solve(
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
        return self.o_proj(self.o_norm(o, gate).flatten(-2))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, key_dim={self.key_dim}, value_dim={self.value_dim}, {self.config}"


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups for ``torch.optim.AdamW(gka.nn.parameter_groups(model, 0.1), lr=…)``: those that decay, and
    those that must not (norms, biases, ``A_log``, ``dt_bias``, a sketch), as in `gka train`.

    transformers' Trainer chooses by name and would decay ``A_log``: give it
    ``optimizers=(torch.optim.AdamW(gka.nn.parameter_groups(model, 0.1), lr=…), None)``.
    """
    # By name besides, for FSDP puts parameters in their place that have no marks.
    layers = (layer for layer in model.modules() if isinstance(layer, GatedKalmaNet))
    sketches = {id(layer.sketch) for layer in layers if layer.config.sketch_dim}

    def stays(parameter: nn.Parameter) -> bool:
        return parameter.dim() < 2 or hasattr(parameter, "_no_weight_decay") or id(parameter) in sketches

    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in learns if not stays(p)], "weight_decay": weight_decay},
        {"params": [p for p in learns if stays(p)], "weight_decay": 0.0},
    ]
