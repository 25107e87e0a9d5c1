"""Finds and loads libgka.so: the one packaged here, the one GKA_LIBRARY names (for work on gka itself), or, where this
is a checkout on PYTHONPATH, the installed one."""

import functools
import os
import sysconfig
from pathlib import Path

import torch


def path() -> Path:
    """Where the library is taken from."""
    override = os.environ.get("GKA_LIBRARY")
    if override:
        return Path(override)
    own = Path(__file__).parent / "lib" / "libgka.so"
    installed = Path(sysconfig.get_path("platlib")) / "gka" / "lib" / "libgka.so"
    return installed if not own.exists() and installed.exists() else own


def _load(library: Path) -> None:
    if not library.is_file():
        raise ImportError(
            f"gka: there is no library at {library}; install the package (pip install --no-build-isolation .) or point "
            "GKA_LIBRARY at a libgka.so"
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise ImportError(
            f"gka: {library} does not load with torch {torch.__version__}; build it against this torch ({error})"
        ) from error


def load() -> None:
    """Loads the library, which registers the operators."""
    _load(path())


@functools.cache
def _load_floors() -> None:
    _load(path().with_name("libgka_python.so"))
    from . import _traced  # noqa: F401  (it needs the library)


@torch.compiler.assume_constant_result  # torch.compile calls it while it traces, and not in what it makes
def load_floors() -> None:
    """Loads what lies beside it: the floors above the operators (the rivals' memories, checkpoints, the tokenizer)."""
    _load_floors()
