"""What must not depend on how tokens are grouped: packing, splitting, stepping, threads; and what must stay apart."""

from itertools import pairwise

import pytest
import torch
from cases import backward, make, relative_error, requiring_grad, split

import gka

EXACTLY = 1e-12


def at(case, tokens):
    """The tokens of a case that the slice picks."""
    return {name: tensor[:, tokens] for name, tensor in case.items() if name not in ("h0", "u0")}


def test_packed_equals_one_by_one():
    lengths = [7, 0, 150, 1]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    case = requiring_grad(make(1, sum(lengths), states=len(lengths)))
    tensors, state = split(case)
    o, (h, u) = gka.gated_kalmanet(**tensors, **state, cu_seqlens=bounds, output_final_state=True)

    parts = []
    for n, (begin, end) in enumerate(pairwise(bounds)):
        own = (case["h0"][n : n + 1], case["u0"][n : n + 1])
        parts.append(gka.gated_kalmanet(**at(case, slice(begin, end)), initial_state=own, output_final_state=True))
    want = [
        torch.cat([part[0] for part in parts], dim=1),
        torch.cat([part[1][0] for part in parts]),
        torch.cat([part[1][1] for part in parts]),
    ]
    for name, a, b in zip("ohu", (o, h, u), want, strict=True):
        assert relative_error(a, b) < EXACTLY, name
    got, want = backward([o, h, u], case), backward(want, case)
    for name in got:
        assert relative_error(got[name], want[name]) < EXACTLY, name


@pytest.mark.parametrize("cut", [0, 1, 64, 128, 199, 200])
def test_one_call_equals_two_joined_by_the_state(cut):
    case = requiring_grad(make(1, 200, states=1))
    tensors, state = split(case)
    o, (h, u) = gka.gated_kalmanet(**tensors, **state, output_final_state=True)
    first, middle = gka.gated_kalmanet(**at(case, slice(0, cut)), **state, output_final_state=True)
    second, (two_h, two_u) = gka.gated_kalmanet(
        **at(case, slice(cut, 200)), initial_state=middle, output_final_state=True
    )
    joined = torch.cat([first, second], dim=1)
    for name, a, b in (("o", joined, o), ("h", two_h, h), ("u", two_u, u)):
        assert relative_error(a, b) < EXACTLY, name
    got, want = backward([joined, two_h, two_u], case), backward([o, h, u], case)
    for name in got:
        assert relative_error(got[name], want[name]) < 1e-11, name


@pytest.mark.parametrize("solver", ["chebyshev", "conjugate_gradient", "gradient_descent", "nesterov", "exact"])
def test_steps_after_a_prefill_equal_a_longer_prefill(solver):
    case = make(2, 140, states=2)
    tensors, state = split(case)
    options = {"solver": solver, "iterations": 5, "scale": 0.5, "ridge": 0.1, "decay_keys": False}
    o, final = gka.gated_kalmanet(**tensors, **state, **options, output_final_state=True)
    _, running = gka.gated_kalmanet(**at(case, slice(0, 135)), **state, **options, output_final_state=True)
    for t in range(135, 140):
        answer = gka.gated_kalmanet_step(**at(case, t), state=running, **options)
        assert relative_error(answer, o[:, t]) < 1e-11
    for got, want in zip(running, final, strict=True):
        assert relative_error(got, want) < EXACTLY


def test_a_few_tokens_on_a_cpu_are_so_many_steps_to_the_bit():
    """With a gradient or without, alone or packed beside a longer sequence: the length of a sequence decides."""
    case, state = split(make(1, 40, 2, 32, 16, dtype=torch.float32, states=1))
    few = at(case, slice(0, 2))
    o, after = gka.gated_kalmanet(**few, **state, output_final_state=True)
    h, u = (tensor.clone() for tensor in state["initial_state"])
    steps = [gka.gated_kalmanet_step(**{n: x[:, t] for n, x in few.items()}, state=(h, u)) for t in range(2)]
    assert torch.equal(o, torch.stack(steps, 1))
    assert torch.equal(after[0], h) and torch.equal(after[1], u)
    assert torch.equal(gka.gated_kalmanet(**requiring_grad(few), **state)[0], o)
    both = tuple(torch.cat([tensor, tensor]) for tensor in state["initial_state"])
    packed = gka.gated_kalmanet(**case, initial_state=both, cu_seqlens=torch.tensor([0, 2, 40]))[0]
    assert torch.equal(packed[:, :2], o)


