"""The operators on a GPU: the same answers as on the CPU, on any stream, in a graph, without waiting."""

import pytest
import torch
from cases import backward, make, relative_error, requiring_grad, split

import gka

BUILT = {backend.name: backend.available for backend in gka.backends()}["cuda"]
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and BUILT), reason="needs a GPU, a torch that sees it and a gka built with GKA_CUDA"
)

SOLVERS = ["chebyshev", "conjugate_gradient", "gradient_descent", "nesterov", "exact"]


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


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("ridge_mode", ["adaptive", "constant"])
def test_every_solver_and_gradient_gives_the_answer_of_the_cpu(solver, gradient, ridge_mode):
    case = make(2, 150, 2, 24, 20, states=2)
    options = {"solver": solver, "gradient": gradient, "ridge_mode": ridge_mode, "ridge": 0.1, "iterations": 8}
    # Rounding grows without bound in conjugate gradients that have not converged.
    tolerance = 1e-5 if solver == "conjugate_gradient" else 1e-10
    assert_close(run(on_gpu(case), **options), run(case, **options), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_narrow_types_give_the_answer_of_the_cpu(dtype, tolerance):
    case = make(2, 300, 3, 128, 64, dtype=dtype, states=2)
    assert_close(run(on_gpu(case)), run(case), tolerance)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_packed_sequences_give_the_answer_of_the_cpu(where):
    lengths = [7, 0, 150, 1, 142]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    case = make(1, sum(lengths), states=len(lengths))
    assert_close(run(on_gpu(case), cu_seqlens=bounds.to(where)), run(case, cu_seqlens=bounds), 1e-11)


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


def test_a_call_waits_for_nothing_and_gives_the_same_bits_on_any_stream():
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


def test_a_graph_replays_a_call():
    case = on_gpu(make(2, 200, 2, 32, 32, dtype=torch.float32))
    other = on_gpu(make(2, 200, 2, 32, 32, dtype=torch.float32, seed=7))
    gka.gated_kalmanet(**case)  # loads the kernels
    torch.cuda.synchronize()
    inputs = {name: tensor.clone() for name, tensor in case.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = gka.gated_kalmanet(**inputs)
    for name, tensor in other.items():
        inputs[name].copy_(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, gka.gated_kalmanet(**other)[0])


def test_gradients_match_those_of_the_cpu_through_autocast():
    case = make(1, 70, 2, 32, 32, dtype=torch.float32)
    leaves = requiring_grad(on_gpu(case))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o, _ = gka.gated_kalmanet(**leaves)
    assert o.dtype == torch.bfloat16
    narrow = {name: t.bfloat16() if name in ("q", "k", "v") else t for name, t in case.items()}
    assert relative_error(o.cpu(), gka.gated_kalmanet(**narrow)[0]) < 1e-2
    for name, gradient in backward([o.cpu()], leaves).items():
        assert gradient.isfinite().all(), name


def test_choose_kernel_says_that_the_gpu_runs_it():
    kernel, reason = gka.choose_kernel("cuda", torch.bfloat16, key_dim=128)
    assert kernel == "cuda"
    assert "hopper" in reason
