"""The command in an empty folder, and one run that was never interrupted."""

import pytest
from training import Gka


@pytest.fixture
def gka(tmp_path):
    return Gka(tmp_path)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The small run, never interrupted."""
    gka = Gka(tmp_path_factory.mktemp("whole"))
    gka.train(gka.write())
    return gka