def test_a_step_uses_and_changes_the_chosen_slots_and_no_other():
    case = make(2, 3, states=5)
    chosen = torch.tensor([4, 1], dtype=torch.int32)
    pool = (case["h0"].clone(), case["u0"].clone())
    own = tuple(state[chosen.long()].clone() for state in pool)
    want = gka.gated_kalmanet_step(**at(case, 0), state=own)
    got = gka.gated_kalmanet_step(**at(case, 0), state=pool, state_indices=chosen)
    assert torch.equal(got, want)
    for state, mine, before in zip(pool, own, (case["h0"], case["u0"]), strict=True):
        assert torch.equal(state[chosen.long()], mine)
        others = torch.tensor([0, 2, 3])
        assert torch.equal(state[others], before[others])
        assert not torch.equal(state[chosen.long()], before[chosen.long()])


def test_a_step_takes_an_iteration_count_per_sequence():
    case = make(3, 2, states=3)
    counts = torch.tensor([0, 4, 30], dtype=torch.int32)
    got = gka.gated_kalmanet_step(**at(case, 0), state=(case["h0"].clone(), case["u0"].clone()), iterations=counts)
    for b, count in enumerate(counts.tolist()):
        alone = {name: tensor[b : b + 1] for name, tensor in case.items()}
        state = (alone["h0"].clone(), alone["u0"].clone())
        want = gka.gated_kalmanet_step(**at(alone, 0), state=state, iterations=count)
        assert torch.equal(got[b : b + 1], want)


def test_a_step_on_the_cpu_takes_all_iterations_whether_or_not_it_may_take_fewer():
    case = make(3, 1, states=3)
    answers = []
    for refine in (True, False):
        state = (case["h0"].clone(), case["u0"].clone())
        answers.append(gka.gated_kalmanet_step(**at(case, 0), state=state, refine=refine))
    assert torch.equal(*answers)


@pytest.mark.parametrize("solver", ["exact", "conjugate_gradient"])
def test_a_step_takes_a_ridge_per_channel(solver):
    case = make(2, 1)
    ridge = torch.linspace(0.1, 1.0, 16).reshape(2, 8)
    options = {"ridge": ridge, "ridge_mode": "constant", "solver": solver}
    want, _ = gka.gated_kalmanet(**case, **options)
    state = (torch.zeros(2, 2, 8, 8, dtype=torch.float64), torch.zeros(2, 2, 8, 6, dtype=torch.float64))
    got = gka.gated_kalmanet_step(**at(case, 0), state=state, **options)
    assert relative_error(got, want[:, 0]) < EXACTLY


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
def test_the_bits_do_not_depend_on_the_number_of_threads(dtype, gradient):
    case = requiring_grad(make(1, 400, 3, 24, 20, dtype=dtype, states=3))
    cu_seqlens = torch.tensor([0, 300, 310, 400])
    tensors, state = split(case)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            o, (h, u) = gka.gated_kalmanet(
                **tensors, **state, cu_seqlens=cu_seqlens, gradient=gradient, output_final_state=True
            )
            results.append([o, h, u, *backward([o, h, u], case).values()])
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "alpha"])
def test_what_is_not_finite_stays_in_its_head_and_sequence_and_never_reaches_an_earlier_token(name, poison):
    cu_seqlens = torch.tensor([0, 30, 60, 90])
    case = make(1, 90, 3)
    clean, _ = gka.gated_kalmanet(**case, cu_seqlens=cu_seqlens)
    case[name][0, 45, 1] = poison
    leaves = requiring_grad(case)
    o, _ = gka.gated_kalmanet(**leaves, cu_seqlens=cu_seqlens)
    assert not o[0, 45, 1].isfinite().all()

    touched = torch.zeros(90, 3, dtype=torch.bool)
    touched[45:60, 1] = True
    assert torch.equal(o[0][~touched], clean[0][~touched])

    gradients = torch.autograd.grad(o.sum(), list(leaves.values()))
    own = torch.zeros(90, 3, dtype=torch.bool)
    own[30:60, 1] = True
    for gradient in gradients:
        assert gradient[0][~own].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_empty_memory_answers_zero(dtype):
    case = make(1, 12, dtype=dtype, gates=("log_decay", "alpha"))
    case["beta"] = torch.ones(1, 12, 2, dtype=dtype)
    case["beta"][:, :5] = 0
    leaves = requiring_grad(case)
    o, _ = gka.gated_kalmanet(**leaves)
    assert not o[:, :5].any()
    assert o[:, 5:].abs().sum(-1).gt(0).all()
    for name, gradient in backward([o], leaves).items():
        assert gradient.isfinite().all(), name


