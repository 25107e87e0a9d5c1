"""The operator against a token-by-token reference in torch, and its gradients against automatic differentiation."""

import pytest
import torch
import torch_reference
from cases import GATES, backward, make, relative_error, requiring_grad, split
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gka

SOLVERS = ("chebyshev", "conjugate_gradient", "gradient_descent", "nesterov", "exact")
DTYPES = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@st.composite
def calls(draw):
    """A case and the options of a call."""
    lengths = draw(st.lists(st.integers(0, 20), max_size=3))
    batch, tokens = (1, sum(lengths)) if lengths else (draw(st.integers(1, 2)), draw(st.integers(1, 40)))
    dtype = draw(st.sampled_from(sorted(DTYPES, key=str)))
    case = make(
        batch,
        tokens,
        draw(st.integers(1, 2)),
        draw(st.integers(1, 17)),
        draw(st.integers(1, 17)),
        dtype=dtype,
        gate_dtype=draw(st.sampled_from((dtype, torch.float32))) if dtype != torch.float64 else None,
        gates=draw(st.sets(st.sampled_from(GATES))),
        states=draw(st.sampled_from((0, len(lengths) or batch))),
        seed=draw(st.integers(0, 1000)),
        decay=draw(st.sampled_from((0.01, 0.5, 5.0))),
    )
    options = {
        "ridge": draw(st.sampled_from((0.02, 0.1, 0.25))),
        "iterations": draw(st.integers(0, 30)),
        "solver": draw(st.sampled_from(SOLVERS)),
        "gradient": draw(st.sampled_from(("implicit", "unrolled"))),
        "ridge_mode": draw(st.sampled_from(("adaptive", "constant"))),
        "ridge_gradient": draw(st.booleans()),
        "decay_keys": draw(st.booleans()),
        "scale": draw(st.sampled_from((1.0, 0.3))),
    }
    if options["solver"] == "conjugate_gradient":
        # Past the dimension of the space conjugate gradients divide rounding errors by each other.
        options["iterations"] = min(options["iterations"], max(1, case["q"].shape[-1] // 2))
    if lengths:
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        options["cu_seqlens"] = bounds.to(draw(st.sampled_from((torch.int32, torch.int64))))
    return case, options


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(calls())
def test_outputs_and_gradients_are_those_of_the_torch_reference(call):
    case, options = call
    tolerance = DTYPES[case["q"].dtype]

    leaves = requiring_grad(case)
    tensors, state = split(leaves)
    o, (h, u) = gka.gated_kalmanet(**tensors, **state, **options, output_final_state=True)

    wide = requiring_grad({name: tensor.double() for name, tensor in case.items()})
    tensors, state = split(wide)
    want_o, (want_h, want_u) = torch_reference.gated_kalmanet(**tensors, **state, **options)

    assert o.dtype == case["q"].dtype
    for name, got, want in (("o", o, want_o), ("h", h, want_h), ("u", u, want_u)):
        assert relative_error(got, want) < tolerance, name

    got = backward([o, h, u], leaves)
    want = backward([want_o.to(o.dtype), want_h.to(h.dtype), want_u.to(u.dtype)], wide)
    for name, gradient in got.items():
        assert gradient.dtype == case[name].dtype
        # What cancels to nothing is compared by the size of what cancelled.
        size = max(want[name].norm().item(), 1e-3 * max(g.norm().item() for g in want.values()))
        assert (gradient.double() - want[name]).norm().item() <= 10 * tolerance * size, name


@pytest.mark.parametrize("ridge_mode", ["adaptive", "constant"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_unrolled_gradient_is_the_derivative_of_the_output(solver, ridge_mode):
    leaves = requiring_grad(make(1, 5, 1, 4, 3, states=1))

    def call(*values):
        tensors, state = split(dict(zip(leaves, values, strict=True)))
        o, (h, u) = gka.gated_kalmanet(
            **tensors,
            **state,
            solver=solver,
            ridge=0.1,
            ridge_mode=ridge_mode,
            iterations=3,
            gradient="unrolled",
            output_final_state=True,
        )
        return o, h, u

    def symmetric_h0(*values):
        values = dict(zip(leaves, values, strict=True))
        values["h0"] = (values["h0"] + values["h0"].mT) / 2
        return call(*values.values())

    assert torch.autograd.gradcheck(symmetric_h0, tuple(leaves.values()))


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
@pytest.mark.parametrize("solver", ["conjugate_gradient", "exact"])
def test_a_ridge_per_channel_and_its_gradient_are_those_of_the_torch_reference(solver, gradient):
    case = make(2, 7, 2, 6, 5)
    case["ridge"] = 0.1 + torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    options = {"ridge_mode": "constant", "solver": solver, "gradient": gradient, "iterations": 4}
    leaves, wide = requiring_grad(case), requiring_grad(case)
    o, _ = gka.gated_kalmanet(**leaves, **options)
    want_o, _ = torch_reference.gated_kalmanet(**wide, **options)
    assert relative_error(o, want_o) < 1e-12
    got, want = backward([o], leaves), backward([want_o], wide)
    for name in got:
        assert relative_error(got[name], want[name]) < 1e-10, name


def test_a_ridge_per_channel_in_float32_has_a_gradient_in_float32():
    case = make(1, 4, 2, 6, 5, dtype=torch.float32)
    ridge = torch.full((2, 6), 0.1, requires_grad=True)
    o, _ = gka.gated_kalmanet(**case, ridge=ridge, ridge_mode="constant", solver="exact")
    (gradient,) = torch.autograd.grad(o.sum(), ridge)
    assert gradient.dtype == torch.float32
    assert gradient.shape == ridge.shape
    assert gradient.norm() > 0


def test_the_parts_make_the_whole():
    case = requiring_grad(make(states=2))
    tensors, state = split(case)
    o, (h, u) = gka.gated_kalmanet(**tensors, **state, scale=0.7, output_final_state=True)

    q, k, v, log_decay, beta, alpha = tensors.values()
    x, only_h = gka.ridge_solve(q, k, log_decay, beta, initial_state=case["h0"], output_final_state=True)
    mixed = q + alpha.unsqueeze(-1) * (x - q)
    joined, only_u = gka.linear_memory(
        mixed, k, v, log_decay, beta, scale=0.7, initial_state=case["u0"], output_final_state=True
    )
    for got, want in ((joined, o), (only_h, h), (only_u, u)):
        assert relative_error(got, want) < 1e-12
    got, want = backward([joined, only_h, only_u], case), backward([o, h, u], case)
    for name in got:
        assert relative_error(got[name], want[name]) < 1e-10, name


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("decay_keys", [True, False])
def test_the_report_states_what_the_solves_did(solver, decay_keys):
    case = make(1, 6, 2, 5, 4, states=1)
    tensors, state = split(case)
    report = gka.gated_kalmanet_report(**tensors, **state, solver=solver, iterations=3, decay_keys=decay_keys)
    h = case["h0"][0]
    for t in range(6):
        q, k = case["q"][0, t], case["k"][0, t]
        gamma = case["log_decay"][0, t].exp() if decay_keys else torch.ones(2, dtype=torch.float64)
        h = gamma[:, None, None] * h + case["beta"][0, t][:, None, None] * k[:, :, None] * k[:, None, :]
        norm = h.flatten(-2).norm(dim=-1)
        x = report["x"][0, t]
        answer = (h @ x.unsqueeze(-1)).squeeze(-1)
        want = {
            "norm": norm,
            "ridge": 0.02 * norm,
            "residual": (answer + 0.02 * norm[:, None] * x - q).norm(dim=-1),
            "true_residual": (answer - q).norm(dim=-1),
            "variance": (q * x).sum(-1),
        }
        for name, value in want.items():
            # Residuals of the exact solve are rounding errors: absolute.
            assert (report[name][0, t] - value).abs().max() < 1e-12, name
    assert all(value.dtype == torch.float64 for value in report.values())
