"""Every part that is optional can be left out, and every part that is missing is named with what to do about it."""

import json
import shlex
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


def test_a_compiler_that_is_too_old_is_named(configure, tmp_path):
    compiler = tmp_path / "old"
    compiler.write_text('#!/bin/sh\nexec g++ -U__GNUC__ -D__GNUC__=11 "$@"\n')
    compiler.chmod(0o755)
    fine, text = configure(*KERNELS_ONLY, f"-DCMAKE_CXX_COMPILER={compiler}")
    assert not fine
    assert f"gka needs g++ 12 or clang 15 or newer, and {compiler} is GNU 11." in text


def including(root, folder, targets, *options):
    """A project that has gka's sources in itself; how each of its and of gka's files is compiled, by name."""
    programs = "\n".join(
        f"add_executable(of_{target} {target}.cpp)\ntarget_link_libraries(of_{target} PRIVATE gka::{target})"
        for target in targets
    )
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(mine LANGUAGES CXX)\nset(CMAKE_EXPORT_COMPILE_COMMANDS ON)\n"
        f"include(FetchContent)\nFetchContent_Declare(gka SOURCE_DIR {root})\nFetchContent_MakeAvailable(gka)\n"
        f"{programs}\n"
    )
    for target in targets:
        (folder / f"{target}.cpp").write_text("int main() {}\n")
    run("cmake", "-G", "Ninja", "-S", folder, "-B", folder / "build", *options)
    listed = json.loads((folder / "build/compile_commands.json").read_text())
    return {entry["file"]: shlex.split(entry["command"]) for entry in listed}


def test_a_project_that_includes_gka_keeps_its_own_flags(root, tmp_path):
    """Nobody chose Release for it: its assertions stay, while gka is fast."""
    commands = including(root, tmp_path, ["kernels"], "-DGKA_BUILD_TORCH=OFF")
    theirs, ours = commands[f"{tmp_path}/kernels.cpp"], commands[f"{root}/src/kernels/checks.cpp"]
    assert f"-I{root}/include" in theirs
    assert {"-O3", "-DNDEBUG", "-Wall"} & {*theirs} == set()
    assert {"-O3", "-DNDEBUG"} <= {*ours}
    installed = {file.name for file in (tmp_path / "build").rglob("CMakeFiles/Export/*/gkaKernels-*.cmake")}
    assert installed == {"gkaKernels-noconfig.cmake"}, "as the project itself is installed"


def test_a_project_that_includes_gka_has_all_of_its_libraries_and_neither_tests_nor_the_command(root, tmp_path):
    absent = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ["GTest", "CLI11"]]
    torch_dir = f"-DGKA_TORCH_DIR={Path(torch.__file__).parent}"
    commands = including(root, tmp_path, ["gka", "engine", "models"], torch_dir, *absent)
    for target in ["gka", "engine", "models"]:
        assert f"-I{root}/include" in commands[f"{tmp_path}/{target}.cpp"]
    assert f"-I{root}/src" in commands[f"{tmp_path}/models.cpp"], "the floors' headers"
    assert [file for file in commands if file.startswith((f"{root}/tests", f"{root}/src/cli"))] == []


def test_a_build_folder_is_not_taken_for_an_installation(configure, tmp_path):
    fine, text = configure(*KERNELS_ONLY)
    assert fine, text
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(asks LANGUAGES CXX)\nfind_package(gka REQUIRED)\n"
    )
    done = run(
        "cmake", "-S", tmp_path, "-B", tmp_path / "asks", f"-DCMAKE_PREFIX_PATH={tmp_path / 'build'}", check=False
    )
    assert "Could not find a package configuration file" in done.stderr


def test_the_presets_of_the_documentation_exist(root):
    listed = run("cmake", "--list-presets", cwd=root).stdout
    for name in ["cpu", "cuda", "asan"]:
        assert f'"{name}"' in listed
        assert name in (root / "docs/building.md").read_text()
