"""Writes nfc_tables.inc, what unicode.cpp needs for Unicode's canonical composition (NFC).

The `tokenizers` package knows an older Unicode than Python does, and what it does not know it leaves alone. Tokens must
come out equal to its, so the tables hold what both know.

    .venv/bin/python src/data/nfc_tables.py > src/data/nfc_tables.inc
"""

import unicodedata

from tokenizers import normalizers

HANGUL = range(0xAC00, 0xD7A4)  # by arithmetic
LOW, HIGH = "\u0316", "\u0301"  # combining classes 220 and 230

nfc, nfd = normalizers.NFC().normalize_str, normalizers.NFD().normalize_str


def code_points():
    return (code for code in range(0x110000) if not 0xD800 <= code < 0xE000 and code not in HANGUL)


def reorders(mark):
    """Whether a mark with a combining class moves past one of another class."""
    other = LOW if unicodedata.combining(mark) > 220 else HIGH
    text = "a" + (mark + other if unicodedata.combining(mark) > unicodedata.combining(other) else other + mark)
    return nfd(text) == unicodedata.normalize("NFD", text)


def classes():
    """Runs (first, last, combining class)."""
    runs = []
    for code in code_points():
        value = unicodedata.combining(chr(code))
        if not value or not reorders(chr(code)):
            continue
        if runs and runs[-1][1:] == [code - 1, value]:
            runs[-1][1] = code
        else:
            runs.append([code, code, value])
    return runs


def decompositions():
    """(character, first, second or 0, whether composition makes it)."""
    for code in code_points():
        parts = unicodedata.decomposition(chr(code))
        if not parts or parts.startswith("<") or nfd(chr(code)) == chr(code):
            continue
        first, second = ([int(part, 16) for part in parts.split()] + [0])[:2]
        composes = second != 0 and nfc(chr(first) + chr(second)) == chr(code)
        yield code, first, second, int(composes)


def table(name, kind, rows):
    entries = ["{" + ", ".join(f"{value:#x}" for value in row) + "}," for row in rows]
    print(f"constexpr {kind} {name}[] = {{")
    line = "   "
    for entry in entries:
        if len(line) + len(entry) + 1 > 120:
            print(line)
            line = "   "
        line += " " + entry
    print(line + "\n};")


print("// Made by nfc_tables.py: do not edit.")
table("kCombining", "CombiningRun", classes())
table("kDecompositions", "Decomposition", decompositions())
