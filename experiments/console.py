"""What experiments and benchmarks show and leave behind: a progress bar, tables, and files that are whole or absent.

Plain Python, no dependency. The bar goes to stderr, so that stdout holds the result alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

# The command: named by GKA (a machine with a card has no environment of ours) or GKA_PROGRAM, or beside this Python.
PROGRAM = os.environ.get("GKA") or os.environ.get("GKA_PROGRAM") or str(Path(sys.executable).parent / "gka")

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def paint(text: str, style: str, stream=None) -> str:
    """`text` in an ANSI style ("1" bold, "2" dim, "32" green, …) where the stream shows colours."""
    stream = stream or sys.stdout
    return f"\x1b[{style}m{text}\x1b[0m" if stream.isatty() and "NO_COLOR" not in os.environ else text


def _width(text: str) -> int:
    return len(_ANSI.sub("", text))


class _Ruled:
    """The lines of a ruled table as wide as these rows; the first `left` columns are aligned left, the others right."""

    def __init__(self, rows: Sequence[Sequence[str] | None], left: int):
        given = [row for row in rows if row is not None]
        self.widths, self.left = [max(map(_width, column)) for column in zip(*given, strict=True)], left

    def line(self, cells: Sequence[str]) -> str:
        padded = []
        for i, (cell, width) in enumerate(zip(cells, self.widths, strict=True)):
            space = " " * (width - _width(cell))
            padded.append(cell + space if i < self.left else space + cell)
        return "│ " + " │ ".join(padded) + " │"

    def rule(self, start: str, middle: str, end: str) -> str:
        return start + middle.join("─" * (width + 2) for width in self.widths) + end

    def head(self, header: Sequence[str]) -> list[str]:
        return [self.rule("┌", "┬", "┐"), self.line(header), self.rule("├", "┼", "┤")]

    def foot(self) -> str:
        return self.rule("└", "┴", "┘")


def table(header: Sequence[str], rows: Sequence[Sequence[str] | None], left: int = 1) -> str:
    """A ruled table; the first `left` columns are aligned left, the others right. A row that is None is a rule."""
    ruled = _Ruled([header, *rows], left)
    body = [ruled.rule("├", "┼", "┤") if row is None else ruled.line(row) for row in rows]
    return "\n".join([*ruled.head(header), *body, ruled.foot()])


class GrowingTable:
    """The same, each row printed when it is known. Its columns are as wide as those of `widest`, rows like those to
    come; a wider cell makes its own line longer."""

    def __init__(self, header: Sequence[str], widest: Sequence[Sequence[str]], left: int = 1):
        self.header, self.ruled = header, _Ruled([header, *widest], left)

    def add(self, row: Sequence[str]) -> None:
        print(self.ruled.line(row), flush=True)

    def __enter__(self) -> GrowingTable:
        print("\n".join(self.ruled.head(self.header)), flush=True)
        return self

    def __exit__(self, *_) -> None:
        print(self.ruled.foot(), flush=True)


class Progress:
    """A bar that redraws itself on a terminal, and prints a line at every tenth of the way elsewhere."""

    def __init__(self, total: int, title: str, stream=None):
        self.total, self.title, self.stream = total, title, stream or sys.stderr
        self.done, self.start, self.live = 0, time.monotonic(), (stream or sys.stderr).isatty()
        self._draw("")

    def step(self, what: str = "", by: int = 1) -> None:
        before, self.done = self.done, self.done + by
        if self.live or before * 10 // self.total != self.done * 10 // self.total:
            self._draw(what)

    def _draw(self, what: str) -> None:
        elapsed, part = time.monotonic() - self.start, self.done / self.total
        if not self.live:
            print(f"{self.title}: {part:4.0%}  {elapsed:5.1f} s  {what}".rstrip(), file=self.stream, flush=True)
            return
        filled = round(part * 28)
        left = f"{elapsed / part - elapsed:4.0f} s left" if 0 < part < 1 else f"{elapsed:6.1f} s     "
        bar = paint("━" * filled, "34", self.stream) + paint("━" * (28 - filled), "2", self.stream)
        print(f"\r{self.title} {bar} {part:4.0%} {left}  {what:<32.32}", end="", file=self.stream, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        if self.live:
            print(file=self.stream, flush=True)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls write(temporary path beside `path`) and moves the result into place; an interrupt leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, numbers: object) -> None:
    write_atomically(path, lambda target: target.write_text(json.dumps(numbers, indent=1) + "\n"))


def read_lines(path: Path) -> list[str]:
    """The lines of a file of JSON lines. Texts in them may have U+2028 or U+0085, where str.splitlines cuts too."""
    with path.open(encoding="utf-8") as file:
        return list(file)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Exits with what `main` returns; Ctrl-C ends it in one line."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped; no file was left half-written", file=sys.stderr)
        sys.exit(130)
