"""The operators under torch.func (grad, vmap of grad, vjp).

These transforms do not see a gradient written in C++, so this module joins the same forward and backward operators in
Python. Nothing here runs outside such a transform.
"""

import torch
from torch import Tensor

from . import _vmap

_ops = torch.ops.gka


def active() -> bool:
    """Whether a transform of torch.func is at work."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _given(gradients: tuple[Tensor, ...], needs: list[bool]) -> tuple[Tensor | None, ...]:
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))


class _Once(torch.autograd.Function):
    """What they have in common: a gradient, in reverse mode."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(
            "gka's operators have a gradient in reverse mode alone (torch.func.grad, vjp, jacrev), and this asks for "
            "one in forward mode (jvp, jacfwd, hessian)"
        )


class _Memory(_Once):
    """gated_kalmanet, ridge_solve and linear_memory: nine tensors, cu_seqlens, the part, its options."""

    @staticmethod
    def forward(q, k, v, log_decay, beta, alpha, h0, u0, diagonal, cu_seqlens, part, options, want_state):
        tensors = (q, k, v, log_decay, beta, alpha, h0, u0, diagonal, cu_seqlens)
        return _ops.gated_kalmanet_forward(part, *tensors, *options, want_state, True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.part, ctx.options, ctx.want_state = inputs
        ctx.has_v = tensors[2] is not None
        ctx.save_for_backward(*tensors, *output[3:])

    @staticmethod
    def backward(ctx, d_o, d_h, d_u, *_):
        *tensors, x, norm, h_segments, u_segments = ctx.saved_tensors
        solves, remembers = ctx.part != "memory", ctx.part != "solve"
        needs = list(ctx.needs_input_grad[:9])
        kept = (x if solves else None, norm if solves else None, h_segments if solves else None)
        d_states = (d_h if ctx.want_state and solves else None, d_u if ctx.want_state and remembers else None)
        gradients = _ops.gated_kalmanet_backward(
            ctx.part,
            *tensors,
            *ctx.options,
            *kept,
            u_segments if remembers else None,
            d_o.contiguous(),
            *d_states,
            needs,
        )
        return (*_given(gradients, needs), None, None, None, None)


def memory(part: str, tensors: tuple[Tensor | None, ...], options: tuple, want_state: bool) -> tuple[Tensor, ...]:
    """(o, h, u) of `gated_kalmanet_forward`; tensors and options in its order."""
    return _Memory.apply(*tensors, part, options, want_state)[:3]


class _ShortConv(_Once):
    generate_vmap_rule = False  # torch takes no rule for an operator that has keywords

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap.folded("short_conv", _ShortConv.apply, _vmap.SHORT_CONV, (_vmap.TOKENS, _vmap.STATES))(
            info, in_dims, *arguments
        )

    @staticmethod
    def forward(x, weight, bias, initial_state, cu_seqlens, options, want_state):
        activation, l2_norm, head_dim, eps = options
        return _ops.short_conv(
            x,
            weight,
            bias,
            activation=activation,
            l2_norm=l2_norm,
            head_dim=head_dim,
            eps=eps,
            initial_state=initial_state,
            output_final_state=want_state,
            cu_seqlens=cu_seqlens,
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.options, ctx.want_state = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, d_y, d_state):
        needs = list(ctx.needs_input_grad[:4])
        d_state = d_state if ctx.want_state else None
        gradients = _ops.short_conv_backward(*ctx.saved_tensors, *ctx.options, d_y.contiguous(), d_state, needs)
        return (*_given(gradients, needs), None, None, None)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: tuple[str, str, int, float],
    want_state: bool,
) -> tuple[Tensor, Tensor]:
    return _ShortConv.apply(x, weight, bias, initial_state, cu_seqlens, options, want_state)


class _Rival(_Once):
    """gka.memory: six tensors, cu_seqlens, the rule, the scale, and whether the state is wanted."""

    @staticmethod
    def forward(*inputs):
        return _ops.memory_forward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.rule, ctx.scale, ctx.want_state = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, d_o, d_state):
        needs = list(ctx.needs_input_grad[:6])
        options = (ctx.rule, ctx.scale, ctx.want_state)
        d_state = d_state if ctx.want_state else None
        gradients = _ops.memory_backward(*ctx.saved_tensors, *options, d_o.contiguous(), d_state, needs)
        return (*_given(gradients, needs), None, None, None, None)


def rival(tensors: tuple[Tensor | None, ...], rule: str, scale: float, want_state: bool) -> tuple[Tensor, Tensor]:
    """(o, state) of `gka.memory`; tensors in the order of `memory_forward`."""
    return _Rival.apply(*tensors, rule, scale, want_state)


class _GatedRmsNorm(_Once):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap.norm(_GatedRmsNorm.apply, info, in_dims, *arguments)

    @staticmethod
    def forward(x, gate, weight, activation, eps):
        return _ops.gated_rms_norm(x, gate, weight, activation=activation, eps=eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.activation, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, d_y):
        needs = list(ctx.needs_input_grad[:3])
        saved = ctx.saved_tensors
        gradients = _ops.gated_rms_norm_backward(*saved, ctx.activation, ctx.eps, d_y.contiguous(), needs)
        return (*_given(gradients, needs), None, None)


def gated_rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor | None, activation: str, eps: float) -> Tensor:
    return _GatedRmsNorm.apply(x, gate, weight, activation, eps)
