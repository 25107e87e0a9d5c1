"""gka.gated_kalmanet_states: the state that the operator leaves, without a query."""

import pytest
import torch

import gka


def tokens(length=37, dtype=torch.float64):
    torch.manual_seed(length)
    k, v = torch.randn(2, length, 3, 5, dtype=dtype), torch.randn(2, length, 3, 4, dtype=dtype)
    decay, beta = -torch.rand(2, length, 3, dtype=dtype), torch.rand(2, length, 3, dtype=dtype)
    return k, v, decay, beta


@pytest.mark.parametrize("decay_keys", [True, False])
@pytest.mark.parametrize("length", [0, 1, 37, 300])
def test_it_is_the_final_state_of_the_operator(length, decay_keys):
    k, v, decay, beta = tokens(length)
    older = (torch.eye(5).double().expand(2, 3, 5, 5).contiguous(), torch.randn(2, 3, 5, 4, dtype=torch.float64))
    options = {"decay_keys": decay_keys, "output_final_state": True, "initial_state": older}
    _, (h, u) = gka.gated_kalmanet(k, k, v, decay, beta, **options)
    own_h, own_u, faded = gka.gated_kalmanet_states(k, v, decay, beta, decay_keys=decay_keys)
    keep = faded.exp()[..., None, None]
    torch.testing.assert_close((keep if decay_keys else 1.0) * older[0] + own_h, h, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(keep * older[1] + own_u, u, rtol=1e-12, atol=1e-13)


def test_its_gradients_are_those_of_the_operators_final_state():
    inputs = [tensor.requires_grad_() for tensor in tokens()]
    h, u, _ = gka.gated_kalmanet_states(*inputs)
    k, v, decay, beta = inputs
    _, (wanted_h, wanted_u) = gka.gated_kalmanet(k, k, v, decay, beta, output_final_state=True)
    to_h, to_u = torch.randn_like(h), torch.randn_like(u)
    to_h = to_h + to_h.mT  # the operator's h is symmetric by contract, and so is its gradient
    got = torch.autograd.grad([h, u], inputs, [to_h, to_u])
    wanted = torch.autograd.grad([wanted_h, wanted_u], inputs, [to_h, to_u])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_token_that_forgets_everything_leaves_what_follows_it():
    k, v, decay, beta = tokens()
    decay[:, 20] = -torch.inf
    h, u, faded = gka.gated_kalmanet_states(k, v, decay.requires_grad_(), beta)
    late_h, late_u, _ = gka.gated_kalmanet_states(k[:, 20:], v[:, 20:], decay[:, 20:], beta[:, 20:])
    torch.testing.assert_close((h, u), (late_h, late_u), rtol=1e-14, atol=1e-15)
    assert (faded == -torch.inf).all()
    gradient = torch.autograd.grad(h.sum() + u.sum(), decay)[0]
    assert gradient.isfinite().all() and not gradient[:, :21].any()


def test_bfloat16_tokens_are_summed_in_float32():
    wide = tokens(300, torch.float32)
    k, v = (tensor.bfloat16() for tensor in wide[:2])
    h, u, _ = gka.gated_kalmanet_states(k, v, *wide[2:])
    wanted = gka.gated_kalmanet_states(k.double(), v.double(), *(tensor.double() for tensor in wide[2:]))
    assert h.dtype == u.dtype == torch.float32
    torch.testing.assert_close((h.double(), u.double()), wanted[:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 3), (3, 1), (1, 1)])
def test_heads_may_share_keys_and_values(key_heads, value_heads):
    k, v, decay, beta = tokens()
    k, v = k[:, :, :key_heads], v[:, :, :value_heads]
    q = torch.randn(2, 37, 3, 5, dtype=torch.float64)
    _, (h, u) = gka.gated_kalmanet(q, k, v, decay, beta, output_final_state=True)
    own_h, own_u, _ = gka.gated_kalmanet_states(k, v, decay, beta)
    torch.testing.assert_close(own_h, h, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(own_u, u, rtol=1e-12, atol=1e-13)
