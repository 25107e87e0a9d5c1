"""The operators under torch.vmap: what is mapped over becomes more heads (of a convolution more channels), which know
nothing of each other, so one call does for all of it. Norms whose weight is mapped over, or learns, go one by one.
cu_seqlens is the same for all heads and cannot be mapped over.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Where the heads are: of tensors by token, of states, and of what is by head or channel alone.
TOKENS, STATES, HEADS, WHOLE = 2, 1, 0, None


def fold(x: object, mapped: int | None, axis: int | None, size: int, name: str) -> object:
    """x with what is mapped over in front of its heads; copies where it is the same for all."""
    if not isinstance(x, Tensor) or (axis is WHOLE and mapped is None):
        return x
    if axis is WHOLE:
        raise ValueError(f"{name}: cu_seqlens is the same for everything that vmap maps over, and here it is mapped.")
    x = x.expand(size, *x.shape) if mapped is None else x.movedim(mapped, 0)
    return x.movedim(0, axis).flatten(axis, axis + 1)


def unfold(y: Tensor, axis: int, size: int) -> tuple[Tensor, int | None]:
    """The reverse, and where the mapped dimension is; an empty result stands for one that was not asked for."""
    if y.dim() <= axis or y.shape == (0,):
        return y, None
    return y.unflatten(axis, (size, y.shape[axis] // size)).movedim(axis, 0), 0


def folded(name: str, call: Callable, inputs: dict[int, int | None], outputs: tuple[int, ...]) -> Callable:
    """A rule for vmap: where the heads of each tensor among the arguments are, and of each result."""

    def rule(info, in_dims, *arguments):
        size = info.batch_size
        given = [
            fold(x, mapped, inputs[i], size, name) if i in inputs else x
            for i, (x, mapped) in enumerate(zip(arguments, in_dims, strict=True))
        ]
        results = [unfold(y, axis, size) for y, axis in zip(call(*given), outputs, strict=True)]
        return tuple(y for y, _ in results), tuple(mapped for _, mapped in results)

    return rule


def _one_by_one(call: Callable, info, in_dims, arguments) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    def of(i: int) -> list:
        pairs = zip(arguments, in_dims, strict=True)
        return [x.select(mapped, i) if isinstance(x, Tensor) and mapped is not None else x for x, mapped in pairs]

    each = [call(*of(i)) for i in range(info.batch_size)]
    return tuple(torch.stack(parts) for parts in zip(*each, strict=True)), (0,) * len(each[0])


def _rows(x: Tensor | None, mapped: int | None, size: int) -> Tensor | None:
    """What is mapped over as more rows."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if mapped is None else x.movedim(mapped, 0)
    return x if x.dim() == 2 else x.flatten(0, 1)


def _is_row(x: Tensor, mapped: int | None) -> bool:
    return x.dim() - (mapped is not None) == 1


def norm(call: Callable, info, in_dims, x, gate, weight, activation, eps) -> tuple[Tensor, int]:
    """Of gated_rms_norm, which has one weight for all rows: where each has its own they go one by one."""
    if in_dims[2] is not None:
        arguments = (x, gate, weight, activation, eps)
        (y,), (place,) = _one_by_one(lambda *given: (call(*given),), info, in_dims, arguments)
        return y, place
    y = call(*(_rows(t, in_dims[i], info.batch_size) for i, t in enumerate((x, gate))), weight, activation, eps)
    return y if _is_row(x, in_dims[0]) else y.unflatten(0, (info.batch_size, y.shape[0] // info.batch_size)), 0


def _norm_backward(info, in_dims, x, gate, weight, activation, eps, d_y, needs):
    call, arguments = torch.ops.gka.gated_rms_norm_backward, (x, gate, weight, activation, eps, d_y, needs)
    if weight is not None and (in_dims[2] is not None or needs[2]):  # its gradient is a sum over all rows
        return _one_by_one(call, info, in_dims, arguments)
    size = info.batch_size
    rows = [_rows(t, in_dims[i], size) for i, t in ((0, x), (1, gate), (5, d_y))]
    results = call(*rows[:2], weight, activation, eps, rows[2], needs)
    if not _is_row(x, in_dims[0]):
        results = [y if y.shape == (0,) else y.unflatten(0, (size, y.shape[0] // size)) for y in results]
    return tuple(results), tuple(None if y.shape == (0,) else 0 for y in results)


def register(name: str, inputs: dict[int, int | None], outputs: tuple[int, ...]) -> None:
    torch.library.register_vmap(f"gka::{name}", folded(name, getattr(torch.ops.gka, name), inputs, outputs))


# q, k, v, log_decay, beta, alpha, h0, u0, ridge_diagonal, cu_seqlens, behind the part.
_MEMORY = dict(enumerate((*[TOKENS] * 6, *[STATES] * 2, HEADS, WHOLE), 1))
register("gated_kalmanet_forward", _MEMORY, (TOKENS, STATES, STATES, TOKENS, TOKENS, STATES, STATES))
# Behind the options x, norm, h_segments, u_segments, d_o, d_h, d_u.
_SAVED = dict(enumerate((TOKENS, TOKENS, STATES, STATES, TOKENS, STATES, STATES), 20))
register(
    "gated_kalmanet_backward",
    _MEMORY | _SAVED,
    (*[TOKENS] * 6, *[STATES] * 2, HEADS),
)
# x, weight, bias, initial_state, cu_seqlens.
SHORT_CONV = dict(enumerate((TOKENS, HEADS, HEADS, STATES, WHOLE)))
register("short_conv_backward", SHORT_CONV | {9: TOKENS, 10: STATES}, (TOKENS, HEADS, HEADS, STATES))
torch.library.register_vmap("gka::gated_rms_norm_backward", _norm_backward)


def register_rivals() -> None:
    """Of `gka.memory`, whose operators come with a library of their own."""
    tensors = dict(enumerate((*[TOKENS] * 5, STATES, WHOLE)))  # q, k, v, log_decay, beta, initial_state, cu_seqlens
    register("memory_forward", tensors, (TOKENS, STATES))
    register("memory_backward", tensors | {10: TOKENS, 11: STATES}, (*[TOKENS] * 5, STATES))
