"""The small operations around the memory: against torch's own operations, and as citizens of torch."""

import pytest
import torch
from cases import relative_error
from torch.library import opcheck
from torch.nn import functional as F

import gka

ops = torch.ops.gka
NORMS = ("none", "divide", "rsqrt")


def conv_case(batch=2, tokens=9, channels=12, width=4, *, states=None, dtype=torch.float64, seed=0, grad=True):
    """x, weight, bias and an initial state."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        tensor = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return tensor.to(dtype).requires_grad_(grad)

    states = batch if states is None else states
    return {
        "x": draw(batch, tokens, channels),
        "weight": draw(channels, 1, width, scale=0.5),
        "bias": draw(channels, scale=0.3),
        "initial_state": draw(states, channels, width - 1),
    }


def torch_conv(x, weight, bias=None, initial_state=None, *, l2_norm="none", head_dim=0, activation="silu", eps=1e-6):
    """The same by torch's conv1d, silu and norm."""
    before = weight.shape[-1] - 1
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0], x.shape[2], before)
    line = torch.cat([initial_state, x.transpose(1, 2)], dim=-1)
    y = F.conv1d(line, weight, bias, groups=weight.shape[0]).transpose(1, 2)
    if activation == "silu":
        y = F.silu(y)
    if l2_norm != "none":
        heads = y.unflatten(-1, (-1, head_dim))
        if l2_norm == "divide":
            heads = heads / (heads.norm(dim=-1, keepdim=True) + eps)
        else:
            heads = heads * (heads.square().sum(-1, keepdim=True) + eps).rsqrt()
        y = heads.flatten(-2)
    return y, line[..., line.shape[-1] - before :]


def norm_case(*shape, dtype=torch.float64, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = 1 + 0.2 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    return [tensor.to(dtype).requires_grad_(grad) for tensor in (x, gate, weight)]


def torch_norm(x, gate=None, weight=None, *, activation="silu", eps=1e-6):
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        y = y * weight
    if gate is not None:
        y = y * {"silu": F.silu, "sigmoid": torch.sigmoid, "none": lambda z: z}[activation](gate)
    return y


def gradients(outputs, inputs):
    loss = sum((output * torch.arange(output.numel()).view_as(output).cos()).sum() for output in outputs)
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("l2_norm", NORMS)
def test_short_conv_equals_torch_forward_and_backward(width, l2_norm):
    case = conv_case(width=width)
    options = {"l2_norm": l2_norm, "head_dim": 4}
    got = gka.short_conv(**case, **options, output_final_state=True)
    want = torch_conv(**case, **options)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-14
    inputs = [tensor for tensor in case.values() if tensor.numel()]
    for a, b in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        assert relative_error(a, b) < 1e-13


@pytest.mark.parametrize("l2_norm", NORMS)
def test_short_conv_passes_gradcheck(l2_norm):
    case = conv_case(2, 5, 6, 3)

    def conv(x, weight, bias, initial_state):
        options = {"l2_norm": l2_norm, "head_dim": 3, "initial_state": initial_state}
        return gka.short_conv(x, weight, bias, **options, output_final_state=True)

    assert torch.autograd.gradcheck(conv, tuple(case.values()))


@pytest.mark.parametrize(("gate", "weight"), [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("activation", ["silu", "sigmoid", "none"])
def test_gated_rms_norm_passes_gradcheck_and_equals_torch(gate, weight, activation):
    x, g, w = norm_case(2, 3, 2, 5)
    inputs = [x] + ([g] if gate else []) + ([w] if weight else [])

    def norm(*tensors, function=gka.gated_rms_norm):
        rest = iter(tensors[1:])
        return function(
            tensors[0], next(rest) if gate else None, next(rest) if weight else None, activation=activation, eps=1e-5
        )

    assert torch.autograd.gradcheck(norm, inputs)
    assert relative_error(norm(*inputs), norm(*inputs, function=torch_norm)) < 1e-14


@pytest.mark.parametrize("shape", [(7,), (3, 16), (2, 5, 130), (2, 3, 4, 64), (3, 1000)])
def test_gated_rms_norm_takes_any_shape(shape):
    x, gate, weight = norm_case(*shape)
    got, want = gka.gated_rms_norm(x, gate, weight), torch_norm(x, gate, weight)
    assert relative_error(got, want) < 1e-14
    for a, b in zip(gradients([got], (x, gate, weight)), gradients([want], (x, gate, weight)), strict=True):
        assert relative_error(a, b) < 1e-13


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 6e-4)])
def test_low_precision_rounds_once(dtype, tolerance):
    case = conv_case(2, 50, 64, dtype=dtype, grad=False)
    exact = {name: tensor.double() for name, tensor in case.items()}
    y, _ = gka.short_conv(**case, l2_norm="divide", head_dim=32)
    assert y.dtype == dtype
    assert relative_error(y, torch_conv(**exact, l2_norm="divide", head_dim=32)[0]) < tolerance
    x, gate, weight = norm_case(4, 50, 64, dtype=dtype, grad=False)
    y = gka.gated_rms_norm(x, gate, weight.float())
    assert relative_error(y, torch_norm(x.double(), gate.double(), weight.double())) < tolerance


