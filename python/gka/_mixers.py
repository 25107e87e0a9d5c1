"""The layers GKA is compared with, as modules. docs/layers.md says what each computes. Parameters have the names of
published checkpoints. All layers are called alike: ``y, state = layer(x, state)``."""

import itertools
import json
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from . import _parts as parts
from ._library import load_floors
from ._memory import memory
from ._ops import gated_kalmanet, gated_kalmanet_step
from ._parts import Norm, ShortConv


class MemoryState(NamedTuple):
    """What a memory keeps of each sequence; None for fields that its configuration does not use."""

    conv_q: Tensor | None  # [N, channels, conv_size − 1]
    conv_k: Tensor | None
    conv_v: Tensor | None
    s: Tensor  # [N, heads, K, V]
    length: Tensor | None = None  # int64 [N], where positions matter


class AttentionState(NamedTuple):
    """Rotated keys and values of the tokens that are still seen, oldest first, and how many there have been."""

    conv_q: Tensor | None
    conv_k: Tensor | None
    conv_v: Tensor | None
    keys: Tensor  # [N, tokens, kv heads, head_dim]
    values: Tensor
    length: Tensor  # int64 [N]


class MesaState(NamedTuple):
    conv_q: Tensor | None
    conv_k: Tensor | None
    h: Tensor  # [N, heads, D, D]
    u: Tensor


class Mamba2State(NamedTuple):
    conv: Tensor  # [N, channels, conv_size − 1]
    s: Tensor  # [N, heads, state_size, head_dim]


