"""The configuration of a small model that takes every kind of layer; the pattern is each test's own."""

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "initializer_range": 0.2,
    "mamba2_config": {"head_dim": 16, "state_size": 8, "n_groups": 2},
    "eos_token_id": 60,
}
