"""A small hybrid that remembers what it is told: seven blocks of Gated KalmaNet and one of attention, 7.6M parameters.

prepare    text (experiments/data) and chats, a tokenizer learned from both, token files, train.json
train      gka train on them
export     the run as a folder to serve: bfloat16, chat template, end tokens
evaluate   gka eval on chats with names and values that training never showed, asked for a fact (recall) or a name (who)

  run.py prepare && run.py train && run.py export && run.py evaluate
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from dialogues import END, START, Chats, as_text, test_items

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import PROGRAM, run_program, write_atomically, write_json  # noqa: E402

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MODEL = {
    "model_type": "hybrid_qwen3",
    "hybrid_override_pattern": "3xGKA-*-4xGKA",
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "initializer_range": 0.04,
}
TRAINING = {
    "model": MODEL,
    "data": {
        "kind": "tokens",
        "files": [
            {"path": "recall.tokens", "weight": 7},
            {"path": "wikipedia.tokens", "weight": 2},
            {"path": "prose.tokens", "weight": 1},
        ],
        "packed": True,
    },
    "eval_data": {"kind": "tokens", "files": "recall.test.tokens", "packed": True, "eval_fraction": 0.99},
    "length": 1024,
    "batch_tokens": 65536,
    "steps": 3000,
    "learning_rate": 2e-3,
    "warmup": 0.03,
    "final_learning_rate": 0.02,
    "weight_decay": 0.05,
    "eval_every": 250,
    "eval_batches": 2,
    "checkpoint_every": 1000,
    "keep": 1,
}
FACTS = (1, 5, 10, 16)  # of the tasks
TASKS = {f"{name}-{facts}": (facts, back) for name, back in (("recall", False), ("who", True)) for facts in FACTS}


def call(*command: str) -> None:
    if subprocess.run([PROGRAM, *command]).returncode:
        raise SystemExit(f"hybrid: gka {command[0]} failed")


def write_texts(path: Path, texts: Iterable[str]) -> None:
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    write_atomically(path, lambda target: target.write_text("".join(lines)))


def documents(path: Path, megabytes: float) -> list[str]:
    """Documents of a source in an order of its own, up to so many megabytes."""
    found = [json.loads(line)["text"] for line in path.open()]
    random.Random(0).shuffle(found)
    size, taken = 0, []
    for text in found:
        size += len(text)
        if size > megabytes * 1e6:
            break
        taken.append(text)
    return taken


def paragraphs(texts: list[str]) -> list[str]:
    """Short ones, for chats in which something is read between the facts."""
    return [part for text in texts[:400] for part in text.split("\n\n") if 150 < len(part) < 600]


def text_of(folder: Path, name: str) -> Path:
    """A source's training text: all of it, or the half that experiments/lm/pack.py brought to this machine."""
    return next((path for part in ("train", "1") if (path := folder / f"{name}.{part}.jsonl").exists()), folder / name)


def write_chats(path: Path, seed: int, count: int, read: list[str]) -> Path:
    """One shard: chats of a stream of their own."""
    chats = Chats(seed, prose=read)
    write_texts(path, (as_text(chats.chat()) for _ in range(count)))
    return path


