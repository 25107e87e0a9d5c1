"""Gated KalmaNet: a memory layer that answers each query by a ridge regression over the whole past.

Per head, with γ_t = exp(log_decay_t):

    H_t = γ_t H_{t-1} + β_t k_t k_tᵀ        λ_t = ridge · ‖H_t‖_F
    U_t = γ_t U_{t-1} + β_t k_t v_tᵀ        x_t = solve(H_t + λ_t I, q_t)
                                            o_t = scale · U_tᵀ (q_t + α_t (x_t − q_t))

``libgka.so`` does the work and registers the torch operators ``torch.ops.gka.*``. This package finds the library and
gives the operators their Python signatures.
"""

import typing as _typing

from ._library import load as _load
from ._library import path as _path

_load()

from . import _flops  # noqa: E402, F401  (they need the library)
from ._block import gated_rms_norm, short_conv, short_conv_step  # noqa: E402  (they need the library)
from ._engine import Engine  # noqa: E402
from ._info import Backend, backends, choose_kernel  # noqa: E402
from ._info import version as _version  # noqa: E402
from ._memory import memory  # noqa: E402
from ._ops import (  # noqa: E402
    gated_kalmanet,
    gated_kalmanet_certainty,
    gated_kalmanet_report,
    gated_kalmanet_step,
    linear_memory,
    ridge_solve,
)
from ._states import gated_kalmanet_states  # noqa: E402
from ._tokenizer import Tokenizer  # noqa: E402

__version__ = _version()

#: For ``CMAKE_PREFIX_PATH``, so that ``find_package(gka)`` finds this installation.
cmake_prefix_path = str(_path().parents[1])

#: The configurations of models and the training files that come with gka: ``gka.configs_path + "/tiny/gka.json"``.
configs_path = str(_path().parents[1] / "share" / "gka" / "configs")


#: Loaded when they are asked for: gka.nn, gka.vision, … need no import of their own.
_MODULES = ("data", "dtensor", "hf", "models", "nn", "train", "vision")

if _typing.TYPE_CHECKING:
    from . import data, dtensor, hf, models, nn, train, vision  # noqa: F401
    from .models import load


def __getattr__(name: str) -> object:
    import importlib

    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name == "load":
        return importlib.import_module(".models", __name__).load
    raise AttributeError(f"module 'gka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


__all__ = [
    "Backend",
    "Engine",
    "Tokenizer",
    "__version__",
    "backends",
    "choose_kernel",
    "cmake_prefix_path",
    "configs_path",
    "gated_kalmanet",
    "gated_kalmanet_certainty",
    "gated_kalmanet_report",
    "gated_kalmanet_states",
    "gated_kalmanet_step",
    "gated_rms_norm",
    "linear_memory",
    "load",
    "memory",
    "models",
    "nn",
    "ridge_solve",
    "short_conv",
    "short_conv_step",
    "vision",
]
