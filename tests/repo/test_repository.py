"""Promises the repository makes about itself: one version, pinned packages, one direction of includes."""

import os
import re
import sys
from importlib import metadata

import pytest
from commands import ROOT, run

import gka

# Each layer may include itself and the layers to its left; `kernels` and the public headers below it know no torch.
STAIRCASE = ["base", "kernels", "ops", "layers", "models", "data", "infer", "train", "serve", "python", "cli"]
TORCH_FREE = [
    *(ROOT / "src/kernels").rglob("*"),
    *(
        ROOT / "include/gka" / name
        for name in ["types.h", "kernels.h", "block_kernels.h", "info.h", "engine.h", "engine_c.h"]
    ),
]


def includes(path):
    return re.findall(r'^#include\s+[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def test_the_version_is_the_same_everywhere(root, build_dir):
    version = re.search(r"project\(gka VERSION (\S+)", (root / "CMakeLists.txt").read_text())[1]
    assert gka.__version__ == version
    assert metadata.version("gka") == version
    assert run(build_dir / "bin/gka", "--version").stdout == f"gka {version}\n"
    assert re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-test.txt"])
def test_every_python_package_is_pinned_to_one_version(root, file):
    lines = [line for line in (root / file).read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9.]*(\.post\d)?", line)] == []


def test_includes_go_down_the_staircase_only():
    upward = []
    for place, layer in enumerate(STAIRCASE):
        above = tuple(f"{name}/" for name in STAIRCASE[place + 1 :])
        for path in (ROOT / "src" / layer).rglob("*"):
            if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
                upward += [
                    f"{path.relative_to(ROOT)} includes {name}" for name in includes(path) if name.startswith(above)
                ]
    assert upward == []


def test_the_kernels_know_nothing_of_torch():
    torch = ("torch/", "ATen/", "c10/", "gka/gka.h", "gka/block.h")
    sources = [path for path in TORCH_FREE if path.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    assert len(sources) > 3
    assert [f"{path} includes {name}" for path in sources for name in includes(path) if name.startswith(torch)] == []


def test_every_kernel_on_trial_is_described_and_can_be_measured():
    names = re.findall(r'\{"(\w+)", Trial::', (ROOT / "src/kernels/cuda/trial.h").read_text())
    section = (ROOT / "docs/kernels.md").read_text().split("\n## On trial\n")[1].split("\n## ")[0]
    described = re.findall(r"^\| `(\w+)` \|", section, re.M)
    measured = run(sys.executable, ROOT / "bench/trials.py", "--names").stdout.split()
    assert names
    assert sorted(names) == sorted(described) == sorted(measured)


def test_setting_up_a_second_time_does_nothing(root):
    if not (root / ".venv/.requirements.sha256").exists():
        pytest.skip("this checkout was not set up by scripts/setup.sh")
    assert run("scripts/setup.sh", cwd=root).stdout == ""


@pytest.mark.parametrize(
    ("program", "says", "oldest"), [("cmake", "cmake version 3.22.1", "3.25"), ("g++", "11", "12")]
)
def test_setting_up_names_what_is_too_old(root, tmp_path, program, says, oldest):
    if not (root / ".venv/.requirements.sha256").exists():
        pytest.skip("this checkout was not set up by scripts/setup.sh")
    (tmp_path / program).write_text(f"#!/bin/sh\necho {says}\n")
    (tmp_path / program).chmod(0o755)
    without_cxx = {name: value for name, value in os.environ.items() if name != "CXX"}
    done = run(
        "scripts/setup.sh", cwd=root, env={**without_cxx, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False
    )
    assert done.returncode != 0
    assert f"{program} is {says.split()[-1]}, and gka needs {oldest} or newer" in done.stderr
