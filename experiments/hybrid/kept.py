"""What a memory costs in bytes, and in answers, where attention keeps its last tokens only (docs/inference.md).

  kept.py [MODEL] [--chats 200]

Ten facts are told, then a text is read (this repository's licence) of so many tokens, and all of it becomes a memory;
the question comes behind it. A model without recall in words (--chats 0) has its bytes printed alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dialogues import END, START, Chats, as_text

import gka

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import run_program  # noqa: E402

KEPT = (None, 256, 128, 64, 0)
FACTS = 10


def licence() -> list[str]:
    """Its paragraphs, each on one line."""
    parts = (ROOT / "LICENSE").read_text().split("\n\n")
    return [text for part in parts if 150 < len(text := " ".join(part.split())) < 600]


def named(keep: int | None) -> str:
    return "all" if keep is None else str(keep)


def print_bytes(engine: gka.Engine, count: int) -> None:
    text = engine.encode("\n\n".join(licence()))
    tokens = (text * (1 + count // len(text)))[:count]
    print(f"bytes of a memory of {count} tokens")
    for keep in KEPT:
        memory = engine.create_memory(tokens, keep_tokens=keep)
        print(
            f"  attention keeps {named(keep):>4}: {memory.kept_tokens:5} tokens, "
            f"states {memory.state_bytes:11,}, cache {memory.cache_bytes:11,}"
        )
        engine.delete_memory(memory.id)


def chat_of(chats: Chats, engine: gka.Engine, read: int) -> tuple[list[int], list[int], str]:
    """The tokens of a chat in which so many tokens of text, or a few more, are read after the facts; a question; its
    answer."""
    known = chats.facts(FACTS)
    turns = [("user", chats.tell(known)), ("assistant", chats.acknowledge())]
    told = len(engine.encode(as_text(turns)))
    while len(engine.encode(as_text(turns))) < told + read:
        turns += [("user", "Read this. " + chats.draw.choice(chats.prose)), ("assistant", chats.acknowledge())]
    fact = chats.draw.choice(known)
    question = f"{START}user\n{fact.say(chats.draw.choice(fact.relation.asked))}{END}\n{START}assistant\n"
    return engine.encode(as_text(turns)), engine.encode(question), fact.say(fact.relation.answer)


def print_answers(engine: gka.Engine, count: int, read: int) -> None:
    chats = Chats(7, test=True, prose=licence())
    right, tokens = dict.fromkeys(KEPT, 0), 0
    ends = engine.encode(END) + engine.encode("\n")
    for _ in range(count):
        story, question, answer = chat_of(chats, engine, read)
        tokens += len(story)
        for keep in KEPT:
            memory = engine.create_memory(story, keep_tokens=keep)
            done = engine.generate(question, memory=memory.id, max_tokens=32, temperature=0, stop_tokens=ends)
            right[keep] += done.text.split(END)[0].split("\n")[0].strip() == answer
            engine.delete_memory(memory.id)
    shares = ", ".join(f"{named(keep)}: {right[keep] / count:.3f}" for keep in KEPT)
    print(f"{FACTS} facts, then {read} tokens of text ({tokens / count:.0f} in all); right of {count} chats: {shares}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "experiments" / "hybrid" / "recall-8m"))
    parser.add_argument("--chats", type=int, default=200, help="of each kind; 0: bytes alone")
    parser.add_argument("--tokens", type=int, default=4096, help="of the memory whose bytes are printed")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with gka.Engine(options.model, device=options.device) as engine:
        print_bytes(engine, options.tokens)
        for read in (0, 512) if options.chats else ():
            print_answers(engine, options.chats, read)
    return 0


if __name__ == "__main__":
    run_program(main)
