"""The ``gka`` command of an installed package: hands over to the packaged binary."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Replaces this process by the binary, with the same arguments."""
    binary = Path(__file__).parent / "bin" / "gka"
    try:
        os.execv(binary, ["gka", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"gka: cannot run {binary}: {error.strerror}; reinstall the package with its command line")
