"""Training documents in the form of RULER's tasks, with other words, numbers and texts than its own.

Keys and values are made of syllables and digits, haystacks are the training text of experiments/lm, and the wording of
each kind is read off one of RULER's own prompts, so that what is learned is the form and what is tested is the memory.
A document is a prompt with its answer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "experiments" / name) for name in ("", "hybrid")]

from console import read_lines, run_program, write_atomically  # noqa: E402
from dialogues import made_up  # noqa: E402

CHARACTERS = 4.2  # of a token, about
KINDS = ("single", "multikey", "multivalue", "multiquery", "vt", "cwe")


class Wording:
    """How RULER asks: the prompt's parts around the context and what is asked for, from one of its own prompts."""

    def __init__(self, prompt: str, context: str, query: str):
        before, after = prompt.split(context)
        self.before, self.after, self.query = before, after, query

    def prompt(self, context: str, query: str) -> str:
        return self.before + context + self.after.replace(self.query, query)


def read_wording(tasks: Path, task: str, first: str, last: str, query: str) -> Wording:
    """From the shortest file of a task: the context lies between two patterns, and a third finds what is asked for."""
    file = min(tasks.glob(f"{task}-*.jsonl"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
    prompt = json.loads(read_lines(file)[1])["context"]
    begin = re.search(first, prompt).end()
    end = max(match.start() for match in re.finditer(last, prompt))
    return Wording(prompt, prompt[begin:end], re.search(query, prompt[end:])[1])


class Documents:
    """From one stream of random numbers."""

    def __init__(self, seed: int, texts: list[str], tasks: Path, tokens: int):
        self.draw, self.texts, self.size = random.Random(seed), texts, int(tokens * CHARACTERS)
        ask = r"for (\S+?(?:, (?:and )?\S+?)*) mentioned"
        quiz = r"afterwards\.\n"
        self.one = read_wording(tasks, "niah_single_2", quiz, r"\nWhat is the special", ask)
        self.many = read_wording(tasks, "niah_multiquery", quiz, r"\nWhat are all the special", ask)
        self.track = read_wording(tasks, "vt", r"following text\.\n\n", r"\nQuestion: Find", r"value (\d+)")
        self.common = read_wording(tasks, "cwe", r"most often\.\n", r"\nQuestion: What are", r"(10) most")

    def text(self, characters: int) -> list[str]:
        """Sentences of training text."""
        found, size = [], 0
        while size < characters:
            text = self.draw.choice(self.texts)
            start = self.draw.randrange(max(1, len(text) - characters))
            pieces = re.split(r"(?<=[.!?])\s+", text[start : start + characters - size])
            found += pieces
            size += sum(map(len, pieces)) + len(pieces)
        return found

    def key(self) -> str:
        return f"{made_up(self.draw)}-{made_up(self.draw)}"

    def value(self) -> str:
        return str(self.draw.randrange(10**6, 10**7))

    def needles(self, kind: str, size: int) -> str:
        keys, values, asked = {"single": (1, 1, 1), "multikey": (4, 1, 1), "multivalue": (1, 4, 1),
                               "multiquery": (4, 1, 4)}[kind]  # fmt: skip
        facts = {self.key(): [self.value() for _ in range(values)] for _ in range(keys)}
        told = [
            f"One of the special magic numbers for {key} is: {value}." for key, many in facts.items() for value in many
        ]
        sentences = self.text(size)
        for needle in self.draw.sample(told, len(told)):
            sentences.insert(self.draw.randrange(len(sentences) + 1), needle)
        wanted = self.draw.sample(list(facts), asked)
        query = wanted[0] if asked == 1 else ", ".join(wanted[:-1]) + ", and " + wanted[-1]
        wording = self.one if asked * values == 1 else self.many
        answers = [value for key in wanted for value in facts[key]]
        return wording.prompt(" ".join(sentences), query) + " " + ", ".join(answers) + "."

    def tracking(self, size: int) -> str:
        names = ["".join(self.draw.choice("BCDFGHJKLMNPQRSTVWXZ") for _ in range(5)) for _ in range(5)]
        number = str(self.draw.randrange(10000, 99999))
        lines = self.text(size)
        places = sorted(self.draw.sample(range(len(lines)), min(5, len(lines))))
        for moved, (place, name) in enumerate(zip(places, names, strict=False)):
            value = number if moved == 0 else f"VAR {names[moved - 1]} "
            lines.insert(place + moved, f"VAR {name} = {value}")
        return self.track.prompt("\n".join(lines), number) + " ".join(names[: len(places)]) + "."

    def counting(self, size: int) -> str:
        times, rare = (30, 3) if size > 12_000 else (6, 1)
        common = list({made_up(self.draw) for _ in range(10)})
        words = common * times
        while sum(map(len, words)) + 6 * len(words) < size:
            words += [made_up(self.draw)] * rare
        self.draw.shuffle(words)
        context = " ".join(f"{i + 1}. {word}" for i, word in enumerate(words))
        return self.common.prompt(context, "10") + " " + " ".join(f"{i + 1}. {w}" for i, w in enumerate(common))

    def document(self) -> str:
        """Of a length between a sixteenth of the longest and the longest."""
        size = int(self.size * 2 ** -self.draw.uniform(0, 4))
        kind = self.draw.choice(KINDS)
        if kind == "vt":
            return self.tracking(size)
        return self.counting(size) if kind == "cwe" else self.needles(kind, size)


def write_documents(path: Path, seed: int, characters: int, texts: list[str], tasks: Path, tokens: int) -> Path:
    documents = Documents(seed, texts, tasks, tokens)

    def lines() -> Iterator[str]:
        size = 0
        while size < characters:
            text = documents.document()
            size += len(text)
            yield json.dumps({"text": text}, ensure_ascii=False) + "\n"

    write_atomically(path, lambda target: target.write_text("".join(lines())))
    return path


def read_texts(data: Path, most: int = 2000) -> list[str]:
    texts: list[str] = []
    for name in ("wikipedia.1", "prose.1"):
        file = data / "text" / f"{name}.jsonl"
        if file.exists():
            texts += [json.loads(line)["text"] for line in read_lines(file)[:most]]
    return [text for text in texts if len(text) > 2000]


def make(options: argparse.Namespace) -> int:
    """Shards, one for each processor, for gka tokenize."""
    data, shards = Path(options.data), os.cpu_count() or 1
    each = int(options.tokens * CHARACTERS / shards)
    texts = read_texts(data)
    with concurrent.futures.ProcessPoolExecutor(shards) as pool:
        waiting = [
            pool.submit(
                write_documents,
                Path(options.out) / f"needles-{i:03}.jsonl",
                i,
                each,
                texts,
                data / "ruler",
                options.length,
            )
            for i in range(shards)
        ]
        for one in waiting:
            print(one.result())
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="out/lm/data", help="what pack.py unpacked, ruler.tar among it (out/lm/data)")
    parser.add_argument("--out", default="out/hybrids/needles")
    parser.add_argument("--tokens", type=int, default=3_300_000, help="in all, about")
    parser.add_argument("--length", type=int, default=16384, help="of the longest, in tokens (16384)")
    return parser.parse_args()


if __name__ == "__main__":
    run_program(lambda: make(arguments()))
