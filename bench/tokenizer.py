"""gka's BPE beside the `tokenizers` package, one thread each: megabytes of text per second of processor time.

gka's time is that of `gka tokenize`, reading and writing included, less that of a run on an empty file; the package's
is that of its fastest call (encode_batch_fast).

.venv/bin/python bench/tokenizer.py [FILE…]      (without files: text and code that is at hand)
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/data"))

import text_samples  # noqa: E402

PROGRAM = os.environ.get("GKA_PROGRAM", str(Path(sys.executable).parent / "gka"))


def processor_seconds():
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def seconds(function, times=3):
    best = float("inf")
    for _ in range(times):
        start = processor_seconds()
        function()
        best = min(best, processor_seconds() - start)
    return best


def gka(*arguments):
    subprocess.run([PROGRAM, *map(str, arguments)], check=True, capture_output=True)


def learn_there(path, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([path.read_text(encoding="utf-8")], trainer)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--vocab-size", type=int, default=16000)
    arguments = parser.parse_args()

    texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in arguments.files}
    if not texts:
        code = text_samples.corpus(4_000_000).removeprefix((text_samples.SENTENCES + text_samples.CODE) * 20)
        texts = {"code": code, "languages": "".join(text_samples.SENTENCES.split("\n", 1)[1] * 300)}
        texts["mixtures"] = "\n".join(text_samples.mixtures(6000, seed=1))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        everything = folder / "all.txt"
        everything.write_text("".join(texts.values()), encoding="utf-8")
        size = everything.stat().st_size / 1e6
        print(f"learning {arguments.vocab_size} tokens from {size:.1f} MB")
        file = folder / "gpt2.json"
        learn = ["tokenizer", "train", everything, "--vocab-size", arguments.vocab_size]
        ours = seconds(lambda: gka(*learn, "--out", file), times=1)
        theirs = seconds(lambda: learn_there(everything, arguments.vocab_size), times=1)
        print(f"  gka {ours:6.2f} s    tokenizers {theirs:6.2f} s")

        gka(*learn, "--pattern", "qwen2", "--out", folder / "qwen2.json")
        (folder / "empty.txt").write_text("")
        for file in (folder / "gpt2.json", folder / "qwen2.json"):
            other = Tokenizer.from_file(str(file))
            print(f"{file.stem}, one thread, MB/s")
            for title, text in texts.items():
                documents = [text[at : at + 20_000] for at in range(0, len(text), 20_000)]
                lines = folder / "texts.jsonl"
                lines.write_text(
                    "".join(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents), "utf-8"
                )
                run = ["--tokenizer", file, "--threads", 1, "--no-end-token", "--out", folder / "out"]
                start_up = seconds(lambda run=run: gka("tokenize", folder / "empty.txt", *run))
                mine = seconds(lambda run=run, lines=lines: gka("tokenize", lines, *run)) - start_up
                other_time = seconds(lambda documents=documents, other=other: other.encode_batch_fast(documents))
                size = len(text.encode()) / 1e6
                print(f"  {title:12} {size:6.1f} MB    gka {size / mine:6.1f}    tokenizers {size / other_time:6.1f}")


if __name__ == "__main__":
    main()
