"""Writes newer_tables.inc: characters that the `tokenizers` package knows and this Python does not.

The regular expressions of that package know a newer Unicode than many a PCRE2. Each of these characters gets a stand-in
of the same category and length, for pre_tokenizer.cpp to put in its place while it looks for matches.

    .venv/bin/python src/data/newer_tables.py > src/data/newer_tables.inc
"""

import re
import unicodedata

from tokenizers import Regex, pre_tokenizers

CATEGORIES = re.findall("..", "LuLlLtLmLoMnMcMeNdNlNoPcPdPsPePiPfPoSmScSkSoZsZlZpCf")
FALLBACK = {
    "Lm": 0x16B40,
    "Pd": 0x10EAD,
    "Po": 0x10100,
    "Sc": 0x1E2FF,
    "Nd": 0x104A0,
}  # beyond U+FFFF, from Unicode 4 to 13
SAME_SCRIPT = {0x1B132: 0x1B001, 0x1B155: 0x1B000}  # Hiragana and Katakana, which patterns ask for by name
OLD = unicodedata.ucd_3_2_0  # what is in this one every PCRE2 knows


def matching(pattern, codes, step=1024):
    """Those of the codes that the package's regular expression matches."""
    remove = pre_tokenizers.Split(Regex(pattern), "removed")
    found = set()
    for at in range(0, len(codes), step):
        some = codes[at : at + step]
        kept = {letter for piece, _ in remove.pre_tokenize_str("".join(map(chr, some))) for letter in piece}
        found.update(code for code in some if chr(code) not in kept)
    return found


def stand_in(code, category):
    """An old character of the category, of as many bytes; for an ideograph another ideograph."""
    if code in SAME_SCRIPT:
        return SAME_SCRIPT[code]
    if category == "Lo" and 0x20000 <= code < 0x40000:
        return 0x20000
    start = 0x800 if code < 0x10000 else 0x10000
    for other in range(start, 0x110000 if start == 0x10000 else 0x10000):
        if not 0xD800 <= other < 0xE000 and OLD.category(chr(other)) == category == unicodedata.category(chr(other)):
            return other
    return FALLBACK.get(category, 0) if start == 0x10000 else 0


unknown = [code for code in range(0x800, 0x110000) if unicodedata.category(chr(code)) == "Cn"]
changed = [code for code in range(0x800, 0x110000) if unicodedata.category(chr(code)) not in {"Cn", "Cs", "Co"}]
runs = []
for category in CATEGORIES:
    codes = matching(rf"\p{{{category}}}", unknown)
    codes |= {c for c in matching(rf"\p{{{category}}}", changed) if unicodedata.category(chr(c)) != category}
    for code in sorted(codes):
        other = stand_in(code, category)
        assert other, (hex(code), category)
        if runs and runs[-1][1] == code - 1 and runs[-1][2] == other:
            runs[-1][1] = code
        else:
            runs.append([code, code, other])

print("// Made by newer_tables.py: do not edit.")
print("constexpr NewerRun kNewer[] = {")
line = "   "
for run in sorted(runs):
    entry = "{" + ", ".join(f"{value:#x}" for value in run) + "},"
    if len(line) + len(entry) + 1 > 120:
        print(line)
        line = "   "
    line += " " + entry
print(line + "\n};")
