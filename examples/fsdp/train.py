"""A small Gated KalmaNet model trained with torch's own tools: FSDP2 under torchrun, here on two CPU processes.

    torchrun --nproc-per-node 2 examples/fsdp/train.py --steps 60

The task: pairs of tokens, then the first of one pair again; the model must name the second. The layer is an ordinary
nn.Module, so what works with other modules (fully_shard, AdamW, clipping, state dicts) works with it.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import gka.nn

PAIRS, VOCABULARY, WIDTH = 4, 32, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gka = gka.nn.GatedKalmaNet(WIDTH, head_dim=WIDTH, num_q_heads=1, num_iter=10)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gka(self.norm(x))[0]
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -1])


def batch(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """[rows, 2·PAIRS + 1] tokens and the answer of each row."""
    half = VOCABULARY // 2
    keys = torch.stack([torch.randperm(half, generator=generator)[:PAIRS] for _ in range(rows)])
    values = torch.randint(half, VOCABULARY, (rows, PAIRS), generator=generator)
    asked = torch.randint(PAIRS, (rows, 1), generator=generator)
    pairs = torch.stack([keys, values], -1).flatten(1)
    return torch.cat([pairs, keys.gather(1, asked)], 1), values.gather(1, asked).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=64, help="sequences per process and step")
    parser.add_argument("--save", help="write the whole state dict here at the end")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights everywhere
    torch.set_num_threads(1)
    model = Model()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    plain = [p for p in model.parameters() if p.ndim > 1]
    bare = [p for p in model.parameters() if p.ndim <= 1]  # norms, biases, A_log, dt_bias: no weight decay
    optimizer = torch.optim.AdamW([{"params": plain}, {"params": bare, "weight_decay": 0.0}], lr=3e-3)
    generator = torch.Generator().manual_seed(1 + rank)  # other data on each process
    for step in range(1, arguments.steps + 1):
        tokens, answers = batch(generator, arguments.rows)
        loss = functional.cross_entropy(model(tokens), answers)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 1 or step % 20 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            norm = norm.full_tensor().item()
            if rank == 0:
                print(f"step {step:4d}  loss {mean.item() / world:.4f}  gradient norm {norm:.3f}", flush=True)
    if arguments.save:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(weights, arguments.save)
    dist.barrier()  # nobody leaves while another still sends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
