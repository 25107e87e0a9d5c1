"""What the package says about itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gka

ROOT = Path(__file__).resolve().parents[2]


def python(code, **environment):
    """Runs `code` in a fresh interpreter that finds gka as this one did."""
    path = os.pathsep.join([str(Path(gka.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_version_is_the_one_the_build_states():
    assert f"project(gka VERSION {gka.__version__} " in (ROOT / "CMakeLists.txt").read_text()


def test_modules_that_are_loaded_when_asked_for_are_listed_and_typed():
    modules = {path.stem for path in Path(gka.__file__).parent.glob("*.py") if not path.stem.startswith("_")}
    assert modules | {"load"} <= set(dir(gka))
    typed = Path(gka.__file__).read_text().split("if _typing.TYPE_CHECKING:\n", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"\w+", typed)) >= modules | {"load"}, "type checkers do not see __getattr__"


def test_backends_tell_what_was_built_and_what_runs():
    table = {backend.name: backend for backend in gka.backends()}
    assert table["reference"].available
    assert table["cpu"].available
    assert f"{torch.get_num_threads()} thread" in table["cpu"].detail
    for backend in table.values():
        assert backend.built or not backend.available
        assert backend.detail
        assert str(backend).startswith(f"{backend.name}: ")


def test_choose_kernel_names_a_backend_that_runs_and_says_why():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        kernel, reason = gka.choose_kernel("cpu", dtype, key_dim=64, solver="exact", gradient="unrolled")
        assert kernel == "cpu"
        assert reason


def test_choose_kernel_says_what_is_missing_for_a_device_without_kernels():
    kernel, reason = gka.choose_kernel("mps")
    assert kernel == ""
    assert "no kernels for the device mps" in reason
    assert "cpu" in reason


@pytest.mark.parametrize(
    ("options", "said"), [({"key_dim": 300}, "D from 1 to 256, got 300"), ({"value_dim": 0}, "V from 1 to 256, got 0")]
)
def test_no_kernel_takes_what_the_operator_refuses(options, said):
    kernel, reason = gka.choose_kernel("cpu", **options)
    assert kernel == "" and said in reason
    sizes = {"key_dim": 8, "value_dim": 8} | options
    q, v = torch.zeros(1, 2, 1, sizes["key_dim"]), torch.zeros(1, 2, 1, sizes["value_dim"])
    with pytest.raises(ValueError, match=said):
        gka.gated_kalmanet(q, q, v)


def test_choose_kernel_refuses_names_that_do_not_exist():
    with pytest.raises(ValueError, match=r"^choose_kernel: solver takes one of chebyshev"):
        gka.choose_kernel(solver="jacobi")


def test_the_library_links_no_python():
    from gka import _library

    dynamic = subprocess.run(["readelf", "-d", _library.path()], capture_output=True, text=True, check=True).stdout
    needed = [line for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert any("libtorch" in line for line in needed)
    assert not any("python" in line for line in needed)


def test_a_missing_library_is_explained():
    result = python("import gka", GKA_LIBRARY="/nowhere/libgka.so")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: gka: there is no library at /nowhere/libgka.so")


def test_a_broken_library_is_explained(tmp_path):
    broken = tmp_path / "libgka.so"
    broken.write_bytes(b"not a library")
    result = python("import gka", GKA_LIBRARY=str(broken))
    assert result.returncode != 0
    assert f"gka: {broken} does not load with torch {torch.__version__}" in result.stderr


def test_a_forced_instruction_set_is_the_one_in_use():
    result = python("import gka; print({b.name: b.detail for b in gka.backends()}['cpu'])", GKA_CPU="portable")
    assert result.stdout.startswith("portable, "), result.stderr


def test_an_unknown_instruction_set_is_reported_and_refused():
    code = "import gka, torch; print(gka.backends()); x = torch.zeros(1, 1, 1, 1); gka.gated_kalmanet(x, x, x)"
    result = python(code, GKA_CPU="abacus")
    assert "abacus" in result.stdout
    assert "available=False" in result.stdout
    assert result.returncode != 0
    assert "abacus" in result.stderr
