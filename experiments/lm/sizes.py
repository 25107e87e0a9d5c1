"""The models of the experiments with text: sizes, layers, and two ways to make layers comparable.

parameters   every layer has as many parameters as GKA: what is fitted is the width of the MLP, in Mamba2, which has
             none, the number of blocks
mlp          every layer has the same MLP, as in the paper; a layer that is larger makes a larger model (Mamba2: twice
             as many blocks, as in flash-linear-attention)
"""

from __future__ import annotations

from dataclasses import dataclass, field

END = 50256  # GPT-2's end of a document


def padded(vocabulary: int) -> int:
    """A multiple of 64: products with odd sizes are slow."""
    return -(-vocabulary // 64) * 64


VOCABULARY = padded(50257)  # GPT-2's


@dataclass(frozen=True)
class Size:
    """`fitted`: the MLP's width (for Mamba2 the number of blocks) that gives a layer as many parameters as GKA."""

    title: str
    blocks: int
    width: int
    heads: int
    head_dim: int
    mlp: int
    fitted: dict[str, int]
    length: int = 2048
    batch_tokens: int = 65536
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    tokens: int = 96_000_000
    packs: tuple[int, ...] = (1, 2)
    deviation: float = 0.02  # of the first weights


SIZES = {
    "50m": Size(
        "50M", 12, 512, 4, 128, 1856,
        {"attention": 2048, "deltanet": 2048, "gla": 2048, "mesanet": 2048, "gdn": 1344, "kda": 1856, "mamba2": 29},
    ),
    "12m": Size(
        "12M", 12, 256, 2, 128, 896,
        {"attention": 992, "deltanet": 992, "gla": 992, "mesanet": 992, "gdn": 640, "kda": 800, "mamba2": 26},
        batch_tokens=32768, tokens=47_000_000, packs=(1,),
    ),
    "toy": Size(
        "toy", 2, 32, 2, 16, 64,
        {"attention": 72, "deltanet": 72, "gla": 72, "mesanet": 72, "gdn": 32, "kda": 64, "mamba2": 2},
        length=64, batch_tokens=512, rates=(1e-2, 2e-2), tokens=8192, packs=(1,), deviation=0.1,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """`token` of the pattern; `choices` are keys of the configuration. All of them train on tensor cores: a comparison
    in which one has kernels and another has not would be one of kernels."""

    title: str
    token: str
    choices: dict[str, object] = field(default_factory=dict)
    fits_as: str = ""  # the entry of Size.fitted; those with none have GKA's MLP


LAYERS = {
    "attention": Layer("attention", "*", fits_as="attention"),
    "deltanet": Layer("DeltaNet", "DN", fits_as="deltanet"),
    "mamba2": Layer("Mamba2", "M2", fits_as="mamba2"),
    "gdn": Layer("Gated DeltaNet", "GDN", {"gdn_config": {"expand_v": 2.0}}, fits_as="gdn"),
    "gdn-narrow": Layer("Gated DeltaNet, values as wide as keys", "GDN", {"gdn_config": {"expand_v": 1.0}}),
    "gka-paper": Layer("GKA as in the paper (β = 1)", "GKA", {"gka_config": {"use_beta_gate": False}}),
    "gka": Layer("GKA as released (β²)", "GKA"),
    "gka-eps": Layer("GKA, ε of its norm 1e-5 as GDN's", "GKA", {"gka_config": {"norm_eps": 1e-5}}),
    "gla": Layer("GLA", "GLA", fits_as="gla"),
    "kda": Layer("KDA", "KDA", fits_as="kda"),
}
USUAL = tuple(LAYERS)  # what a plan has unless it is told otherwise


def with_eps(layer: str, eps: float) -> Layer:
    """With another ε in the norm of the layer's output."""
    like = LAYERS[layer]
    choices = {key: value | {"norm_eps": eps} for key, value in like.choices.items()}
    title = f"{like.title}, ε {eps:.0e}".replace("e-0", "e-")
    return Layer(title, like.token, choices or {f"{layer}_config": {"norm_eps": eps}}, like.fits_as)


LAYERS |= {f"{layer}-eps-1e-{n}": with_eps(layer, 10.0**-n) for layer in ("gka", "gdn", "gdn-narrow") for n in (4, 3)}
FIRST_THREE = ("attention", "gdn", "gka")  # those that get a second seed
MATCHES = ("parameters", "mlp")


def model(size: str, layer: str, match: str = "parameters", vocabulary: int = VOCABULARY) -> dict[str, object]:
    """The configuration of a model of one kind of layer."""
    chosen, what = SIZES[size], LAYERS[layer]
    fitted = chosen.fitted.get(what.fits_as) if match == "parameters" else None
    blocks, mlp = chosen.blocks, chosen.mlp
    if what.token == "M2":
        blocks = fitted or 2 * chosen.blocks
    elif fitted:
        mlp = fitted
    config = common(size, vocabulary) | {"hybrid_override_pattern": f"{blocks}x{what.token}", "intermediate_size": mlp}
    if what.token == "GLA":  # half as many heads, with keys half as wide as all of them together
        config["gla_config"] = {"num_heads": chosen.heads // 2}
    return config | what.choices


def common(size: str, vocabulary: int = VOCABULARY) -> dict[str, object]:
    chosen = SIZES[size]
    config: dict[str, object] = {
        "model_type": "hybrid_qwen3",
        "hidden_size": chosen.width,
        "intermediate_size": chosen.mlp,
        "num_attention_heads": chosen.heads,
        "num_key_value_heads": chosen.heads,
        "head_dim": chosen.head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": chosen.deviation,
        "max_position_embeddings": chosen.length,
    }
    return config | ({"eos_token_id": END} if vocabulary == VOCABULARY else {})
