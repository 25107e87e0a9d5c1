"""Strides, types and sizes: the same numbers in another layout give the same bits."""

import pytest
import torch
from cases import backward, make, relative_error, requiring_grad, split

import gka

LAYOUTS = {
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "channels strided": lambda t: torch.stack([t, torch.full_like(t, float("nan"))], dim=-1)[..., 0],
    "a slice of something wider": lambda t: torch.cat([t, torch.full_like(t, float("nan"))], dim=-1)[
        ..., : t.shape[-1]
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_change_a_bit(layout):
    case = requiring_grad(make(2, 140))
    want, _ = gka.gated_kalmanet(**case)
    got, _ = gka.gated_kalmanet(**{name: LAYOUTS[layout](tensor) for name, tensor in case.items()})
    assert torch.equal(got, want)
    got, want = backward([got], case), backward([want], case)
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("layout", ["heads first", "channels strided", "a slice of something wider"])
def test_a_step_takes_strided_views(layout):
    case = make(states=2)
    token = {name: tensor[:, :1] for name, tensor in split(case)[0].items()}
    strided = {name: LAYOUTS[layout](tensor)[:, 0] for name, tensor in token.items()}
    plain = {name: tensor[:, 0] for name, tensor in token.items()}
    results = []
    for inputs in (plain, strided):
        state = (case["h0"].clone(), case["u0"].clone())
        results.append([gka.gated_kalmanet_step(**inputs, state=state), *state])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_expanded_inputs_count_as_what_they_show():
    case = make(1, 10)
    expanded = {name: tensor.expand(3, *tensor.shape[1:]) for name, tensor in case.items()}
    shared = {name: tensor[:, :, :1].expand_as(tensor) for name, tensor in case.items()}
    for inputs in (expanded, shared):
        got, _ = gka.gated_kalmanet(**inputs)
        want, _ = gka.gated_kalmanet(**{name: tensor.contiguous() for name, tensor in inputs.items()})
        assert torch.equal(got, want)


def test_strided_states_and_gradients_of_states_are_taken():
    case = requiring_grad(make(states=2))
    tensors, _ = split(case)
    o, final = gka.gated_kalmanet(**tensors, initial_state=(case["h0"], case["u0"]), output_final_state=True)
    turned = tuple(case[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("h0", "u0"))
    again, other = gka.gated_kalmanet(**tensors, initial_state=turned, output_final_state=True)
    assert torch.equal(o, again)

    # A transposed loss sends back a transposed gradient; sum() an expanded one.
    def loss(h, u):
        return (h.mT * torch.arange(8.0)).sum() + u.sum()

    got = torch.autograd.grad(loss(*other), list(case.values()), allow_unused=True)
    want = torch.autograd.grad(loss(*final), list(case.values()), allow_unused=True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("gates", ["own", "float32"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.float32, 5e-6)])
def test_a_narrow_type_costs_no_more_than_the_rounding_of_inputs_and_outputs(dtype, tolerance, gates):
    """Against float64 on the same rounded inputs: computing is done in float32, only results are rounded."""
    case = make(2, 150, 2, 32, 24, dtype=dtype, gate_dtype=torch.float32 if gates == "float32" else dtype, states=2)
    results = []
    for inputs in (case, {name: tensor.double() for name, tensor in case.items()}):
        leaves = requiring_grad(inputs)
        tensors, state = split(leaves)
        o, (h, u) = gka.gated_kalmanet(**tensors, **state, ridge=0.05, output_final_state=True)
        # One gradient for both, as the narrow type has it.
        weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(5)).to(dtype).to(o.dtype)
        gradients = torch.autograd.grad(o, list(leaves.values()), weight)
        results.append({"o": o, "h": h, "u": u} | {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)})
        assert o.dtype == inputs["q"].dtype
        assert all(g.dtype == inputs[name].dtype for name, g in zip(leaves, gradients, strict=True))
    got, want = results
    for name in got:
        room = 10 if got[name].dtype == torch.float32 else 1
        limit = 5e-6 * room if got[name].dtype == torch.float32 else tolerance
        assert relative_error(got[name], want[name]) < limit, name


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(1, 1), (1, 256), (256, 1), (17, 33), (64, 64), (128, 128), (256, 256)]
)
def test_every_size_from_1_to_256_works(key_dim, value_dim):
    case = make(1, 5, 1, key_dim, value_dim, dtype=torch.float32)
    narrow, wide = requiring_grad(case), requiring_grad({name: tensor.double() for name, tensor in case.items()})
    (o, _), (want_o, _) = gka.gated_kalmanet(**narrow, ridge=0.1), gka.gated_kalmanet(**wide, ridge=0.1)
    assert relative_error(o, want_o) < 1e-5
    got, want = backward([o], narrow), backward([want_o.float()], wide)
    for name in got:
        assert (got[name].double() - want[name]).norm() < 1e-4 * max(want[name].norm(), 1e-2), name


def test_h_counts_as_its_symmetric_part():
    case = make(states=2)
    skewed = case["h0"] + torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).triu(1)
    symmetric = (skewed + skewed.mT) / 2
    tensors, _ = split(case)
    results = []
    for h0 in (skewed, symmetric):
        h0 = h0.clone().requires_grad_()
        o, (h, _) = gka.gated_kalmanet(**tensors, initial_state=(h0, case["u0"]), output_final_state=True)
        (gradient,) = torch.autograd.grad((o.sum() + (h * skewed).sum()), h0)
        assert torch.equal(gradient, gradient.mT)
        results.append((o, h, gradient))
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-12


def test_the_input_is_not_changed():
    case = requiring_grad(make(states=2))
    before = {name: tensor.detach().clone() for name, tensor in case.items()}
    tensors, state = split(case)
    o, (h, u) = gka.gated_kalmanet(**tensors, **state, output_final_state=True)
    backward([o, h, u], case)
    for name, tensor in case.items():
        assert torch.equal(tensor, before[name]), name
