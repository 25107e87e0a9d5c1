"""The rivals' memories in chunks on a GPU, against the recurrence in float64 on the same bfloat16 inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch.nn import functional as F

import gka  # noqa: F401  (registers the operators)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
SCALE = 0.3


@dataclass(frozen=True)
class Case:
    name: str
    lengths: list[int] = field(default_factory=lambda: [200])
    heads: int = 2
    key_dim: int = 128
    value_dim: int = 128
    delta: bool = True
    decay: bool = True
    beta: bool = True
    shared_keys: bool = False
    strong: bool = False
    per_channel: bool = False
    weak: bool = False


CASES = [
    Case("Gated DeltaNet"),
    Case("Gated DeltaNet, wide values", value_dim=256, lengths=[130]),
    Case("DeltaNet, narrow", key_dim=64, value_dim=64, decay=False),
    Case("packed", lengths=[1, 0, 129, 64, 300], key_dim=40, value_dim=24),
    Case("Mamba2", heads=4, value_dim=64, delta=False, shared_keys=True),
    Case("RetNet", key_dim=64, value_dim=128, delta=False, beta=False),
    Case("decays to 0", strong=True),
    Case("Kimi Delta Attention", lengths=[300], per_channel=True),
    Case("Kimi Delta Attention, packed", lengths=[1, 0, 129, 64, 300], key_dim=40, value_dim=200, per_channel=True),
    Case("Kimi Delta Attention, hardly decaying", key_dim=64, value_dim=64, per_channel=True, weak=True),
    Case("Kimi Delta Attention, decays to 0", per_channel=True, strong=True),
    Case("gated linear attention", value_dim=256, delta=False, beta=False, per_channel=True),
    Case("gated linear attention, decays to 0", key_dim=64, delta=False, beta=False, per_channel=True, strong=True),
]


def recurrence(case: Case, q, k, v, log_decay, beta, initial):
    """Each sequence token by token; float64."""
    answers, finals, start = [], [], 0
    for n, length in enumerate(case.lengths):
        state = initial[n]
        for t in range(start, start + length):
            if log_decay is not None:
                state = log_decay[0, t].exp().reshape(case.heads, -1, 1) * state
            write = v[0, t] - torch.einsum("hk,hkv->hv", k[0, t], state) if case.delta else v[0, t]
            write = write * beta[0, t, :, None] if beta is not None else write
            state = state + torch.einsum("hk,hv->hkv", k[0, t], write)
            answers.append(SCALE * torch.einsum("hk,hkv->hv", q[0, t], state))
        finals.append(state)
        start += length
    return torch.stack(answers)[None], torch.stack(finals)


def inputs(case: Case):
    source = torch.Generator().manual_seed(len(case.name))
    tokens, key_heads = sum(case.lengths), 1 if case.shared_keys else case.heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=source)

    q, k = (F.normalize(normal(key_heads, case.key_dim), dim=-1).bfloat16() for _ in range(2))
    v = normal(case.heads, case.value_dim).bfloat16()
    decays = [case.heads, case.key_dim] if case.per_channel else [case.heads]
    g = -(1e-4 if case.weak else 0.1) * normal(*decays).square()
    if case.strong:
        g = torch.where(normal(*decays) > 1, -torch.inf, torch.where(normal(*decays) > 1, -1e4, g))
        g = torch.where(normal(*decays) > 1, -30, g) if case.per_channel else g
    beta = torch.sigmoid(normal(case.heads))
    initial = torch.randn(len(case.lengths), case.heads, case.key_dim, case.value_dim, generator=source)
    tensors = [q, k, v, g if case.decay else None, beta if case.beta else None, initial]
    return [None if x is None else x.cuda() for x in tensors]


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_states_and_gradients_are_the_recurrences(case: Case):
    given = inputs(case)
    here = [None if x is None else x.clone().requires_grad_() for x in given]
    wide = [None if x is None else x.double().requires_grad_() for x in given]
    heads = [None if x is None else (x.expand(-1, -1, case.heads, -1) if i < 2 else x) for i, x in enumerate(here)]
    bounds = torch.tensor([0, *case.lengths]).cumsum(0) if len(case.lengths) > 1 else None
    o, state = torch.ops.gka.chunked_delta_rule(
        *heads[:5], scale=SCALE, delta=case.delta, initial_state=heads[5], output_final_state=True, cu_seqlens=bounds
    )
    wide_heads = [None if x is None else (x.expand(-1, -1, case.heads, -1) if i < 2 else x) for i, x in enumerate(wide)]
    want_o, want_state = recurrence(case, *wide_heads)
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    loss = (o.double() * d_o).sum() + (state.double() * d_state).sum()
    want_loss = (want_o * d_o).sum() + (want_state * d_state).sum()
    got = torch.autograd.grad(loss, [x for x in here if x is not None])
    want = torch.autograd.grad(want_loss, [x for x in wide if x is not None])
    for name, mine, theirs in [("o", o, want_o), ("state", state, want_state), *zip("qkvabc", got, want, strict=False)]:
        assert mine.isfinite().all(), name
        distance = (mine.double() - theirs).norm() / theirs.norm()
        assert distance < 1e-2, f"{name}: {distance:.1e}"


@needs_gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[7]], ids=lambda case: case.name)
def test_the_same_call_gives_the_same_bits(case: Case):
    q, k, v, g, beta, _ = inputs(case)
    first, second = (torch.ops.gka.chunked_delta_rule(q, k, v, g, beta)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_what_the_kernels_do_not_take_is_refused_in_a_sentence():
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(NotImplementedError, match=r"take bfloat16 on a GPU.*got Float on cpu with keys of 16"):
        torch.ops.gka.chunked_delta_rule(q, q, q)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"k": (1, 4, 1, 16)}, r"k takes the shape \[1, 4, 2, 16\], got \[1, 4, 1, 16\]"),
        ({"v": (1, 5, 2, 8)}, r"v takes the shape \[1, 4, 2, 8\], got \[1, 5, 2, 8\]"),
        ({"log_decay": (1, 4)}, r"log_decay takes the shape \[1, 4, 2\] or \[1, 4, 2, 16\], got \[1, 4\]"),
        ({"beta": (1, 4, 2, 16)}, r"beta takes the shape \[1, 4, 2\], got \[1, 4, 2, 16\]"),
        ({"initial_state": (2, 2, 16, 8)}, r"initial_state takes the shape \[1, 2, 16, 8\], got \[2, 2, 16, 8\]"),
        ({"cu_seqlens": (2, 2)}, r"cu_seqlens takes one dimension.*got \[2, 2\]"),
    ],
    ids=lambda wrong: next(iter(wrong)) if isinstance(wrong, dict) else "",
)
def test_a_wrong_shape_is_refused_before_a_kernel_reads_beyond_it(wrong: dict, sentence: str):
    shapes = {"q": (1, 4, 2, 16), "k": (1, 4, 2, 16), "v": (1, 4, 2, 8)} | wrong
    with pytest.raises(ValueError, match=sentence):
        torch.ops.gka.chunked_delta_rule(**{name: torch.zeros(shape) for name, shape in shapes.items()})
