"""What on_device.sh has trained, looked at, and every exchange of a cut layer in groups of one rank (NCCL on a GPU)."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import gka
from gka import _collectives as exchange
from gka._context import cut_sequence
from gka._ranks import Ranks
from gka._tensor import cut_heads


def losses(run):
    return torch.tensor([json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()])


def look_at_runs(folder, device):
    whole, stopped, float32 = (losses(folder / name) for name in ("whole", "stopped", "float32"))
    print(f"loss {whole[0]:.4f} -> {whole[-1]:.4f}; bfloat16 from float32 by {(whole[:6] - float32).abs().max():.1e}")
    print(f"a run that was stopped differs by {(whole - stopped).abs().max():.1e}")
    assert len(whole) == len(stopped) == 12
    assert whole.isfinite().all() and whole[-1] < whole[0]
    assert (whole - stopped).abs().max() < 2e-2  # two orders of a GPU's sums in bfloat16
    assert (whole[:6] - float32).abs().max() < 5e-2
    model = gka.load(folder / "whole")
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "the masters are float32"
    ids = torch.arange(64, device=device).unsqueeze(0)
    assert gka.load(folder / "whole", device=device)(ids).isfinite().all()


def gap(got, want):
    return ((got - want).norm() / want.norm().clamp_min(1e-6)).item()


def exchanges(device):
    """In a group of one rank what is sent comes back."""
    group, x = dist.group.WORLD, torch.randn(2, 3, 4, 4, device=device, requires_grad=True)
    decay = torch.ones(2, 3, device=device, requires_grad=True)
    results = [exchange.gather(x.detach(), group)[0], exchange.gather_past(x, 1, group), exchange.shift(x, group)]
    results += [exchange.fold_past(x, decay, group), exchange._Copy.apply(x, group), exchange._Sum.apply(x, group)]
    assert [gap(y, x) for y in results] == [0, 0, 1, 1, 0, 0]  # nothing was before the first rank
    sum(y.sum() for y in results[1:]).backward()
    assert x.grad.isfinite().all() and decay.grad.isfinite().all()


def cut_in_one(device, ranks):
    """A model whose sequences and heads are cut over one rank is the model."""
    config = json.loads(Path("recall.json").read_text())["model"]
    torch.manual_seed(0)
    whole = gka.models.Decoder(config, device=device)
    ids = torch.randint(512, (2, 256), device=device)
    wanted = torch.autograd.grad(whole.loss(ids, ids)[0], list(whole.parameters()))
    cut = gka.models.Decoder(config, device="meta")
    cut_heads(cut, ranks.mesh["tensor"])
    cut_sequence(cut, ranks.group("context"))
    cut.to_empty(device=device)
    with torch.no_grad():
        for mine, its in zip(cut.parameters(), whole.parameters(), strict=True):
            (mine.to_local() if hasattr(mine, "to_local") else mine).copy_(its)
    got = torch.autograd.grad(cut.loss(ids, ids)[0], list(cut.parameters()))
    got = [g.to_local() if hasattr(g, "to_local") else g for g in got]
    worst = max(gap(a, b) for a, b in zip(got, wanted, strict=True))
    print(f"a model cut over one rank: its gradients differ by {worst:.1e}")
    assert worst < 5e-3  # float32; a GPU's products may be in TF32


def main():
    folder = Path(sys.argv[1])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if not on_gpu:
        print("there is no GPU here: gloo on the CPU")
    ranks = Ranks(device)
    look_at_runs(folder, device)
    exchanges(device)
    cut_in_one(device, ranks)
    dist.destroy_process_group()
    print(
        "on_device: all of it holds, " + (f"NCCL on {torch.cuda.get_device_name(0)}" if on_gpu else "gloo on the CPU")
    )


if __name__ == "__main__":
    main()
