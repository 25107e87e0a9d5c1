"""torch's ring, as attention under context parallel calls it: output and gradients against attention over the whole
sequence. One rank: NCCL. Several ranks share the card, which NCCL does not allow: their messages go through the CPU and
gloo (which crashes on messages that lie on the card). Without a card: the CPU's kernel."""

import os

import torch
import torch.distributed as dist
from torch.nn import functional

from gka import _ring

HEADS, KV_HEADS, HEAD_DIM, TOKENS, BATCH = 8, 2, 128, 1024, 2


class ThroughTheCpu:
    """One of torch's rotaters, with messages that lie on the card."""

    def __init__(self, rotater, device):
        self.rotater, self.device = rotater, device

    def exchange_buffers(self, buffer):
        self.rotater.exchange_buffers(buffer.cpu())

    def next_buffer(self):
        return self.rotater.next_buffer().to(self.device)


def send_through_the_cpu(device):
    from torch.distributed.tensor.experimental._context_parallel import _attention

    create = _attention._create_rotater
    _attention._create_rotater = lambda *arguments, **named: ThroughTheCpu(create(*arguments, **named), device)


def attend(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def check(device, dtype, bound):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    whole = [torch.randn(BATCH, TOKENS, h, HEAD_DIM, dtype=torch.float64).to(dtype) for h in heads]
    exact = [t.to(device, torch.float64).requires_grad_() for t in whole[:3]]
    wanted = attend(*exact)
    wanted = [wanted, *torch.autograd.grad(wanted, exact, whole[3].to(device, torch.float64))]
    piece = slice(TOKENS // ranks * rank, TOKENS // ranks * (rank + 1))
    mine = [t[:, piece].to(device).requires_grad_() for t in whole[:3]]
    assert _ring.fits(mine[0]), "torch's ring has no kernel for this"
    out = _ring.attention(*mine, dist.group.WORLD)
    got = [out, *torch.autograd.grad(out, mine, whole[3][:, piece].to(device))]
    gaps = [((a - b[:, piece]).norm() / b[:, piece].norm()).item() for a, b in zip(got, wanted, strict=True)]
    worst = torch.tensor(max(gaps))
    dist.all_reduce(worst if dist.get_backend() == "gloo" else (worst := worst.to(device)), dist.ReduceOp.MAX)
    if rank == 0:
        print(f"the ring on {ranks} ranks, {device}, {dtype}, {dist.get_backend()}: differs by {worst.item():.1e}")
    assert worst < bound


def main():
    on_gpu = torch.cuda.is_available()
    alone = int(os.environ["WORLD_SIZE"]) == 1
    dist.init_process_group("nccl" if on_gpu and alone else "gloo")
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if not alone:
        send_through_the_cpu(device)
    check(device, torch.bfloat16, 1e-2)
    if not on_gpu:
        check(torch.device("cpu"), torch.float64, 1e-12)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
