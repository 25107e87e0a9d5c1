"""What is installed works by itself, and holds what it should and nothing else."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import ROOT, run
from torch.utils import cpp_extension

import gka

TORCH = Path(torch.__file__).parent


def build_example(source, folder, *arguments):
    """Copies an example away from the repository, as a user would, and builds it there."""
    shutil.copytree(source, folder / "source")
    run("cmake", "-G", "Ninja", "-S", folder / "source", "-B", folder / "build", *arguments)
    run("cmake", "--build", folder / "build")
    return folder / "build"


def test_another_cmake_project_finds_gka_and_runs(root, prefix, tmp_path):
    place = tmp_path / "a torch"  # in a folder with a space, as that of a project may be
    place.mkdir()
    for name in ["include", "lib"]:
        (place / name).symlink_to(TORCH / name)
    asked = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DGKA_TORCH_DIR={place}"]
    build = build_example(root / "examples/cpp", tmp_path / "my project", *asked)
    output = run(build / "recall").stdout
    assert f"gka {gka.__version__}" in output
    assert "Gated KalmaNet" in output


def test_the_kernels_serve_a_project_that_has_no_torch(root, prefix, tmp_path):
    build = build_example(
        root / "examples/kernels_only", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", "-DGKA_TORCH_DIR=/nowhere"
    )
    assert "differ by" in run(build / "stream").stdout
    assert "torch" not in run("ldd", build / "stream").stdout


def test_a_program_continues_a_prompt_with_the_engine(root, prefix, tmp_path):
    build = build_example(root / "examples/engine", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    model = root / "tests/goldens/tiny-hqwen3-gka"
    expected = gka.Engine(model).generate([5, 17, 3], max_tokens=16, temperature=0).ids
    for program in ["continue", "continue_in_c"]:
        lines = run(build / program, model, "5", "17", "3").stdout.splitlines()
        assert 1 <= len(lines) <= 16
        assert [int(line.split()[0]) for line in lines] == expected
    done = run(build / "continue_in_c", root, "5", check=False)
    assert done.returncode == 1
    assert "config.json" in done.stderr


def test_a_program_trains_on_texts_with_the_installed_floors(root, prefix, tmp_path):
    """Layers, models and data from C++: the loss of packed texts and its gradient, as Python has them."""
    build = build_example(root / "examples/models", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    folder, texts = root / "tests/goldens/tiny-hqwen3-gka", ["a text", "and another, longer one"]
    said = run(build / "losses", folder, *texts).stdout
    model = gka.load(folder, dtype=torch.float32)
    rows = [torch.tensor([list(text.encode())]) for text in texts]
    loss = sum(-model(row)[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None]).sum() for row in rows)
    loss = loss / sum(row.shape[1] - 1 for row in rows)
    loss.backward()
    length = sum(p.grad.square().sum() for p in model.parameters()).sqrt().item()
    got = re.fullmatch(r"29 tokens of 2 texts, 4 blocks: loss (.*), gradient (.*)\n", said)
    assert [float(number) for number in got.groups()] == pytest.approx([loss.item(), length], rel=1e-4)
    assert "pcre" not in run("ldd", build / "losses").stdout


def test_what_an_installed_header_includes_is_installed(prefix):
    floors = prefix / "include/gka/floors"
    assert {path.name for path in floors.iterdir()} == {"base", "ops", "layers", "models", "data", "kernels"}
    headers = [*floors.rglob("*.h")]
    places, missing = (floors, prefix / "include"), []
    for header in headers:
        for name in re.findall(r'^#include "([^"]+)"', header.read_text(), re.MULTILINE):
            if not any((place / name).exists() for place in places):
                missing.append(f"{header.relative_to(floors)} includes {name}")
    assert len(headers) > 50 and missing == []


def test_a_cmake_project_finds_the_gka_that_pip_installed(root, tmp_path):
    folder = tmp_path / "build"
    run(
        "cmake",
        "-G",
        "Ninja",
        "-S",
        root / "examples/cpp",
        "-B",
        folder,
        f"-DCMAKE_PREFIX_PATH={gka.cmake_prefix_path}",
    )


def test_a_project_without_torch_is_told_what_to_do(root, prefix, tmp_path):
    arguments = [
        "-S",
        root / "examples/cpp",
        "-B",
        tmp_path,
        f"-DCMAKE_PREFIX_PATH={prefix}",
        "-DGKA_TORCH_DIR=/nowhere",
    ]
    done = run("cmake", "-G", "Ninja", *arguments, check=False)
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "There is no LibTorch in '/nowhere'" in message
    assert "-DGKA_TORCH_DIR=" in message


@pytest.mark.parametrize(
    ("components", "targets"), [("", "kernels gka engine"), ("engine", "gka engine"), ("kernels", "kernels")]
)
def test_a_component_has_the_name_of_its_target(prefix, tmp_path, components, targets):
    asked = f"COMPONENTS {components}" if components else ""
    wanted = "\n".join(f"get_target_property(place gka::{name} LOCATION)" for name in targets.split())
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(asks LANGUAGES CXX)\n"
        f"find_package(gka 0.1 REQUIRED {asked})\n{wanted}\nfind_package(gka 0.1 REQUIRED COMPONENTS abacus)\n"
    )
    done = run(
        "cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}", check=False
    )
    assert "get_target_property" not in done.stderr
    assert "This gka has no component 'abacus'" in " ".join(done.stderr.split())


def test_what_is_optional_may_be_missing(prefix, tmp_path):
    """A program that uses the engine where there is torch, and the kernels anywhere."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(asks LANGUAGES CXX)\n"
        "find_package(gka 0.1 REQUIRED COMPONENTS kernels OPTIONAL_COMPONENTS engine models)\n"
        'message(STATUS "${gka_kernels_FOUND} ${gka_engine_FOUND} ${gka_models_FOUND}")\n'
        "get_target_property(place gka::kernels LOCATION)\n"
    )
    said = {}
    for name, option in [("without", "-DGKA_TORCH_DIR=/nowhere"), ("with", f"-DGKA_TORCH_DIR={TORCH}")]:
        said[name] = run(
            "cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / name, f"-DCMAKE_PREFIX_PATH={prefix}", option
        ).stdout
    assert "-- TRUE FALSE FALSE" in said["without"]
    assert "-- TRUE TRUE TRUE" in said["with"]


