"""Four iterations for (H̃ + a I) x = q with ‖H̃‖_F = 1, so that the spectrum lies in [a, 1 + a]: docs/mathematics.md.

Each is a generator that yields its estimate before and after every step. `rounded` is applied to the result of every
operation: the identity for the type of the tensors, or rounding to bfloat16, as if each were done in that arithmetic
(sums inside a product are kept in float32, as tensor cores do).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

Round = Callable[[torch.Tensor], torch.Tensor]


def exactly(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def to_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def product(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.matmul(h, x.unsqueeze(-1)).squeeze(-1)


def weights(a: float, iterations: int) -> list[float]:
    """Chebyshev's ω_0 … ω_r."""
    rho, found = 1 / (1 + 2 * a), [2.0]
    for _ in range(iterations):
        found.append(4 / (4 - rho * rho * found[-1]))
    return found


def residual(h, x, q, a, rounded: Round):
    return rounded(rounded(rounded(product(h, x)) + rounded(a * x)) - q)


def chebyshev(h, q, a, iterations, rounded: Round = exactly) -> Iterator[torch.Tensor]:
    step, omega = 2 / (1 + 2 * a), weights(a, iterations)
    before, x = torch.zeros_like(q), rounded(step * q)
    yield x
    for i in range(1, iterations + 1):
        moved = rounded(x - rounded(step * omega[i] * residual(h, x, q, a, rounded)))
        before, x = x, rounded(moved + rounded((omega[i] - 1) * rounded(x - before)))
        yield x


def gradient_descent(h, q, a, iterations, rounded: Round = exactly) -> Iterator[torch.Tensor]:
    step = 2 / (1 + 2 * a)
    x = rounded(step * q)
    yield x
    for _ in range(iterations):
        x = rounded(x - rounded(step * residual(h, x, q, a, rounded)))
        yield x


def nesterov(h, q, a, iterations, rounded: Round = exactly) -> Iterator[torch.Tensor]:
    """With the best parameters for quadratics."""
    step, root = 4 / (3 * (1 + a) + a), math.sqrt(3 * (1 + a) / a + 1)
    momentum = (root - 2) / (root + 2)
    x = y = rounded(step * q)
    yield x
    for _ in range(iterations):
        before, x = x, rounded(y - rounded(step * residual(h, y, q, a, rounded)))
        y = rounded(x + rounded(momentum * rounded(x - before)))
        yield x


TINY = 1e-30  # a squared residual with which nothing is left to do; below, gradients of the quotient overflow


def over(top: torch.Tensor, bottom: torch.Tensor, epsilon: float) -> torch.Tensor:
    """0 where nothing is left to divide by: the residual is zero, and the estimate stays. `epsilon` is the other way to
    keep from dividing by zero, which many programs take."""
    done = bottom.abs() < TINY
    return torch.where(done, torch.zeros_like(top), top / torch.where(done, torch.ones_like(bottom), bottom + epsilon))


def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum(-1, keepdim=True)


def conjugate_gradient(h, q, a, iterations, rounded: Round = exactly, steps: list | None = None, epsilon: float = 0):
    """`steps` collects (step length, β) of every iteration."""
    x = torch.zeros_like(q)
    r = p = q
    size = rounded(dot(r, r))
    yield x
    for _ in range(iterations):
        hp = rounded(rounded(product(h, p)) + rounded(a * p))
        length = rounded(over(size, rounded(dot(p, hp)), epsilon))
        x = rounded(x + rounded(length * p))
        r = rounded(r - rounded(length * hp))
        new = rounded(dot(r, r))
        ratio = rounded(over(new, size, epsilon))
        if steps is not None:
            steps.append((length, ratio))
        p, size = rounded(r + rounded(ratio * p)), new
        yield x


def guarded(*arguments) -> Iterator[torch.Tensor]:
    """Conjugate gradient whose divisors have 1e-6 added."""
    return conjugate_gradient(*arguments, epsilon=1e-6)


METHODS = {
    "gradient descent": gradient_descent,
    "Nesterov": nesterov,
    "conjugate gradient": conjugate_gradient,
    "conjugate gradient + 1e-6": guarded,
    "Chebyshev": chebyshev,
}


def solve(method, h, q, a, iterations, rounded: Round = exactly) -> torch.Tensor:
    *_, x = method(h, q, a, iterations, rounded)
    return x


class Implicit(torch.autograd.Function):
    """The gradient of the solution, by one more solve with the same method: dq = y, dH̃ = −½(y xᵀ + x yᵀ)."""

    @staticmethod
    def forward(ctx, h, q, a, method, iterations, rounded):
        x = solve(method, rounded(h), rounded(q), a, iterations, rounded)
        ctx.save_for_backward(h, x)
        ctx.rest = a, method, iterations, rounded
        return x

    @staticmethod
    def backward(ctx, dx):
        (h, x), (a, method, iterations, rounded) = ctx.saved_tensors, ctx.rest
        y = solve(method, rounded(h), rounded(dx.contiguous()), a, iterations, rounded)
        outer = y.unsqueeze(-1) * x.unsqueeze(-2)
        return (outer + outer.transpose(-1, -2)).mul_(-0.5), y, None, None, None, None


def exact(h, q, a) -> torch.Tensor:
    identity = torch.eye(h.shape[-1], dtype=h.dtype, device=h.device)
    return torch.linalg.solve(h + a * identity, q)


def states(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """H_t/‖H_t‖_F and ‖H_t‖_F of keys [heads, T, D], for every t: what a kernel never writes down."""
    h = torch.cumsum(k.unsqueeze(-1) * k.unsqueeze(-2), dim=-3)
    norm = h.flatten(-2).norm(dim=-1)
    return h / norm[..., None, None], norm
