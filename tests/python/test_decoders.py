"""gka.models and the layers of gka.nn: the same numbers as the C++ decoder, states, gradients, files."""

import copy
import inspect
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import small_models
import torch
from safetensors.torch import load_file

import gka

PROGRAM = Path(sys.executable).parent / "gka"
ALL = "-".join(gka.models.MIXERS)
CONFIG = small_models.CONFIG | {"hybrid_override_pattern": ALL}
#: Every kind, and of those with choices some away from their defaults.
LAYERS = {
    **{token: {} for token in ALL.split("-")},
    "attention without norms": {
        "hybrid_override_pattern": "*",
        "attention_config": {"qk_norm": False, "qkv_bias": True, "conv_size": 3},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
    },
    "GKA with more": {
        "hybrid_override_pattern": "GKA",
        "gka_config": {"sketch_dim": 4, "kv_proj_rank": 3, "kv_learnable_residual": True, "num_iter": 8},
    },
    "GDN with more": {
        "hybrid_override_pattern": "GDN",
        "gdn_config": {"expand_v": 2.0, "conv_bias": True, "kv_proj_rank": 3, "kv_learnable_residual": True},
    },
    "GDN with less": {
        "hybrid_override_pattern": "GDN",
        "gdn_config": {"use_gate": False, "use_short_conv": False, "allow_neg_eigval": True},
    },
    "MESA without convolution": {"hybrid_override_pattern": "MESA", "mesa_config": {"conv_size": 0, "use_gate": True}},
    "GLA with convolution": {"hybrid_override_pattern": "GLA", "gla_config": {"conv_size": 4, "use_gate": False}},
    "LA of elu": {"hybrid_override_pattern": "LA", "linear_attn_config": {"feature_map": "elu"}},
}


def make(choices, dtype=torch.float64):
    torch.manual_seed(0)
    model = gka.models.Decoder(CONFIG | choices, dtype=dtype)
    with torch.no_grad():  # no norm, bias or gate at its start
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(params=LAYERS)
def model(request):
    choices = LAYERS[request.param]
    return make(choices or {"hybrid_override_pattern": request.param})


