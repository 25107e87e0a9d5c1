"""Data of experiments/data as few files as possible, for a machine that has no network, and back.

pack      lm-1.tar: half of every source's training documents, the held-out text, tasks, the tokenizer
          lm-2.tar: the other half; enwik8.tar: its bytes
cut       lm-1.tar as packs of its files that fit into a call each: lm-1.0.tar, which has the tokenizer, lm-1.1.tar, …
unpack    tokenises them with `gka tokenize`: tokens/SOURCE.1.tokens, SOURCE.2.tokens, SOURCE.test.tokens; tasks/

Text travels, not tokens: under xz it takes 0.6 bytes a token, tokens take 1.4. Every machine unpacks, the one that
packed as well, so that a run sees the same files wherever it is.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import io
import json
import lzma
import random
import re
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import PROGRAM, read_lines, run_program, table, write_atomically  # noqa: E402

SOURCES = ("wikipedia", "rfc", "pubmed", "gcide", "prose", "code")
PARTS = 2
TASKS = (
    "lambada",
    "hellaswag",
    "piqa",
    "arc_easy",
    "arc_challenge",
    "winogrande",
    "boolq",
    "openbookqa",
    "sciq",
    "copa",
)
EXTRACTION = ("squad",)
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]  # for text
PIECE = 50_000  # bytes of enwik8's test part in an item: as many items as a standard error needs

Member = tuple[str, bytes]


# ---- What goes in


def part_of(line: str) -> int:
    """Which half a document belongs to: its text decides, so that every source is cut alike on every machine."""
    return hashlib.sha256(line.encode()).digest()[0] % PARTS + 1


def training_text(data: Path, source: str, part: int, limit: int) -> bytes:
    with (data / "text" / f"{source}.train.jsonl").open() as file:
        lines = [line for line in file if part_of(line) == part]
    return "".join(lines[:limit] if limit else lines).encode()


def some_items(lines: list[str], most: int) -> list[str]:
    """The line about the task and so many items, drawn once: what `--limit` then takes is a sample too."""
    about, items = lines[0], lines[1:]
    random.Random(0).shuffle(items)
    return [about, *items[:most]]


def task(data: Path, name: str, most: int) -> bytes:
    return "".join(some_items(read_lines(data / "tasks" / f"{name}.jsonl"), most)).encode()


FIELDS = {
    "Request for Comments:": re.compile(r"^Request for Comments:\s*(\d+)", re.MULTILINE),
    "Published in:": re.compile(r"^\s+((?:January|February|March|April|May|June|July|August|September|October|November"
                                r"|December) \d{4})$", re.MULTILINE),
    "First author:": re.compile(r"^\S.*?\s{3,}((?:[A-Z]\.[ -]?)+\s?[A-Z][\w'-]+)"),
}  # fmt: skip


def header_items(text: str, characters: int = 4000) -> list[dict]:
    """What an RFC's first lines say, asked for at the end of its first page or two."""
    items = []
    for field, pattern in FIELDS.items():
        if found := pattern.search(text[:1500]):
            context = f"{text[:characters]}\n\nSummary of this document\n\n{field}"
            items.append({"context": context, "answers": [found[1]]})
    return items


def rfc_headers(data: Path) -> bytes:
    """Extraction as FDA has it, from held-out RFCs."""
    about = {"task": "rfc_headers", "kind": "contains", "stop": ["\n"], "max_tokens": 16, "source": "held-out RFCs"}
    texts = [json.loads(line)["text"] for line in (data / "text" / "rfc.test.jsonl").open()]
    lines = [about, *(item for text in texts for item in header_items(text))]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def enwik8_test(data: Path) -> bytes:
    """enwik8's last 5 MB as a task for a model of other tokens than bytes: bits per byte."""
    text = (data / "text" / "enwik8.test").read_bytes().decode("utf-8", "replace")
    pieces, piece = [], ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= PIECE:
            pieces.append(piece)
            piece = ""
    about = {"task": "enwik8", "kind": "text", "source": "bytes 95,000,000 to 100,000,000 of enwik8"}
    items = ({"text": text} for text in [*pieces, piece] if text)
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [about, *items]).encode()


def members(data: Path, options: argparse.Namespace) -> dict[str, list[tuple[str, object]]]:
    """By pack: the names in it and what makes their bytes."""
    packs: dict[str, list[tuple[str, object]]] = {}
    for part in range(1, PARTS + 1):
        packs[f"lm-{part}.tar"] = [
            (f"text/{source}.{part}.jsonl", (training_text, data, source, part, options.documents))
            for source in options.sources
        ]
    first = packs["lm-1.tar"]
    for source in options.sources:
        first.append((f"text/{source}.test.jsonl", (read, data / "text" / f"{source}.test.jsonl")))
    for name in (*TASKS, *EXTRACTION):
        if (data / "tasks" / f"{name}.jsonl").exists():
            first.append((f"tasks/{name}.jsonl", (task, data, name, options.items)))
    if "rfc" in options.sources:
        first.append(("tasks/rfc_headers.jsonl", (rfc_headers, data)))
    first.append(("gpt2/tokenizer.json", (read, data / "gpt2" / "tokenizer.json")))
    if (data / "text" / "enwik8.test").exists():
        first.append(("tasks/enwik8.jsonl", (enwik8_test, data)))
        packs["enwik8.tar"] = [
            (f"text/enwik8.{part}", (read, data / "text" / f"enwik8.{part}")) for part in ("train", "valid", "test")
        ]
    return packs


