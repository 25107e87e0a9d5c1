"""Queries and keys in the dimensions of a sketch and back: against einsum in float64, on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cases import relative_error, weights

import gka

ops = torch.ops.gka
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


def down(x, p):
    return torch.einsum("...hd,hsd->...hs", x, p)


def from_sketch(q, z, p, alpha):
    x = torch.einsum("...hs,hsd->...hd", z, p)
    return x if alpha is None else q + alpha.unsqueeze(-1) * (x - q)


@dataclass(frozen=True)
class Case:
    name: str
    tokens: tuple[int, ...] = (2, 9)
    heads: int = 3
    wide: int = 8
    low: int = 4
    mixes: bool = True
    heads_first: bool = False  # how q lies in memory

    def inputs(self, dtype=torch.float64, device="cpu") -> dict[str, torch.Tensor]:
        """q, k, z, the sketch and α, of unit rows as in a block; numbers that bfloat16 has."""
        source = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.float64)

        tensors = {name: normal(*self.tokens, self.heads, self.wide) / self.wide**0.5 for name in "qk"}
        tensors["z"] = normal(*self.tokens, self.heads, self.low) / self.low**0.5
        tensors["p"] = torch.linalg.qr(normal(self.heads, self.wide, self.low))[0].mT
        tensors = {name: tensor.bfloat16().to(device, dtype) for name, tensor in tensors.items()}
        if self.heads_first:
            tensors["q"] = tensors["q"].transpose(-3, -2).contiguous().transpose(-3, -2)
        alpha = torch.rand(*self.tokens, self.heads, generator=source, dtype=torch.float64).float()
        tensors["alpha"] = alpha.to(device, dtype if dtype == torch.float64 else torch.float32)
        return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


def both_ways(case: Case, q, k, z, p, alpha, to=ops.to_sketch, back=ops.from_sketch):
    """P q, P k, whatever else reads q and k, and q with the answer z."""
    low_q, low_k, same_q, same_k = to(q, k, p)
    return [low_q, low_k, 2 * same_q, 3 * same_k, back(same_q, z, p, alpha if case.mixes else None)]


def by_einsum(case: Case, **inputs):
    return both_ways(case, **inputs, to=lambda q, k, p: (down(q, p), down(k, p), q, k), back=from_sketch)


def gradients(outputs, inputs):
    return torch.autograd.grad(outputs, list(inputs.values()), weights(*outputs), allow_unused=True)


def assert_equal(case: Case, got_inputs, tolerance, slope_tolerance):
    want_inputs = case.inputs()
    got, want = both_ways(case, **got_inputs), by_einsum(case, **want_inputs)
    names = ["low_q", "low_k", "q", "k", "back", *(f"d_{name}" for name in want_inputs)]
    slopes = gradients(got, got_inputs)
    want_weights = [w.double().cpu() for w in weights(*got)]
    want_slopes = torch.autograd.grad(want, list(want_inputs.values()), want_weights, allow_unused=True)
    for name, mine, theirs in zip(names, [*got, *slopes], [*want, *want_slopes], strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert mine.shape == theirs.shape, name
            error = relative_error(mine.cpu(), theirs)
            assert error < (slope_tolerance if name.startswith("d_") else tolerance), f"{name}: {error:.1e}"


CASES = [
    Case("a batch of sequences"),
    Case("without alpha", mixes=False),
    Case("one token", tokens=(5,)),
    Case("heads before tokens in memory", heads_first=True),
    Case("a row of tokens", tokens=(1, 70), heads=2, wide=64, low=32),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients_are_those_of_einsum(case: Case):
    assert_equal(case, case.inputs(), 1e-14, 1e-13)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bfloat16_is_close_to_float64_and_the_sketch_learns_in_its_own_type(case: Case):
    inputs = case.inputs(torch.bfloat16)
    assert_equal(case, inputs, 5e-3, 1e-2)
    learned = inputs | {"p": inputs["p"].detach().float().requires_grad_()}
    assert gradients(both_ways(case, **learned), learned)[3].dtype == torch.float32


@pytest.mark.parametrize("used", [[0], [3], [1, 2], [4]], ids=str)
def test_results_that_nobody_reads_have_no_part_in_the_gradients(used: list[int]):
    case = CASES[0]
    got_inputs, want_inputs = case.inputs(), case.inputs()
    got = gradients([both_ways(case, **got_inputs)[i] for i in used], got_inputs)
    want = gradients([by_einsum(case, **want_inputs)[i] for i in used], want_inputs)
    for name, mine, theirs in zip(want_inputs, got, want, strict=True):
        if theirs is None:
            assert mine is None or not mine.any(), name
        else:
            assert relative_error(mine, theirs) < 1e-13, name


def test_a_second_derivative_is_refused():
    case = CASES[0]
    inputs = case.inputs()
    (d_q,) = torch.autograd.grad(both_ways(case, **inputs)[4].square().sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="sketch: it can be differentiated once"):
        d_q.sum().backward()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"sketch": (3, 8)}, r"sketch takes three dimensions \[H, S, D\], got \[3, 8\]"),
        ({"q": (1, 4, 2, 8)}, r"q takes the shape \[..., 3, 8\] beside a sketch of \[3, 4, 8\], got \[1, 4, 2, 8\]"),
        ({"k": (1, 5, 3, 8)}, r"k takes the shape \[1, 4, 3, 8\], got \[1, 5, 3, 8\]"),
        ({"z": (1, 4, 3, 8)}, r"z takes the shape \[1, 4, 3, 4\], got \[1, 4, 3, 8\]"),
        ({"alpha": (1, 4)}, r"alpha takes the shape \[1, 4, 3\], got \[1, 4\]"),
    ],
    ids=lambda wrong: next(iter(wrong)) if isinstance(wrong, dict) else "",
)
def test_a_wrong_shape_is_refused_in_a_sentence(wrong: dict, sentence: str):
    shapes = {"q": (1, 4, 3, 8), "k": (1, 4, 3, 8), "z": (1, 4, 3, 4), "alpha": (1, 4, 3), "sketch": (3, 4, 8)} | wrong
    q, k, z, alpha, sketch = (torch.zeros(shape) for shape in shapes.values())
    with pytest.raises(ValueError, match=sentence):
        ops.to_sketch(q, k, sketch) if "k" in wrong else ops.from_sketch(q, z, sketch, alpha)


# ---- On a GPU: the kernels' sizes, and what torch's operations have to take there

GPU_CASES = [
    Case("a layer's", tokens=(2, 700), heads=4, wide=128, low=32),
    Case("more than a stretch of tokens", tokens=(1, 2100), heads=2, wide=64, low=64),
    Case("wide", tokens=(3, 50), heads=2, wide=256, low=64),
    Case("without alpha", tokens=(2, 300), wide=128, low=32, mixes=False),
    Case("heads before tokens in memory", tokens=(2, 300), wide=128, low=32, heads_first=True),
    Case("one token", tokens=(5,), wide=128, low=32),
    Case("another size", tokens=(2, 100), wide=40, low=12),
]


@pytest.fixture(params=["", "sketch"], ids=["torch's operations", "kernels"])
def trial(request, monkeypatch):
    """Without the kernels, and with them where they take a call."""
    monkeypatch.setenv("GKA_TRIAL", request.param)


@needs_gpu
@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_on_a_gpu_values_and_gradients_are_those_of_einsum(case: Case, dtype: torch.dtype):
    assert_equal(case, case.inputs(dtype, "cuda"), 5e-3, 1e-2)


@needs_gpu
@pytest.mark.usefixtures("trial")
def test_on_a_gpu_the_same_call_gives_the_same_bits():
    case = GPU_CASES[0]
    inputs = case.inputs(torch.bfloat16, "cuda")
    first, second = (gradients(both_ways(case, **inputs), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def sketched(q, k, v, log_decay, beta, alpha, p, *, to, back, bounds):
    """A layer's answer, with a ridge beside which a solve does not enlarge what rounding P q and P k has left."""
    low_q, low_k, same_q, same_k = to(q, k, p)
    z, _ = gka.ridge_solve(low_q, low_k, log_decay, beta, ridge=1.0, cu_seqlens=bounds)
    query = back(same_q, z, p, alpha)
    if q.is_cuda:
        named = {"log_decay": log_decay, "beta": beta, "delta": False, "cu_seqlens": bounds}
        return ops.chunked_delta_rule(query, same_k, v, **named)[0]
    return gka.linear_memory(query, same_k, v, log_decay, beta, cu_seqlens=bounds)[0]


