"""What ranks send each other inside a layer, each with its gradient. Every rank of a group takes part in every one of
them, forward and backward, in the same order."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup
# Newer torch has other names for the two.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Copy(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def copy(x: Tensor, group: Group) -> Tensor:
    """The same on all ranks, each of which does something else with it: gradients add up."""
    return _Copy.apply(x, group) if group.size() > 1 else x


def sum_parts(x: Tensor, group: Group) -> Tensor:
    """The sum of what the ranks have, with which all of them do the same."""
    return _Sum.apply(x, group) if group.size() > 1 else x


def gather(x: Tensor, group: Group) -> Tensor:
    """[ranks, …]; no gradient."""
    pieces = torch.empty((group.size(), *x.shape), dtype=x.dtype, device=x.device)
    _all_gather(pieces.view(-1), x.contiguous().view(-1), group=group)
    return pieces


class _Shift(Function):
    """One neighbour's message, first rank to last; the gradient goes the other way."""

    @staticmethod
    def pass_on(x: Tensor, group: Group, by: int) -> Tensor:
        rank, size = group.rank(), group.size()
        received = torch.zeros_like(x, memory_format=torch.contiguous_format)
        messages = []
        if 0 <= rank + by < size:
            messages.append(dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=rank + by))
        if 0 <= rank - by < size:
            messages.append(dist.P2POp(dist.irecv, received, group=group, group_peer=rank - by))
        for message in dist.batch_isend_irecv(messages) if messages else []:
            message.wait()
        return received

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _Shift.pass_on(x, group, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _Shift.pass_on(gradient, ctx.group, -1), None


def shift(x: Tensor, group: Group) -> Tensor:
    """What the rank before has; zeros on the first rank."""
    return _Shift.apply(x, group)


class _GatherPast(Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(gather(x, group)[: group.rank() + 1].unbind(0), dim)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        rank, size = ctx.group.rank(), ctx.group.size()
        pieces = gradient.chunk(rank + 1, ctx.dim)
        sent = torch.zeros((size, *pieces[0].shape), dtype=gradient.dtype, device=gradient.device)
        sent[: rank + 1] = torch.stack(pieces)
        mine = torch.empty_like(sent[0])
        _reduce_scatter(mine.view(-1), sent.view(-1), group=ctx.group)
        return mine, None, None


def gather_past(x: Tensor, dim: int, group: Group) -> Tensor:
    """What the ranks up to this one have, one after the other along ``dim``."""
    return _GatherPast.apply(x, dim, group)


def _fold(pieces: Tensor, decays: Tensor) -> Tensor:
    """Σ_j (Π_{i>j} decays_i) pieces_j, the last one undecayed: pieces [n, N, H, …], decays [n, N, H]."""
    total = pieces.new_zeros(pieces.shape[1:])
    for piece, decay in zip(pieces, decays, strict=True):
        total = total * decay[..., None, None] + piece
    return total


class _FoldPast(Function):
    """P_c = Σ_{j<c} (Π_{j<i<c} D_i) S_j, from every rank's own sum S and decay D = exp(log_decay).

    With G_c the gradient that reaches P_c on rank c, the gradient of S_c is Ḡ_{c+1} = Σ_{j>c} (Π_{c<i<j} D_i) G_j: the
    same exchange, seen from the other end; that of log D_c is ⟨Ḡ_{c+1}, D_c P_c⟩. Nobody keeps another rank's state.
    """

    @staticmethod
    def forward(ctx, own: Tensor, log_decay: Tensor, group: Group) -> Tensor:
        rank = group.rank()
        decays = gather(log_decay, group).exp()
        past = _fold(gather(own, group)[:rank], decays[:rank])
        ctx.group = group
        ctx.save_for_backward(past, decays)
        return past

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        past, decays = ctx.saved_tensors
        rank = ctx.group.rank()
        later = gather(gradient, ctx.group)[rank + 1 :].flip(0)
        reached = _fold(later, decays[rank + 1 :].flip(0))
        of_decay = (reached * past).flatten(-2).sum(-1) * decays[rank]
        return reached, of_decay, None


def fold_past(own: Tensor, log_decay: Tensor, group: Group) -> Tensor:
    """What a memory holds where this rank's tokens begin, from what each rank's own tokens leave in an empty one.

    Args:
        own: this rank's sum, [N, H, D, V].
        log_decay: how much an older state fades over this rank's tokens, log, [N, H].
    """
    return _FoldPast.apply(own, log_decay, group)
