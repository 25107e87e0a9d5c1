"""The ``gka`` command of an installed package: hands over to the packaged binary.

A package of its own, since importing gka imports torch, which takes longer than most commands.
"""

import os
import sys
import sysconfig
from pathlib import Path


def binary() -> Path:
    """Beside this package; where this is a checkout on PYTHONPATH, which has none, the installed one."""
    beside = Path(__file__).parents[1] / "gka" / "bin" / "gka"
    installed = Path(sysconfig.get_path("platlib")) / "gka" / "bin" / "gka"
    return beside if beside.exists() else installed


def main() -> None:
    """Replaces this process by the binary, with the same arguments."""
    program = binary()
    try:
        os.execv(program, ["gka", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"gka: cannot run {program}: {error.strerror}; reinstall the package with its command line")
