"""`gka tokenizer train`: what it learns is what the `tokenizers` package learns from the same text, and loads there."""

import json

import pytest
import text_samples
import token_files
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

PATTERNS = {
    "gpt2": None,
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    r"\p{L}+|[^\p{L}]": r"\p{L}+|[^\p{L}]",
}


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(text_samples.corpus(300_000), encoding="utf-8")
    return path


def learn_there(corpus, pattern, vocab_size, min_count):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=PATTERNS[pattern] is None)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level
    if PATTERNS[pattern]:
        split = pre_tokenizers.Split(Regex(PATTERNS[pattern]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if pattern == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([corpus.read_bytes().decode()], trainer)
    return json.loads(tokenizer.to_str())["model"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_merges_are_learnt_as_by_the_tokenizers_package(pattern, corpus, tmp_path):
    out = tmp_path / "tokenizer.json"
    token_files.call("tokenizer", "train", corpus, "--vocab-size", 2000, "--pattern", pattern, "--out", out)
    ours = json.loads(out.read_text(encoding="utf-8"))["model"]
    theirs = learn_there(corpus, pattern, 2000, 2)
    assert ours["merges"] == [list(merge) for merge in theirs["merges"]]
    assert ours["vocab"] == theirs["vocab"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_learnt_loads_there_and_encodes_alike(pattern, corpus, tmp_path):
    out = tmp_path / "tokenizer.json"
    token_files.call("tokenizer", "train", corpus, "--vocab-size", 1500, "--pattern", pattern, "--out", out)
    texts = [*text_samples.mixtures(300, seed=5), "a<|endoftext|>b"]
    theirs = [encoding.ids for encoding in Tokenizer.from_file(str(out)).encode_batch(texts)]
    assert token_files.encode(tmp_path, out, texts) == theirs


def test_learning_twice_gives_the_same_file(corpus, tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for out in files:
        token_files.call("tokenizer", "train", corpus, "--vocab-size", 700, "--out", out)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_special_tokens_come_first_and_the_text_is_never_cut_through_them(tmp_path):
    (tmp_path / "corpus.txt").write_text("<a>x<b>" * 50)
    out = tmp_path / "tokenizer.json"
    options = ["--vocab-size", 300, "--special", "<a>", "--special", "<b>", "--out", out]
    done = token_files.call("tokenizer", "train", tmp_path / "corpus.txt", *options)
    assert b"smaller than 300" in done.stderr
    tokenizer = Tokenizer.from_file(str(out))
    assert [tokenizer.id_to_token(0), tokenizer.id_to_token(1)] == ["<a>", "<b>"]
    assert tokenizer.get_vocab_size() == 258  # nothing else occurs, so nothing was joined


def test_a_vocabulary_smaller_than_the_bytes_is_refused(corpus, tmp_path):
    done = token_files.call(
        "tokenizer", "train", corpus, "--vocab-size", 100, "--out", tmp_path / "x.json", check=False
    )
    assert done.returncode == 1
    assert b"too small: 256 bytes and the special tokens make 257" in done.stderr
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("arguments", [["--vocab-size", 10**20], ["--min-count", 0]])
def test_a_number_that_makes_no_sense_is_refused(corpus, tmp_path, arguments):
    done = token_files.call("tokenizer", "train", corpus, "--out", tmp_path / "x.json", *arguments, check=False)
    assert done.returncode == 2 and arguments[0].encode() in done.stderr
    assert not (tmp_path / "x.json").exists()


def test_nothing_is_learnt_from_no_text(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    done = token_files.call("tokenizer", "train", tmp_path / "empty.txt", "--out", tmp_path / "x.json", check=False)
    assert done.returncode == 1
    assert done.stderr == b"gka: there is no text in what was read, so no tokenizer\n"
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_a_place_that_cannot_be_written_is_named_before_anything_is_learnt(tmp_path):
    (tmp_path / "bad.jsonl").write_text("no JSON")
    done = token_files.call(
        "tokenizer", "train", tmp_path / "bad.jsonl", "--out", tmp_path / "none" / "x.json", check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"gka: cannot write")
    done = token_files.call("tokenizer", "train", tmp_path / "bad.jsonl", "--out", tmp_path / "x.json", check=False)
    assert b"is not JSON" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]
