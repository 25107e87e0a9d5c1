"""A decoder of the Llama kind whose attention is the ridge regression itself: norm, q k v, answer, MLP; loss on the
next token. The solver is handed in."""

from __future__ import annotations

import torch
from methods import states
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, heads: int, width: int):
        super().__init__()
        size = heads * width
        self.heads, self.width = heads, width
        self.norms = nn.ModuleList([nn.RMSNorm(size, eps=1e-6) for _ in range(2)])
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.gate_up = nn.Linear(size, 2 * 2 * size, bias=False)
        self.down = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: torch.Tensor, answer) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.view(len(x), self.heads, self.width).transpose(0, 1) for part in parts)
        q, k = (functional.normalize(part, dim=-1) for part in (q, k))
        h, norm = states(k)
        solved = answer(h, q) / norm.unsqueeze(-1)
        u = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), dim=-3)
        o = torch.matmul(solved.unsqueeze(-2), u).squeeze(-2)
        x = x + self.out(o.transpose(0, 1).flatten(1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, heads * width)
        self.blocks = nn.ModuleList([Block(heads, width) for _ in range(layers)])
        self.norm = nn.RMSNorm(heads * width, eps=1e-6)
        self.head = nn.Linear(heads * width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, answer) -> torch.Tensor:
        """The loss of one sequence."""
        x = self.embedding(tokens[:-1])
        for block in self.blocks:
            x = block(x, answer)
        return functional.cross_entropy(self.head(self.norm(x)), tokens[1:])
