"""What torch's flop counter counts for our operators: the multiplications and additions of the recurrence itself.

A solve counts a product with H for every step. So layers can be compared, whichever kernel or chunks compute them.
"""

from torch.ops import gka as _ops
from torch.utils.flop_counter import register_flop_formula


def _numbers(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _solve(part: str, tokens: int, d: int, iterations: int) -> int:
    return 0 if part == "memory" else tokens * 2 * d * d * iterations


def _forward(part: str, q: tuple[int, ...], v: tuple[int, ...] | None, iterations: int) -> int:
    """Writing H (2D²) and U (2DV), asking U (2DV), and the solve."""
    tokens, d = _numbers(q[:-1]), q[-1]
    writes = (0 if part == "memory" else 2 * d * d) + (0 if part == "solve" else 4 * d * v[-1])
    return _solve(part, tokens, d, iterations) + tokens * writes


def _backward(part: str, q: tuple[int, ...], v: tuple[int, ...] | None, iterations: int) -> int:
    """One more solve; two outer products into H's gradient and one product with it; four with U and its gradient."""
    tokens, d = _numbers(q[:-1]), q[-1]
    products = (0 if part == "memory" else 6 * d * d) + (0 if part == "solve" else 8 * d * v[-1])
    return _solve(part, tokens, d, iterations) + tokens * products


@register_flop_formula(_ops.gated_kalmanet)
def _both(q, k, v, *args, iterations=30, **kwargs):
    return _forward("both", q, v, iterations)


@register_flop_formula(_ops.ridge_solve)
def _solve_alone(q, k, *args, iterations=30, **kwargs):
    return _forward("solve", q, None, iterations)


@register_flop_formula(_ops.linear_memory)
def _memory_alone(q, k, v, *args, **kwargs):
    return _forward("memory", q, v, 0)


@register_flop_formula(_ops.gated_kalmanet_step)
def _step(q, k, v, *args, iterations=30, **kwargs):
    return _forward("both", q, v, iterations)


_ITERATIONS = 13  # where the inner operators have it


@register_flop_formula(_ops.gated_kalmanet_forward)
def _inner_forward(part, q, k, v, *args, **kwargs):
    return _forward(part, q, v, args[_ITERATIONS - 4])


@register_flop_formula(_ops.gated_kalmanet_backward)
def _inner_backward(part, q, k, v, *args, **kwargs):
    return _backward(part, q, v, args[_ITERATIONS - 4])


@register_flop_formula(_ops.short_conv)
def _conv(x, weight, *args, **kwargs):
    return 2 * _numbers(x) * weight[-1]


@register_flop_formula(_ops.short_conv_backward)
def _conv_backward(x, weight, *args, **kwargs):
    return 4 * _numbers(x) * weight[-1]


def _rival(q: tuple[int, ...], v: tuple[int, ...], rule: str) -> int:
    """Writing S (2KV) and asking it (2KV); the delta rule asks it once more, for what it already answers."""
    return _numbers(q[:-1]) * q[-1] * v[-1] * (6 if rule == "delta" else 4)


def count_rivals() -> None:
    """Registers `gka.memory`, whose operators come with a library of their own."""

    @register_flop_formula(_ops.memory_forward)
    def _(q, k, v, log_decay, beta, state, bounds, rule, *args, **kwargs):
        return _rival(q, v, rule)

    @register_flop_formula(_ops.memory_backward)
    def _(q, k, v, log_decay, beta, state, bounds, rule, *args, **kwargs):
        return 2 * _rival(q, v, rule)
