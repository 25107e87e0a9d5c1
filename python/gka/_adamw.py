"""The AdamW of `gka train`, over parameters of which each rank holds its part, and the norm of their gradient.

The fused kernel runs on the local parts; no rank ever has the whole optimiser state.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdamW:
    """Parameters by name; those in ``decaying`` decay."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        decaying: set[str],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.parameters, self.decaying = parameters, decaying
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.first = {name: torch.zeros_like(p.detach()) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(p.detach()) for name, p in parameters.items()}
        self.steps = torch.zeros((), dtype=torch.float32, device=next(iter(parameters.values())).device)

    def zero_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self.steps += 1
        for decays in (True, False):
            names = [n for n, p in self.parameters.items() if (n in self.decaying) == decays and p.grad is not None]
            names = [
                n for n in names if local(self.parameters[n]).numel() > 0
            ]  # a rank may hold nothing of a small one
            if not names:
                continue
            torch._fused_adamw_(
                [local(self.parameters[n].detach()) for n in names],
                [local(self.parameters[n].grad) for n in names],
                [local(self.first[n]) for n in names],
                [local(self.second[n]) for n in names],
                [],
                [self.steps] * len(names),
                lr=learning_rate,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay if decays else 0.0,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )

    def state(self) -> dict[str, Tensor]:
        """The tensors themselves, not copies, named as in optimizer.safetensors of `gka train`."""
        return {
            **{f"exp_avg.{name}": tensor for name, tensor in self.first.items()},
            **{f"exp_avg_sq.{name}": tensor for name, tensor in self.second.items()},
            "steps": self.steps,
        }