@pytest.mark.parametrize("lengths", [(5, 0, 1, 7), (0,), (300, 2)])
def test_packed_sequences_equal_one_by_one(lengths):
    tokens = sum(lengths)
    case = conv_case(1, tokens, states=len(lengths))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    y, state = gka.short_conv(**case, cu_seqlens=cu_seqlens, output_final_state=True)
    want_y, want_state = [], []
    for n, length in enumerate(lengths):
        one = {**case, "x": case["x"][:, cu_seqlens[n] : cu_seqlens[n] + length]}
        one["initial_state"] = case["initial_state"][n : n + 1]
        a, b = gka.short_conv(**one, output_final_state=True)
        want_y.append(a)
        want_state.append(b)
    want_y, want_state = torch.cat(want_y, 1), torch.cat(want_state)
    assert torch.equal(y, want_y)
    assert torch.equal(state, want_state)
    inputs = list(case.values())
    for a, b in zip(gradients((y, state), inputs), gradients((want_y, want_state), inputs), strict=True):
        assert relative_error(a, b) < 1e-13


@pytest.mark.parametrize("width", [1, 4])
def test_steps_after_a_prefix_equal_one_longer_call(width):
    case = conv_case(3, 12, width=width, grad=False)
    options = {"l2_norm": "rsqrt", "head_dim": 6}
    want, final = gka.short_conv(**case, **options, output_final_state=True)
    x = case.pop("x")
    start, state = gka.short_conv(x[:, :7], **case, **options, output_final_state=True)
    slots = torch.tensor([4, 0, 2])
    pool = torch.full((5, 12, width - 1), torch.nan, dtype=torch.float64)
    pool[slots] = state
    del case["initial_state"]
    rest = [gka.short_conv_step(x[:, t], **case, **options, state=pool, state_indices=slots) for t in range(7, 12)]
    assert relative_error(torch.cat([start, torch.stack(rest, 1)], 1), want) < 1e-15
    assert torch.equal(pool[slots], final)
    assert pool[[1, 3]].isnan().all()


def test_views_are_taken_as_they_are():
    wide = torch.randn(2, 9, 3, 12, dtype=torch.float64)
    x = wide[:, :, 1]
    case = conv_case()
    y, _ = gka.short_conv(x, case["weight"])
    assert torch.equal(y, gka.short_conv(x.contiguous(), case["weight"])[0])
    transposed = wide.transpose(1, 2)
    assert torch.equal(gka.gated_rms_norm(transposed), gka.gated_rms_norm(transposed.contiguous()))
    columns = wide.transpose(-1, -2)
    assert torch.equal(gka.gated_rms_norm(columns), gka.gated_rms_norm(columns.contiguous()))


