"""torch.func and the flop counter on our operators and on a layer."""

import warnings

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.utils.flop_counter import FlopCounterMode

import gka


def inputs(batch=2, tokens=9, heads=2, d=4, seed=0):
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    q, k = (torch.nn.functional.normalize(draw(batch, tokens, heads, d), dim=-1) for _ in range(2))
    gates = (-draw(batch, tokens, heads).abs() / 9, *(draw(batch, tokens, heads).sigmoid() for _ in range(2)))
    return [q, k, draw(batch, tokens, heads, 3), *gates]


OPERATORS = {
    "gated_kalmanet": lambda *t: gka.gated_kalmanet(*t, iterations=8)[0],
    "gated_kalmanet with a state": lambda *t: sum(
        part.sum() for part in gka.gated_kalmanet(*t, iterations=8, output_final_state=True)[1]
    ),
    "ridge_solve": lambda q, k, v, g, b, a: gka.ridge_solve(q, k, g, b, iterations=8)[0],
    "linear_memory": lambda q, k, v, g, b, a: gka.linear_memory(q, k, v, g, b)[0],
    "memory by the delta rule": lambda q, k, v, g, b, a: gka.memory(q, k, v, g, b)[0],
    "memory that adds, and its state": lambda q, k, v, g, b, a: sum(
        part.sum() for part in gka.memory(q, k, v, g, b, rule="add", output_final_state=True)
    ),
    "memory from a state": lambda q, k, v, g, b, a: gka.memory(
        q, k, v, g, b, initial_state=a.sum((1, 2)).view(-1, 1, 1, 1).expand(-1, 2, 4, 3)
    )[0],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_grad_and_vmap_of_grad_are_autograds_gradients(name):
    tensors = inputs()

    def loss(*t):
        return OPERATORS[name](*t).square().sum()

    leaves = [t.clone().requires_grad_() for t in tensors]
    want = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)
    got = grad(loss, argnums=tuple(range(6)))(*tensors)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    stacked = [torch.stack([a, b]) for a, b in zip(tensors, inputs(seed=1), strict=True)]
    both = vmap(grad(loss, argnums=tuple(range(6))))(*stacked)
    for place in range(2):
        alone = grad(loss, argnums=tuple(range(6)))(*(t[place] for t in stacked))
        for ours, theirs in zip(both, alone, strict=True):
            assert torch.allclose(ours[place], theirs, rtol=1e-12, atol=1e-14)


