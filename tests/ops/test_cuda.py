"""The operators on a GPU: the same answers as on the CPU, on any stream, in a graph, without waiting."""

import pytest
import torch
from cases import backward, make, relative_error, requiring_grad, split

import gka

BUILT = {backend.name: backend.available for backend in gka.backends()}["cuda"]
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and BUILT), reason="needs a GPU, a torch that sees it and a gka built with GKA_CUDA"
)

PATHS = ["plain", "hopper"]  # GKA_GPU
SOLVERS = ["chebyshev", "conjugate_gradient", "gradient_descent", "nesterov", "exact"]


def take_path(monkeypatch, name):
    """Has calls that the kernels of this name carry run on them, or skips the test."""
    monkeypatch.setenv("GKA_GPU", name)
    try:
        kernel, reason = gka.choose_kernel("cuda", torch.bfloat16)
    except ValueError as error:
        pytest.skip(str(error))
    if name == "hopper" and kernel != "hopper":
        pytest.skip(reason)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    take_path(monkeypatch, request.param)
    return request.param


def on_gpu(case):
    return {name: tensor.detach().cuda() for name, tensor in case.items()}


def run(case, **options):
    """Every output and gradient of one call."""
    leaves = requiring_grad(case)
    tensors, state = split(leaves)
    o, (h, u) = gka.gated_kalmanet(**tensors, **state, **options, output_final_state=True)
    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t) for t in (o, h, u)]
    gradients = torch.autograd.grad((o, h, u), list(leaves.values()), weights)
    return {"o": o, "h": h, "u": u} | {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}


def assert_close(got, want, tolerance):
    for name in want:
        assert got[name].is_cuda
        assert got[name].dtype == want[name].dtype
        assert relative_error(got[name].cpu(), want[name]) < tolerance, name


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_every_sequence_of_a_large_batch_gets_the_same_bits(path, dim):
    """The same sequence many times: more chunks than the card has blocks for, so that blocks take several in turn."""
    one = make(1, 192, 2, dim, dim, dtype=torch.bfloat16)
    leaves = requiring_grad(on_gpu({name: t.repeat(200, *[1] * (t.dim() - 1)) for name, t in one.items()}))
    o = gka.gated_kalmanet(**leaves)[0]
    gradients = torch.autograd.grad(o, list(leaves.values()), torch.randn_like(o[:1]).repeat(200, 1, 1, 1))
    for got in (o, *gradients):
        assert got.isfinite().all()
        assert torch.equal(got, got[:1].expand_as(got))


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("ridge_mode", ["adaptive", "constant"])
def test_every_solver_and_gradient_gives_the_answer_of_the_cpu(solver, gradient, ridge_mode):
    case = make(2, 150, 2, 24, 20, states=2)
    options = {"solver": solver, "gradient": gradient, "ridge_mode": ridge_mode, "ridge": 0.1, "iterations": 8}
    # Rounding grows without bound in conjugate gradients that have not converged.
    tolerance = 1e-5 if solver == "conjugate_gradient" else 1e-10
    assert_close(run(on_gpu(case), **options), run(case, **options), tolerance)


def test_float32_gives_the_answer_of_the_cpu():
    case = make(2, 300, 3, 128, 64, dtype=torch.float32, states=2)
    assert_close(run(on_gpu(case)), run(case), 2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "key_dim", "value_dim"), [(300, 128, 64), (64, 16, 128), (193, 48, 40), (1, 100, 7), (140, 64, 256)]
)
def test_16_bit_types_give_the_answer_of_the_cpu(path, dtype, tokens, key_dim, value_dim):
    case = make(2, tokens, 3, key_dim, value_dim, dtype=dtype, gate_dtype=torch.float32, states=2)
    tolerance = 2e-3 if path == "plain" and dtype == torch.float16 else 1e-2
    assert_close(run(on_gpu(case)), run(case), tolerance)


def test_heads_that_share_keys_and_values_give_the_answer_of_the_cpu(path):
    case = make(2, 300, 6, 64, 64, dtype=torch.bfloat16, gate_dtype=torch.float32, states=2)
    case |= {"k": case["k"][:, :, ::3].contiguous(), "v": case["v"][:, :, ::2].contiguous()}
    assert_close(run(on_gpu(case)), run(case), 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_of_32_channels_give_the_answer_of_the_cpu(path, dtype):
    case = make(2, 300, 4, 32, 32, dtype=dtype, gate_dtype=torch.float32, states=2)
    assert_close(run(on_gpu(case)), run(case), 1e-2)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(256, 256), (160, 40), (160, 300)])
def test_heads_of_256_channels_give_the_answer_of_the_cpu(path, key_dim, value_dim):
    case = make(2, 300, 2, key_dim, value_dim, dtype=torch.bfloat16, gate_dtype=torch.float32, states=2)
    assert_close(run(on_gpu(case)), run(case), 1e-2)


