"""The layers of gka.nn as torch's own code treats modules: copied, moved, loaded, without numbers, without tokens; and
what they say where they are called wrongly."""

import copy
import io
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gka

WIDTH = 32
LAYERS = {
    "GKA": lambda **f: gka.nn.GatedKalmaNet(WIDTH, 8, 4, sketch_dim=4, **f),
    "GKA with few keys": lambda **f: gka.nn.GatedKalmaNet(WIDTH, 8, 4, 2, 2, kv_proj_rank=4, **f),
    "attention": lambda **f: gka.nn.Attention(WIDTH, 4, 2, attention_bias=True, **f),
    "window": lambda **f: gka.nn.Attention(WIDTH, 4, sliding_window=3, conv_size=3, **f),
    "GDN": lambda **f: gka.nn.GatedDeltaNet(WIDTH, 8, 4, conv_bias=True, **f),
    "DN": lambda **f: gka.nn.DeltaNet(WIDTH, 8, **f),
    "KDA": lambda **f: gka.nn.KimiDeltaAttention(WIDTH, 8, **f),
    "MESA": lambda **f: gka.nn.MesaNet(WIDTH, 8, **f),
    "GLA": lambda **f: gka.nn.GatedLinearAttention(WIDTH, 4, **f),
    "RET": lambda **f: gka.nn.RetNet(WIDTH, 4, **f),
    "LA": lambda **f: gka.nn.LinearAttention(WIDTH, 4, **f),
    "M2": lambda **f: gka.nn.Mamba2(WIDTH, head_dim=16, state_size=8, **f),
}
ROTARY = ("attention", "window", "RET")  # whose frequencies torch's fakes cannot make


@pytest.fixture(params=LAYERS)
def make(request):
    torch.manual_seed(0)
    return LAYERS[request.param]


def marked(layer):
    return {name for name, p in layer.named_parameters() if hasattr(p, "_no_weight_decay")}


def by_a_file(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(layer):
    other = type("Two", (torch.nn.Module,), {})()
    other.layer = copy.deepcopy(layer).to("meta")
    other.load_state_dict({f"layer.{name}": t for name, t in layer.state_dict().items()}, assign=True)
    return other.layer


@pytest.mark.parametrize(
    "twin",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), by_a_file, assigned],
    ids=["deepcopy", "pickle", "file", "assign"],
)
def test_a_copy_answers_alike_and_knows_what_must_not_decay(make, twin):
    layer, x = make(), torch.randn(2, 7, WIDTH)
    other = twin(layer)
    assert torch.equal(other(x)[0], layer(x)[0])
    assert marked(other) == marked(layer) != set()
    assert not {id(p) for p in other.parameters()} & {id(p) for p in layer.parameters()} or twin is assigned


def test_a_layer_that_comes_from_meta_knows_what_must_not_decay(make):
    wanted = marked(make())
    layer = make(device="meta")
    assert marked(layer) == wanted
    layer.to_empty(device="cpu").reset_parameters()
    assert marked(layer) == wanted
    torch.nn.ModuleList([layer]).double()
    assert layer(torch.randn(1, 3, WIDTH).double())[0].isfinite().all()
    assert marked(layer) == wanted


def test_an_optimiser_is_told_what_must_not_decay(make):
    layer = make()
    for parameter in layer.parameters():
        if parameter.dim() == 3 and parameter.shape[-1] == 8:  # the sketch, as FSDP leaves it
            del parameter._no_weight_decay
    decays, stays = gka.nn.parameter_groups(torch.nn.Sequential(layer), 0.1)
    names = {id(p): name.split(".")[-1] for name, p in layer.named_parameters()}
    assert decays["weight_decay"] == 0.1 and stays["weight_decay"] == 0.0
    assert {names[id(p)] for p in decays["params"]} <= {"weight", "k_rep", "v_rep"}
    assert all(p.dim() > 1 for p in decays["params"])
    assert all(p.dim() < 2 or names[id(p)] == "sketch" for p in stays["params"])
    assert len(decays["params"]) + len(stays["params"]) == len(names)


def test_shapes_are_known_without_numbers(make, request):
    layer, x = make(device="meta"), torch.empty(2, 5, WIDTH, device="meta")
    y, state = layer(x)
    assert y.is_meta and y.shape == x.shape
    want = make()(torch.zeros(2, 5, WIDTH))[1]
    assert [None if t is None else t.shape for t in state] == [None if t is None else t.shape for t in want]
    if request.node.callspec.params["make"] in ROTARY:
        return
    with FakeTensorMode():
        y = make()(torch.empty(2, 5, WIDTH))[0]
        y.sum().backward()
    assert y.shape == x.shape


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_no_tokens_give_every_parameter_a_gradient_of_zeros(make, shape):
    layer, x = make(), torch.randn(*shape, WIDTH, requires_grad=True)
    y, _ = layer(x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_a_wrong_call_is_named_in_one_sentence(make):
    layer = make()
    name = type(layer).__name__
    other = gka.nn.Mamba2 if name != "Mamba2" else gka.nn.DeltaNet
    _, state = layer(torch.randn(2, 3, WIDTH))
    _, foreign = other(WIDTH, head_dim=16)(torch.randn(2, 3, WIDTH))
    for shape in ((WIDTH, WIDTH), (3, WIDTH), (2, 2, 3, WIDTH)):
        with pytest.raises(ValueError, match=rf"{name} takes x \[B, T, hidden_size\], got \[{shape[0]}, "):
            layer(torch.randn(shape))
    for given in (foreign, tuple(state), list(state)):
        with pytest.raises(TypeError, match=f"{name} takes the state that a call of it returned, a .*State, got"):
            layer(torch.randn(2, 3, WIDTH), given)
    with pytest.raises(TypeError, match="takes cu_seqlens as a tensor, got list"):
        layer(torch.randn(1, 3, WIDTH), cu_seqlens=[0, 3])
    for bounds in ([0, 2], [0, 4], [1, 3], [0, 2, 1, 3], [0.0, 3.0]):
        with pytest.raises((ValueError, TypeError), match="cu_seqlens"):
            layer(torch.randn(1, 3, WIDTH), cu_seqlens=torch.tensor(bounds))
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(torch.randn(2, 3, WIDTH), cu_seqlens=torch.tensor([0, 3]))
    if name != "Attention":
        for shape in ((WIDTH,), (2, 1, WIDTH)):
            with pytest.raises(ValueError, match=r"step takes one token of each sequence, x \[B, hidden_size\], got"):
                layer.step(torch.randn(shape), state)
