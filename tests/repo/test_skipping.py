"""What a build leaves out is skipped, and nothing else is."""

import importlib.util

import pytest


@pytest.fixture
def hook(root):
    """A test's call as the tests' conftest.py wraps it."""
    spec = importlib.util.spec_from_file_location("conftest_of_all", root / "tests/conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    call = module.pytest_runtest_call(None)
    next(call)
    return call


def test_float64_on_a_gpu_is_skipped_where_the_build_has_none(hook):
    with pytest.raises(pytest.skip.Exception, match="GKA_CUDA_FLOAT64"):
        hook.throw(RuntimeError("gka: built without float64 on the GPU (GKA_CUDA_FLOAT64)"))


def test_any_other_error_stays_one(hook):
    with pytest.raises(RuntimeError, match="something else"):
        hook.throw(RuntimeError("something else"))
