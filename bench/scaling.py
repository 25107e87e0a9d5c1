"""What training the 8B model at 128K tokens would take on many GPUs: an estimate on paper, from measured pieces.

    python bench/scaling.py            # writes its section of docs/distributed.md

Measured, from docs/benchmarks.md and docs/training.md: how much of the card's own matrix rate a whole step of the 440M
model with GKA reaches at the longest sequence, and what a block keeps for its backward pass. Counted: FLOP, bytes sent
(docs/distributed.md), memory. Assumed, since no second card was there to measure: the two bandwidths below.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, markdown, write_section

from gka.models import Decoder, read_config

TOKENS = 131_072  # of a sequence
BATCH = 32 * TOKENS  # of a step
WITHIN, BETWEEN = 450e9, 50e9  # bytes per second and GPU: NVLink in a machine of 8, 400 Gbit/s per GPU between them
LAYOUTS = [(8, 1, 8), (64, 8, 8), (512, 32, 16)]  # GPUs = data × context
KEPT_PER_TOKEN = 3.31e9 / 65_536 / 1024  # bytes per token and channel of the 440M model's block: docs/training.md


@dataclass
class Model:
    parameters: int
    outside: int  # embedding and head
    layers: int
    heads: int
    head_dim: int
    hidden: int
    flop: float  # per token, forward and backward


def count(path: Path) -> Model:
    """As `gka bench train` counts: 6 FLOP per parameter but those of an untied embedding, and the memory's own."""
    c = read_config(json.loads(path.read_text()))
    sizes = {name: p.numel() for name, p in Decoder(c, device="meta").named_parameters()}
    embedding = sizes["model.embed_tokens.weight"]
    outside = embedding + sizes.get("lm_head.weight", 0)
    used = sum(sizes.values()) - (0 if c["tie_word_embeddings"] else embedding)
    layers, heads, d = len(c["layer_types"]), c["num_attention_heads"], c["head_dim"]
    solves = 2 * 2 * d * d * c["gka_config"]["num_iter"]
    memory = layers * heads * (solves + (2 + 4 + 6 + 8) * d * d)
    return Model(sum(sizes.values()), outside, layers, heads, d, c["hidden_size"], 6.0 * used + memory)


def measured() -> tuple[float, float]:
    """Tokens per second of the 440M model at its longest sequence, and the card's matrix rate, FLOP per second."""
    text = (ROOT / "docs/benchmarks.md").read_text()
    rows = re.findall(r"\| 440m/gka \| ([\d,]+) \| ([\d,]+) \|", text)
    rate = re.search(r"a matrix product runs at (\d+) TFLOP/s", text)
    return float(rows[-1][1].replace(",", "")), float(rate[1]) * 1e12


def row(model: Model, useful: float, gpus: int, data: int, context: int, recompute: bool) -> list[str]:
    tokens = TOKENS // context  # of one part on one GPU
    parts = BATCH // TOKENS // data
    state = 16 * model.parameters / gpus  # float32: weights, gradients, two averages
    block = (model.parameters - model.outside) / model.layers
    whole = 2 * (model.outside + 2 * block) + 4 * model.outside  # bfloat16, the next block on its way; head's gradient
    kept = KEPT_PER_TOKEN * model.hidden * tokens
    activations = (2 * model.hidden * tokens * model.layers + kept) if recompute else kept * model.layers
    weights = parts * 8 * model.parameters * (gpus - 1) / gpus  # gathered twice in bfloat16, summed in float32
    memory = model.heads * 2 * model.head_dim**2 * 4
    states = parts * 2 * model.layers * memory
    compute = parts * tokens * model.flop * (4 / 3 if recompute else 1) / useful
    speed = WITHIN if gpus <= 8 else BETWEEN
    sending = (weights + states * (context - 1)) / speed
    step = max(compute, sending)
    return [
        str(gpus),
        f"{data} × {context}",
        "yes" if recompute else "no",
        str(parts),
        f"{(state + whole + activations) / 1e9:.0f}",
        f"{weights / 1e9:,.0f}",
        f"{states / 1e9:.2f}",
        f"{compute:.1f}",
        f"{sending:.1f}",
        f"{step:.1f}",
        f"{BATCH / step / 1e3:,.0f}k",
    ]


def main() -> None:
    small, large = count(ROOT / "configs/440m/gka.json"), count(ROOT / "configs/8b/gka.json")
    speed, rate = measured()
    useful = speed * small.flop
    rows = [row(large, useful, *layout, recompute) for layout in LAYOUTS for recompute in (False, True)]
    names = "GPUs | data × context | recompute | parts | memory, GB | weights and gradients sent, GB"
    names += " | states sent, GB | computing, s | sending, s | step, s | tokens/s"
    text = f"""## What 8, 64 and 512 GPUs would take: an estimate

`python bench/scaling.py`, from `docs/benchmarks.md`: on paper. Nobody has run this; there was one card.

The 8B model of `configs/8b/gka.json` ({large.parameters / 1e9:.1f} billion parameters), sequences of {TOKENS:,} tokens,
{BATCH // TOKENS} of them ({BATCH / 1e6:.1f}M tokens) in a step, per GPU:

{markdown(names.split(" | "), rows)}

Measured: the 440M model trains at {speed:,.0f} tokens/s at its longest sequence on an H200, which is
{useful / rate:.0%} of the card's matrix rate of {rate / 1e12:.0f} TFLOP/s by this count of FLOP
({large.flop / 1e9:.0f} billion per token here); the 8B model is taken to reach the same share, though `gka.train` fuses
less than `gka train`, which was measured. A block keeps {KEPT_PER_TOKEN * large.hidden / 1e3:.0f} kB per token, the
440M's times the width. Counted: weights, gradients and averages are cut over all GPUs (16 bytes per parameter), and
each part of a batch gathers the weights twice in bfloat16 and sums gradients in float32. Assumed: {WITHIN / 1e9:.0f}
GB/s to and from a GPU within a machine of 8, {BETWEEN / 1e9:.0f} GB/s between machines; sending hides behind computing
entirely. Recomputing (`checkpoint_activations`) costs a third of the forward and backward pass.
"""
    write_section(ROOT / "docs/distributed.md", "scaling", text)
    print(text)


if __name__ == "__main__":
    main()