@needs_gpu
@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("lengths", [[600], [1, 0, 129, 64, 406]], ids=["one sequence", "packed"])
def test_on_a_gpu_a_sketched_answer_is_that_of_float64(lengths: list[int]):
    source = torch.Generator().manual_seed(5)
    case = Case("", tokens=(1, sum(lengths)), heads=2, wide=128, low=32)
    given = {name: tensor.detach() for name, tensor in case.inputs().items() if name != "z"}
    given |= {name: torch.nn.functional.normalize(given[name], dim=-1).bfloat16().double() for name in "qk"}
    given["v"] = torch.randn(given["q"].shape, generator=source).bfloat16().double()
    gates = torch.rand(2, 1, sum(lengths), 2, generator=source).double()
    given |= {"log_decay": -0.05 * gates[0], "beta": gates[1]}
    gate_names = ("log_decay", "beta", "alpha")
    here = {
        name: tensor.cuda().to(torch.float32 if name in gate_names else torch.bfloat16).requires_grad_()
        for name, tensor in given.items()
    }
    exact = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    bounds = torch.tensor([0, *lengths]).cumsum(0) if len(lengths) > 1 else None
    o = sketched(**here, to=ops.to_sketch, back=ops.from_sketch, bounds=None if bounds is None else bounds.cuda())
    want = sketched(**exact, to=lambda q, k, p: (down(q, p), down(k, p), q, k), back=from_sketch, bounds=bounds)
    d_o = torch.randn(o.shape, generator=source).bfloat16()
    slopes = torch.autograd.grad(o, list(here.values()), d_o.cuda())
    want_slopes = torch.autograd.grad(want, list(exact.values()), d_o.double())
    assert relative_error(o.cpu(), want) < 5e-3
    for name, mine, theirs in zip(exact, slopes, want_slopes, strict=True):
        assert relative_error(mine.cpu(), theirs) < 1e-2, name
