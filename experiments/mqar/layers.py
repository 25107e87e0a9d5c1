"""The layers of the figure: for each a pattern and the choices in which it differs from its published defaults.

Every model has two blocks of one head and an MLP, each as wide as the model (Mamba2, as published, has no MLP), and one
matrix for the embedding and the head. Where a layer's authors choose other heads (GLA: four) one of the model's width
stands in. Attention and GLA get the short convolution that the other layers have: without one they must first find out
how to look at the token before, which takes them longer than these runs last. Mamba2 is published with a state of 128
numbers per channel whatever the width, four times Gated KalmaNet's at width 32; a second one has as many as that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layer:
    name: str  # in file names and on the command line
    title: str  # in the figure
    token: str  # in the pattern
    choices: dict[str, object] = field(default_factory=dict)  # further keys of config.json
    memory: Callable[[int], float] | None = None  # numbers a block remembers at a width
    constant_memory: bool = True

    def model(self, width: int, vocabulary: int) -> dict[str, object]:
        """The config.json of two blocks."""
        return {
            "vocab_size": vocabulary,
            "tie_word_embeddings": True,
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


def _squares(count: float) -> Callable[[int], float]:
    """So many matrices of width × width."""
    return lambda width: count * width**2


LAYERS = {
    layer.name: layer
    for layer in [
        Layer("attention", "attention", "*", {"attention_config": {"conv_size": 4}}, constant_memory=False),
        Layer(
            "mamba2",
            "Mamba2",
            "M2",
            {"mamba2_config": lambda width: {"head_dim": min(width, 64)}},
            lambda width: 2 * width * 128,
        ),
        Layer(
            "mamba2-narrow",
            "Mamba2, state as GKA",
            "M2",
            {"mamba2_config": lambda width: {"head_dim": min(width, 64), "state_size": width}},
            _squares(2),
        ),
        Layer("gla", "GLA", "GLA", {"gla_config": {"num_heads": 1, "conv_size": 4}}, _squares(0.5)),
        Layer("deltanet", "DeltaNet", "DN", {"deltanet_config": _one_head}, _squares(1)),
        Layer("gdn", "Gated DeltaNet", "GDN", {"gdn_config": {"expand_v": 2.0}}, _squares(2)),
        Layer("kda", "Kimi Delta Attention", "KDA", {"kda_config": _one_head}, _squares(1)),
        Layer("mesanet", "MesaNet", "MESA", {"mesa_config": _one_head}, _squares(2)),
        Layer(
            "gka-plain",
            "GKA, no gate, no α",
            "GKA",
            {"gka_config": {"use_forgetting_gate": False, "use_alpha_connection": False, "use_beta_gate": False}},
            _squares(2),
        ),
        Layer("gka", "GKA", "GKA", {}, _squares(2)),
    ]
}
