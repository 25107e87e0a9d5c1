"""Tokenizers against the `tokenizers` package of Hugging Face: token for token, whatever the text."""

import json
import random

import pytest
import text_samples
import token_files
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern, behavior="isolated", **options):
    return pre_tokenizers.Split(Regex(pattern), behavior, **options)


def byte_level(**options):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False} | options)


PRE_TOKENIZERS = {
    "gpt2": byte_level(use_regex=True),
    "gpt2-space": byte_level(use_regex=True, add_prefix_space=True),
    "no-regex": pre_tokenizers.Sequence([split(r"\n", "merged_with_previous"), byte_level()]),
    "llama3": pre_tokenizers.Sequence([split(LLAMA3), byte_level()]),
    "qwen2": pre_tokenizers.Sequence([split(QWEN2), byte_level()]),
    "gpt4o": pre_tokenizers.Sequence([split(GPT4O, "removed", invert=True), byte_level()]),
    "deepseek": pre_tokenizers.Sequence(
        [
            split(r"\p{N}{1,3}"),
            split(r"[一-龥぀-ゟ゠-ヿ]+"),
            split(
                r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            byte_level(),
        ]
    ),
    "starcoder": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)]),
    "others": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(),
            pre_tokenizers.Split("==", "contiguous"),
            split(r"\p{Lu}", "merged_with_next"),
            split(r"\s", "removed"),
            byte_level(use_regex=True, add_prefix_space=True),
        ]
    ),
}


def learn(pre_tokenizer, vocab_size=3000, normalizer=None, **options):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<|endoftext|>"]} | options
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **options)
    tokenizer.train_from_iterator(text_samples.corpus(200_000).splitlines(keepends=True), trainer)
    return tokenizer


@pytest.fixture(scope="module")
def texts():
    everything = "".join(text_samples.characters())
    runs = [everything[at : at + 700] for at in range(0, len(everything), 700)]
    spaced = [" ".join(everything[at : at + 1000 : 3]) for at in range(0, len(everything), 1000)]
    long = ["a" * 5000, "ab" * 3000, " " * 4000, "=" * 4000, "好" * 2000, "\n" * 3000, "", "é" * 999]
    return [*text_samples.mixtures(1500, seed=1), text_samples.SENTENCES, text_samples.CODE, *runs, *spaced, *long]


def expect_same(folder, tokenizer, texts):
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    ours = token_files.encode(folder, path, texts)
    theirs = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    assert len(ours) == len(theirs)
    for text, mine, other in zip(texts, ours, theirs, strict=True):
        assert mine == other, f"{text!r}"


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_text_gets_the_tokens_of_the_tokenizers_package(name, texts, tmp_path):
    normalizer = normalizers.NFC() if name == "qwen2" else None
    expect_same(tmp_path, learn(PRE_TOKENIZERS[name], normalizer=normalizer), texts)


def test_words_that_are_tokens_are_taken_whole_with_ignore_merges(texts, tmp_path):
    tokenizer = learn(PRE_TOKENIZERS["llama3"])
    file = json.loads(tokenizer.to_str())
    file["model"]["ignore_merges"] = True
    file["model"]["merges"] = file["model"]["merges"][::3]  # so that many tokens cannot be reached by merges
    kept = {"".join(merge) for merge in file["model"]["merges"]} | set(file["model"]["vocab"])
    file["model"]["merges"] = [merge for merge in file["model"]["merges"] if set(merge) <= kept]
    expect_same(tmp_path, Tokenizer.from_str(json.dumps(file)), texts[:800])


def test_bytes_without_a_token_are_left_out_or_unknown(texts, tmp_path):
    tokenizer = learn(PRE_TOKENIZERS["gpt2"], initial_alphabet=[], limit_alphabet=60)
    expect_same(tmp_path, tokenizer, texts[:800])
    file = json.loads(tokenizer.to_str())
    file["model"]["unk_token"] = "<|endoftext|>"
    for fuse in (False, True):
        file["model"]["fuse_unk"] = fuse
        expect_same(tmp_path, Tokenizer.from_str(json.dumps(file)), texts[:300])


def sprinkle(texts, tokens, seed):
    rng = random.Random(seed)
    made = []
    for text in texts:
        for _ in range(rng.randint(1, 5)):
            at = rng.randint(0, len(text))
            around = rng.choice(["", " ", "  \n", "x", "_", "é"])
            text = text[:at] + around + rng.choice(tokens) + rng.choice(["", around]) + text[at:]
        made.append(text)
    return made


@pytest.mark.parametrize("nfc", [False, True])
def test_added_tokens_are_found_where_the_tokenizers_package_finds_them(nfc, texts, tmp_path):
    tokenizer = learn(PRE_TOKENIZERS["qwen2"], normalizer=normalizers.NFC() if nfc else None)
    tokenizer.add_tokens(
        [
            AddedToken("<left>", lstrip=True),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<both>", lstrip=True, rstrip=True),
            AddedToken("word", single_word=True),
            AddedToken("wo", normalized=False, single_word=True),
            AddedToken("<longer>"),
            AddedToken("<lo", normalized=True),
            AddedToken("cafe\u0301"),
            AddedToken("=="),
        ]
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", AddedToken("<|strip|>", lstrip=True, rstrip=True)])
    tokens = [entry["content"] for entry in json.loads(tokenizer.to_str())["added_tokens"]] + ["<l", "café", "<|im_"]
    expect_same(tmp_path, tokenizer, sprinkle(texts[:1200], tokens, seed=2))


def test_malformed_utf8_counts_as_replacement_characters(tmp_path):
    tokenizer = learn(PRE_TOKENIZERS["gpt2"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = text_samples.malformed(400, seed=3)
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_bytes(text)
    files = [tmp_path / f"{index}.txt" for index in range(len(texts))]
    token_files.call("tokenize", *files, "--tokenizer", tmp_path, "--no-end-token", "--out", tmp_path / "out")
    theirs = [tokenizer.encode(text.decode("utf-8", errors="replace")).ids for text in texts]
    assert token_files.read(tmp_path / "out.tokens").documents == theirs
