"""What layers write into the residual stream before anything is learned: root mean squares at the first weights.

  embedding   of the tokens, which is the stream before the first block
  layer, MLP  of what the first block's layer and its MLP add to it
  kept        cosine between a token's embedding and the stream behind the last block
  gradient    length of the loss's gradient with respect to the layers' projections

The same tokens for all: drawn at random, each of the second half one of the first half once more.

  first.py --size 12m --only gka gka-eps-1e-3 gdn
"""

from __future__ import annotations

import argparse
import sys

import torch
from sizes import LAYERS, SIZES, model
from sweep import ROOT
from torch.nn import functional

sys.path.insert(0, str(ROOT / "experiments"))

from console import run_program, table

import gka

VOCABULARY = 4096


def size_of(x: torch.Tensor) -> float:
    return x.detach().float().pow(2).mean().sqrt().item()


def look(size: str, layer: str, length: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    decoder = gka.models.Decoder(model(size, layer, vocabulary=VOCABULARY))
    added: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, output: object) -> None:
        added.append((output[0] if isinstance(output, tuple) else output).detach())

    norms = ("input_layernorm", "post_attention_layernorm")
    for block in decoder.model.layers:
        for name, module in block.named_children():
            if name not in norms:
                module.register_forward_hook(keep)
    half = torch.randint(VOCABULARY, (length // 2,))
    ids = torch.cat([half, half[torch.randperm(length // 2)]])[None]
    logits = decoder(ids[:, :-1])
    functional.cross_entropy(logits[0], ids[0, 1:]).backward()
    embedded = decoder.model.embed_tokens.weight.detach()[ids[:, :-1]]
    gradients = [
        p.grad.pow(2).sum() for name, p in decoder.named_parameters() if ".mlp." not in name and "_proj" in name
    ]
    parts = [size_of(x) for x in added[:2]] + [float("nan")] * (2 - len(added[:2]))
    return {
        "embedding": size_of(embedded),
        "layer": parts[0],
        "MLP": parts[1] if LAYERS[layer].token != "M2" else float("nan"),
        "kept": functional.cosine_similarity(embedded + sum(added), embedded, dim=-1).mean().item(),
        "gradient": torch.stack(gradients).sum().sqrt().item(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="12m")
    parser.add_argument("--only", nargs="+", choices=list(LAYERS), default=list(LAYERS), metavar="LAYER",
                        help=f"any of {', '.join(LAYERS)} (all)")  # fmt: skip
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    for layer in options.only:
        found = look(options.size, layer, options.length, options.seed)
        rows.append([LAYERS[layer].title, *(f"{value:.4f}" for value in found.values())])
    print(table(["layer", *found], rows))
    return 0


if __name__ == "__main__":
    run_program(main)
