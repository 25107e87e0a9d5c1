"""experiments/solvers: the iterations solve what they say they solve, and Chebyshev's two gradients are one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments" / "solvers"))

from methods import METHODS, Implicit, exact, solve, states, to_bfloat16

RIDGE = 0.1


@pytest.fixture
def systems():
    random = torch.Generator().manual_seed(0)
    k, q = (torch.nn.functional.normalize(torch.randn(2, 20, 8, generator=random).double(), dim=-1) for _ in range(2))
    return states(k)[0], q


@pytest.mark.parametrize("method", [name for name in METHODS if "1e-6" not in name])
def test_every_method_comes_to_the_exact_solution_in_float64(systems, method):
    h, q = systems
    x = solve(METHODS[method], h, q, RIDGE, 400)
    torch.testing.assert_close(x, exact(h, q, RIDGE), rtol=1e-9, atol=1e-9)


def test_chebyshevs_implicit_gradient_for_q_is_the_one_through_its_iterations(systems):
    h, q = systems
    q.requires_grad_()
    direction = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    for iterations in (1, 7, 30):
        implicit = Implicit.apply(h, q, RIDGE, METHODS["Chebyshev"], iterations, lambda tensor: tensor)
        unrolled = solve(METHODS["Chebyshev"], h, q, RIDGE, iterations)
        found = [torch.autograd.grad((x * direction).sum(), q)[0] for x in (implicit, unrolled)]
        torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_in_bfloat16_every_estimate_is_a_bfloat16_number(systems):
    h, q = (to_bfloat16(tensor.float()) for tensor in systems)
    for method in METHODS.values():
        for x in method(h, q, RIDGE, 5, to_bfloat16):
            assert torch.equal(x, to_bfloat16(x))


def test_what_is_computed_is_drawn_and_nothing_else_is_asked_for(tmp_path):
    from plot import draw_all

    sizes = {"batch": 1, "tokens": 8, "heads": 1, "width": 8}
    about = {"sizes": sizes, "machine": "CPU", "date": "2026-01-01", "ridge": 0.02, "iterations": 2}
    kept = [{"method": "Chebyshev", "ridge": 0.02, "divisors": [0.9, 0.8]}]
    draw_all({"about": about, "divisors": kept}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["divisors.png"]