@pytest.mark.parametrize("ridge", [0.25, 0.02])
def test_a_constant_ridge_in_16_bits_gives_the_answer_of_the_cpu(path, ridge):
    case = make(2, 300, 2, 128, 128, dtype=torch.bfloat16, gate_dtype=torch.float32, states=2)
    options = {"ridge_mode": "constant", "ridge": ridge}
    assert_close(run(on_gpu(case), **options), run(case, **options), 1e-2)


@pytest.mark.parametrize("dim", [32, 128])
def test_ridge_solve_in_16_bits_gives_the_answer_of_the_cpu(path, dim):
    case = make(2, 300, 2, dim, dim, dtype=torch.bfloat16, gate_dtype=torch.float32, gates=("log_decay", "beta"))
    del case["v"]

    def both(inputs):
        leaves = requiring_grad(inputs)
        x, _ = gka.ridge_solve(**leaves)
        weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
        return dict(zip(["x", *leaves], [x, *torch.autograd.grad(x, list(leaves.values()), weight)], strict=True))

    assert_close(both(on_gpu(case)), both(case), 1e-2)


@pytest.mark.parametrize("tokens", [1, 3])
def test_short_prompts_give_the_answer_of_the_cpu(path, tokens):
    # Of a first token the decay fades nothing, and its gradient is 0: nothing to compare with. Nor does its o = Uᵀx
    # depend on β: dβ is what is left of terms in 1/β.
    case = make(64, tokens, 2, 128, 128, dtype=torch.bfloat16, gate_dtype=torch.float32, gates=("beta", "alpha"))
    case["beta"] = 0.1 + 0.9 * case["beta"]
    assert_close(run(on_gpu(case)), run(case), 1e-2)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_packed_sequences_give_the_answer_of_the_cpu(where):
    lengths = [7, 0, 150, 1, 142]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    case = make(1, sum(lengths), states=len(lengths))
    assert_close(run(on_gpu(case), cu_seqlens=bounds.to(where)), run(case, cu_seqlens=bounds), 1e-11)


def test_packed_bfloat16_gives_the_answer_of_the_cpu(path):
    lengths = [7, 0, 150, 1, 142]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    case = make(1, sum(lengths), 2, 64, 64, dtype=torch.bfloat16, states=len(lengths))
    assert_close(run(on_gpu(case), cu_seqlens=bounds.cuda()), run(case, cu_seqlens=bounds), 1e-2)


@pytest.mark.parametrize(("forwards", "backwards"), [("plain", "hopper"), ("hopper", "plain")])
def test_either_backward_pass_follows_either_forward_pass(monkeypatch, forwards, backwards):
    case = make(1, 200, 2, 128, 128, dtype=torch.bfloat16, gate_dtype=torch.float32)
    leaves = requiring_grad(on_gpu(case))
    take_path(monkeypatch, forwards)
    o, _ = gka.gated_kalmanet(**leaves)
    take_path(monkeypatch, backwards)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    got = torch.autograd.grad(o, list(leaves.values()), weight)
    wide = requiring_grad({name: tensor.double() for name, tensor in case.items()})
    want = torch.autograd.grad(gka.gated_kalmanet(**wide)[0], list(wide.values()), weight.cpu().double())
    for name, mine, theirs in zip(leaves, got, want, strict=True):
        assert relative_error(mine.cpu(), theirs) < 1e-2, name


@pytest.mark.parametrize("lengths", [[16384], [9000, 0, 130, 7254]])
def test_both_paths_agree_on_long_sequences(monkeypatch, lengths):
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).cuda()
    case = make(1, sum(lengths), 8, 64, 64, dtype=torch.bfloat16, gate_dtype=torch.float32, decay=0.01)
    case = on_gpu(case)
    results = []
    for path in PATHS:
        take_path(monkeypatch, path)
        results.append(run(case, cu_seqlens=bounds))
    for name, plain in results[0].items():
        assert relative_error(results[1][name], plain) < 1e-2, name


