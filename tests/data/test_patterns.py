"""Patterns against the engine of the `tokenizers` package: what is not refused cuts every text at the same places."""

import json

import pytest
import text_samples
import token_files
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PATTERNS = [
    r"\p{Han}+|\p{Hiragana}+|\P{Katakana}",
    r"\p{Greek}+|\p{Hangul}|\p{^Thai}",
    r"\w+",
    r"[\w-]+|\W",
    r"\b",
    r"a{,2}|b{2,}|\d{1,2}?",
    r"\v|[\v]|\x41|\u0042",
    r"(?m:a.)|.$",
    r"(?i:'s|[a-k]+)",
    r"x*",
    r"(?=[aeiou])",
]
BEHAVIOURS = ["removed", "merged_with_previous", "merged_with_next", "contiguous"]
CASES = [(pattern, "isolated") for pattern in PATTERNS] + [
    (r"x*|(?=[aeiou])|\w", behaviour) for behaviour in BEHAVIOURS
]

# Every pair of two bytes has a token of its own, so that a cut between them shows.
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
PAIRS = [(a, b) for a in LETTERS for b in LETTERS]
VOCABULARY = {letter: number for number, letter in enumerate(LETTERS + [a + b for a, b in PAIRS])}


@pytest.fixture(scope="module")
def texts():
    everything = "".join(c for c in map(chr, range(1, 0x3FFFF)) if not "\ud800" <= c <= "\udfff")
    own = [
        "",
        "aab  bbb\n\nx",
        "Straße's 'S 'ſ",
        "foo_bar baz²x³ Ⓐb",
        "日本、語。「」カー",
        "xxaxx",
        "\x0b\x0c\x85{,3}",
    ]
    return (
        own + text_samples.mixtures(60, seed=5) + [everything[at : at + 3000] for at in range(0, len(everything), 3000)]
    )


@pytest.mark.parametrize(("pattern", "behaviour"), CASES)
def test_a_pattern_cuts_where_the_tokenizers_package_cuts(pattern, behaviour, texts, tmp_path):
    tokenizer = Tokenizer(models.BPE(VOCABULARY, PAIRS))
    tokenizer.decoder = decoders.ByteLevel()
    cut = pre_tokenizers.Split(Regex(pattern), behaviour, invert=behaviour == "removed")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    ours = token_files.encode(tmp_path, path, texts)
    for text, mine in zip(texts, ours, strict=True):
        assert mine == tokenizer.encode(text, add_special_tokens=False).ids, f"{text[:200]!r}"


def test_text_that_spells_a_special_token_stays_text_when_asked_to(tmp_path):
    tokenizer = Tokenizer(models.BPE(VOCABULARY, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["plain"])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    text = "a<|end|>plain b"
    for flag, as_text in [([], False), (["--no-specials"], True)]:
        tokenizer.encode_special_tokens = as_text
        done = token_files.call("tokenizer", "encode", tmp_path, *flag, input=text.encode())
        assert json.loads("[" + done.stdout.decode().replace(" ", ",") + "]") == tokenizer.encode(text).ids
