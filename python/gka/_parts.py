"""The parts of gka.nn's layers: projections with a short convolution, shared heads, gated norms."""

import copy
import functools
import math
from numbers import Integral, Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ._block import gated_rms_norm, short_conv, short_conv_step

EPS = 1e-6  # of unit length and of β, as published
L2Norm = Literal["none", "divide", "rsqrt"]


def wide(x: Tensor) -> torch.dtype:
    """The type in which gates, norms and decays are computed."""
    return torch.promote_types(x.dtype, torch.float32)


def unit(x: Tensor, norm: L2Norm) -> Tensor:
    """Scales to unit length over the last dimension, in one of the two ways checkpoints were trained with."""
    if norm == "none":
        return x
    y = x.to(wide(x))
    if norm == "divide":
        return (y / (y.norm(dim=-1, keepdim=True) + EPS)).to(x.dtype)
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


def whole(share: float, size: int, name: str, of: str = "a head of") -> int:
    exact = share * size
    if abs(exact - round(exact)) > 1e-6 or round(exact) < 1:
        raise ValueError(f"{name} is {share}, which of {of} {size} is not a whole number of at least 1.")
    return round(exact)


def divided(size: int, parts: int, name: str) -> int:
    if parts < 1 or size % parts:
        raise ValueError(f"{name} is {parts}, which does not divide {size}.")
    return size // parts


def one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices[:-1]) + f" or {choices[-1]!r}"
        raise ValueError(f"{name} is {value!r}; it takes {listed}.")
    return value


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name} is {value}; it takes {least} or more.")


def whole_numbers(least: int, **values: int | None) -> None:
    """None: left out."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < least):
            raise ValueError(f"{name} is {value!r}; it takes a whole number of at least {least}.")


def numbers(least_of: dict[str, float], **values: float) -> None:
    """Finite and above 0, or at least what ``least_of`` has for them."""
    for name, value in values.items():
        number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        least = least_of.get(name)
        if not number or (value <= 0 if least is None else value < least):
            takes = "above 0" if least is None else f"of at least {least}"
            raise ValueError(f"{name} is {value!r}; it takes a number {takes}.")


def flags(**values: bool) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it takes True or False.")


#: Numbers with a fraction that may be 0. All others are factors, which 0 would make nothing of.
_MAY_BE_ZERO = dict.fromkeys(("norm_eps", "rms_norm_eps", "lambda_lower_bound"), 0)


def check_arguments(
    annotations: dict[str, object], given: dict[str, object], may_be_none: tuple[str, ...] = ("conv_size",)
) -> None:
    """Every number and every choice between two among ``given`` by its annotation, as a model's configuration is
    checked (``models/ranges.cpp``). ``may_be_none``: whole numbers for which 0 is none."""
    for name, annotation in annotations.items():
        value = given.get(name)
        if annotation is bool:
            flags(**{name: value})
        elif annotation is int:
            whole_numbers(0 if name in may_be_none else 1, **{name: value})
        elif annotation == int | None:
            whole_numbers(0, **{name: value})
        elif annotation is float:
            numbers(_MAY_BE_ZERO, **{name: value})


class Limits(NamedTuple):
    """What the operators take at most."""

    head: int  # channels of a key or value
    conv_size: int
    conv_head: int  # channels of a head that a convolution brings to unit length


@functools.cache
def limits() -> Limits:
    return Limits(*torch.ops.gka.limits())


def head_size(name: str, size: int) -> int:
    """Of keys or values, as the kernels take them."""
    if not 1 <= size <= limits().head:
        raise ValueError(f"{name} of a head has {size} channels; the memory takes 1 to {limits().head}.")
    return size


def rotary_size(name: str, size: int) -> None:
    if size % 2:
        raise ValueError(f"{name} has {size} channels, and the rotary embedding turns them in pairs.")


def no_gradient_of_a_step(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            "step has no gradient, and x asks for one: call the layer itself, or step under torch.no_grad()."
        )


class Marked(nn.Module):
    """A module whose parameters keep their mark ``_no_weight_decay`` when torch replaces them: in a copy, on another
    device, from an assigned state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_mark_what_was)

    def _marked(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if hasattr(parameter, "_no_weight_decay")}

    def _mark(self, names: set[str]) -> None:
        for name, parameter in self.named_parameters():
            if name in names:
                parameter._no_weight_decay = True

    def __deepcopy__(self, memo: dict) -> "Marked":
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        twin._mark(self._marked())
        return twin

    def _apply(self, *arguments: object, **options: object) -> "Marked":
        names = self._marked()
        super()._apply(*arguments, **options)
        self._mark(names)
        return self

    def _load_from_state_dict(self, *arguments: object, **options: object) -> None:
        self._were_marked = self._marked()
        super()._load_from_state_dict(*arguments, **options)


def _mark_what_was(module: Marked, _: object) -> None:
    """Behind a load, when the modules inside have theirs too."""
    module._mark(module.__dict__.pop("_were_marked", set()))