def test_beta_zero_writes_nothing():
    case = make(1, 20, states=1)
    tensors, state = split(case)
    tensors["beta"][:, 7:] = 0
    tensors["log_decay"][:, 7:] = 0
    _, (h, u) = gka.gated_kalmanet(**tensors, **state, output_final_state=True)
    _, (want_h, want_u) = gka.gated_kalmanet(**at(tensors, slice(0, 7)), **state, output_final_state=True)
    assert relative_error(h, want_h) < EXACTLY
    assert relative_error(u, want_u) < EXACTLY


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_total_forgetting_starts_anew(dtype):
    case = make(1, 300, dtype=dtype, states=1)
    tensors, state = split(case)
    tensors["log_decay"][:, 170] = -float("inf")
    o, (h, u) = gka.gated_kalmanet(**tensors, **state, output_final_state=True)
    fresh, (fresh_h, fresh_u) = gka.gated_kalmanet(**at(tensors, slice(170, 300)), output_final_state=True)
    tolerance = {torch.float64: EXACTLY, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert relative_error(o[:, 170:], fresh) < tolerance
    assert relative_error(h, fresh_h) < tolerance
    assert relative_error(u, fresh_u) < tolerance
    leaves = requiring_grad(tensors)
    o, _ = gka.gated_kalmanet(**leaves, **state)
    gradients = torch.autograd.grad(o[:, 170:].sum(), list(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        assert gradient.isfinite().all(), name
        if name != "log_decay":
            assert not gradient[:, :170].any(), name


def test_no_iterations_give_the_first_guess():
    case = make(1, 6, 2, 5, 5, gates=())
    o, _ = gka.gated_kalmanet(**case, iterations=0, ridge=0.25)
    h, u = torch.zeros(2, 5, 5, dtype=torch.float64), torch.zeros(2, 5, 5, dtype=torch.float64)
    for t in range(6):
        q, k, v = (case[name][0, t] for name in "qkv")
        h, u = h + k[:, :, None] * k[:, None, :], u + k[:, :, None] * v[:, None, :]
        first = 2 / ((1 + 2 * 0.25) * h.flatten(-2).norm(dim=-1))  # 2/(L + μ)
        want = (u.mT @ (first[:, None] * q).unsqueeze(-1)).squeeze(-1)
        assert relative_error(o[0, t], want) < EXACTLY


@pytest.mark.parametrize("packed", [False, True])
def test_no_tokens_hand_the_state_through(packed):
    case = requiring_grad(make(1, 0, states=2 if packed else 1))
    tensors, state = split(case)
    cu_seqlens = torch.zeros(3, dtype=torch.int64) if packed else None
    o, (h, u) = gka.gated_kalmanet(**tensors, **state, cu_seqlens=cu_seqlens, output_final_state=True)
    assert o.shape == (1, 0, 2, 6)
    assert relative_error(h, case["h0"]) < EXACTLY
    assert relative_error(u, case["u0"]) < EXACTLY
    gradients = torch.autograd.grad((h.sum(), u.sum()), (case["h0"], case["u0"]))
    for gradient in gradients:
        assert torch.equal(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize("packed", [False, True])
def test_no_tokens_and_no_state_give_a_state_of_zeros(packed):
    case = make(1, 0)
    cu_seqlens = torch.zeros(3, dtype=torch.int64) if packed else None
    _, (h, u) = gka.gated_kalmanet(**case, cu_seqlens=cu_seqlens, output_final_state=True)
    assert h.shape == (2 if packed else 1, 2, 8, 8)
    assert not h.any()
    assert not u.any()


def test_no_sequences_give_no_results():
    for case, cu_seqlens in ((make(0, 5), None), (make(1, 0), torch.tensor([0]))):
        leaves = requiring_grad(case)
        o, (h, u) = gka.gated_kalmanet(**leaves, cu_seqlens=cu_seqlens, output_final_state=True)
        assert o.numel() == 0
        assert h.shape == (0, 2, 8, 8)
        assert u.shape == (0, 2, 8, 6)
        for gradient in torch.autograd.grad((o.sum() + h.sum() + u.sum()), list(leaves.values())):
            assert gradient.numel() == 0
    empty = at(make(0, 1), 0)
    state = (torch.zeros(0, 2, 8, 8, dtype=torch.float64), torch.zeros(0, 2, 8, 6, dtype=torch.float64))
    assert gka.gated_kalmanet_step(**empty, state=state).shape == (0, 2, 6)


@pytest.mark.parametrize("gamma", [1.0, 0.99999, 0.999, 0.9, 0.5])
def test_float32_follows_float64_over_65536_tokens(gamma):
    case = make(1, 65536, 1, 16, 16, gates=())
    case["log_decay"] = torch.full((1, 65536, 1), gamma, dtype=torch.float64).log()
    narrow = {name: tensor.float() for name, tensor in case.items()}
    wide = {name: tensor.double() for name, tensor in narrow.items()}  # the same rounded inputs
    got, (h, u) = gka.gated_kalmanet(**narrow, output_final_state=True)
    want, (want_h, want_u) = gka.gated_kalmanet(**wide, output_final_state=True)
    assert relative_error(got, want) < 1e-4
    assert relative_error(got[:, -1000:], want[:, -1000:]) < 1e-4
    assert relative_error(h, want_h) < 1e-4
    assert relative_error(u, want_u) < 1e-4
