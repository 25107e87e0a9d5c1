"""The operator as a citizen of torch: opcheck, compile, checkpoint, autocast, autograd's rules."""

import pytest
import torch
from cases import backward, make, relative_error, requiring_grad, split, weights
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import gka

ops = torch.ops.gka


def opcheck_calls():
    """Every operator, with what makes a difference to shapes and to autograd."""
    case = requiring_grad(make(states=2))
    tensors = [tensor for name, tensor in case.items() if name not in ("h0", "u0")]
    state = {"h0": case["h0"], "u0": case["u0"]}
    plain = [tensor.detach() for tensor in tensors]
    packed = requiring_grad(make(1, 12, gates=("log_decay",), dtype=torch.float32))
    cu_seqlens = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    ridge = torch.full((2, 8), 0.1, dtype=torch.float64, requires_grad=True)
    constant = {"ridge_diagonal": ridge, "ridge_mode": "constant", "solver": "exact"}
    step = [tensor[:, 0].contiguous() for tensor in plain]
    pool = {"h": torch.zeros(3, 2, 8, 8, dtype=torch.float64), "u": torch.zeros(3, 2, 8, 6, dtype=torch.float64)}
    chosen = {"state_indices": torch.tensor([2, 0]), "iterations_per_sequence": torch.tensor([3, 4], dtype=torch.int32)}
    return {
        "plain": (ops.gated_kalmanet, tensors[:3], {}),
        "gates and states": (ops.gated_kalmanet, tensors, {**state, "output_final_state": True}),
        "packed": (ops.gated_kalmanet, list(packed.values()), {"cu_seqlens": cu_seqlens, "output_final_state": True}),
        "ridge per channel": (ops.gated_kalmanet, tensors, constant),
        "bfloat16": (ops.gated_kalmanet, [t.detach().bfloat16().requires_grad_() for t in tensors], {}),
        "shared heads": (ops.gated_kalmanet, [tensors[0], *(t[:, :, :1] for t in tensors[1:3]), *tensors[3:]], {}),
        "no gradient": (ops.gated_kalmanet, plain, {}),
        "ridge_solve": (ops.ridge_solve, tensors[:2], {"h0": case["h0"], "output_final_state": True}),
        "linear_memory": (ops.linear_memory, tensors[:5], {"u0": case["u0"], "output_final_state": True}),
        "report": (ops.gated_kalmanet_report, tensors, state),
        "step": (ops.gated_kalmanet_step, step, {"h": pool["h"][:2], "u": pool["u"][:2]}),
        "certainty": (ops.gated_kalmanet_certainty, plain, {**{n: t.detach() for n, t in state.items()}}),
        "step with certainty": (
            ops.gated_kalmanet_step,
            step,
            {"h": pool["h"][:2], "u": pool["u"][:2], "certainty": torch.zeros(2, 2, dtype=torch.float64)},
        ),
        "step in a pool": (ops.gated_kalmanet_step, step, {**pool, **chosen}),
    }


@pytest.mark.parametrize("name", opcheck_calls())
def test_opcheck_passes(name):
    op, args, kwargs = opcheck_calls()[name]
    opcheck(op.default, tuple(args), kwargs)


OPTIONS = (1.0, 0.02, 30, "chebyshev", "implicit", "adaptive", True, True, True)  # scale … refine


@pytest.mark.parametrize("part", ["both", "solve", "memory"])
def test_opcheck_passes_for_the_inner_operators(part):
    q, k, v, *gates = make().values()
    inputs = (part, q, k, None if part == "solve" else v, *gates, None, None, None, None, *OPTIONS)
    opcheck(ops.gated_kalmanet_forward.default, (*inputs, True, True))
    o, h, u, *saved = ops.gated_kalmanet_forward(*inputs, True, True)
    saved = [tensor if tensor.numel() else None for tensor in saved]
    states = [tensor if tensor.numel() else None for tensor in (h, u)]
    needs = [True] * 6 + [False] * 3
    opcheck(ops.gated_kalmanet_backward.default, (*inputs, *saved, torch.ones_like(o), *states, needs))


def call(case, **options):
    tensors, state = split(case)
    o, (h, u) = gka.gated_kalmanet(**tensors, **state, **options, output_final_state=True)
    return [o, h, u]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(backend):
    def layer(case):
        o, h, u = call(case)
        return [2 * o.tanh(), h, u]

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    case = requiring_grad(make(states=2, dtype=torch.float32))
    want, got = layer(case), compiled(case)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-6
    want, got = backward(want, case), backward(got, case)
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-5, name


