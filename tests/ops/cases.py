"""Inputs for the tests of the operator, and how far apart two tensors are."""

import torch
from torch import Tensor

GATES = ("log_decay", "beta", "alpha")


def make(
    batch=2,
    tokens=9,
    heads=2,
    key_dim=8,
    value_dim=6,
    *,
    dtype=torch.float64,
    gate_dtype=None,
    gates=GATES,
    states=0,
    seed=0,
    decay=0.5,
) -> dict[str, Tensor]:
    """Unit queries and keys, values, the named gates and, for `states` sequences, an initial state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    case = {
        "q": torch.nn.functional.normalize(normal(batch, tokens, heads, key_dim), dim=-1),
        "k": torch.nn.functional.normalize(normal(batch, tokens, heads, key_dim), dim=-1),
        "v": normal(batch, tokens, heads, value_dim),
        "log_decay": -decay * uniform(batch, tokens, heads),
        "beta": uniform(batch, tokens, heads),
        "alpha": uniform(batch, tokens, heads),
    }
    case = {name: tensor for name, tensor in case.items() if name not in GATES or name in gates}
    types = {name: (gate_dtype or dtype) if name in GATES else dtype for name in case}
    case = {name: tensor.to(types[name]) for name, tensor in case.items()}
    if states:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        root = normal(states, heads, key_dim, key_dim)
        case["h0"] = (root @ root.mT / key_dim).to(wide)
        case["u0"] = normal(states, heads, key_dim, value_dim).to(wide)
    return case


def split(case: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """The case as (tensor arguments, the initial_state keyword) of `gka.gated_kalmanet`."""
    tensors = {name: tensor for name, tensor in case.items() if name not in ("h0", "u0")}
    return tensors, {"initial_state": (case["h0"], case["u0"])} if "h0" in case else {}


def requiring_grad(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers as leaves of a graph."""
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in case.items()}


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖_F / ‖want‖_F; ‖got‖_F where `want` is zero; infinite where either is not finite."""
    got, want = got.detach().double(), want.detach().double()
    if not (got.isfinite().all() and want.isfinite().all()):
        return float("inf")
    norm = want.norm().item()
    return (got - want).norm().item() / (norm if norm > 0 else 1.0)


def weights(*tensors: Tensor, seed=1) -> list[Tensor]:
    """Random gradients for a loss Σ output · weight."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in tensors]


def backward(outputs: list[Tensor], inputs: dict[str, Tensor], seed=1) -> dict[str, Tensor]:
    """The gradient of Σ output · weight in each input; zero for an input that no output depends on."""
    pairs = [(o, w) for o, w in zip(outputs, weights(*outputs, seed=seed), strict=True) if o.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
    used, weight = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(used, list(inputs.values()), weight, materialize_grads=True)
    return dict(zip(inputs, gradients, strict=True))
