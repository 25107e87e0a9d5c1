"""The README's code runs as it stands, and what it links to is there."""

import os
import re
import sys
from pathlib import Path

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
    operator, module = blocks("python")
    (tmp_path / "first.py").write_text(operator + "\nassert next_o.shape == (B, H, D) and q.grad is not None\n")
    (tmp_path / "second.py").write_text(module + "\nassert y.shape == (1, 64)\n")
    run(sys.executable, tmp_path / "first.py")
    run(sys.executable, tmp_path / "second.py")


def test_the_commands_from_nothing_to_a_trained_model_run(tmp_path):
    (commands,) = (block for block in blocks("sh") if "gka tokenize" in block)
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 400)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    short = commands.replace("--set output=runs/book", "--set output=runs/book --set steps=2 --set tokens=null")
    assert short != commands
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run("bash", "-euc", short, cwd=tmp_path, env=os.environ | {"PATH": path})
    assert (tmp_path / "book.png").stat().st_size > 0


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
