"""A byte model of two attention layers with random weights, written by other means than gka's."""

import json

import torch
from safetensors.torch import save_file

WIDTH, VOCABULARY, HEAD = 32, 257, 8


def write_byte_model(folder, *, norms_of_one=False, **keys):
    """``keys`` go into config.json. The weights do not depend on them."""
    config = {
        "architectures": ["HybridQwen3ForCausalLM"],
        "model_type": "hybrid_qwen3",
        "hybrid_override_pattern": "*-*",
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config | keys))
    random = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": [VOCABULARY, WIDTH], "model.norm.weight": [WIDTH]}
    for layer in ["model.layers.0.", "model.layers.1."]:
        shapes |= {
            layer + "input_layernorm.weight": [WIDTH],
            layer + "post_attention_layernorm.weight": [WIDTH],
            layer + "self_attn.q_proj.weight": [32, WIDTH],
            layer + "self_attn.k_proj.weight": [16, WIDTH],
            layer + "self_attn.v_proj.weight": [16, WIDTH],
            layer + "self_attn.o_proj.weight": [WIDTH, 32],
            layer + "self_attn.q_norm.weight": [HEAD],
            layer + "self_attn.k_norm.weight": [HEAD],
            layer + "mlp.gate_proj.weight": [64, WIDTH],
            layer + "mlp.up_proj.weight": [64, WIDTH],
            layer + "mlp.down_proj.weight": [WIDTH, 64],
        }
    weights = {
        name: torch.ones(shape) if norms_of_one and len(shape) == 1 else 0.3 * torch.randn(shape, generator=random)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder
