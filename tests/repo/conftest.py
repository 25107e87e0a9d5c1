"""Where the repository and its build are, and gka installed into a folder of its own."""

import os

import pytest
from commands import ROOT, run


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def build_dir():
    """The finished build these tests look at: GKA_BUILD_DIR, or the one `make` leaves."""
    folder = (ROOT / os.environ.get("GKA_BUILD_DIR", "build/cpu")).resolve()
    if not (folder / "CMakeCache.txt").exists():
        pytest.fail(f"there is no build in {folder}: run `make build`, or name one with GKA_BUILD_DIR")
    return folder


@pytest.fixture(scope="session")
def prefix(build_dir, tmp_path_factory):
    """What `cmake --install` puts down, moved elsewhere: it may lie anywhere, and in a folder with a space."""
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", build_dir, "--prefix", folder / "made")
    return (folder / "made").rename(folder / "moved here")