class Norm(Marked):
    """The weight of an RMS norm, under its published name."""

    def __init__(self, size: int, eps: float = 1e-6, **factory: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, **factory))
        self.weight._no_weight_decay = True

    def forward(self, x: Tensor, gate: Tensor | None = None, activation: str = "silu") -> Tensor:
        return gated_rms_norm(x, gate, self.weight, activation=activation, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class ShortConv(Marked):
    """A causal convolution per channel and SiLU, with unit-length heads where asked for."""

    def __init__(
        self, channels: int, width: int, head_dim: int, norm: L2Norm = "none", bias: bool = False, **factory: object
    ) -> None:
        super().__init__()
        if width > limits().conv_size:
            raise ValueError(f"conv_size is {width}; it takes at most {limits().conv_size}.")
        if norm != "none" and head_dim > limits().conv_head:
            raise ValueError(
                f"a head has {head_dim} channels; behind a short convolution it takes 1 to {limits().conv_head}."
            )
        self.weight = nn.Parameter(torch.empty(channels, 1, width, **factory))
        self.bias = nn.Parameter(torch.empty(channels, **factory)) if bias else None
        if bias:
            self.bias._no_weight_decay = True
        self.options = {"l2_norm": norm, "head_dim": head_dim if norm != "none" else 0, "eps": EPS}

    def forward(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ends = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}
        return short_conv(x, self.weight, self.bias, **ends, **self.options)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        return short_conv_step(x, self.weight, self.bias, state=state, **self.options)

    def extra_repr(self) -> str:
        channels, _, width = self.weight.shape
        return f"{channels}, width={width}, l2_norm={self.options['l2_norm']!r}"


class LowRank(nn.Module):
    def __init__(self, inputs: int, rank: int, outputs: int, **factory: object) -> None:
        super().__init__()
        self.linearA = nn.Linear(inputs, rank, bias=False, **factory)
        self.linearB = nn.Linear(rank, outputs, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.linearB(functional.silu(self.linearA(x)))


def expand_heads(layer: nn.Module, name: str, x: Tensor, heads: int) -> Tensor:
    """Expands shared heads: copies or a learned mixture, plus a low-rank part if the layer has one."""
    count = x.shape[-2]
    mixture, low_rank = getattr(layer, f"{name}_rep", None), getattr(layer, f"proj_{name}", None)
    if low_rank is None:
        return x if count == heads else x.repeat_interleave(heads // count, -2)
    every = x if layer.peers is None else layer.peers.gather(x, -2)  # the low-rank part mixes heads
    if mixture is not None:
        repeated = torch.einsum("eh,...hd->...ed", mixture.to(x.dtype), every)
    else:
        repeated = x.repeat_interleave(heads // count, -2)
    return repeated + low_rank(every.flatten(-2)).unflatten(-1, (heads, -1))


def add_expansion(
    layer: nn.Module, name: str, count: int, size: int, heads: int, rank: int, learned: bool, **factory: object
) -> None:
    if not rank or count == heads:
        return
    layer.add_module(f"proj_{name}", LowRank(count * size, rank, heads * size, **factory))
    if learned:
        layer.register_parameter(f"{name}_rep", nn.Parameter(torch.empty(heads, count, **factory)))


def log_decay(projected: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """−exp(A_log)·softplus(projected + dt_bias), at least float32: decays near 1 have no room in 16 bits."""
    dtype = wide(projected)
    return -a_log.to(dtype).exp() * functional.softplus(projected.to(dtype) + dt_bias.to(dtype))


def fresh(shape: tuple[int, ...], **factory: object) -> nn.Parameter:
    """A parameter that no optimiser should decay."""
    parameter = nn.Parameter(torch.empty(shape, **factory))
    parameter._no_weight_decay = True
    return parameter


@torch.no_grad()
def reset(layer: nn.Module, std: float = 0.02) -> None:
    """Draws first values as the C++ layers do, for every part that is here."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=std)
            if module.bias is not None:
                module.bias.zero_()
                module.bias._no_weight_decay = True
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(std=std)
        elif isinstance(module, ShortConv):
            bound = module.weight.shape[-1] ** -0.5
            module.weight.uniform_(-bound, bound)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, Norm):
            module.weight.fill_(1)
    for name in ("proj_k", "proj_v"):
        if hasattr(layer, name):
            getattr(layer, name).linearB.weight.zero_()  # at the start a head is the copy it would be without
    for name in ("k_rep", "v_rep"):
        if hasattr(layer, name):
            mixture = getattr(layer, name)
            few = torch.eye(mixture.shape[1], dtype=mixture.dtype, device=mixture.device)
            mixture.copy_(few.repeat_interleave(mixture.shape[0] // mixture.shape[1], 0))


@torch.no_grad()
def reset_decay(a_log: Tensor, dt_bias: Tensor | None, low: float = 0.0) -> None:
    a_log.uniform_(low, 16).clamp_(min=1e-6).log_()
    if dt_bias is None:
        return
    dt = torch.empty_like(dt_bias).uniform_(math.log(0.001), math.log(0.1)).exp()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
