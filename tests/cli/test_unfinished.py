"""What a command was writing when Ctrl-C came or the disk was full: nothing of it stays, what was there before does."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PROGRAM = os.environ.get("GKA_PROGRAM") or Path(sys.executable).parent / "gka"
MODEL = HERE.parent / "goldens/tiny-hqwen3-gka"

COMMANDS = {  # and what they make
    "score": (["score", MODEL, "--ids", "ids", "--logits", "out"], "out"),
    "eval": (["eval", MODEL, "--tokenizer", "bytes", "--tasks", "task.jsonl", "--samples", "out"], "out"),
    "tokenize": (["tokenize", "text", "--out", "out"], "out.tokens"),
    "tokenizer train": (["tokenizer", "train", "text", "--vocab-size", "300", "--out", "out"], "out"),
    "import": (["import", MODEL, "--out", "out"], "out"),
    "convert": (["convert", MODEL, "--pattern", "*-GKA-GKA-GKA", "--out", "out"], "out"),
}
FOLDERS = ("import", "convert")


@pytest.fixture(scope="module")
def signal_at(tmp_path_factory):
    library = tmp_path_factory.mktemp("preload") / "signal_at.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, HERE / "signal_at.c"], check=True)
    return library


@pytest.fixture
def folder(tmp_path):
    """What the commands read."""
    (tmp_path / "ids").write_text("1 2 3 4 5 6 7 8\n" * 8)
    (tmp_path / "text").write_text("one two three four five six seven eight nine ten\n" * 200)
    items = '{"context": "a", "choices": ["b", "c"], "answer": 0}\n' * 40
    (tmp_path / "task.jsonl").write_text('{"task": "t", "kind": "choice"}\n' + items)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def call(folder, words, **options):
    return subprocess.run([PROGRAM, *map(str, words)], cwd=folder, capture_output=True, text=True, **options)


def interrupted(folder, words, library, at):
    environment = os.environ | {"LD_PRELOAD": os.fspath(library), "SIGNAL_AT": at, "OMP_NUM_THREADS": "1"}
    done = call(folder, words, env=environment)
    assert done.returncode == 130, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_leaves_nothing_behind_and_says_so(command, folder, signal_at):
    words, out = COMMANDS[command]
    before = names(folder)
    at = "write .unfinished-out/" if command in FOLDERS else f"write /{out}.writing-"
    assert interrupted(folder, words, signal_at, at) == f"gka: interrupted; {out} was not written."
    assert names(folder) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_after_all_was_written_leaves_it_whole(command, folder, signal_at):
    words, out = COMMANDS[command]
    before = names(folder)
    at = f"rename {folder / out}" if command in FOLDERS else f"rename {out}"
    assert interrupted(folder, words, signal_at, at) == "gka: interrupted."
    assert names(folder) == sorted([*before, out])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_one_sentence_and_what_was_there_stays(command, folder):
    words, out = COMMANDS[command]
    if command not in FOLDERS:
        (folder / out).write_text("older")
    before = names(folder)
    done = call(folder, words, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)))
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(rf"gka: cannot write .*{out}\S*: File too large", done.stderr.splitlines()[-1])
    assert names(folder) == before
    assert command in FOLDERS or (folder / out).read_text() == "older"