def opcheck_calls():
    conv, packed = conv_case(), conv_case(1, 9, states=3)
    cu_seqlens = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    plain = {name: tensor.detach() for name, tensor in conv.items()}
    x, gate, weight = norm_case(2, 3, 8)
    state = {"initial_state": conv["initial_state"], "output_final_state": True}
    pool = torch.randn(5, 12, 3, dtype=torch.float64)
    taps = [plain["x"], plain["weight"], plain["bias"], plain["initial_state"], None]
    options = ["silu", "rsqrt", 4, 1e-6]
    needs = [True, True, False, True]
    return {
        "short_conv": (ops.short_conv, (conv["x"], conv["weight"]), {}),
        "with states": (ops.short_conv, (conv["x"], conv["weight"], conv["bias"]), state),
        "packed": (
            ops.short_conv,
            (packed["x"], packed["weight"]),
            {"cu_seqlens": cu_seqlens, "output_final_state": True, "l2_norm": "divide", "head_dim": 4},
        ),
        "no gradient": (ops.short_conv, (plain["x"], plain["weight"]), {}),
        "short_conv_step": (ops.short_conv_step, (plain["x"][:, 0], plain["weight"]), {"state": pool[:2].clone()}),
        "step in a pool": (
            ops.short_conv_step,
            (plain["x"][:, 0], plain["weight"], plain["bias"]),
            {"state": pool, "state_indices": torch.tensor([3, 1])},
        ),
        "short_conv_backward": (ops.short_conv_backward, (*taps, *options, plain["x"], None, needs), {}),
        "gated_rms_norm": (ops.gated_rms_norm, (x, gate, weight), {}),
        "without a gate": (ops.gated_rms_norm, (x,), {}),
        "gated_rms_norm_backward": (
            ops.gated_rms_norm_backward,
            (x.detach(), gate.detach(), weight.detach(), "silu", 1e-6, x.detach(), [True, True, True]),
            {},
        ),
    }


@pytest.mark.parametrize("name", opcheck_calls())
def test_opcheck_passes(name):
    op, args, kwargs = opcheck_calls()[name]
    opcheck(op.default, args, kwargs)


def test_compiled_equals_eager_for_every_length():
    torch._dynamo.reset()

    def block(x, weight, gate):
        y, _ = gka.short_conv(x, weight, l2_norm="divide", head_dim=4)
        return gka.gated_rms_norm(y.unflatten(-1, (3, 4)), gate.unflatten(-1, (3, 4))).tanh()

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 70):
        case = conv_case(1, tokens)
        inputs = (case["x"], case["weight"], torch.randn_like(case["x"], requires_grad=True))
        got, want = compiled(*inputs), block(*inputs)
        assert relative_error(got, want) < 1e-14
        for a, b in zip(gradients([got], inputs), gradients([want], inputs), strict=True):
            assert relative_error(a, b) < 1e-13