def test_one_compiled_graph_serves_every_length():
    torch._dynamo.reset()
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda case: call(case)[0], backend=counting, fullgraph=True, dynamic=True)
    for tokens in (5, 130, 300):
        case = make(1, tokens)
        assert relative_error(compiled(case), call(case)[0]) < 1e-12
    assert len(graphs) == 1


def test_a_compiled_graph_with_symbolic_sizes_has_the_gradients_of_eager():
    torch._dynamo.reset()
    compiled = torch.compile(lambda case: call(case)[0], backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 130):
        case = requiring_grad(make(1, tokens))
        got, want = backward([compiled(case)], case), backward([call(case)[0]], case)
        for name in want:
            assert relative_error(got[name], want[name]) < 1e-12, name


def test_a_packed_call_compiles():
    torch._dynamo.reset()

    def packed(case, cu_seqlens):
        return gka.gated_kalmanet(**case, cu_seqlens=cu_seqlens)[0]

    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    case = requiring_grad(make(1, 20))
    cu_seqlens = torch.tensor([0, 7, 20])
    want = packed(case, cu_seqlens)
    got = compiled(case, cu_seqlens)
    assert relative_error(got, want) < 1e-12
    for a, b in zip(backward([got], case).values(), backward([want], case).values(), strict=True):
        assert relative_error(a, b) < 1e-12


def test_a_compiled_backward_pass_is_traced_too():
    torch._dynamo.reset()
    case = requiring_grad(make())
    want = backward([gka.gated_kalmanet(**case)[0]], case)

    def train(case):
        o, _ = gka.gated_kalmanet(**case)
        o.backward(weights(o)[0])

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(train, backend="aot_eager")(case)
    for name, leaf in case.items():
        assert relative_error(leaf.grad, want[name]) < 1e-12, name


def test_a_compiled_step_updates_the_state_in_place():
    torch._dynamo.reset()
    case = {name: tensor[:, 0] for name, tensor in make().items()}
    fresh = make(states=2)
    eager, compiled = ((fresh["h0"].clone(), fresh["u0"].clone()) for _ in range(2))

    def step(state):
        return gka.gated_kalmanet_step(**case, state=state)

    want = step(eager)
    assert relative_error(torch.compile(step, backend="aot_eager", fullgraph=True)(compiled), want) < 1e-12
    for a, b in zip(compiled, eager, strict=True):
        assert relative_error(a, b) < 1e-12
    assert relative_error(compiled[0], fresh["h0"]) > 1e-3


def test_checkpointing_changes_nothing():
    case = requiring_grad(make(states=2))
    plain = backward(call(case), case)
    recomputed = backward(checkpoint(lambda c: call(c), case, use_reentrant=False), case)
    for name in plain:
        assert torch.equal(recomputed[name], plain[name]), name


def test_autocast_casts_queries_keys_and_values_and_leaves_gates_and_states():
    case = make(dtype=torch.float32, states=2)
    tensors, state = split(requiring_grad(case))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, (h, u) = gka.gated_kalmanet(**tensors, **state, output_final_state=True)
    cast = {name: tensor.bfloat16() if name in "qkv" else tensor for name, tensor in case.items()}
    want_o, (want_h, want_u) = gka.gated_kalmanet(*list(cast.values())[:6], **split(cast)[1], output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert h.dtype == u.dtype == torch.float32
    for got, want in ((o, want_o), (h, want_h), (u, want_u)):
        assert torch.equal(got, want)
    o.float().sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in tensors.values())


