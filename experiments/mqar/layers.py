"""The layers of the figure: for each a pattern and the choices in which it differs from its published defaults.

Every model has two blocks of one head (or a few) and an MLP, each as wide as the model (Mamba2, as published, has no
MLP), and one matrix for the embedding and the head. Where a layer's authors choose other heads (GLA: four) one of the
model's width stands in. Attention and GLA get the short convolution that the other layers have: without one they must
first find out how to look at the token before, which takes them longer than these runs last. Mamba2 is published with a
state of 128 numbers per channel whatever the width, four times Gated KalmaNet's at width 32; a second one has as many
as that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layer:
    name: str  # in file names and on the command line
    title: str  # in the figure
    token: str  # in the pattern
    choices: dict[str, object] = field(default_factory=dict)  # further keys of config.json, of width and heads
    memory: Callable[[int, int], float] | None = None  # numbers a block remembers, at a width with so many heads
    constant_memory: bool = True

    def model(self, width: int, vocabulary: int, heads: int = 1) -> dict[str, object]:
        """The config.json of two blocks."""
        return {
            "vocab_size": vocabulary,
            "tie_word_embeddings": True,
            "hidden_size": width,
            "intermediate_size": width,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": width // heads,
            "hybrid_override_pattern": f"2x{self.token}",
            **{key: value(width, heads) if callable(value) else value for key, value in self.choices.items()},
        }


def _heads(width: int, heads: int) -> dict[str, object]:
    return {"num_heads": heads, "head_dim": width // heads}


def _mamba2(state: int | None) -> Callable[[int, int], dict[str, object]]:
    """Heads of at most 64, of which it has 2 · width / 64 and at least two; a state of so many, or the width."""
    return lambda width, heads: {"head_dim": max(8, min(width, 64) // heads), "state_size": state or width}


def _squares(count: float) -> Callable[[int, int], float]:
    """So many matrices of width × width, or of what a head has of it."""
    return lambda width, heads: count * width**2 / heads


LAYERS = {
    layer.name: layer
    for layer in [
        Layer("attention", "attention", "*", {"attention_config": {"conv_size": 4}}, constant_memory=False),
        Layer(
            "mamba2",
            "Mamba2, state 128",
            "M2",
            {"mamba2_config": _mamba2(128)},
            lambda width, _: 2 * width * 128,
        ),
        Layer(
            "mamba2-narrow",
            "Mamba2, state as wide as the model",
            "M2",
            {"mamba2_config": _mamba2(None)},
            lambda width, _: 2 * width**2,
        ),
        Layer(
            "gla", "GLA", "GLA", {"gla_config": lambda _, heads: {"num_heads": heads, "conv_size": 4}}, _squares(0.5)
        ),
        Layer("deltanet", "DeltaNet", "DN", {"deltanet_config": _heads}, _squares(1)),
        Layer("gdn", "Gated DeltaNet", "GDN", {"gdn_config": {"expand_v": 2.0}}, _squares(2)),
        Layer("kda", "Kimi Delta Attention", "KDA", {"kda_config": _heads}, _squares(1)),
        Layer("mesanet", "MesaNet", "MESA", {"mesa_config": _heads}, _squares(2)),
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
