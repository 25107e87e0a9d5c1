"""experiments/hybrid: a chat's questions can be answered from what was told, and only tests have test words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments" / "hybrid"))

import dialogues
from dialogues import UNKNOWN, WORDS, Chats


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def test_every_answer_names_a_fact_that_was_told():
    chats = Chats(0, prose=["Nothing of the kind."])
    answered = 0
    for _ in range(300):
        turns = chats.chat()
        told = ""
        for who, what in turns:
            if who == "user":
                told += " " + what
            elif who == "assistant" and what not in (*dialogues.ACKNOWLEDGED, UNKNOWN) and len(turns) > 2:
                name, value = what.split(" ")[0].removesuffix("'s"), what.rstrip(".").split(" ")[-1]
                assert {name, value} <= words(told), (what, turns)
                answered += 1
    assert answered > 1000


def test_training_and_test_chats_share_no_listed_name_and_no_city():
    seen = [set(), set()]
    for test in (False, True):
        chats = Chats(1, test=test)
        for _ in range(300):
            seen[test] |= words(dialogues.as_text(chats.chat()))
    listed = set(WORDS["name"]) | set(WORDS["city"])
    assert len(seen[0] & listed) > 100 and len(seen[1] & listed) > 20
    assert not seen[0] & seen[1] & listed


def test_a_test_item_has_as_many_facts_as_it_says_and_one_answer():
    for item in dialogues.test_items(3, 10, 10, False) + dialogues.test_items(3, 10, 10, True):
        assert item["context"].endswith("<|im_start|>assistant\n")
        assert len(item["answers"]) == 1 and UNKNOWN not in item["answers"]
        told = re.sub(r"<\|im_start\|>assistant\n.*?<\|im_end\|>", "", item["context"]).split("\n")
        assert sum(line.count(".") for line in told) >= 10


def test_the_same_seed_gives_the_same_chats():
    assert Chats(5).chat() == Chats(5).chat()


def test_what_a_memory_keeps_is_measured():
    program = Path(dialogues.__file__).with_name("kept.py")
    said = subprocess.run(
        [sys.executable, program, "--chats", "2", "--tokens", "200"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout
    numbers = [re.findall(r"[\d,]*\d", line)[-3:] for line in said.split("\n")[1:6]]
    rows = [[int(number.replace(",", "")) for number in row] for row in numbers]
    assert [kept for kept, _, _ in rows] == [200, 200, 136, 72, 8]
    assert len({states for _, states, _ in rows}) == 1
    assert [cache * 3 for _, _, cache in rows] == [rows[0][2] * pages for pages in (3, 3, 2, 1, 0)]
    assert said.count("right of 2 chats: all: ") == 2