@pytest.mark.parametrize(
    "function", [lambda c: gka.short_conv(c["x"], c["weight"])[0], lambda c: gka.gated_rms_norm(c["x"])]
)
def test_a_second_derivative_is_refused(function):
    case = conv_case()
    (gradient,) = torch.autograd.grad(function(case).square().sum(), case["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once, and this asks for a second derivative"):
        torch.autograd.grad(gradient.sum(), case["x"])


def test_a_gradient_does_not_depend_on_which_others_are_asked_for():
    case = conv_case()
    every = dict(
        zip(case, gradients(gka.short_conv(**case, output_final_state=True), list(case.values())), strict=True)
    )
    for name in case:
        leaves = {other: tensor.detach().requires_grad_(other == name) for other, tensor in case.items()}
        (one,) = gradients(gka.short_conv(**leaves, output_final_state=True), [leaves[name]])
        assert torch.equal(one, every[name]), name


def test_a_step_that_would_need_a_gradient_is_refused():
    case = conv_case()
    with pytest.raises(ValueError, match="short_conv_step: x takes a tensor that requires no gradient"):
        gka.short_conv_step(case["x"][:, 0], case["weight"].detach(), state=case["initial_state"].detach())


def bad_calls():
    c = {name: tensor.detach() for name, tensor in conv_case().items()}
    x, weight = c["x"], c["weight"]

    def conv(**options):
        return lambda: gka.short_conv(**{"x": x, "weight": weight, **options})

    def step(**options):
        return lambda: gka.short_conv_step(**{"x": x[:, 0], "weight": weight, "state": c["initial_state"], **options})

    return [
        (conv(x=x[0]), ValueError, r"short_conv: x takes shape \[B, T, C\], got \[9, 12\]"),
        (conv(x=x.long()), TypeError, "short_conv: x takes float64, float32, bfloat16 or float16, got int64"),
        (conv(weight=weight[:5]), ValueError, r"weight takes shape \[C, 1, W\], got \[5, 1, 4\]"),
        (conv(weight=weight[:, 0]), ValueError, r"weight takes shape \[C, 1, W\]"),
        (conv(weight=torch.zeros(12, 1, 9)), ValueError, "weight takes from 1 to 8 taps, got 9"),
        (conv(bias=torch.zeros(3)), ValueError, r"bias takes shape \[C\] = \[12\], got \[3\]"),
        (conv(activation="relu"), ValueError, 'activation takes one of none, silu, sigmoid, got "relu"'),
        (conv(activation="sigmoid"), ValueError, 'activation takes none or silu, got "sigmoid"'),
        (conv(l2_norm="l2"), ValueError, 'l2_norm takes one of none, divide, rsqrt, got "l2"'),
        (conv(l2_norm="divide"), ValueError, "head_dim takes a divisor of the 12 channels from 1 to 256.*got 0"),
        (conv(l2_norm="divide", head_dim=5), ValueError, "head_dim takes a divisor of the 12 channels.*got 5"),
        (conv(eps=-1.0), ValueError, "eps takes a finite number of at least 0, got -1"),
        (
            conv(initial_state=torch.zeros(2, 12, 4)),
            ValueError,
            r"initial_state takes shape \[N, C, P\] = \[2, 12, 3\]",
        ),
        (conv(cu_seqlens=torch.tensor([0, 9])), ValueError, "x takes batch size 1 beside cu_seqlens, got 2"),
        (conv(x=x[:1], cu_seqlens=torch.tensor([0, 8])), ValueError, "cu_seqlens takes the number of tokens, 9"),
        (step(state=torch.zeros(2, 3, 12).transpose(1, 2)), ValueError, "state takes a contiguous tensor"),
        (step(state=torch.zeros(5, 12, 3)), ValueError, "state takes one slot per sequence, 2"),
        (step(state_indices=torch.tensor([0, 0])), ValueError, "state_indices takes distinct slots, got 0 twice"),
        (step(state_indices=torch.tensor([0, 2])), ValueError, "state_indices takes slots from 0 to 1"),
        (lambda: gka.gated_rms_norm(x, x[:1]), ValueError, r"gate takes shape \[T, H, D\] = \[2, 9, 12\]"),
        (lambda: gka.gated_rms_norm(x, None, x[0, 0, :3]), ValueError, r"weight takes shape \[D\] = \[12\], got \[3\]"),
        (lambda: gka.gated_rms_norm(torch.zeros(2, 9000)), ValueError, "x takes a last dimension from 1 to 8192"),
        (lambda: gka.gated_rms_norm(torch.zeros(1, 1, 1, 1, 3)), ValueError, "x takes one to four dimensions, got 5"),
        (
            lambda: gka.gated_rms_norm(x, x, activation="tanh"),
            ValueError,
            "activation takes one of none, silu, sigmoid",
        ),
    ]


@pytest.mark.parametrize(("call", "error", "message"), bad_calls())
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_nothing_comes_of_nothing():
    case = conv_case(2, 0)
    y, state = gka.short_conv(**case, output_final_state=True)
    assert y.shape == (2, 0, 12)
    assert torch.equal(state, case["initial_state"])
    for gradient in gradients((y, state), list(case.values())):
        assert gradient.isfinite().all()
    assert gka.gated_rms_norm(torch.zeros(0, 5)).shape == (0, 5)


@pytest.mark.skipif(
    not (torch.cuda.is_available() and {b.name: b.available for b in gka.backends()}["cuda"]),
    reason="needs a GPU, a torch that sees it and a gka built with GKA_CUDA",
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gpu_gives_the_answers_of_the_cpu(dtype):
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]
    case = conv_case(1, 300, 256, states=3, dtype=dtype)
    options = {"l2_norm": "divide", "head_dim": 128, "output_final_state": True}
    cu_seqlens = torch.tensor([0, 100, 100, 300])

    def run(device):
        leaves = {name: tensor.detach().to(device).requires_grad_() for name, tensor in case.items()}
        y, state = gka.short_conv(**leaves, **options, cu_seqlens=cu_seqlens.to(device))
        out = gka.gated_rms_norm(y.unflatten(-1, (2, 128)), leaves["x"].unflatten(-1, (2, 128)), leaves["bias"][:128])
        weights = [torch.linspace(-1, 1, t.numel(), device=device).view_as(t).to(t) for t in (out, state)]
        return [out, state, *torch.autograd.grad((out, state), list(leaves.values()), weights)]

    for got, want in zip(run("cuda"), run("cpu"), strict=True):
        assert relative_error(got.cpu(), want) < tolerance
