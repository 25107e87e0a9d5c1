"""Keys and values with fewer heads than queries: as if each head had its copy, and nothing is copied."""

import pytest
import torch
from cases import backward, make, relative_error, requiring_grad, split

import gka

EXACTLY = 1e-12
HEADS = 6


def shared(keys, values, batch=2, tokens=9, **options):
    """A case of six heads, of which `keys` and `values` share one."""
    case = make(batch, tokens, HEADS, **options)
    return {**case, "k": case["k"][:, :, ::keys].contiguous(), "v": case["v"][:, :, ::values].contiguous()}


def copied(case):
    """The same with a copy for every head, as part of the graph."""
    return {name: x.repeat_interleave(HEADS // x.shape[2], 2) if name in ("k", "v") else x for name, x in case.items()}


def answers(case, **options):
    tensors, state = split(case)
    o, (h, u) = gka.gated_kalmanet(**tensors, **state, **options, output_final_state=True)
    return [o, h, u]


@pytest.mark.parametrize(("keys", "values"), [(2, 2), (6, 6), (3, 1), (1, 6), (2, 3)])
@pytest.mark.parametrize("tokens", [9, 300])
def test_answers_and_gradients_are_those_of_copies(keys, values, tokens):
    case = requiring_grad(shared(keys, values, tokens=tokens, states=2))
    got, want = answers(case), answers(copied(case))
    for name, a, b in zip("ohu", got, want, strict=True):
        assert torch.equal(a, b), name
    got, want = backward(got, case), backward(want, case)
    for name in want:
        assert got[name].shape == case[name].shape
        assert relative_error(got[name], want[name]) < EXACTLY, name


def test_packed_sequences_and_every_option_are_those_of_copies():
    bounds = torch.tensor([0, 5, 5, 150, 151])
    ridge = torch.rand(HEADS, 8, dtype=torch.float64) + 0.1
    for options in ({}, {"solver": "exact", "ridge_mode": "constant", "ridge": ridge}, {"gradient": "unrolled"}):
        case = requiring_grad(shared(3, 2, 1, 151, states=4))
        got, want = (answers(c, cu_seqlens=bounds, **options) for c in (case, copied(case)))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        got, want = backward(got, case), backward(want, case)
        for name in want:
            assert relative_error(got[name], want[name]) < EXACTLY, name


def test_the_halves_the_report_and_certainty_are_those_of_copies():
    case = shared(3, 2)
    copies = copied(case)
    q, k, v, decay, beta, _ = case.values()
    assert torch.equal(gka.ridge_solve(q, k, decay, beta)[0], gka.ridge_solve(q, copies["k"], decay, beta)[0])
    want, _ = gka.linear_memory(q, copies["k"], copies["v"], decay, beta)
    assert torch.equal(gka.linear_memory(q, k, v, decay, beta)[0], want)
    report, wanted = gka.gated_kalmanet_report(**case), gka.gated_kalmanet_report(**copies)
    for name in wanted:
        assert torch.equal(report[name], wanted[name]), name
    assert torch.equal(gka.gated_kalmanet_certainty(**case)[2], gka.gated_kalmanet_certainty(**copies)[2])


@pytest.mark.parametrize("solver", ["chebyshev", "exact"])
def test_a_step_is_that_of_copies(solver):
    case = shared(3, 2, states=2)
    results = []
    for each in (case, copied(case)):
        state = (case["h0"].clone(), case["u0"].clone())
        token = {name: x[:, 0] for name, x in each.items() if name not in ("h0", "u0")}
        results.append((gka.gated_kalmanet_step(**token, state=state, solver=solver), *state))
    for name, a, b in zip("ohu", *results, strict=True):
        assert torch.equal(a, b), name


def test_narrow_types_sum_what_heads_share_before_they_round():
    case = requiring_grad(shared(6, 6, tokens=200, dtype=torch.bfloat16))
    wide = requiring_grad({name: x.detach().double() for name, x in case.items()})
    got = backward([gka.gated_kalmanet(**case)[0]], case)
    want = backward([gka.gated_kalmanet(**wide)[0]], wide)
    for name in ("k", "v"):
        assert relative_error(got[name], want[name]) < 4e-3, name


def test_a_compiled_call_and_its_gradients_are_those_of_eager():
    torch._dynamo.reset()
    compiled = torch.compile(lambda case: answers(case)[0], backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 130):
        case = requiring_grad(shared(2, 3, 1, tokens))
        got, want = backward([compiled(case)], case), backward([answers(case)[0]], case)
        for name in want:
            assert relative_error(got[name], want[name]) < EXACTLY, name


def test_torch_func_takes_them():
    case = shared(2, 3)

    def loss(k, v):
        return gka.gated_kalmanet(**{**case, "k": k, "v": v})[0].square().sum()

    got = torch.func.grad(loss, argnums=(0, 1))(case["k"], case["v"])
    leaves = requiring_grad({"k": case["k"], "v": case["v"]})
    want = torch.autograd.grad(loss(**leaves), list(leaves.values()))
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < EXACTLY


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "heads"), [("k", 4), ("v", 12), ("k", 0)])
def test_a_number_of_heads_that_does_not_divide_is_refused(device, name, heads):
    case = make(heads=HEADS)
    case[name] = torch.zeros(2, 9, heads, case[name].shape[-1], dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"{name} takes as many heads as q, 6, or a divisor of them, got {heads}"):
        gka.gated_kalmanet(**{n: x.to(device) for n, x in case.items()})
