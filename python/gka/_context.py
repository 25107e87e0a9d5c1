"""A sequence cut over ranks: each rank computes its own tokens, and layers exchange what crosses the cuts.

A memory sends the last tokens its convolutions see, and one state. Every rank sums up its own tokens, all ranks gather
these sums at once, and each folds those before it (no rank waits for the one before). Plain causal attention is torch's
own ring. Where the ring does not apply (a window, packed documents, a type without a kernel) ranks gather keys and
values; where a window ends within the neighbour's piece, they take only the neighbour's.

Packed documents may begin anywhere: what a rank receives belongs to its first document alone, and a rank in which a
document begins passes on nothing from before it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import _ring
from ._collectives import fold_past, gather_past, shift
from ._states import gated_kalmanet_states, memory_states


class Context:
    """This rank's place in the sequence, for the layers that ask (``layer.context``)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.bounds: list[int] | None = None
        self._before = 0

    def enter(self, bounds: list[int] | None, before: int = 0) -> None:
        """For packed documents: where this rank's documents begin and end among its tokens ([0, …, T]), and how many
        tokens of the first one lie on other ranks. None: rows that are cut alike. Holds until the next call."""
        self.bounds, self._before = bounds, before

    def before(self, tokens: int) -> int:
        """How many tokens of this rank's first sequence lie on the ranks before."""
        return self.rank * tokens if self.bounds is None else self._before

    def offset(self, x: Tensor) -> Tensor:
        """The same for each of its sequences."""
        if self.bounds is None:
            return torch.full((x.shape[0],), self.before(x.shape[1]), dtype=torch.long, device=x.device)
        offset = torch.zeros(len(self.bounds) - 1, dtype=torch.long, device=x.device)
        offset[0] = self._before
        return offset

    def _of_all(self, first: Tensor) -> Tensor:
        """A state for every sequence: from other ranks for the first, an empty one for those that begin here."""
        if self.bounds is None:
            return first
        if not self._before:
            first = first * 0  # it still has a gradient to hand back, in which other ranks take part
        return torch.cat([first, first.new_zeros(len(self.bounds) - 2, *first.shape[1:])])

    def _last(self, x: Tensor | None) -> Tensor | None:
        """The tokens of the sequence that reaches the next rank."""
        return x if self.bounds is None or x is None else x[:, self.bounds[-2] :]

    def _left(self, of_older: Tensor) -> Tensor:
        """What this rank's tokens leave of an older state: nothing if a document begins among them."""
        begins = self.bounds is not None and (len(self.bounds) > 2 or not self._before)
        return torch.zeros_like(of_older) if begins else of_older

    def halo(self, inputs: list[Tensor], widths: list[int]) -> list[Tensor | None]:
        """The last inputs of each convolution, [N, channels, width − 1], from the rank before; one message for all."""
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
        received = iter(shift(torch.cat(tails, 1), self.group).split([tail.shape[1] for tail in tails], 1))
        states: list[Tensor | None] = []
        for x, width in zip(inputs, widths, strict=True):
            state = next(received).unflatten(1, (x.shape[2], width - 1)) if width > 1 else None
            if state is not None and (strangers := width - 1 - self.before(x.shape[1])) > 0:  # of another document
                state = torch.cat([state[..., :strangers] * 0, state[..., strangers:]], -1)
            states.append(None if state is None else self._of_all(state))
        return states

    def past(self, own: Tensor, left: Tensor) -> Tensor:
        """The memory where each of this rank's sequences begins; see fold_past. One exchange."""
        return self._of_all(fold_past(own, self._left(left), self.group)).contiguous()

    def past_memory(self, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, *, rule: str) -> Tensor:
        """The state S of :func:`gka.memory` where each of this rank's sequences begins."""
        return self.past(*memory_states(*map(self._last, (k, v, log_decay, beta)), rule=rule))

    def past_kalmanet(
        self,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        *,
        decay_keys: bool = True,
        low: Tensor | None = None,
        solves: bool = True,
    ) -> tuple[Tensor | None, Tensor]:
        """The same for (H, U) of :func:`gka.gated_kalmanet`. ``low``: H is of these (sketched) keys; ``solves=False``:
        there is no H."""
        k, v, log_decay, beta, low = map(self._last, (k, v, log_decay, beta, low))
        h, u, fading = gated_kalmanet_states(k, v, log_decay, beta, decay_keys=decay_keys)
        fading = fading.exp()
        if not solves:
            return None, self.past(u, fading)
        if low is not None:
            h = gated_kalmanet_states(low, low, log_decay if decay_keys else None, beta)[0]
        if low is not None or not decay_keys:
            return self.past(h, fading if decay_keys else torch.ones_like(fading)), self.past(u, fading)
        both = self.past(torch.cat([h, u], -1), fading)
        h, u = both.split([h.shape[-1], u.shape[-1]], -1)
        return h.contiguous(), u.contiguous()

    def has_ring(self, q: Tensor) -> bool:
        """Whether torch's ring supports these queries; the same on every rank."""
        return self.bounds is None and _ring.fits(q)

    def ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of this rank's queries over the keys and values up to them, by torch."""
        return _ring.attention(q, k, v, self.group)

    def keys_and_values(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens up to this rank's last: all of them, or those that a window can reach."""
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

    def spans(self, queries: int, keys: int) -> list[tuple[slice, slice]]:
        """Which of this rank's queries see which of these keys: (queries, keys) of each of its sequences."""
        older = keys - queries  # of other ranks
        if self.bounds is None:
            return [(slice(0, queries), slice(0, keys))]
        starts, ends = self.bounds[:-1], self.bounds[1:]
        firsts = [older - min(self._before, older), *(older + start for start in starts[1:])]
        return [
            (slice(start, end), slice(first, older + end))
            for start, end, first in zip(starts, ends, firsts, strict=True)
        ]


def cut_sequence(model: nn.Module, group: dist.ProcessGroup) -> Context:
    """From here on every layer of the decoder computes its rank's part of the sequences."""
    context = Context(group)
    for block in model.model.layers:
        block.mixer.context = context
    return context
