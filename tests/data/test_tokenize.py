"""`gka tokenize` and `gka tokenizer` on the command line."""

import gzip
import json
import lzma
import os
import signal
import subprocess

import pytest
import text_samples
import token_files
from token_files import PROGRAM, call, read
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers


def test_a_text_file_is_one_document_of_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xc3\xa9\xff")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"\n")
    call("tokenize", *(tmp_path / name for name in ["a.txt", "b.txt", "c.txt"]), "--out", tmp_path / "out")
    file = read(tmp_path / "out.tokens")
    assert file.documents == [[*b"caf\xc3\xa9\xff", 256], [10, 256]]
    assert (file.vocab_size, file.end_of_document, file.token_bytes) == (257, 256, 2)


def test_a_separator_cuts_a_text_file_into_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one\n---\ntwo\n---\n\n---\nthree")
    call("tokenize", tmp_path / "a.txt", "--separator", "\n---\n", "--out", tmp_path / "out")
    assert read(tmp_path / "out.tokens").documents == [[*b"one", 256], [*b"two", 256], [*b"three", 256]]


def test_json_lines_have_a_document_a_line_under_the_field_that_is_named(tmp_path):
    lines = [{"text": "a\nb", "other": "x"}, {"text": "é😀", "other": "y"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    call("tokenize", tmp_path / "a.jsonl", "--out", tmp_path / "one", "--no-end-token")
    assert read(tmp_path / "one.tokens").documents == [[*b"a\nb"], [*"é😀".encode()]]
    call("tokenize", tmp_path / "a.jsonl", "--field", "other", "--out", tmp_path / "two")
    assert read(tmp_path / "two.tokens").documents == [[*b"x", 256], [*b"y", 256]]


def test_threads_do_not_change_the_result(tmp_path):
    texts = text_samples.mixtures(200, seed=9)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for threads in (1, 4):
        call("tokenize", tmp_path / "a.jsonl", "--threads", threads, "--out", tmp_path / f"out{threads}")
    assert (tmp_path / "out1.tokens").read_bytes() == (tmp_path / "out4.tokens").read_bytes()


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ('{"text": "a"}\n{"text": \n', [], "a.jsonl line 2 is not JSON"),
        ('{"content": "a"}\n', [], 'line 1 has no field "text"; it has "content", which --field would name'),
        ('{"text": 3}\n', [], 'the field "text" is not a text'),
        ("[1]\n", [], 'line 1 has no field "text"'),
        ('{"text": "a"}\n', ["--end-token", "<eos>"], "the tokenizer has no token '<eos>'"),
        ('{"text": "a"}\n', ["--tokenizer", "/nowhere"], "there is no tokenizer '/nowhere'"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_no_file(content, options, said, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    done = call("tokenize", tmp_path / "a.jsonl", "--out", tmp_path / "new/deeper/out", *options, check=False)
    assert done.returncode == 1
    assert said in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_folders_that_are_not_there_are_made(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    call("tokenize", "a.txt", "--out", "data/corpus", cwd=tmp_path)
    call("tokenize", "a.txt", "--out", "beside", cwd=tmp_path)
    assert (tmp_path / "data/corpus.tokens").read_bytes() == (tmp_path / "beside.tokens").read_bytes()


def test_a_missing_file_is_named(tmp_path):
    done = call("tokenize", tmp_path / "none.txt", "--out", tmp_path / "out", check=False)
    assert done.returncode == 1
    assert b"none.txt: No such file" in done.stderr


def test_verify_finds_a_changed_byte(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    call("tokenize", tmp_path / "a.txt", "--out", tmp_path / "out")
    path = tmp_path / "out.tokens"
    assert b"1001 tokens, 1 documents, 16 bits a token" in call("tokenize", "--verify", path).stdout
    raw = bytearray(path.read_bytes())
    raw[300] ^= 1
    path.write_bytes(raw)
    done = call("tokenize", "--verify", path, check=False)
    assert done.returncode == 1
    assert b"contents do not match its checksum" in done.stderr


def test_an_interrupt_ends_it_without_a_file(tmp_path):
    source = tmp_path / "endless.jsonl"
    with source.open("w") as file:
        line = json.dumps({"text": "x" * 4000}) + "\n"
        for _ in range(100):
            file.write(line * 100)
    command = [token_files.PROGRAM, "tokenize", *[source] * 400, "--out", tmp_path / "out"]  # 16 GB in all
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    while not any(path.name.startswith("out.tokens.writing") for path in tmp_path.iterdir()):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted; " in said
    assert os.listdir(tmp_path) == ["endless.jsonl"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A tokenizer of the `tokenizers` package with a template around texts, and its file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|begin|>", "<|end_of_text|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator([text_samples.corpus(100_000)], trainer)
    ids = [(name, tokenizer.token_to_id(name)) for name in specials]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end_of_text|>", pair="$A $B", special_tokens=ids
    )
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return tokenizer, path


def test_encoding_adds_the_template_when_asked_to(bpe):
    tokenizer, path = bpe
    text = text_samples.SENTENCES
    for specials in (False, True):
        done = call("tokenizer", "encode", path, *(["--specials"] if specials else []), input=text.encode())
        assert [int(word) for word in done.stdout.split()] == tokenizer.encode(text, add_special_tokens=specials).ids


def test_decoding_is_that_of_the_tokenizers_package(bpe):
    tokenizer, path = bpe
    for at, text in enumerate(text_samples.mixtures(6, seed=4)):
        ids = tokenizer.encode(text).ids[: 40 + at]  # cut, so that characters are too
        given = " ".join(map(str, ids)).encode()
        assert call("tokenizer", "decode", path, input=given).stdout.decode() == tokenizer.decode(ids)
        shown = call("tokenizer", "decode", path, "--specials", input=given).stdout.decode()
        assert shown == tokenizer.decode(ids, skip_special_tokens=False)


def test_documents_end_with_the_tokenizers_own_token(bpe, tmp_path):
    tokenizer, path = bpe
    (tmp_path / "a.txt").write_text("abc")
    call("tokenize", tmp_path / "a.txt", "--tokenizer", path.parent, "--out", tmp_path / "out")
    (document,) = read(tmp_path / "out.tokens").documents
    assert document == [
        *tokenizer.encode("abc", add_special_tokens=False).ids,
        tokenizer.token_to_id("<|end_of_text|>"),
    ]


def test_gpt2s_vocabulary_and_merges_are_a_tokenizer(bpe, tmp_path):
    tokenizer, _ = bpe
    tokenizer.model.save(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["merges.txt", "vocab.json"]
    texts = text_samples.mixtures(50, seed=6)
    theirs = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    assert token_files.encode(tmp_path, tmp_path, texts) == theirs


def changed(path, **parts):
    file = json.loads(path.read_text())
    file["model"].update(parts.pop("model", {}))
    return json.dumps(file | parts)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "not supported: normalizer Lowercase"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "not supported: pre-tokenizer Metaspace"),
        ({"pre_tokenizer": None}, "pre-tokenizer has no ByteLevel"),
        ({"decoder": {"type": "WordPiece"}}, "not supported: decoder WordPiece"),
        ({"post_processor": {"type": "BertProcessing"}}, "not supported: post-processor BertProcessing"),
        ({"model": {"type": "Unigram"}}, "not supported: model Unigram"),
        ({"model": {"byte_fallback": True}}, "not supported: byte_fallback"),
        ({"model": {"dropout": 0.1}}, "not supported: dropout"),
        ({"model": {"merges": [["a", "☃"]]}}, "its merges use '☃', which is no token"),
        ({"model": {"merges": ["abc"]}}, "its merge 'abc' is not two tokens"),
        ({"model": {"vocab": [1]}}, "it is damaged or no tokenizer.json"),
    ],
)
def test_what_is_not_supported_is_named(parts, said, bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_text(changed(bpe[1], **parts))
    done = call("tokenizer", "info", tmp_path / "tokenizer.json", check=False)
    assert done.returncode == 1
    assert said in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_a_fingerprint_is_of_what_the_tokenizer_does_not_of_its_file(bpe, tmp_path):
    def fingerprint(text):
        (tmp_path / "tokenizer.json").write_text(text)
        return call("tokenizer", "info", tmp_path / "tokenizer.json").stdout.splitlines()[-1]

    file = json.loads(bpe[1].read_text())
    same = json.loads(bpe[1].read_text())
    same["model"]["merges"] = [" ".join(merge) for merge in same["model"]["merges"]]
    assert fingerprint(json.dumps(file)) == fingerprint(json.dumps(same, indent=3))
    other = json.loads(bpe[1].read_text())
    other["model"]["merges"].reverse()
    assert fingerprint(json.dumps(file)) != fingerprint(json.dumps(other))


def zstd_frame(content):
    """Frames that hold their content as it is, by the format's definition: no package here compresses by zstd."""
    size = len(content)
    assert size < 1 << 17
    block = (size << 3 | 1).to_bytes(3, "little")  # the last block, and a raw one
    return b"\x28\xb5\x2f\xfd" + b"\xa0" + size.to_bytes(4, "little") + block + content


@pytest.mark.parametrize(
    ("ending", "compress"),
    [
        (".gz", gzip.compress),
        (".xz", lzma.compress),
        (".zst", zstd_frame),
        (".gz", lambda b: b"".join(map(gzip.compress, [b[:5], b[5:]]))),
    ],
)
def test_compressed_text_is_read_as_what_it_is(ending, compress, tmp_path):
    text = "".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(200)).encode()
    (tmp_path / f"a.jsonl{ending}").write_bytes(compress(text))
    call("tokenize", tmp_path / f"a.jsonl{ending}", "--out", tmp_path / "a")
    assert [bytes(d[:-1]).decode() for d in read(tmp_path / "a.tokens").documents] == [f"line {n}" for n in range(200)]
    (tmp_path / "odd name").write_bytes(compress(text)[:-9])
    done = call("tokenize", tmp_path / "odd name", "--out", tmp_path / "b", check=False)
    assert done.returncode == 1 and b"compressed text" in done.stderr
    assert not (tmp_path / "b.tokens").exists()


def test_standard_input_is_a_file_called_minus(tmp_path):
    call("tokenize", "-", "--separator", "--", "--out", tmp_path / "a", input=gzip.compress(b"one--two"))
    assert [bytes(d[:-1]) for d in read(tmp_path / "a.tokens").documents] == [b"one", b"two"]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"PAR1", b"it is a Parquet file"),
        (b"%PDF-1.7", b"it is a PDF"),
        (b"GKATOKEN", b"it is a token file"),
        ("\ufeffhi".encode("utf-16-le"), b"it is in UTF-16"),
        ("\ufeffhi".encode("utf-16-be"), b"it is in UTF-16"),
    ],
)
def test_what_is_no_text_is_named(tmp_path, start, said):
    (tmp_path / "a.txt").write_bytes(start + bytes(100))
    done = call("tokenize", tmp_path / "a.txt", "--out", tmp_path / "a", check=False)
    assert b"a.txt: " + said in done.stderr
    assert not (tmp_path / "a.tokens").exists()


def test_a_folder_is_no_name_for_a_token_file(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for out in (tmp_path, f"{tmp_path}/new/", "."):
        done = call("tokenize", tmp_path / "a.txt", "--out", out, check=False)
        assert done.returncode == 1 and b"is a folder; name a file in it, such as" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_nothing_makes_no_token_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    done = call("tokenize", tmp_path / "a.txt", "--out", tmp_path / "a", check=False)
    assert done.returncode == 1 and b"there is no text in what was read" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_output_that_cannot_be_written_is_a_failure(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    call("tokenize", tmp_path / "a.txt", "--out", tmp_path / "a")
    for words, given in [
        (["tokenizer", "encode"], b"text"),
        (["tokenizer", "decode"], b"1 2 3"),
        (["tokenize", "--verify", tmp_path / "a.tokens"], b""),
    ]:
        with open("/dev/full", "w") as full:
            done = subprocess.run([PROGRAM, *words], input=given, stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 1
        assert done.stderr == b"gka: the output could not be written: No space left on device\n"


def test_a_misspelt_option_is_what_is_complained_about():
    done = call("tokenize", "--seperator", "x", check=False)
    assert done.returncode == 2
    assert b"tokenize has no option '--seperator'; did you mean '--separator'?" in done.stderr


def test_a_pattern_of_bytes_that_are_no_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    done = call(
        "tokenizer",
        "train",
        tmp_path / "a.txt",
        "--pattern",
        os.fsdecode(b"\xff\xfe"),
        "--out",
        tmp_path / "t.json",
        check=False,
    )
    assert done.returncode == 1 and b"not valid UTF-8" in done.stderr