def ids_of(*shape, seed=1):
    return torch.randint(60, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(got, want, tolerance=1e-10):
    assert got.shape == want.shape
    assert (got - want).norm() <= tolerance * want.norm()


def test_pieces_joined_by_the_state_are_one_call(model):
    ids = ids_of(2, 23)
    whole, end = model(ids, return_state=True)
    first, state = model(ids[:, :9], return_state=True)
    second, state = model(ids[:, 9:22], state, return_state=True)
    third, joined = model(ids[:, 22:], state, return_state=True)
    assert_same(torch.cat([first, second, third], 1), whole)
    for got, want in zip(joined[0], end[0], strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert_same(got.double(), want.double())


def test_packed_sequences_are_the_same_as_one_by_one(model):
    lengths = [5, 17, 1]
    ids = ids_of(1, sum(lengths))
    packed = model(ids, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    alone = torch.cat([model(part) for part in ids.split(lengths, 1)], 1)
    assert_same(packed, alone)


def test_rivals_compile_into_one_graph_for_every_length_with_the_same_gradients():
    model = make({"hybrid_override_pattern": "GDN-GLA"})
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (9, 23):
        ids, gradients = ids_of(2, tokens), []
        for each in (compiled, model):
            gradients.append(torch.autograd.grad(each(ids).square().sum(), list(model.parameters())))
        for got, want in zip(*gradients, strict=True):
            assert_same(got, want, 1e-8)


def test_layers_of_all_kinds_are_exported_for_any_length():
    model, ids = make({}), ids_of(2, 70)
    exported = torch.export.export(model, (ids_of(2, 9),), dynamic_shapes=({1: torch.export.Dim.AUTO},)).module()
    with torch.no_grad():
        assert_same(exported(ids), model(ids))


def test_what_stands_for_a_memory_in_a_graph_is_an_operator_as_torch_wants_it():
    gka._library.load_floors()
    q, k = (torch.nn.functional.normalize(torch.randn(1, 70, 2, 5), dim=-1).requires_grad_() for _ in range(2))
    v = torch.randn(1, 2, 70, 3).transpose(1, 2).requires_grad_()
    log_decay, beta = (-torch.rand(1, 70, 2, 5)).requires_grad_(), torch.rand(1, 70, 2, requires_grad=True)
    state, bounds = torch.randn(3, 2, 5, 3, requires_grad=True), torch.tensor([0, 20, 20, 70])
    for given in ((None, None, False), (state, bounds, True)):
        arguments = (q, k, v, log_decay, beta, *given[:2], "delta", 0.5, given[2])
        torch.library.opcheck(torch.ops.gka.memory_forward, arguments)


def test_every_kind_of_layer_that_the_library_knows_is_a_module():
    with pytest.raises(ValueError, match="the type 'NONE', which is not known") as error:
        gka.models.read_config(CONFIG | {"hybrid_override_pattern": "NONE"})
    known = re.search(r"the types are (.+)$", str(error.value))[1].split(", ")
    assert sorted(known) == sorted(gka.models.MIXERS)


@pytest.mark.parametrize(
    ("name", "choices"),
    [("solver", gka.nn.Solver), ("gradient", gka.nn.Gradient), ("ridge_mode", gka.nn.RidgeMode)],
)
def test_the_choices_of_the_block_are_those_of_the_operator(name, choices):
    x = torch.randn(1, 2, 1, 4)
    with pytest.raises(ValueError, match=f"{name} takes one of") as error:
        gka.gated_kalmanet(x, x, x, **{name: "none"})
    known = re.search(r"takes one of (.+), got", str(error.value))[1].split(", ")
    assert known == list(choices.__args__)


def test_a_step_is_one_more_token_and_has_no_gradient(model):
    layer = model.model.layers[0].mixer
    x = torch.randn(2, 12, CONFIG["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    if isinstance(layer, gka.nn.Attention):
        with pytest.raises(TypeError, match="grows with every token"):
            layer.step(x[:, 0], None)
        return
    whole, _ = layer(x)
    _, state = layer(x[:, :11])
    state = type(state)(*(None if t is None else t.detach().clone() for t in state))
    with pytest.raises(RuntimeError, match="step has no gradient"):
        layer.step(x[:, 11].clone().requires_grad_(), state)
    assert_same(layer.step(x[:, 11], state), whole[:, 11])


def test_gradients_are_the_slope_of_a_finite_difference(model):
    for block in model.model.layers:  # the gradient a difference sees goes through every step of a solver
        if hasattr(block.mixer, "config"):
            object.__setattr__(block.mixer.config, "gradient", "unrolled")
        if hasattr(block.mixer, "iterations"):
            block.mixer.iterations = 60
    ids = ids_of(1, 14)
    weights = torch.randn_like(model(ids))
    (model(ids) * weights).sum().backward()
    parameters = dict(model.named_parameters())
    directions = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    slope = sum((parameter.grad * directions[name]).sum() for name, parameter in parameters.items())
    values = []
    with torch.no_grad():
        for sign in (1, -2):
            for name, parameter in parameters.items():
                parameter += sign * 1e-7 * directions[name]
            values.append((model(ids) * weights).sum())
    assert torch.isclose((values[0] - values[1]) / 2e-7, slope, rtol=1e-4)


def test_every_layer_starts_from_meta(model):
    empty = gka.models.Decoder(model.config, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(float("nan"))
    empty.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in empty.parameters())
    assert empty(ids_of(1, 5)).isfinite().all()


def test_the_command_line_and_files_have_the_same_model(tmp_path):
    """All kinds of layers in one model: logits of `gka score`, tokens of `gka generate`, and back to the same bits."""
    model = make({}, torch.float32)
    model.save(tmp_path / "model")
    again = gka.load(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    ids = ids_of(1, 40)
    (tmp_path / "ids.txt").write_text(" ".join(map(str, ids[0].tolist())))
    score = ["score", tmp_path / "model", "--ids", tmp_path / "ids.txt", "--logits", tmp_path / "logits.safetensors"]
    subprocess.run([PROGRAM, *score], check=True, capture_output=True)
    with torch.no_grad():
        assert_same(load_file(tmp_path / "logits.safetensors")["logits.0"], again(ids)[0], 1e-4)
    command = ["generate", tmp_path / "model", "--ids", tmp_path / "ids.txt", "--max-tokens", "12", "--greedy"]
    done = subprocess.run([PROGRAM, *command, "--print-ids"], check=True, capture_output=True, text=True)
    assert again.generate(ids, 12)[0].tolist() == list(map(int, done.stdout.split()))
    assert again.score(ids).shape == (1, 39)


def test_what_is_no_model_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="there is no"):
        gka.load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gemma"}))
    with pytest.raises(ValueError, match="'gemma', a kind of model that gka does not have"):
        gka.load(tmp_path)
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        gka.models.Decoder(CONFIG | {"hiden_size": 3})


def test_ids_that_are_none_are_named():
    model = make({})
    for ids, kind, message in (
        ([[1, 2]], TypeError, "ids takes a tensor of token numbers"),
        (torch.tensor([1, 2]), ValueError, r"token numbers \[B, T\] in int64 or int32, got torch.int64 of shape \[2\]"),
        (torch.tensor([[1.0]]), ValueError, "got torch.float32"),
        (torch.tensor([[1, 10**6]]), IndexError, "ids takes numbers from 0 to .*, got some from 1 to 1000000"),
    ):
        for call in (model, lambda ids: model.generate(ids, 3)):
            with pytest.raises(kind, match=message):
                call(ids)
    one = torch.tensor([[1]])
    for call, message in (
        (lambda: model.generate(one[:, :0], 3), "the model needs one to begin with"),
        (lambda: model.generate(one, 3, temperature=-1), "temperature is -1; it takes 0 or more"),
        (lambda: model.generate(one, 3, temperature=1, top_p=0), "top_p is 0; it takes a number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("make_layer", "message"),
    [
        (lambda: gka.nn.GatedKalmaNet(32, 8, solver_type="jacobi"), "solver_type is 'jacobi'; it takes 'chebyshev'"),
        (lambda: gka.nn.GatedKalmaNet(32, 8, ridge_strength=0.0), "ridge_strength is 0.0"),
        (lambda: gka.nn.Attention(32, 4, 3), "num_key_value_heads is 3"),
        (lambda: gka.nn.Attention(32, 4, sliding_window=0), "sliding_window is 0"),
        (lambda: gka.nn.LinearAttention(32, 4, feature_map="exp"), "feature_map is 'exp'"),
        (lambda: gka.nn.RetNet(32, 5), "num_heads is 5, which does not divide 32"),
        (lambda: gka.nn.Mamba2(32, head_dim=48), "head_dim is 48, which does not divide 64"),
        (lambda: gka.nn.DeltaNet(32, 8, expand_k=0.3), "expand_k is 0.3"),
        (lambda: gka.nn.MesaNet(32, 300), "a key of a head has 300 channels"),
        (lambda: gka.nn.MesaNet(32, 8, lambda_lower_bound=2.0), "lambda_lower_bound is 2.0; it takes a number below 1"),
        (lambda: gka.nn.MesaNet(32, 8, lambda_lower_bound=-0.5), "lambda_lower_bound is -0.5; it takes a number of at"),
        (lambda: gka.nn.MesaNet(32, 8, num_iter=0), "num_iter is 0; it takes a whole number of at least 1"),
        (lambda: gka.nn.MesaNet(32, 8, conv_size=9), "conv_size is 9; it takes at most 8"),
        (lambda: gka.nn.GatedDeltaNet(32, 0), "head_dim is 0; it takes a whole number of at least 1"),
        (lambda: gka.nn.GatedDeltaNet(32, 8, num_q_heads=-2), "num_q_heads is -2"),
        (lambda: gka.nn.GatedDeltaNet(32, 8, use_gate="no"), "use_gate is 'no'; it takes True or False"),
        (lambda: gka.nn.KimiDeltaAttention(32, 257), "a head has 257 channels; behind a short convolution"),
        (lambda: gka.nn.DeltaNet(32, 8, expand_k=float("nan")), "expand_k is nan; it takes a number above 0"),
        (lambda: gka.nn.GatedLinearAttention(32, gate_logit_normalizer=-16.0), "gate_logit_normalizer is -16.0"),
        (lambda: gka.nn.GatedLinearAttention(32, gate_low_rank_dim=0), "gate_low_rank_dim is 0"),
        (lambda: gka.nn.RetNet(32, 4, rope_theta=0.0), "rope_theta is 0.0; it takes a number above 0"),
        (lambda: gka.nn.RetNet(32, 32), "a key of a head has 1 channels, and the rotary embedding"),
        (lambda: gka.nn.Attention(32, 4, head_dim=7), "head_dim has 7 channels, and the rotary embedding"),
        (lambda: gka.nn.Attention(32, 4, rope_theta=-1.0), "rope_theta is -1.0"),
        (lambda: gka.nn.Attention(32, 4, conv_size=-1), "conv_size is -1; it takes a whole number of at least 0"),
        (lambda: gka.nn.Attention(32, 4, sliding_window=2.5), "sliding_window is 2.5"),
        (lambda: gka.nn.Mamba2(32, head_dim=16, conv_size=0), "conv_size is 0; it takes a whole number of at least 1"),
        (lambda: gka.nn.Mamba2(32, head_dim=16, state_size=-1), "state_size is -1"),
        (lambda: gka.nn.GatedKalmaNet(32, 8, norm_eps=-1.0), "norm_eps is -1.0; it takes a number of at least 0"),
        (lambda: gka.nn.GatedKalmaNet(32, 8, expand_k=float("inf")), "expand_k is inf"),
    ],
)
def test_a_choice_that_is_none_is_named_at_construction(make_layer, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_layer()


@pytest.mark.parametrize("layer", [gka.nn.RetNet(32, 4), gka.nn.Attention(32, 4)], ids=["RetNet", "Attention"])
def test_a_state_of_other_sequences_is_named(layer):
    _, state = layer(torch.randn(2, 3, 32))
    with pytest.raises(ValueError, match="the state is of 2 sequences, and x is of 3"):
        layer(torch.randn(3, 3, 32), state)


def test_states_are_saved_and_exported(tmp_path):
    layer = gka.nn.GatedKalmaNet(32, 8, dtype=torch.float64)
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    state = layer(x)[1]
    state = gka.nn.State(*(t.detach() for t in state))
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert isinstance(loaded, gka.nn.State)
    assert all(torch.equal(a, b) for a, b in zip(loaded, state, strict=True))
    exported = torch.export.export(layer, (x, state))
    torch.export.save(exported, tmp_path / "layer.pt2")
    again = torch.export.load(tmp_path / "layer.pt2").module()
    with torch.no_grad():
        assert_same(again(x, loaded)[0], layer(x, state)[0])


def test_a_decomposed_export_has_the_layers_gradients():
    layer = gka.nn.GatedKalmaNet(32, 8, num_iter=8, dtype=torch.float64)
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    exported = torch.export.export(layer, (x,)).run_decompositions().module()
    gradients = []
    for each in (exported, layer):
        y = x.clone().requires_grad_()
        gradients += torch.autograd.grad(each(y)[0].square().sum(), y)
    assert_same(*gradients)


GROUPS = {
    "GatedKalmaNet": "gka_config",
    "GatedDeltaNet": "gdn_config",
    "DeltaNet": "deltanet_config",
    "KimiDeltaAttention": "kda_config",
    "MesaNet": "mesa_config",
    "GatedLinearAttention": "gla_config",
    "RetNet": "retnet_config",
    "LinearAttention": "linear_attn_config",
    "Mamba2": "mamba2_config",
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_layer_and_a_configuration_have_the_same_choices_and_defaults(kind):
    """But for sizes, which a configuration may leave to the attention's."""
    sizes = ("heads", "head_dim", "expand_k", "expand_v")
    plain = {key: value for key, value in CONFIG.items() if not key.endswith("_config")}
    group = gka.models.read_config(plain | {"hybrid_override_pattern": "GKA"})[GROUPS[kind]]
    taken = inspect.signature(getattr(gka.nn, kind)).parameters
    assert set(group) <= set(taken)
    for name, value in group.items():
        if not name.endswith(sizes):
            assert (taken[name].default or 0) == (value or 0), name


def test_the_tokenizer_is_the_command_lines(tmp_path):
    tokenizer = gka.Tokenizer("bytes")
    assert tokenizer.encode("né") == [110, 195, 169]
    assert tokenizer.decode([110, 195, 169]) == "né" and tokenizer.decode([195]) == "\ufffd"
    assert tokenizer.vocab_size == 257 and tokenizer.end_of_document == 256 and tokenizer.find("none") is None
    with pytest.raises(ValueError, match="there is no tokenizer"):
        gka.Tokenizer(tmp_path / "none")
    with pytest.raises(TypeError, match="encode takes a text, got NoneType"):
        tokenizer.encode(None)
    for copied in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):  # for workers of a DataLoader
        assert copied.encode("né") == [110, 195, 169]


def test_what_must_not_decay_says_so():
    model = make({})
    marked = {name.split(".")[-1] for name, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert {"A_log", "dt_bias", "D", "lambda_params", "bias"} <= marked
    assert not any(getattr(p, "_no_weight_decay", False) for n, p in model.named_parameters() if "_proj.weight" in n)
