"""The gka command, as pip installs it."""

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import gka_command
import pytest
import torch

import gka

PROGRAM = Path(sys.executable).parent / "gka"


def call(*arguments, **environment):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, env=os.environ | environment)


def test_version_is_the_packages():
    done = call("--version")
    assert (done.returncode, done.stdout) == (0, f"gka {gka.__version__}\n")


def test_what_needs_no_torch_starts_without_it(tmp_path):
    """Loading torch takes half a second. The program by itself, where nothing of torch or of libgka can be found."""
    program = shutil.copy(gka_command.binary(), tmp_path)

    def alone(*arguments):
        return subprocess.run([program, *arguments], input="hi", capture_output=True, text=True, cwd=tmp_path, env={})

    assert alone("--version").stdout == f"gka {gka.__version__}\n"
    assert alone("--help").stdout == alone().stdout == call("--help").stdout
    assert alone("tokenizer", "encode").stdout == "104 105\n"
    assert alone("runs", tmp_path).returncode == 0
    assert "did you mean 'train'?" in alone("trian").stderr
    for words in [["info"], ["--help", "info"]]:
        done = alone(*words)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"gka: cannot run {tmp_path}/gka-torch: No such file or directory\n"


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], [], ["info"], ["runs", "."], ["tokenizer", "info"], ["train", "--help"]]
)
def test_output_that_cannot_be_written_is_a_failure(words, tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, *words], stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch("gka: the output could not be written(: No space left on device)?\n", done.stderr)


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["nothing", "--help"])
def test_help_lists_the_commands_and_shows_examples(arguments):
    done = call(*arguments)
    assert done.returncode == 0
    assert "info " in done.stdout
    assert "Examples:" in done.stdout


def help_in_a_terminal(columns, *command):
    """What `--help` shows above the examples, as lines."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen([PROGRAM, *command, "--help"], stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # how the end of a terminal is told
                break
    os.close(ours)
    assert process.returncode == 0
    return shown.decode().replace("\r", "").split("Examples:")[0].splitlines()


@pytest.mark.parametrize("command", ["plot", "generate"])
def test_help_fits_the_terminal(command):
    piped = call(command, "--help").stdout.split("Examples:")[0].splitlines()
    narrow, wide = help_in_a_terminal(80, command), help_in_a_terminal(400, command)
    assert max(map(len, narrow)) <= 80 < max(map(len, wide)) <= 120
    assert wide == piped
    assert [word for line in narrow for word in line.split()] == [word for line in wide for word in line.split()]


def test_help_of_all_commands_fits_too():
    assert max(map(len, help_in_a_terminal(80)[2:])) <= 80


def test_info_says_what_runs_and_why():
    done = call("info")
    assert done.returncode == 0
    for part in ["Backends", "reference", "cpu", "Which kernel a call of gated_kalmanet takes", "float32, D 128"]:
        assert part in done.stdout


def test_info_as_json_agrees_with_python():
    told = json.loads(call("info", "--json").stdout)
    assert told["build"]["version"] == gka.__version__
    standing = [(backend["name"], backend["built"], backend["available"]) for backend in told["backends"]]
    assert standing == [(backend.name, backend.built, backend.available) for backend in gka.backends()]
    for asked in told["calls"]:
        dtype = getattr(torch, asked.pop("dtype"))
        kernel, reason = asked.pop("kernel"), asked.pop("reason")
        assert (kernel, reason) == gka.choose_kernel(asked.pop("device"), dtype, **asked)


def test_info_explains_the_one_call_that_is_asked_about():
    told = json.loads(call("info", "--json", "--dtype", "float64", "--solver", "exact", "--key-dim", "48").stdout)
    (only,) = told["calls"]
    assert (only["dtype"], only["solver"], only["key_dim"], only["value_dim"]) == ("float64", "exact", 48, 128)
    assert only["kernel"] == "cpu"
    assert only["reason"]


def test_info_says_no_where_the_operator_does():
    said = call("info", "--key-dim", "300").stdout
    assert "no kernel: q and k take a last dimension D from 1 to 256, got 300" in said


def test_info_takes_everything_that_decides_the_kernel():
    told = json.loads(call("info", "--json", "--device", "cuda:1", "--part", "solve", "--no-refine", "--report").stdout)
    (only,) = told["calls"]
    assert (only["device"], only["part"], only["refine"], only["report"]) == ("cuda:1", "solve", False, True)
    done = call("info", "--device", "cuda:one")
    assert done.returncode == 2
    assert "cuda:one" in done.stderr


def test_a_forced_instruction_set_shows():
    told = json.loads(call("info", "--json", GKA_CPU="portable").stdout)
    (cpu,) = [backend for backend in told["backends"] if backend["name"] == "cpu"]
    assert "portable" in cpu["detail"]


@pytest.mark.parametrize("word", ["inof", "ifo", "infos", "Info"])
def test_a_misspelt_command_is_answered_with_the_nearest_one(word):
    done = call(word)
    assert done.returncode == 2
    assert f"no command '{word}'" in done.stderr
    assert "did you mean 'info'?" in done.stderr


def test_an_unlike_command_is_answered_with_all_there_are():
    done = call("frobnicate")
    assert done.returncode == 2
    assert "did you mean" not in done.stderr
    assert "the commands are: info" in done.stderr


def test_a_word_without_a_place_is_what_is_complained_about():
    done = call("score", "model", "book.txt")
    assert done.returncode == 2
    assert done.stderr.startswith("gka: 'book.txt' is no option of `gka score …` and has no place there")


@pytest.mark.parametrize(
    ("given", "spins"), [({}, 1000), ({"GOMP_SPINCOUNT": "7"}, 7), ({"OMP_WAIT_POLICY": "passive"}, 0)]
)
def test_threads_that_wait_soon_sleep_unless_told_otherwise(given, spins):
    shown = call("generate", "--help", OMP_DISPLAY_ENV="verbose", **given).stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in shown


def test_a_wrong_name_for_an_option_is_answered_with_the_right_ones():
    done = call("info", "--solver", "jacobi")
    assert done.returncode == 2
    for part in ["--solver", "'jacobi'", "chebyshev, conjugate_gradient, gradient_descent, nesterov, exact"]:
        assert part in done.stderr
