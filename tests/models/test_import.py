"""gka import and export: models of transformers' families and GGUF files have the same logits here as there."""

import json
import subprocess
import sys
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

PROGRAM = Path(sys.executable).parent / "gka"
IDS = [[3, 14, 15, 92, 65, 35, 89, 79, 3, 23, 84, 62, 64, 33, 83, 27, 95, 2, 88, 41], [7, 1, 82, 81]]

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
#: One model per family and per kind of rotary embedding; the frequencies matter at every position.
FAMILIES = {
    "llama": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 100.0}},
    "llama with biases": {"attention_bias": True, "tie_word_embeddings": True, "rope_theta": 1000.0},
    "qwen2": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}},
    "qwen3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 50.0,
            "beta_fast": 4.0,
            "original_max_position_embeddings": 16,
        },
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "eos_token_id": [5, 6],
    },
}


def call(*arguments):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)


def run(*arguments):
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    return done


def told(*arguments):
    done = call(*arguments)
    assert done.returncode == 1, done
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def logits_of(folder, tmp_path):
    (tmp_path / "ids.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in IDS))
    run("score", folder, "--ids", tmp_path / "ids.txt", "--logits", tmp_path / "logits.safetensors")
    found = load_file(tmp_path / "logits.safetensors")
    return [found[f"logits.{row}"] for row in range(len(IDS))]


def assert_same_logits(got, model, tolerance=2e-5):
    for row, logits in zip(IDS, got, strict=True):
        with torch.no_grad():
            want = model(torch.tensor([row])).logits[0]
        assert (logits - want).norm() <= tolerance * want.norm()


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed; requirements.txt has it")


def make(transformers, family, choices):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.split()[0], **{**SMALL, **choices})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # norms and biases start at one and zero, where they would not be seen
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_each_family_has_transformers_logits_and_goes_back(transformers, family, tmp_path):
    model = make(transformers, family, FAMILIES[family])
    model.save_pretrained(tmp_path / "theirs")
    run("import", tmp_path / "theirs", "--out", tmp_path / "ours")
    assert_same_logits(logits_of(tmp_path / "ours", tmp_path), model)
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config["model_type"] == family.split()[0]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    for row in IDS:
        with torch.no_grad():
            assert torch.equal(again(torch.tensor([row])).logits, model(torch.tensor([row])).logits)


