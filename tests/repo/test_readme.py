"""The README's code runs as it stands, and what it links to is there."""

import re
import sys

import pytest
from commands import ROOT, run

import gka

README = (ROOT / "README.md").read_text()

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(readme LANGUAGES CXX)
find_package(gka REQUIRED)
add_executable(readme main.cpp)
target_link_libraries(readme PRIVATE gka::gka)
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_python_lines_run(tmp_path):
    (code,) = blocks("python")
    (tmp_path / "readme.py").write_text(code + "\nassert next_o.shape == (B, H, D) and q.grad is not None\n")
    run(sys.executable, tmp_path / "readme.py")


def test_the_cpp_lines_build_and_run(tmp_path):
    (code,) = blocks("cpp")
    (tmp_path / "main.cpp").write_text(code)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    build = tmp_path / "build"
    run("cmake", "-G", "Ninja", "-S", tmp_path, "-B", build, f"-DCMAKE_PREFIX_PATH={gka.cmake_prefix_path}")
    run("cmake", "--build", build)
    run(build / "readme")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_what_it_links_to_is_there(target):
    assert (ROOT / target).exists()


def test_the_error_it_quotes_is_the_error(tmp_path):
    import torch

    beta = torch.ones(1, 4, 2)
    beta[0, 3, 1] = -0.5
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError) as error:
        gka.gated_kalmanet(q, q, q, beta=beta)
    assert str(error.value) in README
