"""Running other programs from a test."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, check=True, **options):
    """The finished process, its output captured; a failure shows all of it."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if check and done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\nended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done
