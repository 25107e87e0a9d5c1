"""Bad input raises one sentence that names the argument, what it takes and what it got, before anything runs."""

import re

import pytest
import torch
from cases import make

import gka


def call(**changes):
    return gka.gated_kalmanet(**{**make(states=0), **changes})


def step(**changes):
    case = {name: tensor[:, 0] for name, tensor in make().items()}
    return gka.gated_kalmanet_step(**{**case, "state": states(2), **changes})


def states(n, dtype=torch.float64, key_dim=8, value_dim=6):
    return torch.zeros(n, 2, key_dim, key_dim, dtype=dtype), torch.zeros(n, 2, key_dim, value_dim, dtype=dtype)


def in_one_memory():
    h = torch.zeros(2, 2, 8, 8, dtype=torch.float64)
    return h, h.view(-1)[:192].view(2, 2, 8, 6)


def packed(cu_seqlens, **changes):
    return gka.gated_kalmanet(**{**make(1, 9), **changes}, cu_seqlens=cu_seqlens)


def zeros(*shape, dtype=torch.float64, **kwargs):
    return torch.zeros(*shape, dtype=dtype, **kwargs)


def with_entry(name, value):
    tensor = make()[name]
    tensor[1, 3, 0] = value
    return tensor


# Sizes of the case: B = 2, T = 9, H = 2, D = 8, V = 6.
CASES = {
    # shapes
    "q of rank 3": (
        lambda: call(q=zeros(2, 9, 8)),
        ValueError,
        "q takes shape [B, T, H, D], got [2, 9, 8]",
    ),
    "k of another head size": (
        lambda: call(k=zeros(2, 9, 2, 7)),
        ValueError,
        "k takes shape [B, T, H, D] = [2, 9, 2, 8], got [2, 9, 2, 7]",
    ),
    "v of another length": (
        lambda: call(v=zeros(2, 8, 2, 6)),
        ValueError,
        "v takes shape [B, T, H, V], got [2, 8, 2, 6]",
    ),
    "log_decay per channel": (
        lambda: call(log_decay=zeros(2, 9, 2, 8)),
        ValueError,
        "log_decay takes shape [B, T, H] = [2, 9, 2], got [2, 9, 2, 8]",
    ),
    "beta with heads first": (
        lambda: call(beta=zeros(2, 2, 9)),
        ValueError,
        "beta takes shape [B, T, H] = [2, 9, 2], got [2, 2, 9]",
    ),
    "alpha of another batch": (
        lambda: call(alpha=zeros(1, 9, 2)),
        ValueError,
        "alpha takes shape [B, T, H] = [2, 9, 2], got [1, 9, 2]",
    ),
    # D and V out of range
    "D = 0": (
        lambda: call(q=zeros(2, 9, 2, 0), k=zeros(2, 9, 2, 0)),
        ValueError,
        "q takes a last dimension D from 1 to 256, got 0",
    ),
    "D = 257": (
        lambda: call(q=zeros(2, 9, 2, 257), k=zeros(2, 9, 2, 257)),
        ValueError,
        "q takes a last dimension D from 1 to 256, got 257",
    ),
    "V = 300": (
        lambda: call(v=zeros(2, 9, 2, 300)),
        ValueError,
        "v takes a last dimension V from 1 to 256, got 300",
    ),
    # types
    "q of integers": (
        lambda: call(q=zeros(2, 9, 2, 8, dtype=torch.int64)),
        TypeError,
        "q takes float64, float32, bfloat16 or float16, got int64",
    ),
    "k of another type": (
        lambda: call(k=zeros(2, 9, 2, 8, dtype=torch.float32)),
        TypeError,
        "k takes float64 beside q in float64, got float32",
    ),
    "v of another type": (
        lambda: call(v=zeros(2, 9, 2, 6, dtype=torch.bfloat16)),
        TypeError,
        "v takes float64 beside q in float64, got bfloat16",
    ),
    "float32 gate beside float64": (
        lambda: call(log_decay=zeros(2, 9, 2, dtype=torch.float32)),
        TypeError,
        "log_decay takes float64 beside q in float64, got float32",
    ),
    "float64 gate beside bfloat16": (
        lambda: gka.gated_kalmanet(**{**make(dtype=torch.bfloat16), "beta": zeros(2, 9, 2)}),
        TypeError,
        "beta takes bfloat16 or float32 beside q in bfloat16, got float64",
    ),
    "float16 gate beside bfloat16": (
        lambda: gka.gated_kalmanet(**{**make(dtype=torch.bfloat16), "alpha": zeros(2, 9, 2, dtype=torch.float16)}),
        TypeError,
        "alpha takes bfloat16 or float32 beside q in bfloat16, got float16",
    ),
    # devices
    "k on another device": (
        lambda: call(k=zeros(2, 9, 2, 8, device="meta")),
        ValueError,
        "k takes a tensor on the device of q, cpu, got one on meta",
    ),
    # numbers
    "iterations beyond any solve": (
        lambda: call(iterations=2**60),
        ValueError,
        "iterations takes a number of at most 10000, got 1152921504606846976",
    ),
    "keys beyond float32's squares": (
        lambda: call(**{n: torch.full_like(x.float(), 1e16) if n == "k" else x.float() for n, x in make().items()}),
        ValueError,
        "k takes numbers below 1e15 in float32, got 1e+16",
    ),
    "step: h and u in one memory": (
        lambda: step(state=in_one_memory()),
        ValueError,
        "state takes h and u in memory of their own, got tensors that share it",
    ),
    "iterations < 0": (
        lambda: call(iterations=-1),
        ValueError,
        "iterations takes a number of at least 0, got -1",
    ),
    "ridge = 0": (
        lambda: call(ridge=0.0),
        ValueError,
        "ridge takes a finite number above 0, got 0",
    ),
    "ridge < 0": (
        lambda: call(ridge=-0.5),
        ValueError,
        "ridge takes a finite number above 0, got -0.5",
    ),
    "ridge = nan": (
        lambda: call(ridge=float("nan")),
        ValueError,
        "ridge takes a finite number above 0, got nan",
    ),
    "ridge = inf": (
        lambda: call(ridge=float("inf"), ridge_mode="constant"),
        ValueError,
        "ridge takes a finite number above 0, got inf",
    ),
    "beta < 0": (
        lambda: call(beta=with_entry("beta", -0.25)),
        ValueError,
        "beta takes numbers of at least 0, got -0.25 at [1, 3, 0]",
    ),
    "log_decay > 0": (
        lambda: call(log_decay=with_entry("log_decay", 0.5)),
        ValueError,
        "log_decay takes numbers of at most 0, got 0.5 at [1, 3, 0]",
    ),
    "log_decay = nan": (
        lambda: call(log_decay=with_entry("log_decay", float("nan"))),
        ValueError,
        "log_decay takes numbers of at most 0, got nan at [1, 3, 0]",
    ),
    # names
    "solver": (
        lambda: call(solver="jacobi"),
        ValueError,
        'solver takes one of chebyshev, conjugate_gradient, gradient_descent, nesterov, exact, got "jacobi"',
    ),
    "gradient": (
        lambda: call(gradient="adjoint"),
        ValueError,
        'gradient takes one of implicit, unrolled, got "adjoint"',
    ),
    "ridge_mode": (
        lambda: call(ridge_mode="fixed"),
        ValueError,
        'ridge_mode takes one of adaptive, constant, got "fixed"',
    ),
    # a ridge per channel
    "ridge tensor, adaptive": (
        lambda: call(ridge=torch.ones(2, 8), solver="exact"),
        ValueError,
        'ridge takes a tensor only with ridge_mode "constant", got "adaptive"',
    ),
    "ridge tensor, chebyshev": (
        lambda: call(ridge=torch.ones(2, 8), ridge_mode="constant"),
        ValueError,
        'ridge takes a tensor only with the solvers conjugate_gradient and exact, got "chebyshev"',
    ),
    "ridge tensor of another shape": (
        lambda: call(ridge=torch.ones(8), ridge_mode="constant", solver="exact"),
        ValueError,
        "ridge takes shape [H, D] = [2, 8], got [8]",
    ),
    "ridge tensor of integers": (
        lambda: call(ridge=torch.ones(2, 8, dtype=torch.int32), ridge_mode="constant", solver="exact"),
        TypeError,
        "ridge takes float64, float32, bfloat16 or float16, got int32",
    ),
    "ridge tensor with a zero": (
        lambda: call(ridge=torch.zeros(2, 8), ridge_mode="constant", solver="exact"),
        ValueError,
        "ridge takes finite numbers above 0, got 0 at [0, 0]",
    ),
    # cu_seqlens
    "cu_seqlens of floats": (
        lambda: packed(torch.tensor([0.0, 9.0])),
        TypeError,
        "cu_seqlens takes int32 or int64, got float32",
    ),
    "cu_seqlens of rank 2": (
        lambda: packed(torch.tensor([[0, 9]])),
        ValueError,
        "cu_seqlens takes shape [L], got [1, 2]",
    ),
    "cu_seqlens without entries": (
        lambda: packed(torch.tensor([], dtype=torch.int64)),
        ValueError,
        "cu_seqlens takes one entry more than there are sequences, got none",
    ),
    "cu_seqlens from 1": (
        lambda: packed(torch.tensor([1, 9])),
        ValueError,
        "cu_seqlens takes 0 as its first entry, got 1",
    ),
    "cu_seqlens short of T": (
        lambda: packed(torch.tensor([0, 8])),
        ValueError,
        "cu_seqlens takes the number of tokens, 9, as its last entry, got 8",
    ),
    "cu_seqlens that decreases": (
        lambda: packed(torch.tensor([0, 5, 3, 9], dtype=torch.int32)),
        ValueError,
        "cu_seqlens takes entries that never decrease, got 3 after 5 at 2",
    ),
    "cu_seqlens beside a batch": (
        lambda: call(cu_seqlens=torch.tensor([0, 9])),
        ValueError,
        "q takes batch size 1 beside cu_seqlens, got 2",
    ),
    # states
    "a state of another batch": (
        lambda: call(initial_state=states(3)),
        ValueError,
        "initial_state h takes shape [N, H, D, D] = [2, 2, 8, 8], got [3, 2, 8, 8]",
    ),
    "a state with u of another size": (
        lambda: call(initial_state=states(2, value_dim=7)),
        ValueError,
        "initial_state u takes shape [N, H, D, V] = [2, 2, 8, 6], got [2, 2, 8, 7]",
    ),
    "a state for another number of packed sequences": (
        lambda: packed(torch.tensor([0, 4, 9]), initial_state=states(1)),
        ValueError,
        "initial_state h takes shape [N, H, D, D] = [2, 2, 8, 8], got [1, 2, 8, 8]",
    ),
    "a state of another type": (
        lambda: gka.gated_kalmanet(**make(dtype=torch.bfloat16), initial_state=states(2, torch.bfloat16)),
        TypeError,
        "initial_state h takes float32 beside q in bfloat16, got bfloat16",
    ),
    # the step
    "step: q with a token dimension": (
        lambda: step(q=zeros(2, 1, 2, 8)),
        ValueError,
        "q takes shape [B, H, D], got [2, 1, 2, 8]",
    ),
    "step: a gate of another shape": (
        lambda: step(beta=zeros(2, 3)),
        ValueError,
        "beta takes shape [B, H] = [2, 2], got [2, 3]",
    ),
    "step: a state of another type": (
        lambda: step(state=states(2, torch.float32)),
        TypeError,
        "state h takes float64 beside q in float64, got float32",
    ),
    "step: a state of another size": (
        lambda: step(state=states(2, key_dim=7)),
        ValueError,
        "state h takes shape [N, H, D, D] = [2, 2, 8, 8], got [2, 2, 7, 7]",
    ),
    "step: a pool without indices": (
        lambda: step(state=states(5)),
        ValueError,
        "state takes one slot per sequence, 2, unless state_indices picks from a pool, got 5",
    ),
    "step: a state that is not contiguous": (
        lambda: step(state=(states(2)[0].mT, states(2)[1])),
        ValueError,
        "state h takes a contiguous tensor, because it is updated in place, got strides [128, 64, 1, 8]",
    ),
    "step: an index out of range": (
        lambda: step(state=states(5), state_indices=torch.tensor([0, 5])),
        ValueError,
        "state_indices takes slots from 0 to 4 of the state, got 5",
    ),
    "step: a negative index": (
        lambda: step(state=states(5), state_indices=torch.tensor([-1, 2])),
        ValueError,
        "state_indices takes slots from 0 to 4 of the state, got -1",
    ),
    "step: one index twice": (
        lambda: step(state=states(5), state_indices=torch.tensor([3, 3], dtype=torch.int32)),
        ValueError,
        "state_indices takes distinct slots, got 3 twice",
    ),
    "step: too many indices": (
        lambda: step(state=states(5), state_indices=torch.tensor([0, 1, 2])),
        ValueError,
        "state_indices takes shape [B] = [2], got [3]",
    ),
    "step: iterations of another type": (
        lambda: step(iterations=torch.tensor([3, 4])),
        TypeError,
        "iterations takes int32, got int64",
    ),
    "step: iterations of another length": (
        lambda: step(iterations=torch.tensor([3], dtype=torch.int32)),
        ValueError,
        "iterations takes shape [B] = [2], got [1]",
    ),
    "step: iterations < 0": (
        lambda: step(iterations=torch.tensor([3, -4], dtype=torch.int32)),
        ValueError,
        "iterations takes numbers of at least 0, got -4",
    ),
    "step: log_decay > 0": (
        lambda: step(log_decay=torch.full((2, 2), 0.5, dtype=torch.float64)),
        ValueError,
        "log_decay takes numbers of at most 0, got 0.5 at [0, 0]",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named_in_one_sentence(name):
    run, kind, sentence = CASES[name]
    operator = "gated_kalmanet_step" if name.startswith("step") else "gated_kalmanet"
    with pytest.raises(kind) as caught:
        run()
    assert str(caught.value) == f"{operator}: {sentence}"


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (
            lambda c: gka.gated_kalmanet(**c | {"q": c["q"].numpy()}),
            "gated_kalmanet: q takes a tensor, got one of type",
        ),
        (
            lambda c: gka.gated_kalmanet(**c, cu_seqlens=[0, 9]),
            "gated_kalmanet: cu_seqlens takes a tensor or None, got one of type list",
        ),
        (
            lambda c: gka.gated_kalmanet(**c, initial_state=(1, 2)),
            "gated_kalmanet: initial_state takes (h, u), two tensors, got tuple of 2",
        ),
        (
            lambda c: gka.gated_kalmanet_certainty(**c, initial_state=torch.zeros(2, 2, 8, 8)),
            "gated_kalmanet_certainty: initial_state takes (h, u), two tensors, got one of type Tensor",
        ),
        (
            lambda c: gka.gated_kalmanet_report(**c, initial_state=gka.nn.State(*[None] * 3, *torch.zeros(2, 1))),
            "gated_kalmanet_report: initial_state takes (h, u), two tensors, got State of 5",
        ),
        (lambda c: gka.gated_kalmanet(**c, iterations=3.5), "gated_kalmanet: iterations takes a whole number, got one"),
        (lambda c: gka.gated_kalmanet(**c, ridge="x"), "gated_kalmanet: ridge takes a number, got one of type str"),
        (
            lambda c: gka.gated_kalmanet(**c, solver=None),
            "gated_kalmanet: solver takes a text, got one of type NoneType",
        ),
        (lambda c: gka.ridge_solve(c["q"], 3), "ridge_solve: k takes a tensor, got one of type int"),
        (lambda c: step(state_indices=[0, 1]), "gated_kalmanet_step: state_indices takes a tensor or None, got one of"),
        (lambda c: gka.memory(c["q"], c["k"], "v"), "memory: v takes a tensor, got one of type str"),
    ],
)
def test_an_argument_of_another_python_type_is_named_in_one_sentence(run, sentence):
    with pytest.raises(TypeError) as caught:
        run(make())
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "bounds, sentence",
    [
        ([0, 4, 8], "memory: cu_seqlens takes the number of tokens, 9, as its last entry, got 8"),
        ([0, 4, 10], "memory: cu_seqlens takes the number of tokens, 9, as its last entry, got 10"),
        ([1, 9], "cu_seqlens must begin with 0 and never decrease."),
        ([0, 5, 4, 9], "cu_seqlens must begin with 0 and never decrease."),
        ([0.0, 9.0], "memory: cu_seqlens takes int32 or int64, got Float"),
        ([[0, 9]], "memory: cu_seqlens takes one entry more than there are sequences, got shape [1, 2]"),
        ([], "memory: cu_seqlens takes"),
    ],
)
def test_the_rivals_memories_take_no_bounds_that_leave_tokens_out(bounds, sentence):
    q, k, v = (tensor[:1] for tensor in list(make().values())[:3])
    with pytest.raises((ValueError, TypeError)) as caught:
        gka.memory(q, k, v, cu_seqlens=torch.tensor(bounds))
    assert str(caught.value).startswith(sentence)