def test_gradients_of_single_examples_through_a_layer():
    torch.manual_seed(0)
    layer = gka.nn.GatedKalmaNet(16, 4, num_q_heads=2, dtype=torch.float64)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    x = torch.randn(3, 7, 16, dtype=torch.float64)

    def loss(weights, example):
        return functional_call(layer, weights, (example.unsqueeze(0),))[0].square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    layer(x)[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.allclose(each[name].sum(0), parameter.grad, rtol=1e-10, atol=1e-12), name


CU_SEQLENS = torch.tensor([0, 0, 4, 9])
MAPPED = OPERATORS | {
    "gated_kalmanet of packed sequences": lambda q, k, v, g, b, a: gka.gated_kalmanet(
        q[:1], k[:1], v[:1], g[:1], b[:1], a[:1], iterations=8, cu_seqlens=CU_SEQLENS
    )[0],
    "a ridge per channel": lambda q, k, v, g, b, a: gka.gated_kalmanet(
        q, k, v, g, b, ridge=a[0, :2, :].T.repeat(1, 2) + 0.1, ridge_mode="constant", solver="exact"
    )[0],
    "memory of packed sequences": lambda q, k, v, g, b, a: gka.memory(
        q[:1], k[:1], v[:1], g[:1], b[:1], cu_seqlens=CU_SEQLENS
    )[0],
    "keys that heads share": lambda q, k, v, g, b, a: gka.gated_kalmanet(q, k[:, :, :1], v, g, b, a, iterations=8)[0],
    "short_conv": lambda q, k, v, g, b, a: sum(
        part.sum()
        for part in gka.short_conv(
            q.flatten(2),
            k[0, 0].view(8, 1, 1).expand(8, 1, 3),
            v[0, 0].sum() * torch.ones(8, dtype=torch.float64),
            initial_state=k.flatten(2)[:, :2].mT,
            output_final_state=True,
            l2_norm="rsqrt",
            head_dim=4,
        )
    ),
    "gated_rms_norm": lambda q, k, v, g, b, a: gka.gated_rms_norm(q, k, v.flatten()[:4]),
    "gated_rms_norm of a row": lambda q, k, v, g, b, a: gka.gated_rms_norm(q[0, 0, 0], k[0, 0, 0]),
}


@pytest.mark.parametrize("mapped", [tuple(range(6)), (0,), (1, 3), (2, 5)])
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_one_call_after_the_other_and_says_nothing(name, mapped):
    alone, others = inputs(), inputs(seed=1)
    stacked = [torch.stack([a, b], 1) if i in mapped else a for i, (a, b) in enumerate(zip(alone, others, strict=True))]
    places = tuple(1 if i in mapped else None for i in range(6))

    def both(*t):
        return MAPPED[name](*t), grad(lambda *t: MAPPED[name](*t).square().sum(), argnums=tuple(range(6)))(*t)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, gradients = vmap(both, in_dims=places)(*stacked)
    second = [others[i] if i in mapped else alone[i] for i in range(6)]
    for n, given in enumerate((alone, second)):
        want, each = both(*given)
        assert torch.allclose(y[n], want, rtol=1e-12, atol=1e-14)
        for ours, theirs in zip(gradients, each, strict=True):
            assert torch.allclose(ours[n], theirs, rtol=1e-12, atol=1e-13)


def test_many_models_at_once_and_gradients_through_vmap():
    torch.manual_seed(0)
    models = [gka.nn.GatedKalmaNet(16, 4, num_q_heads=2, num_k_heads=1, dtype=torch.float64) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(models)
    x = torch.randn(2, 5, 16, dtype=torch.float64)

    def answer(weights):
        return functional_call(models[0], weights, (x,))[0]

    assert torch.allclose(vmap(answer)(parameters), torch.stack([m(x)[0] for m in models]), rtol=1e-10, atol=1e-12)
    gradients = grad(lambda w: vmap(answer)(w).square().sum())(parameters)
    for place, model in enumerate(models):
        model(x)[0].square().sum().backward()
        for name, parameter in model.named_parameters():
            assert torch.allclose(gradients[name][place], parameter.grad, rtol=1e-10, atol=1e-12), name


def test_vmap_over_the_bounds_of_packed_sequences_is_refused():
    given = [t[:1] for t in inputs()[:5]]
    for operator in (gka.gated_kalmanet, gka.memory):
        with pytest.raises(ValueError, match="cu_seqlens is the same for everything that vmap maps over"):
            vmap(lambda bounds, call=operator: call(*given, cu_seqlens=bounds)[0])(torch.stack([CU_SEQLENS] * 2))


@pytest.mark.parametrize("rule", ["add", "delta"])
def test_a_second_derivative_of_a_rival_is_refused(rule):
    q, k, v, g, b, _ = inputs()

    def loss(q):
        return gka.memory(q, k, v, g, b, rule=rule)[0].square().sum()

    with pytest.raises(RuntimeError, match="memory: it can be differentiated once"):
        grad(lambda q: grad(loss)(q).square().sum())(q)


def test_the_flop_counter_sees_the_operators():
    q, k, v, g, b, a = inputs(batch=1, tokens=10, heads=2, d=4)
    tokens, d, width = 20, 4, 3
    with FlopCounterMode(display=False) as counter:
        gka.gated_kalmanet(q, k, v, g, b, a, iterations=5)
    forward = tokens * (2 * d * d * 6 + 4 * d * width)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        gka.gated_kalmanet(q.requires_grad_(), k, v, g, b, a, iterations=5)[0].sum().backward()
    assert counter.get_total_flops() == forward + tokens * (2 * d * d * 5 + 6 * d * d + 8 * d * width)


@pytest.mark.parametrize("rule, products", [("add", 2), ("delta", 3)])
def test_the_flop_counter_sees_the_rivals_memories_as_the_recurrence_they_are(rule, products):
    q, k, v, g, b, _ = inputs(batch=1, tokens=10, heads=2, d=4)
    for device in ("cpu", "meta"):
        tensors = [t.detach().to(device).requires_grad_() for t in (q, k, v, g, b)]
        with FlopCounterMode(display=False) as counter:
            gka.memory(*tensors, rule=rule)[0].sum().backward()
        assert counter.get_total_flops() == 3 * 20 * products * 2 * 4 * 3  # forward once, backward twice that


def test_forward_mode_is_refused_by_what_it_is():
    q, k, v, *gates = inputs()
    for operator in (gka.gated_kalmanet, lambda *t: gka.memory(*t[:5])):
        with pytest.raises(NotImplementedError, match="reverse mode alone"):
            torch.func.jvp(lambda q, operator=operator: operator(q, k, v, *gates)[0], (q,), (q,))
