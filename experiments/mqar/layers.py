"""The layers of the figure: for each a pattern and the choices in which it differs from its published defaults.

Every model has two blocks of one head and an MLP, each as wide as the model (Mamba2, as published, has no MLP). Where a
layer's authors choose other heads (GLA: four) one of the model's width stands in.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layer:
    name: str  # in file names and on the command line
    title: str  # in the figure
    token: str  # in the pattern
    choices: dict[str, object] = field(default_factory=dict)  # further keys of config.json
    constant_memory: bool = True

    def model(self, width: int, vocabulary: int) -> dict[str, object]:
        """The config.json of two blocks."""
        return {
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": width,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": width,
            "hybrid_override_pattern": f"2x{self.token}",
            **{key: value(width) if callable(value) else value for key, value in self.choices.items()},
        }


def _one_head(width: int) -> dict[str, object]:
    return {"num_heads": 1, "head_dim": width}


LAYERS = {
    layer.name: layer
    for layer in [
        Layer("attention", "attention", "*", constant_memory=False),
        Layer("mamba2", "Mamba2", "M2", {"mamba2_config": lambda width: {"head_dim": min(width, 64)}}),
        Layer("gla", "GLA", "GLA", {"gla_config": lambda _: {"num_heads": 1}}),
        Layer("deltanet", "DeltaNet", "DN", {"deltanet_config": _one_head}),
        Layer("gdn", "Gated DeltaNet", "GDN"),
        Layer("kda", "Kimi Delta Attention", "KDA", {"kda_config": _one_head}),
        Layer("mesanet", "MesaNet", "MESA", {"mesa_config": _one_head}),
        Layer(
            "gka-plain",
            "GKA, no gate, no α",
            "GKA",
            {"gka_config": {"use_forgetting_gate": False, "use_alpha_connection": False, "use_beta_gate": False}},
        ),
        Layer("gka", "GKA", "GKA"),
    ]
}
