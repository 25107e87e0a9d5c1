"""gka.nn: states, packing, steps, and the same numbers as the C++ block."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

import gka.nn

HIDDEN, HEAD = 24, 8
ROOT = Path(__file__).resolve().parents[2]

#: Every choice of the block, away from its default at least once.
CHOICES = {
    "published": {},
    "paper": {"beta_weight": "paper"},
    "no gates": {
        "use_forgetting_gate": False,
        "use_beta_gate": False,
        "use_alpha_connection": False,
        "use_gate": False,
    },
    "keys that stay": {"use_forgetting_gate_kk": False, "bp_lambda": False},
    "no convolution": {"conv_size": 0},
    "convolution of keys alone": {"use_q_conv": False, "use_v_conv": False, "conv_size": 3},
    "constant ridge": {"ridge_mode": "constant", "ridge_strength": 0.3, "solver_type": "conjugate_gradient"},
    "no solve": {"num_iter": 0, "gla_rescale": False},
    "wide values": {"expand_v": 2.0, "expand_k": 0.5},
    "sketched": {"sketch_dim": 4},
    "low rank": {"kv_proj_rank": 5},
    "learned repetition": {"kv_proj_rank": 5, "kv_learnable_residual": True},
}


def make(seed: int = 0, dtype: torch.dtype = torch.float64, **choices: object) -> gka.nn.GatedKalmaNet:
    torch.manual_seed(seed)
    layer = gka.nn.GatedKalmaNet(HIDDEN, HEAD, num_q_heads=4, num_k_heads=2, num_v_heads=2, **choices)
    with torch.no_grad():  # no head a copy, no gate at its start
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return layer.to(dtype)


def stream(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_same(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-10) -> None:
    assert got.shape == want.shape
    assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES.keys())
def test_two_calls_joined_by_the_state_are_one_call(choices):
    layer, x = make(**choices), stream(2, 50)
    whole, end = layer(x)
    first, state = layer(x[:, :17])
    second, joined = layer(x[:, 17:], state)
    assert_same(torch.cat([first, second], 1), whole)
    for got, want in zip(joined, end, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert_same(got, want)


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES.keys())
def test_steps_after_a_prefill_are_a_longer_prefill(choices):
    layer, x = make(**choices), stream(2, 12)
    whole, _ = layer(x)
    _, state = layer(x[:, :9])
    state = gka.nn.State(*(None if t is None else t.detach().clone() for t in state))
    for t in range(9, 12):
        assert_same(layer.step(x[:, t], state), whole[:, t])


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES.keys())
def test_packed_sequences_are_the_same_as_one_by_one(choices):
    layer, lengths = make(**choices), [5, 0, 33, 1]
    x = stream(1, sum(lengths))
    packed, state = layer(x, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    assert state.u.shape[0] == len(lengths)
    for n, part in enumerate(x.split(lengths, 1)):
        alone, end = layer(part)
        assert_same(packed.split(lengths, 1)[n], alone)
        assert_same(state.u[n], end.u[0])


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES.keys())
def test_every_parameter_has_the_gradient_of_a_finite_difference(choices):
    # Through every step of the solver and through λ: the gradient a difference sees.
    layer, x = make(**choices | {"gradient": "unrolled", "bp_lambda": True}), stream(1, 20)
    weights = torch.randn_like(layer(x)[0])
    (layer(x)[0] * weights).sum().backward()
    for name, parameter in layer.named_parameters():
        direction = torch.randn_like(parameter)
        slope = torch.zeros(()).to(x) if parameter.grad is None else (parameter.grad * direction).sum()
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter += sign * 1e-6 * direction
                values.append((layer(x)[0] * weights).sum())
                parameter -= sign * 1e-6 * direction
        assert torch.isclose((values[0] - values[1]) / 2e-6, slope, rtol=1e-5, atol=1e-6), name


def test_parameters_have_their_published_names():
    names = {
        *(f"{name}_proj.weight" for name in ("q", "k", "v", "a", "b", "alpha", "g", "o")),
        *(f"{name}_conv1d.weight" for name in "qkv"),
        *("b_proj.bias", "alpha_proj.bias", "A_log", "dt_bias", "o_norm.weight"),
    }
    assert set(make().state_dict()) == names
    more = {*(f"proj_{name}.linear{half}.weight" for name in "kv" for half in "AB"), "k_rep", "v_rep"}
    assert set(make(kv_proj_rank=2, kv_learnable_residual=True).state_dict()) == names | more


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ridge": 1}, "no option 'ridge'; its options are num_iter"),
        ({"beta_weight": "half"}, "'published' or 'paper'"),
        ({"expand_v": 0.3}, "expand_v is 0.3"),
        ({"sketch_dim": 9}, "sketch_dim is 9; it must be at most a key's size, 8"),
        ({"num_k_heads": 3}, "num_k_heads is 3, which does not divide the 4 heads"),
        ({"num_q_heads": -4}, "num_q_heads is -4; it takes a whole number of at least 0"),
        ({"head_dim": 0}, "head_dim is 0; it takes a whole number of at least 1"),
        ({"head_dim": 257}, "a key of a head has 257 channels; the memory takes 1 to 256"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0; it takes a whole number"),
        ({"num_iter": 3.5}, "num_iter is 3.5; it takes a whole number"),
        ({"use_gate": "no"}, "use_gate is 'no'; it takes True or False"),
    ],
)
def test_a_choice_that_is_none_is_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        gka.nn.GatedKalmaNet(**{"hidden_size": HIDDEN, "head_dim": HEAD, "num_q_heads": 4, **arguments})


def test_a_step_without_a_state_says_where_one_comes_from():
    with pytest.raises(TypeError, match="step takes the state that a call of the layer returned, got NoneType"):
        gka.nn.GatedKalmaNet(HIDDEN, HEAD).step(torch.zeros(1, HIDDEN), None)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES.keys())
def test_a_model_of_one_block_has_the_logits_of_the_command_line(choices, tmp_path):
    """The rest of a decoder written out here, around gka.nn; the same weights through `gka score`."""
    layer, vocabulary, inner = make(dtype=torch.float32, **choices), 19, 16
    generator = torch.Generator().manual_seed(3)
    own = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (vocabulary, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.mlp.gate_proj.weight": (inner, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (inner, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, inner),
    }
    weights = {name: torch.randn(shape, generator=generator) for name, shape in own.items()}
    block = {name.removeprefix("model.layers.0."): tensor for name, tensor in weights.items()}
    ids = torch.randint(vocabulary, (1, 70), generator=generator)

    x = weights["model.embed_tokens.weight"][ids]
    x = x + layer(rms_norm(x, block["input_layernorm.weight"]))[0]
    y = rms_norm(x, block["post_attention_layernorm.weight"])
    gate = functional.silu(y @ block["mlp.gate_proj.weight"].T) * (y @ block["mlp.up_proj.weight"].T)
    x = x + gate @ block["mlp.down_proj.weight"].T
    want = rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T

    state = {f"model.layers.0.gka.{name}": tensor.detach() for name, tensor in layer.state_dict().items()}
    save_file(weights | state, tmp_path / "model.safetensors")
    config = {
        "model_type": "hybrid_qwen3",
        "architectures": ["HybridQwen3ForCausalLM"],
        "hybrid_override_pattern": "GKA",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "gka_config": choices,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "ids.txt").write_text(" ".join(map(str, ids[0].tolist())) + "\n")
    program = shutil.which("gka", path=str(Path(sys.executable).parent)) or "gka"
    command = [program, "score", tmp_path, "--ids", tmp_path / "ids.txt", "--logits", tmp_path / "logits.safetensors"]
    subprocess.run(command, check=True, capture_output=True)
    got = load_file(tmp_path / "logits.safetensors")["logits.0"]
    assert_same(got, want[0].detach(), 2e-4)


def test_the_fsdp_example_trains_on_two_processes(tmp_path):
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--standalone", "--nproc-per-node=2", ROOT / "examples/fsdp/train.py"]
    saved = tmp_path / "weights.pt"
    done = subprocess.run([*command, "--steps=20", "--save", saved], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    assert [line[1] for line in lines] == ["1", "20"]
    assert float(lines[1][3]) < float(lines[0][3])
    names = {name for name in torch.load(saved) if name.startswith("blocks.0.gka.")}
    assert names == {f"blocks.0.gka.{name}" for name in make().state_dict()}
