"""What this build contains, which parts of it this machine can run, and which kernel a call takes."""

from typing import NamedTuple

import torch


class Backend(NamedTuple):
    """One set of kernels."""

    name: str
    built: bool  #: compiled into this library
    available: bool  #: and able to run on this machine
    detail: str  #: instruction set and threads, or why it cannot run

    def __str__(self) -> str:
        standing = "available" if self.available else "built" if self.built else "not built"
        return f"{self.name}: {standing} ({self.detail})"


def version() -> str:
    """The version of the library."""
    return torch.ops.gka.version()


def backends() -> list[Backend]:
    """The sets of kernels gka has or plans, and whether each runs here.

    >>> print(*gka.backends(), sep="\\n")
    """
    return [Backend(*row) for row in zip(*torch.ops.gka.backends(), strict=True)]


def choose_kernel(
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    key_dim: int = 128,
    value_dim: int = 128,
    solver: str = "chebyshev",
    gradient: str = "implicit",
    ridge_mode: str = "adaptive",
    iterations: int = 30,
    decay_keys: bool = True,
    ridge: float = 0.02,
    part: str = "both",
    refine: bool = True,
    report: bool = False,
) -> tuple[str, str]:
    """Which backend takes a call with these properties, and why. The name is empty if none can.

    `part` is "both" for `gated_kalmanet`, "solve" for `ridge_solve` and "memory" for `linear_memory`; `report` asks
    about `gated_kalmanet_report`.
    """
    device = torch.device(device)
    return torch.ops.gka.choose_kernel(
        device.type,
        device.index or 0,
        dtype,
        key_dim,
        value_dim,
        solver,
        gradient,
        ridge_mode,
        iterations,
        decay_keys,
        ridge,
        part,
        refine,
        report,
    )
