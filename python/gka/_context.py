"""A sequence cut over ranks: each computes its own tokens, and layers exchange what reaches across the cuts.

A Gated KalmaNet layer sends the last tokens its convolutions see and one state: every rank sums up its own tokens, all
gather these sums at once, and each folds those before it (no rank waits for the one before). Attention gathers keys and
values, or, where its window ends within the neighbour, takes only the neighbour's.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import nn as layers
from ._collectives import fold_past, gather_past, shift
from ._ranks import Refusal


class Context:
    """This rank's place in the sequence, for the layers that ask (``layer.context``)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def offset(self, x: Tensor) -> Tensor:
        """Tokens before this rank's, of each sequence."""
        return torch.full((x.shape[0],), self.rank * x.shape[1], dtype=torch.long, device=x.device)

    def halo(self, inputs: list[Tensor | None], widths: list[int]) -> list[Tensor | None]:
        """What each convolution has seen last, [B, channels, width − 1], from the rank before; one message for all."""
        wanted = [(x, width - 1) for x, width in zip(inputs, widths, strict=True) if width > 1]
        if not wanted:
            return [None] * len(inputs)
        for x, reach in wanted:
            if x.shape[1] < reach:
                raise ValueError(
                    f"each context rank has {x.shape[1]} tokens, and a convolution of {reach + 1} reaches back {reach};"
                    " use fewer context ranks or longer sequences."
                )
        tails = [x[:, x.shape[1] - reach :].transpose(1, 2).flatten(1) for x, reach in wanted]
        received = shift(torch.cat(tails, 1), self.group).split([tail.shape[1] for tail in tails], 1)
        states = iter(received)
        return [
            next(states).unflatten(1, (x.shape[2], width - 1)) if width > 1 else None
            for x, width in zip(inputs, widths, strict=True)
        ]

    def past(self, h: Tensor | None, u: Tensor, log_decay: Tensor, decay_keys: bool) -> tuple[Tensor | None, Tensor]:
        """The memory where this rank's tokens begin, from what each rank's leave in an empty one: one exchange."""
        if h is None:
            return None, fold_past(u, log_decay, self.group)
        if not decay_keys or h.shape[2] != u.shape[2]:
            fading = log_decay if decay_keys else torch.zeros_like(log_decay)
            return fold_past(h, fading, self.group), fold_past(u, log_decay, self.group)
        both = fold_past(torch.cat([h, u], -1), log_decay, self.group)
        h, u = both.split([h.shape[-1], u.shape[-1]], -1)
        return h.contiguous(), u.contiguous()

    def keys_and_values(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Those of all tokens up to this rank's last that its queries see."""
        tokens = k.shape[1]
        if window is None or window - 1 > tokens:
            k, v = gather_past(torch.stack([k, v]), 2, self.group).unbind(0)
        elif window > 1:
            tail = torch.stack([k, v])[:, :, tokens - window + 1 :]
            before = shift(tail, self.group)
            if self.rank > 0:
                k, v = torch.cat([before, torch.stack([k, v])], 2).unbind(0)
            else:  # nothing was before; the message still has a gradient to hand back
                k = k + 0 * before.sum()
        return k, v


#: Layers that know how to ask.
CUT = (layers.GatedKalmaNet, layers.Attention)


def cut_sequence(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Every layer of a decoder computes its rank's part of the sequences from here on."""
    for place, block in enumerate(model.model.layers):
        if not isinstance(block.mixer, CUT):
            raise Refusal(
                f"layer {place} is {model.config['layer_types'][place]}, and sequences are cut over ranks for GKA and "
                "attention layers alone; train it with context_parallel 1."
            )
        block.mixer.context = Context(group)
