"""torch.func and the flop counter on our operators and on a layer."""

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


def test_forward_mode_is_refused_by_what_it_is():
    q, k, v, *gates = inputs()
    for operator in (gka.gated_kalmanet, lambda *t: gka.memory(*t[:5])):
        with pytest.raises(NotImplementedError, match="reverse mode alone"):
            torch.func.jvp(lambda q, operator=operator: operator(q, k, v, *gates)[0], (q,), (q,))
