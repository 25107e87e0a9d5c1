"""What ranks of the pool are asked to do; each function runs on every rank of a group."""

import os

import torch
import torch.distributed as dist

import gka
from gka import _collectives, _ring, train
from gka._adamw import local
from gka._context import Context
from gka._library import load_floors
from gka._ranks import Ranks, Refusal
from gka._sharding import part_of, whole_of
from gka._tensor import cut_heads


def train_run(folder, file, assignments=(), resume=False, stop_after=0, **cut):
    """A run of gka.train in this group; its outcome, or the sentence of a refusal. ``stop_after``: a signal comes in
    that step, to the last rank alone."""
    load_floors()
    os.chdir(folder)
    ranks = None
    try:
        plan = train.Plan(train.read_plan(file, list(assignments)))
        ranks = Ranks(torch.device("cpu"), **cut)
        if stop_after and ranks.rank == ranks.size - 1:
            take = train.Trainer._take_step

            def take_and_stop(self):
                self.signals.received = self.step == stop_after
                return take(self)

            train.Trainer._take_step = take_and_stop
        return train.train(plan, ranks, resume=resume)
    except Refusal as error:
        return str(error)
    finally:
        if stop_after and ranks is not None and ranks.rank == ranks.size - 1:
            train.Trainer._take_step = take


def _gap(got, want):
    return ((got - want).norm() / want.norm().clamp_min(1)).item()


def layer_in_context(make, tokens=24, batch=2, bounds=None):
    """A layer on a sequence that is cut over the ranks, against the same on the whole: the largest difference of the
    output, of the input's gradient and of every parameter's, and what this rank has sent. ``bounds``: of packed
    documents."""
    kind, arguments = make
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    layer = getattr(gka.nn, kind)(**arguments, dtype=torch.float64)
    if not arguments.get("num_iter", 1):
        layer.alpha_proj.requires_grad_(False)  # nothing asks for it
    learned = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(batch, tokens, arguments["hidden_size"], dtype=torch.float64, requires_grad=True)
    reached = torch.randn(batch, tokens, arguments["hidden_size"], dtype=torch.float64)
    packed = None if bounds is None else torch.tensor(bounds)
    whole, _ = layer(x, None, packed)
    wanted = torch.autograd.grad(whole, [x, *learned], reached)

    place = dist.get_rank()
    mine = slice(tokens // ranks * place, tokens // ranks * (place + 1))
    layer.context = Context(dist.group.WORLD)
    if bounds is not None:
        mine_alone = [0, *(b - mine.start for b in bounds if mine.start < b < mine.stop), tokens // ranks]
        layer.context.enter(mine_alone, mine.start - max(b for b in bounds if b <= mine.start))
        packed = torch.tensor(mine_alone)
    part = x.detach()[:, mine].clone().requires_grad_()
    sent, gather = [], _collectives.gather
    try:
        _collectives.gather = lambda tensor, group: (sent.append(tensor.numel()), gather(tensor, group))[1]
        y, _ = layer(part, None, packed)
        forward = sum(sent)
        got = list(torch.autograd.grad(y, [part, *learned], reached[:, mine]))
    finally:
        _collectives.gather = gather
    for gradient in got[1:]:
        dist.all_reduce(gradient)
    gaps = [_gap(y, whole[:, mine]), _gap(got[0], wanted[0][:, mine])]
    gaps += [_gap(a, b) for a, b in zip(got[1:], wanted[1:], strict=True)]
    return max(gaps), forward, sum(sent) - forward


def attention_in_context(make, with_ring):
    """layer_in_context's largest difference, and whether torch's ring was what attended; without it: ours."""
    calls, attention, options = [], _ring.attention, _ring._cp_options
    try:
        _ring.attention = lambda *arguments: (calls.append(1), attention(*arguments))[1]
        _ring._cp_options = options if with_ring else None
        return layer_in_context(make)[0], bool(calls)
    finally:
        _ring.attention, _ring._cp_options = attention, options


def model_with_cut_heads(config):
    """The loss of a model whose heads are cut over the ranks and every gradient, against those of the whole model: the
    largest difference."""
    ranks = Ranks(torch.device("cpu"), tensor=dist.get_world_size())
    torch.manual_seed(0)
    whole = gka.models.Decoder(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ids = torch.randint(config["vocab_size"], (2, 20))
    loss, _ = whole.loss(ids, ids)
    wanted = torch.autograd.grad(loss, list(whole.parameters()))

    cut = gka.models.Decoder(config, device="meta", dtype=torch.float64)
    cut_heads(cut, ranks.mesh["tensor"])
    cut.to_empty(device="cpu")
    with torch.no_grad():
        for mine, its in zip(cut.parameters(), whole.parameters(), strict=True):
            local(mine).copy_(part_of(its, mine))
    part, _ = cut.loss(ids, ids, divisor=float(ids.numel()))
    got = torch.autograd.grad(part, list(cut.parameters()))
    pairs = [(ranks.sum(part.detach().clone()), loss), *zip(map(whole_of, got), wanted, strict=True)]
    return max(_gap(a, b) for a, b in pairs)


def operator_on_dtensors(dim, **options):
    """The operator on tensors cut along ``dim`` against the whole: the largest difference of outputs and gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import gka.dtensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    shapes = {"q": (4, 150, 4, 8), "k": (4, 150, 4, 8), "v": (4, 150, 4, 6)}
    whole = {name: torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    whole |= {"log_decay": -torch.rand(4, 150, 4).double(), "beta": torch.rand(4, 150, 4).double()}
    cut = {name: distribute_tensor(t, mesh, [Shard(dim)]).requires_grad_() for name, t in whole.items()}
    whole = {name: t.requires_grad_() for name, t in whole.items()}
    weight = torch.randn(4, 150, 4, 6, dtype=torch.float64)
    wanted, state = gka.gated_kalmanet(**whole, **options)
    gradients = torch.autograd.grad(wanted, list(whole.values()), weight)
    got, its_state = gka.gated_kalmanet(**cut, **options)
    its = torch.autograd.grad(got, list(cut.values()), distribute_tensor(weight, mesh, [Shard(dim)]))
    assert got.placements == its[0].placements == (Shard(dim),)
    pairs = [(got, wanted), *zip(its, gradients, strict=True)]
    if state is not None:
        pairs += zip(its_state, state, strict=True)
    return max(_gap(a.full_tensor(), b) for a, b in pairs)