def test_the_halves_and_the_report_give_the_answer_of_the_cpu():
    case = make(1, 140, gates=("log_decay", "beta"))
    q, k, v, log_decay, beta = case.values()
    gpu = on_gpu(case)
    solved, _ = gka.ridge_solve(gpu["q"], gpu["k"], gpu["log_decay"], gpu["beta"])
    assert relative_error(solved.cpu(), gka.ridge_solve(q, k, log_decay, beta)[0]) < 1e-11
    read, _ = gka.linear_memory(gpu["q"], gpu["k"], gpu["v"], gpu["log_decay"], gpu["beta"])
    assert relative_error(read.cpu(), gka.linear_memory(q, k, v, log_decay, beta)[0]) < 1e-11
    got, want = gka.gated_kalmanet_report(**gpu, iterations=4), gka.gated_kalmanet_report(**case, iterations=4)
    for name in want:
        assert relative_error(got[name].cpu(), want[name]) < 1e-9, name


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_step_works_on_the_slots_it_is_given(solver):
    case = make(2, 1, states=5)
    tensors = {name: tensor[:, 0] for name, tensor in split(case)[0].items()}
    slots, counts = torch.tensor([4, 1]), torch.tensor([3, 9], dtype=torch.int32)
    answers = []
    for device in ("cpu", "cuda"):
        state = (case["h0"].clone().to(device), case["u0"].clone().to(device))
        inputs = {name: tensor.to(device) for name, tensor in tensors.items()}
        indices = {"state_indices": slots.to(device), "iterations": counts.to(device)}
        answers.append([gka.gated_kalmanet_step(**inputs, state=state, solver=solver, **indices), *state])
    for want, got in zip(*answers, strict=True):
        assert relative_error(got.cpu(), want) < 1e-11


def test_a_call_waits_for_nothing_and_gives_the_same_bits_on_any_stream(path):
    case = on_gpu(make(3, 300, 2, 64, 64, dtype=torch.bfloat16, states=3))
    first = run(case)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        leaves = requiring_grad(case)
        tensors, state = split(leaves)
        torch.cuda.set_sync_debug_mode("error")
        try:
            o, (h, u) = gka.gated_kalmanet(**tensors, **state, output_final_state=True)
            torch.autograd.grad(o.sum() + h.sum() + u.sum(), list(leaves.values()))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        again = run(case)
        torch.cuda.current_stream().synchronize()
    for name in first:
        assert torch.equal(first[name], again[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_replays_a_call_with_its_gradients(path, dtype):
    def both(inputs):
        leaves = requiring_grad(inputs)
        o, _ = gka.gated_kalmanet(**leaves)
        return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))]

    case = on_gpu(make(2, 200, 2, 32, 32, dtype=dtype))
    other = on_gpu(make(2, 200, 2, 32, 32, dtype=dtype, seed=7))
    inputs = {name: tensor.clone() for name, tensor in case.items()}
    with torch.cuda.stream(torch.cuda.Stream()):  # loads the kernels, as torch asks for, beside the main stream
        both(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = both(inputs)
    for name, tensor in other.items():
        inputs[name].copy_(tensor)
    graph.replay()
    torch.cuda.synchronize()
    for mine, theirs in zip(got, both(other), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_match_those_of_the_cpu_through_autocast(path):
    case = make(1, 70, 2, 32, 32, dtype=torch.float32)
    leaves = requiring_grad(on_gpu(case))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o, _ = gka.gated_kalmanet(**leaves)
    assert o.dtype == torch.bfloat16
    narrow = {name: t.bfloat16() if name in ("q", "k", "v") else t for name, t in case.items()}
    assert relative_error(o.cpu(), gka.gated_kalmanet(**narrow)[0]) < 1e-2
    for name, gradient in backward([o.cpu()], leaves).items():
        assert gradient.isfinite().all(), name


def test_choose_kernel_names_the_path_that_a_call_takes(path):
    kernel, reason = gka.choose_kernel("cuda", torch.bfloat16, key_dim=128)
    assert kernel == {"plain": "cuda", "hopper": "hopper"}[path]
    assert "hopper" in reason
    taken = (
        {"iterations": 10, "refine": False},
        {"ridge_mode": "constant"},
        {"part": "solve", "key_dim": 32},
        {"key_dim": 32, "value_dim": 32},
        {"key_dim": 256, "value_dim": 256},
    )
    for other in taken:
        assert gka.choose_kernel("cuda:0", torch.bfloat16, **other)[0] == kernel
    refused = (
        {"dtype": torch.float32},
        {"solver": "exact"},
        {"iterations": 100},
        {"decay_keys": False},
        {"ridge": 0.001},
        {"ridge_mode": "constant", "ridge": 0.01},
        {"ridge_mode": "constant", "iterations": 31},
        {"ridge_mode": "constant", "part": "solve"},
        {"ridge_mode": "constant", "key_dim": 256},
        {"part": "solve", "key_dim": 256},
        {"part": "memory"},
        {"report": True},
    )
    for other in refused:
        kernel, reason = gka.choose_kernel("cuda", **{"dtype": torch.bfloat16, **other})
        assert kernel == "cuda"
        assert reason.startswith("hopper: ")


def test_an_unknown_path_is_refused(monkeypatch):
    monkeypatch.setenv("GKA_GPU", "abacus")
    if not {backend.name: backend.built for backend in gka.backends()}["hopper"]:
        pytest.skip("this library has one path")
    case = on_gpu(make())
    with pytest.raises(ValueError, match="GKA_GPU=abacus is not known"):
        gka.gated_kalmanet(**case)