def test_the_form_without_a_gradient_names_the_one_that_has_one():
    q, k, v, *_ = make().values()
    with pytest.raises(ValueError, match=r"because this operator has none \(gated_kalmanet has;"):
        gka.gated_kalmanet_certainty(q.requires_grad_(), k, v)


def test_a_refused_step_leaves_the_state_alone():
    h, u = (torch.ones_like(state) for state in states(2))
    with pytest.raises(ValueError, match="beta"):
        step(state=(h, u), beta=torch.full((2, 2), -1.0, dtype=torch.float64))
    assert torch.equal(h, torch.ones_like(h))
    assert torch.equal(u, torch.ones_like(u))


def test_each_function_complains_under_its_own_name():
    q, k, v, *_ = make().values()
    bad = k[..., :5]
    for function, arguments in (
        (gka.gated_kalmanet_report, (q, bad, v)),
        (gka.ridge_solve, (q, bad)),
        (gka.linear_memory, (q, bad, v)),
    ):
        with pytest.raises(ValueError, match=f"^{function.__name__}: k takes shape"):
            function(*arguments)


def test_the_inner_backward_checks_what_it_is_given():
    q, k, v, *gates = make().values()
    options = (1.0, 0.02, 30, "chebyshev", "implicit", "adaptive", True, True, True)
    inputs = ("both", q, k, v, *gates, None, None, None, None, *options)
    o, _, _, x, norm, h, u = torch.ops.gka.gated_kalmanet_forward(*inputs, False, True)
    needs = [True] * 9
    for saved, sentence in (
        ((None, norm, h, u, o), "x takes a tensor [B, T, H, D], got none"),
        ((x[:, 1:], norm, h, u, o), "x takes shape [B, T, H, D] = [2, 9, 2, 8], got [2, 8, 2, 8]"),
        ((x, norm, h[1:], u, o), "h_segments takes shape [S, H, D, D] = [3, 2, 8, 8], got [2, 2, 8, 8]"),
        ((x, norm, h, u, o[..., 1:]), "d_o takes shape [B, T, H, V] = [2, 9, 2, 6], got [2, 9, 2, 5]"),
    ):
        with pytest.raises((ValueError, TypeError), match=re.escape(f"gated_kalmanet_backward: {sentence}")):
            torch.ops.gka.gated_kalmanet_backward(*inputs, *saved, None, None, needs)


def test_bad_shapes_are_refused_while_tracing():
    case = make()
    case["k"] = case["k"][..., :5]
    compiled = torch.compile(lambda c: gka.gated_kalmanet(**c)[0], backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=re.escape("gated_kalmanet: k takes shape [B, T, H, D]")):
        compiled(case)