def write_shards(out: Path, count: int, read: list[str]) -> list[Path]:
    """`count` chats in as many files as there are processors: 5,000 a second each."""
    shards = os.cpu_count() or 1
    with concurrent.futures.ProcessPoolExecutor(shards) as pool:
        waiting = [
            pool.submit(write_chats, out / f"recall-{i:03}.jsonl", 1000 + i, -(-count // shards), read)
            for i in range(shards)
        ]
        return [one.result() for one in waiting]


def prepare(out: Path, options: argparse.Namespace) -> None:
    text = Path(options.data) / "text"
    if not all(text_of(text, name).exists() for name in ("wikipedia", "prose")):
        fetch = [sys.executable, str(ROOT / "experiments" / "data" / "run.py"), "--no-enwik8", "--out", options.data]
        subprocess.run([*fetch, "--sources", "wikipedia", "prose"], check=True)
    out.mkdir(parents=True, exist_ok=True)
    wikipedia = documents(text_of(text, "wikipedia"), options.megabytes)
    prose = documents(text_of(text, "prose"), 6)
    read = paragraphs(wikipedia)
    chats = Chats(1, prose=read)
    tests = Chats(2, test=True, prose=paragraphs(documents(text / "wikipedia.test.jsonl", 1)))
    write_texts(out / "wikipedia.jsonl", wikipedia)
    write_texts(out / "prose.jsonl", prose)
    shards = write_shards(out, options.chats, read)
    write_texts(out / "recall.test.jsonl", (as_text(tests.chat()) for _ in range(500)))
    sample = out / "sample.jsonl"
    write_texts(sample, [*wikipedia[:1500], *prose[:100], *(as_text(chats.chat()) for _ in range(1500))])
    specials = [word for token in (END_OF_TEXT, START, END) for word in ("--special", token)]
    call(
        "tokenizer",
        "train",
        str(sample),
        "--vocab-size",
        str(VOCABULARY),
        *specials,
        "--out",
        str(out / "tokenizer.json"),
    )
    files = {name: [out / f"{name}.jsonl"] for name in ("wikipedia", "prose", "recall.test")} | {"recall": shards}
    for name, parts in files.items():
        arguments = ["--tokenizer", str(out / "tokenizer.json"), "--out", str(out / name), "--end-token", END_OF_TEXT]
        call("tokenize", *map(str, parts), *arguments)
        for part in parts:
            part.unlink()
    sample.unlink()
    write_json(out / "train.json", TRAINING)


def write_tasks(out: Path, items: int) -> None:
    for name, (facts, back) in TASKS.items():
        about = {"task": name, "kind": "exact", "stop": [END, "\n"], "max_tokens": 32}
        lines = [about, *test_items(facts, facts, items, back)]
        body = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(out / f"{name}.jsonl", lambda target, body=body: target.write_text(body))


def train(out: Path, options: argparse.Namespace) -> None:
    settings = [word for setting in options.set for word in ("--set", setting)]
    call("train", str(out / "train.json"), "--set", f"output={out / 'run'}", *settings)


def export(out: Path, options: argparse.Namespace) -> None:
    model = Path(options.model or out / "model")
    for folder in (model, draft := out / "draft"):
        shutil.rmtree(folder, ignore_errors=True)
    call("export", str(out / "run"), "--out", str(draft), "--dtype", "bfloat16")
    settings = {"bos_token": END_OF_TEXT, "eos_token": END, "chat_template": TEMPLATE, "model_max_length": 8192}
    write_json(draft / "tokenizer_config.json", settings)
    write_json(draft / "generation_config.json", {"eos_token_id": [0, 2]})  # the two that end: a text, a turn
    (draft / "CHECKSUMS.xxh64").unlink(missing_ok=True)  # of the files as they were; the next line writes new ones
    call("export", str(draft), "--out", str(model))
    shutil.rmtree(draft)
    size = sum(path.stat().st_size for path in model.iterdir())
    print(f"{model}: {size / 1e6:.1f} MB. gka serve {model} serves it.")


def evaluate(out: Path, options: argparse.Namespace) -> None:
    model = Path(options.model or out / "model")
    out.mkdir(parents=True, exist_ok=True)
    write_tasks(out, options.items)
    call("eval", str(model), "--tasks", *(str(out / f"{name}.jsonl") for name in TASKS), "--device", options.device)


STEPS = {"prepare": prepare, "train": train, "export": export, "evaluate": evaluate}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="+", choices=list(STEPS))
    parser.add_argument("--out", default="out/hybrid")
    parser.add_argument("--data", default="out/data", help="where experiments/data put its text")
    parser.add_argument("--chats", type=int, default=500000, help="each is seen once (500000)")
    parser.add_argument("--megabytes", type=float, default=32, help="of Wikipedia (32)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of gka train")
    parser.add_argument("--model", help="the folder to export to and to evaluate (OUT/model)")
    parser.add_argument("--items", type=int, default=500, help="of a task of evaluate (500)")
    parser.add_argument("--device", default="cpu", help="of evaluate")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    for step in options.step:
        STEPS[step](Path(options.out), options)
    return 0


if __name__ == "__main__":
    run_program(main)
