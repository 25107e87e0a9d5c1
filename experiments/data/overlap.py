"""Text that is trained on and tested on: 13 words in a row in both, found by their hashes and cut out of training text.

Words are runs of letters and digits, ASCII's without regard to case. Everything runs on whole arrays: a word's hash
comes from running sums of byte · B^position (mod 2^64, B odd, so a power of B can be divided out), and the hash of
thirteen from theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

GRAM = 13
LONG = 2000  # characters; a longer paragraph is cut out sentence by sentence

_BASE, _STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # odd
_INVERSE = pow(_BASE, -1, 2**64)


def _alphabet() -> np.ndarray:
    table = np.zeros(256, np.uint64)
    for byte in range(256):
        character = bytes([byte]).lower()
        if character.isalnum() or byte >= 128:
            table[byte] = character[0] + 1
    return table


_ALPHABET = _alphabet()


_tables: dict[int, np.ndarray] = {}


def _powers(base: int, count: int) -> np.ndarray:
    """base^0 … base^(count − 1); the longest table so far is kept."""
    if len(_tables.get(base, ())) < count:
        powers = np.full(max(count, 1 << 16), base, np.uint64)
        powers[0] = 1
        _tables[base] = np.cumprod(powers, dtype=np.uint64)
    return _tables[base][:count]


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return values ^ (values >> np.uint64(29))


def words(text: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The hash, first byte and end of every word."""
    values = _ALPHABET[np.frombuffer(text, np.uint8)]
    inside = np.concatenate([[False], values > 0, [False]])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[0::2], edges[1::2]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * _powers(_BASE, len(values)), dtype=np.uint64)])
    return _mixed((sums[ends] - sums[starts]) * _powers(_INVERSE, len(values) + 1)[starts]), starts, ends


def grams(hashes: np.ndarray) -> np.ndarray:
    """The hash of every thirteen words in a row."""
    count = max(0, len(hashes) - GRAM + 1)
    total = np.zeros(count, np.uint64)
    for i in range(GRAM):
        total = total * np.uint64(_STEP) + hashes[i : i + count]
    return _mixed(total)


class Forbidden:
    """Everything thirteen words long that some test has."""

    def __init__(self, texts: Iterable[str]):
        found = [np.zeros(0, np.uint64)]
        for text in texts:
            found.append(np.unique(grams(words(text.encode())[0])))
        self.hashes = np.unique(np.concatenate(found))
        self.maybe = np.zeros(1 << 26, bool)  # by the upper 26 bits, to ask the sorted list seldom
        self.maybe[self.hashes >> np.uint64(38)] = True

    def hits(self, hashes: np.ndarray) -> np.ndarray:
        """Which thirteens of a text are in a test, by their first word."""
        if not len(self.hashes):
            return np.zeros(0, np.int64)
        candidates = np.flatnonzero(self.maybe[hashes >> np.uint64(38)])
        places = np.searchsorted(self.hashes, hashes[candidates])
        places[places == len(self.hashes)] = 0
        return candidates[self.hashes[places] == hashes[candidates]]

    def cut(self, text: str) -> tuple[str, int, int]:
        """The text without the paragraphs (of long ones: sentences) that share thirteen words with a test; how many
        thirteens were shared, and how many bytes went. What is left shares none: it is looked at again, because a cut
        makes new neighbours."""
        shared = removed = 0
        while True:
            data = text.encode()
            hashes, starts, ends = words(data)
            hits = self.hits(grams(hashes))
            if not len(hits):
                return text, shared, removed
            shared += len(hits)
            pieces = _pieces(text)
            bounds = np.cumsum([0, *(len(piece.encode()) for piece in pieces)])
            first = np.searchsorted(bounds, starts[hits], side="right") - 1
            last = np.searchsorted(bounds, ends[hits + GRAM - 1] - 1, side="right") - 1
            dropped = {piece for a, b in zip(first, last, strict=True) for piece in range(a, b + 1)}
            text = "".join(piece for i, piece in enumerate(pieces) if i not in dropped)
            removed += len(data) - len(text.encode())


def _pieces(text: str) -> list[str]:
    """Paragraphs with the blank lines behind them; joined they are the text."""
    pieces = []
    for paragraph in re.split(r"(?<=\n)\n+", text):  # each keeps one line end; the blank line is put back below
        paragraph += "\n" if paragraph.endswith("\n") else ""
        pieces += re.split(r"(?<=[.!?;]\s)", paragraph) if len(paragraph) > LONG else [paragraph]
    return pieces
