"""The messages ranks send each other inside a layer, each with its gradient. Every rank of a group takes part in each
of them, forward and backward, in the same order."""

from collections.abc import Sequence

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
    """The same tensor on all ranks. Each rank uses it differently, so gradients add up."""
    return _Copy.apply(x, group) if group.size() > 1 else x


def sum_parts(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' tensors, which all ranks use alike."""
    return _Sum.apply(x, group) if group.size() > 1 else x


def gather(x: Tensor, group: Group) -> Tensor:
    """[ranks, …]; no gradient."""
    pieces = torch.empty((group.size(), *x.shape), dtype=x.dtype, device=x.device)
    _all_gather(pieces.view(-1), x.contiguous().view(-1), group=group)
    return pieces


class _GatherParts(Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(gather(x, group).unbind(0), dim)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _scattered_sum(gradient.chunk(ctx.group.size(), ctx.dim), ctx.group), None, None


def _scattered_sum(pieces: Sequence[Tensor], group: Group) -> Tensor:
    """Every rank has a piece for every rank: the sum of the pieces for this one."""
    sent = torch.stack(list(pieces))
    mine = torch.empty_like(sent[0])
    _reduce_scatter(mine.view(-1), sent.view(-1), group=group)
    return mine


def gather_parts(x: Tensor, dim: int, group: Group) -> Tensor:
    """The ranks' tensors, one after the other along ``dim``; each rank uses the whole differently."""
    return _GatherParts.apply(x, dim, group) if group.size() > 1 else x


def sum_for_each(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' tensors, which each rank uses differently."""
    return copy(sum_parts(x, group), group)


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
    """The tensor of the rank before; zeros on the first rank."""
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
        return _scattered_sum([*pieces, *[torch.zeros_like(pieces[0])] * (size - rank - 1)], ctx.group), None, None


def gather_past(x: Tensor, dim: int, group: Group) -> Tensor:
    """The tensors of the ranks up to this one, one after the other along ``dim``."""
    return _GatherPast.apply(x, dim, group)


def _is_matrix(left: Tensor, state: Tensor) -> bool:
    return left.dim() == state.dim()


def _carry(state: Tensor, left: Tensor) -> Tensor:
    """What tokens leave of an older state."""
    return left @ state if _is_matrix(left, state) else state * left.reshape(left.shape + (1,) * (4 - left.dim()))


def _fold(pieces: Tensor, left: Tensor) -> Tensor:
    """Σ_j (… left_{j+2} left_{j+1}) pieces_j: pieces [n, N, H, D, V], left as in fold_past with n before it."""
    total = pieces.new_zeros(pieces.shape[1:])
    for piece, of_older in zip(pieces, left, strict=True):
        total = _carry(total, of_older) + piece
    return total


class _FoldPast(Function):
    """P_c = Σ_{j<c} (A_{c−1} … A_{j+1}) S_j, from every rank's own S and what its tokens leave of an older state, A.

    With G_c the gradient that reaches P_c on rank c, that of S_c is Ḡ_{c+1} = Σ_{j>c} (A_{c+1}ᵀ … A_{j−1}ᵀ) G_j: the
    same exchange, seen from the other end; that of A_c is Ḡ_{c+1} P_cᵀ. No rank keeps another rank's S.
    """

    @staticmethod
    def forward(ctx, own: Tensor, left: Tensor, group: Group) -> Tensor:
        rank = group.rank()
        lefts = gather(left, group)
        past = _fold(gather(own, group)[:rank], lefts[:rank])
        ctx.group = group
        ctx.save_for_backward(past, lefts)
        return past

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        past, lefts = ctx.saved_tensors
        rank = ctx.group.rank()
        later = gather(gradient, ctx.group)[rank + 1 :].flip(0)
        matrices = _is_matrix(lefts[rank], past)
        reached = _fold(later, (lefts.mT if matrices else lefts)[rank + 1 :].flip(0))
        if matrices:
            return reached, reached @ past.mT, None
        of_left = (reached * past).sum(-1)
        return reached, of_left if lefts.dim() == 4 else of_left.sum(-1), None


def fold_past(own: Tensor, left: Tensor, group: Group) -> Tensor:
    """The memory where this rank's tokens begin, from what each rank's own tokens leave in an empty memory.

    Args:
        own: what this rank's tokens leave in an empty memory, [N, H, D, V].
        left: what they leave of an older state: a factor [N, H], one per key channel [N, H, D], or a matrix that it is
            multiplied with, [N, H, D, D].
    """
    return _FoldPast.apply(own, left, group)