def test_the_installed_program_finds_its_libraries_from_anywhere(prefix, tmp_path):
    environment = {"PATH": "/usr/bin:/bin"}
    assert run(prefix / "bin/gka", "--version", cwd=tmp_path, env=environment).stdout == f"gka {gka.__version__}\n"
    assert run(prefix / "bin/gka", "info", cwd=tmp_path, env=environment).stdout.startswith(f"gka {gka.__version__}, ")


@pytest.mark.parametrize("name", ["libgka.so", "libgka_python.so"])
def test_the_library_carries_no_python(prefix, name):
    library = prefix / "lib" / name
    assert "libpython" not in run("readelf", "--dynamic", library).stdout
    wanted = run("nm", "--dynamic", "--undefined-only", library).stdout.split()
    assert [name for name in wanted if name.startswith(("Py", "_Py"))] == []


@pytest.mark.parametrize("name", ["libgka.so", "libgka_engine.so", "libgka_models.so", "libgka_python.so"])
def test_a_library_shows_only_names_of_its_own(prefix, name):
    """A program's copy of a header's function, compiled with other options, must not serve in ours, nor ours in it."""
    listed = run("nm", "--dynamic", "--extern-only", "--defined-only", prefix / "lib" / name).stdout.splitlines()
    names = [line.split()[-1] for line in listed]
    assert names, "nothing is visible at all"
    assert [name for name in names if "3gka" not in name and not name.startswith("gka_")] == []


STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Wswitch-enum", "-Werror", "-fsyntax-only"]


@pytest.mark.parametrize("header", sorted(path.name for path in (ROOT / "include/gka").iterdir()))
def test_a_public_header_stands_alone_without_a_warning(prefix, header):
    """In a user's program, whatever that is compiled with: from C++20, or from C where it is for C."""
    compiler = ["gcc", "-std=c11", "-xc"] if header.endswith("_c.h") else ["g++", "-std=c++20", "-xc++"]
    torch_headers = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    run(*compiler, *STRICT, "-include", f"gka/{header}", f"-I{prefix / 'include'}", *torch_headers, "/dev/null")


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_code_for_an_instruction_set_shows_only_names_of_its_own(build_dir, isa):
    """A weak std:: symbol compiled for AVX-512 must not end up serving a machine that has none."""
    joined = build_dir / f"src/kernels/isa_{isa}.o"
    if not joined.exists():
        pytest.skip(f"this build has no {isa} kernels")
    names = [line.split()[-1] for line in run("nm", "--extern-only", "--defined-only", joined).stdout.splitlines()]
    own = f"_ZN3gka7kernels3cpu{len(isa)}{isa}"
    assert names, "nothing is visible at all"
    assert [name for name in names if not name.startswith(own)] == []


def test_a_checkout_on_the_python_path_uses_what_is_installed(root, tmp_path):
    """It has neither the library nor the program, and comes before the package that has them."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root / "python")}
    command = Path(sys.executable).parent / "gka"
    assert run(command, "--version", cwd=tmp_path, env=environment).stdout == f"gka {gka.__version__}\n"
    asked = "import gka; print(gka.__file__, gka.__version__)"
    said = run(sys.executable, "-c", asked, cwd=tmp_path, env=environment).stdout.split()
    assert said == [str(root / "python/gka/__init__.py"), gka.__version__]


def test_the_command_does_not_wait_for_torch(tmp_path):
    asked = "import gka_command, sys; print('torch' in sys.modules, gka_command.binary().is_file())"
    assert run(sys.executable, "-c", asked, cwd=tmp_path).stdout.split() == ["False", "True"]


def test_configurations_are_installed_and_the_license(prefix, root):
    assert (prefix / "share/gka/LICENSE").read_text() == (root / "LICENSE").read_text()
    there = prefix / "share/gka/configs"
    wanted = {path.relative_to(root / "configs") for path in (root / "configs").rglob("*.json")}
    assert {path.relative_to(there) for path in there.rglob("*") if path.is_file()} == wanted
