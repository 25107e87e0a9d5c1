"""Calling `gka`, and token files as docs/data.md describes them, read without gka."""

import itertools
import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PROGRAM = os.environ.get("GKA_PROGRAM", str(Path(sys.executable).parent / "gka"))
HEADER = struct.Struct("<8sIIQQQqQQ24xQ")


def call(*arguments, check=True, **options):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, **options)
    if check:
        assert done.returncode == 0, done.stderr.decode()
    return done


@dataclass
class TokenFile:
    vocab_size: int
    end_of_document: int
    token_bytes: int
    documents: list


def read(path):
    raw = Path(path).read_bytes()
    magic, version, width, tokens, documents, vocabulary, end, *_ = HEADER.unpack_from(raw)
    assert (magic, version) == (b"GKATOKEN", 1)
    ids = np.frombuffer(raw, {2: "<u2", 4: "<u4"}[width], tokens, HEADER.size)
    start = HEADER.size + -(-tokens * width // 8) * 8
    offsets = np.frombuffer(raw, "<u8", documents + 1, start)
    assert start + 8 * (documents + 1) == len(raw)
    cut = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    return TokenFile(vocabulary, end, width, cut)


def encode(folder, tokenizer, texts):
    """The tokens of each text, by `gka tokenize`."""
    lines = folder / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    call("tokenize", lines, "--tokenizer", tokenizer, "--no-end-token", "--out", folder / "texts")
    return read(folder / "texts.tokens").documents
