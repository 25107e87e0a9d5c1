"""For all tests: some send Ctrl-C or hang up, which what runs in the background or under nohup is told to ignore; what
a build leaves out is skipped."""

import signal

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """What a build leaves out cannot be tested with it: kernels may be compiled without float64 on the GPU."""
    try:
        return (yield)
    except RuntimeError as error:
        if "built without float64 on the GPU" in str(error):
            pytest.skip("this build has no float64 on the GPU (GKA_CUDA_FLOAT64=OFF)")
        raise
