"""The first commands of docs/training.md, as they stand there."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from training import PROGRAM

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def section():
    text = (ROOT / "docs/training.md").read_text()
    return text.split("## In five minutes\n", 1)[1].split("\n## ", 1)[0]


def commands(section):
    found = re.findall(r"^    (gka .*?)(?:\s+#.*)?$", section, re.MULTILINE)
    assert len(found) == 6
    return found


@pytest.fixture(scope="module")
def folder(section, tmp_path_factory):
    """What a reader has: a clone's configurations, a text, and the file of the page."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "book.txt").write_text("".join(f"{i} sheep, and then {i + 1} sheep. " for i in range(2000)))
    (folder / "recall.json").write_text(re.search(r"^    \{\n.*?^    \}\n", section, re.MULTILINE | re.DOTALL)[0])
    return folder


def run(command, folder):
    bin = f"{Path(PROGRAM).parent}:{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": bin}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done


def test_the_model_of_the_page_learns_to_recall(section, folder):
    run(commands(section)[0], folder)
    lines = (folder / "runs/recall/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["eval_accuracy"] > 0.95


def test_the_other_commands_of_the_page_work_after_it(section, folder):
    for command in commands(section)[1:]:
        shortened = command + " --set steps=2" if command.startswith("gka train") else command
        if command.startswith("gka plot"):
            pytest.importorskip("matplotlib")
        run(shortened, folder)
    assert (folder / "recall.png").exists() and (folder / "runs/tiny-gka/latest/tokenizer.json").exists()


def test_a_sliding_window_is_shorter_than_the_sequences_it_slides_over():
    pairs = [(p, p.with_name("sliding-window.train.json")) for p in ROOT.glob("configs/*/sliding-window.json")]
    assert len(pairs) > 3
    for model, recipe in pairs:
        window, length = (json.loads(p.read_text())[key] for p, key in ((model, "sliding_window"), (recipe, "length")))
        assert window < length, model