def byte_letters():
    """GPT-2's letter for every byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def gguf_model(path, formats, seed=0, words="smollm"):
    """A Llama of two layers with a tokenizer of bytes and three merges, and its tensors under their names elsewhere."""
    random = np.random.default_rng(seed)
    width, inner, heads, few = 256, 512, 4, 2
    letters = byte_letters()
    tokens = ["<end>", *(letters[byte] for byte in range(256)), "th", "Ġth", "Ġthe"]
    shapes = {"token_embd": (len(tokens), width)}
    names = {"token_embd": "model.embed_tokens"}
    for layer in range(2):
        for theirs, ours, rows, columns in [
            ("attn_q", "self_attn.q_proj", width, width),
            ("attn_k", "self_attn.k_proj", width * few // heads, width),
            ("attn_v", "self_attn.v_proj", width * few // heads, width),
            ("attn_output", "self_attn.o_proj", width, width),
            ("ffn_gate", "mlp.gate_proj", inner, width),
            ("ffn_up", "mlp.up_proj", inner, width),
            ("ffn_down", "mlp.down_proj", width, inner),
        ]:
            shapes[f"blk.{layer}.{theirs}"] = (rows, columns)
            names[f"blk.{layer}.{theirs}"] = f"model.layers.{layer}.{ours}"
    stored, meant = {}, {}
    for place, (name, shape) in enumerate(shapes.items()):
        kind = formats[place % len(formats)]
        if kind in gguf_files.FORMATS:
            stored[name + ".weight"], values = gguf_files.quantised(kind, shape, random)
        else:
            stored[name + ".weight"], values = gguf_files.plain(kind, random.normal(0, 0.05, shape))
        if "attn_q" in name or "attn_k" in name:  # llama.cpp's order: neighbouring channels turn together
            count = heads if "attn_q" in name else few
            values = values.reshape(count, -1, 2, width).swapaxes(1, 2).reshape(shape)
        meant[names[name] + ".weight"] = values
    for theirs, ours in [("output_norm", "model.norm")] + [
        (f"blk.{layer}.{kind}", f"model.layers.{layer}.{name}")
        for layer in range(2)
        for kind, name in [("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")]
    ]:
        stored[theirs + ".weight"], meant[ours + ".weight"] = gguf_files.plain("F32", random.normal(1, 0.1, width))
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": width,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": few,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 100.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": words,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["t h", "Ġ th", "Ġth e"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    gguf_files.write(path, metadata, stored)
    return meant, metadata, stored


def test_a_gguf_file_of_every_type_is_its_dequantised_copy(transformers, tmp_path):
    meant, _, _ = gguf_model(tmp_path / "model.gguf", ["Q8_0", "F32", "F16", "BF16", *gguf_files.FORMATS])
    run("import", tmp_path / "model.gguf", "--out", tmp_path / "ours")
    got = load_file(tmp_path / "ours/model.safetensors")
    assert set(got) == set(meant)
    for name, values in meant.items():
        assert torch.allclose(got[name], torch.from_numpy(values), rtol=1e-6, atol=1e-9), name
    # Another program reads the copy with what it knows of Llama.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert_same_logits(logits_of(tmp_path / "ours", tmp_path), model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    text = "the 12 thes é<end>"
    ids = tokenizer.encode(text)
    assert ids[:2] == [257, 102] and ids[-1] == 0 == tokenizer.eos_token_id
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hey"}], tokenize=False) == "hey"


def test_float16_stays_float16_and_another_type_can_be_asked_for(tmp_path):
    gguf_model(tmp_path / "model.gguf", ["F16"])
    run("import", tmp_path / "model.gguf", "--out", tmp_path / "half")
    run("import", tmp_path / "model.gguf", "--out", tmp_path / "short", "--dtype", "bfloat16")
    assert load_file(tmp_path / "half/model.safetensors")["model.norm.weight"].dtype == torch.float16
    assert load_file(tmp_path / "short/model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_what_cannot_come_in_is_named_and_leaves_nothing(tmp_path):
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    _, metadata, stored = gguf_model(path, ["F16"])
    cases = [
        ({"general.architecture": "gemma2"}, {}, "'gemma2', which gka does not have; it has qwen3 qwen2 llama"),
        (
            {"llama.final_logit_softcapping": 30.0},
            {},
            "has the key 'llama.final_logit_softcapping', which gka does not",
        ),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, {}, "the rule 'deepseek-llm', which gka does not have"),
        ({}, {"blk.0.attn_q.bias": stored["output_norm.weight"]}, "tensors that this model has no use for"),
        ({}, {"rope_freqs.weight": (0, (32,), bytes(128))}, "not Llama 3's"),
    ]
    for keys, tensors, words in cases:
        gguf_files.write(path, metadata | keys, stored | tensors)
        assert words in told("import", path, "--out", out)
        assert not out.exists()
    path.write_bytes(b"GGUF" + bytes(3))
    assert "is not a sound GGUF file" in told("import", path, "--out", out)
    out.mkdir()
    assert "which is there already" in told("import", path, "--out", out)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    config = {"model_type": "gemma3_text", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    assert "'gemma3_text', a kind of model that gka does not have" in told("score", tmp_path, "--ids", "none.txt")
    config |= {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "'quantization_config'" in told("import", tmp_path, "--out", tmp_path / "out")


def test_int8_is_written_once_and_scores_as_int8_made_at_load(tmp_path):
    source = Path(__file__).resolve().parents[1] / "goldens/tiny-hqwen3-gka"
    run("export", source, "--out", tmp_path / "bytes", "--weights", "int8")
    (tmp_path / "ids").write_text("3 1 4 1 5 9 2 6\n")
    scores = [
        json.loads(run("score", folder, "--ids", tmp_path / "ids", "--per-token", "--device", "cpu", *more).stdout)
        for folder, more in ((tmp_path / "bytes", []), (source, ["--weights", "int8"]))
    ]
    assert scores[0]["sequences"] == scores[1]["sequences"]
    said = told("export", tmp_path / "bytes", "--out", tmp_path / "again")
    assert "is int8, which is written and not read here" in said and not (tmp_path / "again").exists()
