"""Every part that is optional can be left out, and every part that is missing is named with what to do about it."""

from pathlib import Path

import pytest
import torch
from commands import run

KERNELS_ONLY = ["-DGKA_BUILD_TORCH=OFF", "-DGKA_BUILD_TESTS=OFF"]


@pytest.fixture
def configure(root, tmp_path):
    """Configures the project with some options; the process and its messages as one line."""

    def start(*options):
        done = run("cmake", "-G", "Ninja", "-S", root, "-B", tmp_path / "build", *options, check=False)
        return done.returncode == 0, " ".join((done.stdout + done.stderr).split())

    return start


def test_the_kernels_need_nothing_but_a_compiler(configure):
    absent = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ["GTest", "CLI11", "nlohmann_json", "Python"]]
    fine, text = configure(*KERNELS_ONLY, *absent)
    assert fine, text


def test_a_torch_that_is_already_there_is_used_without_asking_python(configure):
    folder = Path(torch.__file__).parent
    fine, text = configure(
        f"-DGKA_TORCH_DIR={folder}", "-DGKA_PYTHON=/bin/false", "-DGKA_BUILD_CLI=OFF", "-DGKA_BUILD_TESTS=OFF"
    )
    assert fine, text
    assert f"torch {torch.__version__.split('+')[0]} in {folder.resolve()}" in text


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["-DGKA_TORCH_DIR=/nowhere"], "name its folder: -DGKA_TORCH_DIR="),
        (["-DGKA_PYTHON=/bin/false"], "Install torch (pip install torch)"),
        (["-DCMAKE_DISABLE_FIND_PACKAGE_CLI11=ON"], "switch it off (-DGKA_BUILD_CLI=OFF)"),
        (["-DGKA_BUILD_TORCH=OFF", "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON"], "(-DGKA_BUILD_TESTS=OFF)"),
    ],
    ids=["a wrong torch folder", "a Python without torch", "no CLI11", "no GoogleTest"],
)
def test_what_is_missing_is_named_with_what_to_do(configure, options, advice):
    fine, text = configure("-DGKA_BUILD_TESTS=ON", *options)
    assert not fine
    assert advice in text


def test_asking_for_cuda_where_there_is_none_says_so_and_builds_the_rest(configure, root):
    fine, text = configure(*KERNELS_ONLY, "-DGKA_CUDA=ON")
    assert fine, text
    if not (root / "src/kernels/cuda/CMakeLists.txt").exists():
        assert "has no CUDA kernels yet: building the CPU kernels alone" in text


def test_the_presets_of_the_documentation_exist(root):
    listed = run("cmake", "--list-presets", cwd=root).stdout
    for name in ["cpu", "cuda", "asan"]:
        assert f'"{name}"' in listed
        assert name in (root / "docs/building.md").read_text()
