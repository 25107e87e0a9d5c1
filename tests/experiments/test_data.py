"""experiments/data: what cleaning leaves, and that nothing tested is trained on."""

from __future__ import annotations

import random
import re
import string
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments" / "data"))

from overlap import GRAM, Forbidden
from sources import plain, rfc_text, squeeze

SWAPPED = {ord(letter): letter.swapcase() for letter in string.ascii_letters}


def grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9\u0080-\uffff]+", text.lower())
    return {tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)}


def test_a_cut_text_shares_no_13_words_with_a_test_and_the_rest_stays():
    draw = random.Random(0)
    vocabulary = ["Fluß", "naïve", "river", "Stone", "7", "x1", "the", "of", "run"]

    def sentence(n: int) -> str:
        return " ".join(draw.choice(vocabulary) for _ in range(n)) + ". "

    tests = [sentence(20) for _ in range(30)]
    tested = Forbidden(tests)
    forbidden = set().union(*map(grams, tests))
    touched = 0
    for trial in range(50):
        paragraphs = [sentence(draw.randrange(5, 40)) for _ in range(8)]
        if trial % 2:
            paragraphs[3] += tests[trial % 30].translate(SWAPPED).replace(" ", " - ")
        text = "\n\n".join(paragraphs)
        cut, shared, removed = tested.cut(text)
        assert (shared > 0) == bool(grams(text) & forbidden)
        assert not grams(cut) & forbidden
        assert len(text.encode()) - len(cut.encode()) == removed
        if not shared:
            assert cut == text
        touched += shared > 0
    assert touched >= 25


def test_of_a_long_paragraph_only_the_sentence_goes():
    sentences = [" ".join(f"w{i}x{j}" for j in range(15)) + ". " for i in range(60)]
    cut, shared, _ = Forbidden([sentences[30]]).cut("".join(sentences))
    assert shared == 3  # 15 words have three thirteens
    assert cut == "".join(sentences[:30] + sentences[31:])


def test_wikipedia_markup_leaves_prose():
    markup = (
        "{{Infobox|a={{b|c}}}}'''Anarchism''' is a [[political philosophy|philosophy]] of [[Freedom]].<ref>x</ref> "
        "[http://a.b see here]&nbsp;too.\n== History ==\n* one\n[[Image:x.jpg|thumb|a [[link]] in it]]\n"
        "{| class=x\n|-\n| cell\n|}\nMore.\n[[de:Anarchismus]]\n==See also==\n* [[Other]]"
    )
    assert plain(markup) == "Anarchism is a philosophy of Freedom. see here too.\n\nHistory\n\none\n\nMore."


def test_a_page_break_in_an_rfc_does_not_cut_its_paragraph():
    foot, head = "Mogul & Deering              [page 2]", "RFC 1191   Path MTU   November 1990"
    page = f"   to the same network as the source, and\n\n\n{foot}\n\f\n\n{head}\n\n\n\n"
    assert rfc_text(page + "   that works.\n") == "to the same network as the source, and\nthat works."
    assert rfc_text(page.replace(", and", ".") + "   It works.\n").endswith("source.\n\nIt works.")


def test_squeezing_keeps_paragraphs():
    assert squeeze("a  \n\n\n\nb\n") == "a\n\nb"