@pytest.mark.parametrize("rule", ["add", "delta"])
def test_autocast_leaves_the_inside_and_the_states_of_the_rivals_memories_in_float32(rule):
    case = make(dtype=torch.float32, gates=("log_decay", "beta"))
    options = {"rule": rule, "output_final_state": True}
    options["initial_state"] = torch.randn(case["q"].shape[0], *case["q"].shape[2:], case["v"].shape[3])
    cast = {name: tensor.bfloat16() if name in "qkv" else tensor for name, tensor in case.items()}
    want_o, want_state = gka.memory(**cast, **options)
    tensors = requiring_grad(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = gka.memory(**tensors, **options)
        torch._dynamo.reset()
        compiled = torch.compile(gka.memory, backend="aot_eager", fullgraph=True)(**case, **options)
        gradient = torch.func.grad(lambda q: gka.memory(**case | {"q": q}, **options)[0].float().sum())(case["q"])
    for got in ((o, state), compiled):
        assert torch.equal(got[0], want_o) and torch.equal(got[1], want_state) and got[1].dtype == torch.float32
    o.float().sum().backward()
    torch.testing.assert_close(gradient, tensors["q"].grad, rtol=0.02, atol=0.02)


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = gka.gated_kalmanet(**make())
    assert o.dtype == torch.float64


@pytest.mark.parametrize("function", ["ridge_solve", "linear_memory", "step", "report"])
def test_autocast_reaches_every_operator(function):
    case = make(dtype=torch.float32, gates=("log_decay",), states=2)
    q, k, v, log_decay, h, u = case.values()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if function == "ridge_solve":
            got = gka.ridge_solve(q, k, log_decay)[0]
        elif function == "linear_memory":
            got = gka.linear_memory(q, k, v, log_decay)[0]
        elif function == "step":
            got = gka.gated_kalmanet_step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], state=(h, u))
        else:
            got = gka.gated_kalmanet_report(q, k, v, log_decay)["norm"]
            want = gka.gated_kalmanet_report(q.bfloat16(), k.bfloat16(), v.bfloat16(), log_decay)["norm"]
            assert torch.equal(got, want)
            return
    assert got.dtype == torch.bfloat16


def test_a_second_derivative_is_refused():
    case = requiring_grad(make())
    o, _ = gka.gated_kalmanet(**case)
    (gradient,) = torch.autograd.grad(o.square().sum(), case["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once, and this asks for a second derivative"):
        torch.autograd.grad(gradient.sum(), case["k"])


def test_forward_mode_is_refused():
    case = make()
    with torch.autograd.forward_ad.dual_level():
        case["q"] = torch.autograd.forward_ad.make_dual(case["q"], torch.ones_like(case["q"]))
        with pytest.raises(RuntimeError, match="jvp"):
            gka.gated_kalmanet(**case)


def test_a_step_that_would_need_a_gradient_is_refused():
    case = {name: tensor[:, 0] for name, tensor in requiring_grad(make()).items()}
    state = tuple(make(states=2)[name] for name in ("h0", "u0"))
    with pytest.raises(ValueError, match="gated_kalmanet_step: q takes a tensor that requires no gradient"):
        gka.gated_kalmanet_step(**case, state=state)
    with torch.no_grad():
        gka.gated_kalmanet_step(**case, state=state)


def test_a_graph_that_kept_a_state_notices_that_a_step_changed_it():
    case = make(states=2)
    h = case["h0"].clone()
    weight = torch.ones_like(h, requires_grad=True)
    kept = (weight * h).sum()
    token = {name: tensor[:, 0] for name, tensor in case.items() if name not in ("h0", "u0")}
    gka.gated_kalmanet_step(**token, state=(h, case["u0"]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_a_gradient_does_not_depend_on_which_others_are_asked_for():
    case = requiring_grad(make(states=2))
    all_of_them = backward(call(case), case)
    for name in case:
        leaves = {other: tensor.detach() for other, tensor in case.items()}
        leaves[name].requires_grad_()
        (gradient,) = backward(call(leaves), {name: leaves[name]}).values()
        assert relative_error(gradient, all_of_them[name]) < 1e-12, name


def test_a_loss_on_the_final_state_alone_has_a_gradient():
    case = requiring_grad(make(states=2))
    o, h, u = call(case)
    for state, blind in ((h, "v"), (u, None)):
        got = torch.autograd.grad(state.square().sum(), [case["k"], case["v"]], retain_graph=True, allow_unused=True)
        assert got[0].norm() > 0
        if blind == "v":
            assert not got[1].any()
    # And it is the same gradient as with a loss on o that counts for nothing.
    weighted = torch.autograd.grad((h.sum() + 0 * o.sum(), u.sum()), case["k"], retain_graph=True)
    alone = torch.autograd.grad((h.sum(), u.sum()), case["k"])
    assert torch.equal(weighted[0], alone[0])


def test_states_that_were_not_asked_for_are_no_part_of_the_graph():
    case = requiring_grad(make())
    o, h, u = ops.gated_kalmanet(*case.values())
    assert o.requires_grad
    assert h.numel() == u.numel() == 0
    assert not h.requires_grad
    assert not u.requires_grad


def test_inference_mode_gives_the_same_numbers():
    case = make()
    with torch.inference_mode():
        got = gka.gated_kalmanet(**case)[0]
    assert torch.equal(got, gka.gated_kalmanet(**case)[0])