class Mixer(parts.Marked):
    """Mixes tokens: ``forward(x, state=None, cu_seqlens=None) -> (y, state)``."""

    _kind: type[tuple]  # of its state
    context = None  # the other ranks of a sequence that is cut over them (gka._context)
    peers = None  # the ranks that share the heads of a layer that is cut over them (gka._tensor)
    first_head = 0  # of those this rank has

    @torch.no_grad()
    def _step(self, x: Tensor, state: tuple) -> Tensor:
        y, after = self.forward(x.unsqueeze(1), state)
        for old, new in zip(state, after, strict=True):
            if old is not None:
                old.copy_(new)
        return y.squeeze(1)

    def step(self, x: Tensor, state: tuple) -> Tensor:
        """One token of each sequence, x [B, hidden_size] -> y. Updates the state in place. No gradient."""
        if not isinstance(state, tuple):
            raise TypeError(f"step takes the state that a call of the layer returned, got {type(state).__name__}.")
        if x.dim() != 2:
            raise ValueError(f"step takes one token of each sequence, x [B, hidden_size], got {list(x.shape)}.")
        parts.no_gradient_of_a_step(x)
        return self._step(x, state)

    def _begin(self, x: Tensor, state: tuple | None, cu_seqlens: Tensor | None) -> tuple:
        """The state before x, with nothing in it where a sequence begins."""
        name = type(self).__name__
        if isinstance(x, Tensor) and x.dim() != 3:
            raise ValueError(f"{name} takes x [B, T, hidden_size], got {list(x.shape)}.")
        if isinstance(cu_seqlens, list | tuple):
            raise TypeError(f"{name} takes cu_seqlens as a tensor, got {type(cu_seqlens).__name__}.")
        if state is None:
            return self._kind(*[None] * len(self._kind._fields))
        if not isinstance(state, self._kind):
            kind = self._kind.__name__
            raise TypeError(f"{name} takes the state that a call of it returned, a {kind}, got {type(state).__name__}.")
        return state

    def _heads(
        self, sizes: dict[str, int], x: Tensor, kept: tuple[Tensor | None, ...], cu_seqlens: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """For each name in ``sizes``: projection, convolution if there is one, heads of that size; and the states
        of the convolutions afterwards. ``kept``: their states before."""
        convs = [getattr(self, f"{name}_conv1d", None) for name in sizes]
        inputs = [getattr(self, f"{name}_proj")(x) for name in sizes]
        if self.context is not None:
            kept = self.context.halo(inputs, [0 if conv is None else conv.weight.shape[-1] for conv in convs])
        done = [
            (y, None) if conv is None else conv(y, state, cu_seqlens)
            for y, conv, state in zip(inputs, convs, kept, strict=True)
        ]
        heads = [y.unflatten(-1, (-1, size)) for (y, _), size in zip(done, sizes.values(), strict=True)]
        return heads, [after for _, after in done]

    def _remember(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
        rule: Literal["add", "delta"],
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """The answers of a plain memory, and its state afterwards."""
        if self.context is not None:
            state = self.context.past_memory(k, v, log_decay, beta, rule=rule)
        ends = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}
        return memory(q, k, v, log_decay, beta, rule=rule, scale=scale, **ends)

    def _output(self, o: Tensor, x: Tensor, norm: str = "o_norm", activation: str = "silu") -> Tensor:
        gate = None
        if getattr(self, "g_proj", None) is not None:
            gate = self.g_proj(x).unflatten(-1, o.shape[-2:])
        return self.o_proj(getattr(self, norm)(o, gate, activation).flatten(-2))


def positions_of(x: Tensor, length: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Each token's place in its own sequence, [B, T]; ``length``: how many tokens of each there have been."""
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if length is not None and length.dim() and len(length) != sequences:
        raise ValueError(f"the state is of {len(length)} sequences, and x is of {sequences}.")
    here = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(x.device, torch.long)
        sequence = torch.searchsorted(bounds[1:].contiguous(), here, right=True)
        local = here - bounds[sequence]
        return (local if length is None else local + length[sequence]).unsqueeze(0)
    return here.expand(x.shape[0], -1) if length is None else length.unsqueeze(1) + here


def lengths_of(x: Tensor, cu_seqlens: Tensor) -> list[int]:
    """The lengths of the sequences packed in x; refuses bounds that do not fit its tokens."""
    if x.shape[0] != 1:
        raise ValueError(f"attention takes batch size 1 beside cu_seqlens, got {x.shape[0]}.")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"attention takes cu_seqlens in int32 or int64, got {cu_seqlens.dtype}.")
    bounds = cu_seqlens.tolist()
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    if bounds[:1] != [0] or bounds[-1] != x.shape[1] or min(sizes, default=0) < 0:
        raise ValueError(
            f"attention takes cu_seqlens that go from 0 to the number of tokens, {x.shape[1]}, and never decrease, "
            f"got {bounds}."
        )
    return sizes


def length_after(x: Tensor, length: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is not None:
        more = cu_seqlens.to(x.device, torch.long).diff()
    else:
        more = torch.full((x.shape[0],), x.shape[1], dtype=torch.long, device=x.device)
    return more if length is None else length + more


class Rotary(nn.Module):
    """Channel i turns with channel i + D/2; the frequencies are the library's."""

    def __init__(self, channels: int, theta: float, parameters: dict[str, object] | None = None) -> None:
        super().__init__()
        self.choices = (channels, float(theta), json.dumps(parameters or {}))
        load_floors()
        self.turns, self.factor = torch.ops.gka.rotary_frequencies(*self.choices)  # float64, and no buffer: never cast

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.turns.device != positions.device:
            self.turns = self.turns.to(positions.device)
        angles = (positions.double().unsqueeze(-1) * self.turns).unsqueeze(-2)
        kind = torch.promote_types(dtype, torch.float32)
        return (angles.cos() * self.factor).to(kind), (angles.sin() * self.factor).to(kind)


def rotate(x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = by
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Attention(Mixer):
    """Qwen3's softmax attention, full or over a sliding window.

    Args:
        hidden_size, num_attention_heads, num_key_value_heads, head_dim: sizes. Left out: as many key heads as query
            heads, and head_dim = hidden_size / num_attention_heads.
        sliding_window: how many tokens a token sees, itself included. Left out: all.
        rope_theta, rope_parameters: the rotary embedding; parameters as in config.json.
        attention_bias: biases on all four projections. qkv_bias: biases on q, k and v only.
        qk_norm: RMS norm of q and k per head, with rms_norm_eps.
        conv_size: a short convolution of q, k and v. 0: none.
    """

    _kind = AttentionState

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        *,
        sliding_window: int | None = None,
        rope_theta: float = 10000.0,
        rope_parameters: dict[str, object] | None = None,
        attention_bias: bool = False,
        qkv_bias: bool = False,
        qk_norm: bool = True,
        rms_norm_eps: float = 1e-6,
        conv_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parts.check_arguments(Attention.__init__.__annotations__, locals())
        factory = {"device": device, "dtype": dtype}
        heads, few = num_attention_heads, num_key_value_heads or num_attention_heads
        parts.divided(heads, few, "num_key_value_heads")
        size = head_dim or parts.divided(hidden_size, heads, "num_attention_heads")
        parts.rotary_size("head_dim", size)
        parts.whole_numbers(1, sliding_window=sliding_window)
        self.heads, self.kv_heads, self.head_dim, self.window = heads, few, size, sliding_window
        biased = attention_bias or qkv_bias
        self.q_proj = nn.Linear(hidden_size, heads * size, bias=biased, **factory)
        self.k_proj = nn.Linear(hidden_size, few * size, bias=biased, **factory)
        self.v_proj = nn.Linear(hidden_size, few * size, bias=biased, **factory)
        self.o_proj = nn.Linear(heads * size, hidden_size, bias=attention_bias, **factory)
        self.q_norm = Norm(size, rms_norm_eps, **factory) if qk_norm else None
        self.k_norm = Norm(size, rms_norm_eps, **factory) if qk_norm else None
        for name, count in (("q", heads), ("k", few), ("v", few)):
            conv = ShortConv(count * size, conv_size, size, **factory) if conv_size else None
            self.add_module(f"{name}_conv1d", conv)
        self.rotary = Rotary(size, rope_theta, rope_parameters)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        parts.reset(self, std)

    def project(
        self, x: Tensor, state: AttentionState | None, cu_seqlens: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple]:
        """q, k (both rotated) and v, [B, T, heads, head_dim], and the convolutions' states."""
        kept = (None, None, None) if state is None else state[:3]
        (q, k, v), convs = self._heads(dict.fromkeys("qkv", self.head_dim), x, kept, cu_seqlens)
        by = self.rotary(positions, x.dtype)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, by), rotate(k, by), v, tuple(convs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """mask: None for plain causal attention of as many queries as keys, else that of torch's attention."""
        o = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        return o.transpose(1, 2)

    def _mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        if queries == keys and (self.window is None or keys <= self.window):
            return None
        places = torch.arange(keys, device=device)
        age = places[keys - queries :].unsqueeze(1) - places
        return (age >= 0) if self.window is None else (age >= 0) & (age < self.window)

    def forward(
        self, x: Tensor, state: AttentionState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, AttentionState | None]:
        """x [B, T, hidden_size]. Packed sequences begin here and leave no state."""
        self._begin(x, state, cu_seqlens)
        if cu_seqlens is not None and state is not None:
            raise ValueError("attention takes cu_seqlens or a state, not both: packed sequences begin with the call.")
        if self.context is not None:
            return self._in_context(x, cu_seqlens)
        sizes = None if cu_seqlens is None else lengths_of(x, cu_seqlens)
        length = None if state is None else state.length
        q, k, v, convs = self.project(x, state, cu_seqlens, positions_of(x, length, cu_seqlens))
        if sizes is not None:
            rows = zip(q.split(sizes, 1), k.split(sizes, 1), v.split(sizes, 1), strict=True)
            o = [self.attend(a, b, c, self._mask(a.shape[1], a.shape[1], x.device)) for a, b, c in rows]
            return self.o_proj(torch.cat(o, 1).flatten(-2)), None
        if state is not None:
            k, v = torch.cat([state.keys, k], 1), torch.cat([state.values, v], 1)
        o = self.attend(q, k, v, self._mask(q.shape[1], k.shape[1], x.device))
        if self.window is not None:
            k, v = k[:, -self.window :], v[:, -self.window :]
        after = AttentionState(*convs, k, v, length_after(x, length, None))
        return self.o_proj(o.flatten(-2)), after

    def _in_context(self, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, None]:
        """This rank's part of sequences that are cut over ranks; returns no state."""
        positions = positions_of(x, self.context.offset(x), cu_seqlens)
        q, k, v, _ = self.project(x, None, cu_seqlens, positions)
        if self.window is None and self.context.has_ring(q):
            return self.o_proj(self.context.ring(q, k, v).flatten(-2)), None
        k, v = self.context.keys_and_values(k, v, self.window)
        pieces = []
        for mine, seen in self.context.spans(q.shape[1], k.shape[1]):
            queries, keys = mine.stop - mine.start, seen.stop - seen.start
            if x.is_cuda and self.window is None and queries != keys:
                mask = causal_lower_right(queries, keys)  # of a whole one no memory is left for long sequences
            else:
                mask = self._mask(queries, keys, x.device)
            pieces.append(self.attend(q[:, mine], k[:, seen], v[:, seen], mask))
        return self.o_proj(torch.cat(pieces, 1).flatten(-2)), None

    def step(self, x: Tensor, state: AttentionState) -> Tensor:
        raise TypeError(
            "attention's state grows with every token, so it has no step in place: y, state = layer(x[:, None], state)"
        )


class _DeltaRule(Mixer):
    """The base of the three delta rules: each writes β(v − Sᵀk), what the memory does not already answer."""

    _kind = MemoryState

    def _build(
        self,
        hidden_size: int,
        heads: tuple[int, int, int],
        key_dim: int,
        value_dim: int,
        conv_size: int,
        conv_bias: bool,
        norm_eps: float,
        factory: dict,
        rank: int = 0,
        learned: bool = False,
    ) -> None:
        self.heads, self.key_dim, self.value_dim = max(heads), key_dim, value_dim
        names = ("num_q_heads", "num_k_heads", "num_v_heads")
        for name, count in zip(names, heads, strict=True):
            if self.heads % count:
                raise ValueError(f"{name} is {count}, which does not divide the {self.heads} heads of the layer.")
        self._unit_keys = not (rank and heads[1] < self.heads)
        for (name, norm), count, size in zip(self._norms().items(), heads, (key_dim, key_dim, value_dim), strict=True):
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, count * size, bias=False, **factory))
            conv = ShortConv(count * size, conv_size, size, norm, conv_bias, **factory) if conv_size else None
            self.add_module(f"{name}_conv1d", conv)
        parts.add_expansion(self, "k", heads[1], key_dim, self.heads, rank, learned, **factory)
        parts.add_expansion(self, "v", heads[2], value_dim, self.heads, rank, learned, **factory)
        self.b_proj = nn.Linear(hidden_size, self.heads, bias=False, **factory)
        self.o_norm = Norm(value_dim, norm_eps, **factory)
        self.o_proj = nn.Linear(self.heads * value_dim, hidden_size, bias=False, **factory)

    def _decay(self, x: Tensor) -> Tensor | None:
        return None

    _activation = "silu"
    allow_neg_eigval = False

    def _norms(self) -> dict[str, str]:
        """Heads with a low-rank part have their length only after it is added."""
        return {"q": "rsqrt", "k": "rsqrt" if self._unit_keys else "none", "v": "none"}

    def forward(
        self, x: Tensor, state: MemoryState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        before = self._begin(x, state, cu_seqlens)
        sizes = {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim}
        heads, convs = self._heads(sizes, x, before[:3], cu_seqlens)
        if self.q_conv1d is None:
            norms = self._norms().values()
            heads = [parts.unit(functional.silu(y), norm) for y, norm in zip(heads, norms, strict=True)]
        q, k, v = (parts.expand_heads(self, name, y, self.heads) for name, y in zip("qkv", heads, strict=True))
        if not self._unit_keys:
            k = parts.unit(k, "rsqrt")
        beta = torch.sigmoid(self.b_proj(x).to(parts.wide(x)))
        beta = beta * 2 if self.allow_neg_eigval else beta
        o, s = self._remember(q, k, v, self._decay(x), beta, before.s, cu_seqlens, "delta", self.key_dim**-0.5)
        return self._output(o, x, activation=self._activation), MemoryState(*convs, s)


class GatedDeltaNet(_DeltaRule):
    """S ← γ(I − βkkᵀ)S + βkvᵀ. Arguments as in ``gdn_config``."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int = 128,
        num_q_heads: int | None = None,
        num_k_heads: int | None = None,
        num_v_heads: int | None = None,
        *,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        kv_proj_rank: int | None = None,
        kv_learnable_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parts.check_arguments(GatedDeltaNet.__init__.__annotations__, locals())
        factory = {"device": device, "dtype": dtype}
        q_heads = num_q_heads or max(hidden_size // head_dim, 1)
        self.allow_neg_eigval = allow_neg_eigval
        self._build(
            hidden_size,
            (q_heads, num_k_heads or q_heads, num_v_heads or q_heads),
            parts.whole(expand_k, head_dim, "expand_k"),
            parts.whole(expand_v, head_dim, "expand_v"),
            conv_size if use_short_conv else 0,
            conv_bias,
            norm_eps,
            factory,
            kv_proj_rank or 0,
            kv_learnable_residual,
        )
        self.gk_proj = nn.Linear(hidden_size, self.heads, bias=False, **factory)
        self.A_log, self.dt_bias = parts.fresh((self.heads,), **factory), parts.fresh((self.heads,), **factory)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.heads * self.value_dim, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        parts.reset(self, std)
        parts.reset_decay(self.A_log, self.dt_bias)

    def _decay(self, x: Tensor) -> Tensor:
        return parts.log_decay(self.gk_proj(x), self.A_log, self.dt_bias)


class DeltaNet(_DeltaRule):
    """S ← (I − βkkᵀ)S + βkvᵀ. Arguments as in ``deltanet_config``."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int = 128,
        num_heads: int | None = None,
        *,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        conv_size: int = 4,
        use_gate: bool = False,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parts.check_arguments(DeltaNet.__init__.__annotations__, locals())
        factory = {"device": device, "dtype": dtype}
        heads = num_heads or max(hidden_size // head_dim, 1)
        self.allow_neg_eigval = allow_neg_eigval
        key_dim, value_dim = parts.whole(expand_k, head_dim, "expand_k"), parts.whole(expand_v, head_dim, "expand_v")
        self._build(hidden_size, (heads,) * 3, key_dim, value_dim, conv_size, False, norm_eps, factory)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, heads * value_dim, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        parts.reset(self, std)


class KimiDeltaAttention(_DeltaRule):
    """S ← (I − βkkᵀ)diag(γ)S + βkvᵀ, a decay per key channel. Arguments as in ``kda_config``."""

    _activation = "sigmoid"

    def __init__(
        self,
        hidden_size: int,
        head_dim: int = 128,
        num_heads: int | None = None,
        *,
        expand_v: float = 1.0,
        conv_size: int = 4,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parts.check_arguments(KimiDeltaAttention.__init__.__annotations__, locals())
        factory = {"device": device, "dtype": dtype}
        heads = num_heads or max(hidden_size // head_dim, 1)
        self.allow_neg_eigval = allow_neg_eigval
        value_dim = parts.whole(expand_v, head_dim, "expand_v")
        self._build(hidden_size, (heads,) * 3, head_dim, value_dim, conv_size, False, norm_eps, factory)

        def low_rank(outputs: int, bias: bool) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(hidden_size, value_dim, bias=False, **factory),
                nn.Linear(value_dim, outputs, bias=bias, **factory),
            )

        self.f_proj = low_rank(heads * head_dim, False)
        self.g_proj = low_rank(heads * value_dim, True)
        self.A_log, self.dt_bias = parts.fresh((heads,), **factory), parts.fresh((heads * head_dim,), **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        parts.reset(self, std)
        parts.reset_decay(self.A_log, None, low=1.0)
        self.dt_bias.zero_()

    def _decay(self, x: Tensor) -> Tensor:
        def heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (self.heads, self.key_dim))

        return parts.log_decay(heads(self.f_proj(x)), self.A_log.unsqueeze(-1), heads(self.dt_bias))


class MesaNet(Mixer):
    """GKA's two memories with a learned diagonal ridge. Arguments as in ``mesa_config``."""

    _kind = MesaState

    def __init__(
        self,
        hidden_size: int,
        head_dim: int = 128,
        num_heads: int | None = None,
        *,
        conv_size: int = 4,
        use_gate: bool = False,
        lambda_lower_bound: float = 0.25,
        num_iter: int = 30,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parts.check_arguments(MesaNet.__init__.__annotations__, locals())
        if lambda_lower_bound >= 1:
            raise ValueError(f"lambda_lower_bound is {lambda_lower_bound}; it takes a number below 1, where Λ begins.")
        factory = {"device": device, "dtype": dtype}
        self.head_dim = parts.head_size("a key", head_dim)
        self.heads = num_heads or max(hidden_size // head_dim, 1)
        self.bound, self.iterations = lambda_lower_bound, num_iter
        for name in "qkv":
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, self.heads * head_dim, bias=False, **factory))
        for name in "qk":
            conv = ShortConv(self.heads * head_dim, conv_size, head_dim, "rsqrt", **factory) if conv_size else None
            self.add_module(f"{name}_conv1d", conv)
        self.a_proj, self.b_proj = (nn.Linear(hidden_size, self.heads, **factory) for _ in range(2))
        self.lambda_params = parts.fresh((self.heads * head_dim,), **factory)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.heads * head_dim, bias=False, **factory)
        self.o_norm = Norm(head_dim, norm_eps, **factory)
        self.o_proj = nn.Linear(self.heads * head_dim, hidden_size, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        parts.reset(self, std)
        self.lambda_params.fill_(math.log(math.expm1(1.0 - self.bound)))  # Λ = 1

    def _solve(self, x: Tensor) -> dict[str, object]:
        dtype = parts.wide(x)
        ridge = functional.softplus(self.lambda_params.to(dtype)) + self.bound
        return {
            "log_decay": functional.logsigmoid(self.a_proj(x).to(dtype)),
            "beta": torch.sigmoid(self.b_proj(x).to(dtype)),
            "ridge": ridge.view(self.heads, self.head_dim),
            "iterations": self.iterations,
            "solver": "conjugate_gradient",
            "ridge_mode": "constant",
        }

    def forward(
        self, x: Tensor, state: MesaState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MesaState]:
        before = self._begin(x, state, cu_seqlens)
        (q, k), convs = self._heads(dict.fromkeys("qk", self.head_dim), x, before[:2], cu_seqlens)
        if self.q_conv1d is None:
            q, k = (parts.unit(functional.silu(y), "rsqrt") for y in (q, k))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        solve, memories = self._solve(x), None if state is None else (before.h, before.u)
        if self.context is not None:
            memories = self.context.past_kalmanet(k, v, solve["log_decay"], solve["beta"])
        ends = {"initial_state": memories, "output_final_state": True, "cu_seqlens": cu_seqlens}
        o, (h, u) = gated_kalmanet(q, k, v, **solve, **ends)
        return self._output(o, x), MesaState(*convs, h, u)

    @torch.no_grad()
    def _step(self, x: Tensor, state: MesaState) -> Tensor:
        heads = {}
        for name, kept in (("q", state.conv_q), ("k", state.conv_k), ("v", None)):
            y, conv = getattr(self, f"{name}_proj")(x), getattr(self, f"{name}_conv1d", None)
            y = (y if conv is None else conv.step(y, kept)).unflatten(-1, (-1, self.head_dim))
            heads[name] = parts.unit(functional.silu(y), "rsqrt") if conv is None and name != "v" else y
        return self._output(gated_kalmanet_step(**heads, **self._solve(x), state=(state.h, state.u)), x)


class _Adding(Mixer):
    """The base of the memories that only add; their widths are shares of the model's."""

    _kind = MemoryState

    _norm = "o_norm"

    def _build(
        self,
        hidden_size: int,
        heads: int,
        expand_k: float,
        expand_v: float,
        conv_size: int,
        use_gate: bool,
        norm: str,
        norm_eps: float,
        factory: dict,
    ) -> None:
        keys = parts.whole(expand_k, hidden_size, "expand_k", "hidden_size")
        values = parts.whole(expand_v, hidden_size, "expand_v", "hidden_size")
        self.heads, self._norm = heads, norm
        self.key_dim = parts.divided(keys, heads, "num_heads")
        self.value_dim = parts.divided(values, heads, "num_heads")
        for name, channels in (("q", keys), ("k", keys), ("v", values)):
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, channels, bias=False, **factory))
            conv = ShortConv(channels, conv_size, channels // heads, **factory) if conv_size else None
            self.add_module(f"{name}_conv1d", conv)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, values, bias=False, **factory)
        self.add_module(norm, Norm(self.value_dim, norm_eps, **factory))
        self.o_proj = nn.Linear(values, hidden_size, bias=False, **factory)

    def reset_parameters(self, std: float = 0.02) -> None:
        parts.reset(self, std)

    def _map(self, name: str, heads: Tensor, by: object) -> Tensor:
        return heads

    def _turn(self, x: Tensor, length: Tensor | None, cu_seqlens: Tensor | None) -> object:
        return None

    def _decay(self, x: Tensor) -> Tensor | None:
        return None

    _counts = False

    def forward(
        self, x: Tensor, state: MemoryState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        before = self._begin(x, state, cu_seqlens)
        length = before.length if self.context is None else self.context.offset(x)
        by = self._turn(x, length, cu_seqlens)
        sizes = {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim}
        (q, k, v), convs = self._heads(sizes, x, before[:3], cu_seqlens)
        q, k = self._map("q", q, by), self._map("k", k, by)
        o, s = self._remember(q, k, v, self._decay(x), None, before.s, cu_seqlens, "add", self.key_dim**-0.5)
        length = length_after(x, length, cu_seqlens) if self._counts else None
        return self._output(o, x, self._norm), MemoryState(*convs, s, length)


class GatedLinearAttention(_Adding):
    """S ← diag(γ)S + kvᵀ. Arguments as in ``gla_config``."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        conv_size: int = 0,
        use_gate: bool = True,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16.0,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parts.check_arguments(GatedLinearAttention.__init__.__annotations__, locals())
        factory = {"device": device, "dtype": dtype}
        norm = "g_norm_swish_gate" if use_gate else "g_norm"
        self._build(hidden_size, num_heads, expand_k, expand_v, conv_size, use_gate, norm, norm_eps, factory)
        self.normalizer = gate_logit_normalizer
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False, **factory),
            nn.Linear(gate_low_rank_dim, num_heads * self.key_dim, **factory),
        )
        self.reset_parameters()

    def _decay(self, x: Tensor) -> Tensor:
        gate = self.gk_proj(x).to(parts.wide(x))
        return (functional.logsigmoid(gate) / self.normalizer).unflatten(-1, (-1, self.key_dim))


class RetNet(_Adding):
    """S ← γS + kvᵀ with a fixed γ per head. Arguments as in ``retnet_config``."""

    _counts = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        use_gate: bool = True,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parts.check_arguments(RetNet.__init__.__annotations__, locals())
        factory = {"device": device, "dtype": dtype}
        norm = "g_norm_swish_gate" if use_gate else "g_norm"
        self._build(hidden_size, num_heads, expand_k, expand_v, 0, use_gate, norm, norm_eps, factory)
        parts.rotary_size("a key of a head", self.key_dim)
        self.rotary = Rotary(self.key_dim, rope_theta)
        self.reset_parameters()

    def _turn(self, x: Tensor, length: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.rotary(positions_of(x, length, cu_seqlens), x.dtype)

    def _map(self, name: str, heads: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(heads, by)

    def _decay(self, x: Tensor) -> Tensor:
        heads = torch.arange(self.heads, dtype=torch.float64, device=x.device) + self.first_head
        return torch.log1p(-torch.exp2(-5.0 - heads)).to(parts.wide(x)).expand(*x.shape[:-1], -1)


class _Features(nn.Module):
    """Two affine maps of a head's vector, multiplied."""

    def __init__(self, size: int, **factory: object) -> None:
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(size, size, **factory), nn.Linear(size, size, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer1(x) * self.layer2(x)


_FEATURE_MAPS = {"elu": lambda x: functional.elu(x) + 1, "relu": functional.relu, "identity": lambda x: x}


class LinearAttention(_Adding):
    """S ← S + φ(k)vᵀ, queried with φ(q). Arguments as in ``linear_attn_config``."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        feature_map: Literal["elementwise_product", "elu", "relu", "identity"] = "elementwise_product",
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parts.check_arguments(LinearAttention.__init__.__annotations__, locals())
        factory = {"device": device, "dtype": dtype}
        parts.one_of("feature_map", feature_map, ("elementwise_product", *_FEATURE_MAPS))
        self._build(hidden_size, num_heads, expand_k, expand_v, 0, False, "norm", norm_eps, factory)
        self.feature_map = feature_map
        if feature_map == "elementwise_product":
            self.feature_map_q = _Features(self.key_dim, **factory)
            self.feature_map_k = _Features(self.key_dim, **factory)
        self.reset_parameters()

    def _map(self, name: str, heads: Tensor, by: object) -> Tensor:
        if self.feature_map == "elementwise_product":
            return getattr(self, f"feature_map_{name}")(heads)
        return _FEATURE_MAPS[self.feature_map](heads)


class Mamba2(Mixer):
    """S ← e^{ΔA}S + ΔBxᵀ, y = CᵀS + Dx. Arguments as in ``mamba2_config``."""

    _kind = Mamba2State

    sharers = 1  # ranks that share a group's heads

    def __init__(
        self,
        hidden_size: int,
        *,
        expand: float = 2.0,
        head_dim: int = 64,
        state_size: int = 128,
        n_groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parts.check_arguments(Mamba2.__init__.__annotations__, locals(), may_be_none=())
        factory = {"device": device, "dtype": dtype}
        self.inner = parts.whole(expand, hidden_size, "expand", "hidden_size")
        self.heads = parts.divided(self.inner, head_dim, "head_dim")
        parts.divided(self.heads, n_groups, "n_groups")
        self.head_dim, self.state_size, self.groups = head_dim, state_size, n_groups
        mixed = self.inner + 2 * n_groups * state_size
        self.in_proj = nn.Linear(hidden_size, self.inner + mixed + self.heads, bias=False, **factory)
        self.conv1d = ShortConv(mixed, conv_size, head_dim, "none", conv_bias, **factory)
        self.A_log, self.dt_bias, self.D = (parts.fresh((self.heads,), **factory) for _ in range(3))
        self.norm = Norm(self.inner, norm_eps, **factory)
        self.out_proj = nn.Linear(self.inner, hidden_size, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        parts.reset(self, std)
        parts.reset_decay(torch.empty_like(self.A_log), self.dt_bias)
        self.A_log.copy_(torch.arange(1, self.heads + 1, dtype=torch.float64).log())
        self.D.fill_(1)

    def forward(
        self, x: Tensor, state: Mamba2State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Mamba2State]:
        before = self._begin(x, state, cu_seqlens)
        states, dtype = self.groups * self.state_size, parts.wide(x)
        z, mixed, steps = self.in_proj(x).split([self.inner, self.inner + 2 * states, self.heads], -1)
        kept = before.conv
        if self.context is not None:
            (kept,) = self.context.halo([mixed], [self.conv1d.weight.shape[-1]])
        mixed, conv = self.conv1d(mixed, kept, cu_seqlens)
        v, k, q = mixed.split([self.inner, states, states], -1)
        v = v.unflatten(-1, (self.heads, self.head_dim))
        k, q = (
            t.unflatten(-1, (self.groups, self.state_size)).repeat_interleave(self.heads // self.groups, -2)
            for t in (k, q)
        )
        delta = functional.softplus(steps.to(dtype) + self.dt_bias.to(dtype))
        y, s = self._remember(q, k, v, -self.A_log.to(dtype).exp() * delta, delta, before.s, cu_seqlens, "add")
        skipped = y.to(dtype) + v.to(dtype) * self.D.to(dtype).unsqueeze(-1)
        gated = (skipped.flatten(-2) * functional.silu(z.to(dtype))).to(x.dtype)
        if self.groups == 1 and self.peers is None:
            return self.out_proj(self.norm(gated)), Mamba2State(conv, s)
        by_group = gated.unflatten(-1, (self.groups, -1)).to(dtype)
        scale = torch.rsqrt(self._mean_squares(by_group) + self.norm.eps)
        normed = (by_group * scale).flatten(-2).to(x.dtype) * self.norm.weight.to(x.dtype)
        return self.out_proj(normed), Mamba2State(conv, s)

    def _mean_squares(self, by_group: Tensor) -> Tensor:
        """Over each group's channels, [B, T, groups, 1]; a group's channels may lie on several ranks."""
        squares = by_group.square()
        if self.sharers == 1:
            return squares.mean(-1, keepdim=True)
        mine, groups = self.peers.rank // self.sharers, self.peers.size // self.sharers
        sums = functional.pad(squares.sum(-1), (mine, groups - mine - 1))  # a rank has a part of one group
        return self.peers.total(sums)[..., mine, None, None] / (squares.shape[-1] * self.sharers)