def read(path: Path) -> bytes:
    return path.read_bytes()


def compressed(make: tuple) -> bytes:
    function, *arguments = make
    return lzma.compress(function(*arguments), format=lzma.FORMAT_XZ, filters=XZ)


def write_pack(path: Path, found: list[Member]) -> None:
    def write(target: Path) -> None:
        with tarfile.open(target, "w") as archive:
            for name, content in found:
                entry = tarfile.TarInfo(name + ".xz")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))

    write_atomically(path, write)


def pack(options: argparse.Namespace) -> int:
    data, out = Path(options.data), Path(options.out)
    if not (data / "gpt2" / "tokenizer.json").exists():
        raise SystemExit(f"pack: {data} has no data yet; experiments/data/run.py makes it")
    rows = []
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for name, making in members(data, options).items():
            contents = list(pool.map(compressed, [make for _, make in making]))
            write_pack(out / name, [(member, content) for (member, _), content in zip(making, contents, strict=True)])
            rows.append([name, f"{(out / name).stat().st_size / 2**20:.1f}", str(len(making))])
    print(table(["pack", "MiB", "files"], rows))
    return 0


# ---- In pieces

TOKENIZER = "gpt2/tokenizer.json"


def fitting(found: list[Member], room: float) -> list[Member]:
    """Of those in their order the ones that fit, as a tar holds them."""
    taken, used = [], tarfile.RECORDSIZE  # at the end, at most
    for name, content in found:
        size = tarfile.BLOCKSIZE * (1 + -(-len(content) // tarfile.BLOCKSIZE))
        if used + size <= room:
            taken.append((name, content))
            used += size
    return taken


def cut(options: argparse.Namespace) -> int:
    with tarfile.open(options.pack) as archive:
        found = [(entry.name.removesuffix(".xz"), archive.extractfile(entry).read()) for entry in archive]
    found = [(name, content) for name, content in found if not (options.no_tasks and name.startswith("tasks/"))]
    found.sort(key=lambda member: (member[0] != TOKENIZER, -len(member[1])))
    rows = []
    while found:
        taken = fitting(found, 2**20 * (options.most if rows else options.first))
        if not taken:
            raise SystemExit(f"cut: {found[0][0]} does not fit into a pack; give a larger --first or --most")
        found = [member for member in found if member not in taken]
        path = options.pack.with_name(f"{options.pack.stem}.{len(rows)}.tar")
        write_pack(path, taken)
        rows.append([path.name, f"{path.stat().st_size / 2**20:.1f}", str(len(taken))])
    print(table(["pack", "MiB", "files"], rows))
    return 0


# ---- And out again


def tokenise(text: Path, prefix: Path, tokenizer: str) -> int:
    command = [PROGRAM, "tokenize", str(text), "--out", str(prefix), "--tokenizer", tokenizer]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"unpack: gka tokenize {text.name}: {done.stderr.strip()}")
    with prefix.with_name(prefix.name + ".tokens").open("rb") as file:
        return int.from_bytes(file.read(32)[16:24], "little")


def expand(content: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda target: target.write_bytes(lzma.decompress(content)))


def unpack(options: argparse.Namespace) -> int:
    out = Path(options.out)
    for file in options.packs:
        with tarfile.open(file) as archive, concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = []
            for entry in archive:
                name = entry.name.removesuffix(".xz")
                if not re.fullmatch(r"(text|tasks|ruler|gpt2)/[\w.-]+", name):
                    raise SystemExit(f"unpack: {file} has {entry.name}, which belongs to no pack")
                waiting.append(pool.submit(expand, archive.extractfile(entry).read(), out / name))
            for one in waiting:
                one.result()
    rows = []
    for text in sorted((out / "text").iterdir()):
        name = text.name.removesuffix(".jsonl")
        prefix = out / "tokens" / name
        prefix.parent.mkdir(exist_ok=True)
        if not prefix.with_name(name + ".tokens").exists():
            tokenizer = str(out / "gpt2" / "tokenizer.json") if text.suffix == ".jsonl" else "bytes"
            rows.append([name, f"{tokenise(text, prefix, tokenizer):,}"])
    print(table(["tokens", "number"], rows))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    packing = commands.add_parser("pack")
    packing.set_defaults(command=pack)
    packing.add_argument("--data", default="out/data", help="what experiments/data made (out/data)")
    packing.add_argument("--out", default="build/packs")
    packing.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES), metavar="SOURCE")
    packing.add_argument("--documents", type=int, default=0, help="of a source in a pack, at most (0: all)")
    packing.add_argument("--items", type=int, default=1000, help="of a task, at most (1000)")
    packing.add_argument("--jobs", type=int, default=2)
    cutting = commands.add_parser("cut")
    cutting.set_defaults(command=cut)
    cutting.add_argument("pack", type=Path)
    cutting.add_argument("--first", type=float, default=12.5, metavar="MIB", help="of the first at most (12.5)")
    cutting.add_argument("--most", type=float, default=27, metavar="MIB", help="of the others at most (27)")
    cutting.add_argument("--no-tasks", action="store_true", help="leave out what runs with --items 0 do not ask")
    unpacking = commands.add_parser("unpack")
    unpacking.set_defaults(command=unpack)
    unpacking.add_argument("packs", nargs="+", metavar="PACK")
    unpacking.add_argument("--out", default="out/lm/data")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    return options.command(options)


if __name__ == "__main__":
    run_program(main)
