"""Chats in which somebody is told facts and asked for them: recall in words.

A chat has up to sixteen facts about people (where somebody lives, whose number it is), told in one message or several,
with text to read in between, some of them told anew later; then questions from name to fact and back, some about names
nobody mentioned. Answers have one form each, so that they can be compared word for word. A fifth of all names and
values appears in test chats only, and most names and half of the values are made up of syllables for each chat, so that
looking up is what can be learned, not who lives where.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

START, END = "<|im_start|>", "<|im_end|>"
NAMES_MADE_UP, VALUES_MADE_UP = 0.7, 0.5  # shares


def read_words() -> dict[str, list[str]]:
    """words.txt: a kind and words of it in every line."""
    words: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("words.txt").read_text().splitlines():
        kind, *more = line.split()
        words.setdefault(kind, []).extend(more)
    return words


WORDS = read_words()


@dataclass(frozen=True)
class Relation:
    """A fact between a name {n} and a value {v}: how it is told, asked for, answered, asked by value, changed."""

    value: str
    told: list[str]
    asked: list[str]
    answer: str
    back: list[str]
    changed: str = ""


RELATIONS = [
    Relation(
        "city",
        [
            "{n} lives in {v}.",
            "{n}'s home is {v}.",
            "In {v} lives {n}.",
            "{n} has a house in {v}.",
            "{n} moved to {v}.",
        ],
        ["Where does {n} live?", "In which city does {n} live?", "Where is {n}'s home?", "{n} lives where?"],
        "{n} lives in {v}.",
        ["Who lives in {v}?", "Whose home is {v}?", "Which person lives in {v}?"],
        "{n} has moved and lives in {v} now.",
    ),
    Relation(
        "job",
        ["{n} is a {v}.", "{n} works as a {v}.", "{n}'s job is {v}.", "{n} earns money as a {v}."],
        ["What does {n} do?", "What is {n}'s job?", "What does {n} work as?", "What is the job of {n}?"],
        "{n} works as a {v}.",
        ["Who is a {v}?", "Who works as a {v}?", "Which person is the {v}?"],
        "{n} has a new job and is a {v} now.",
    ),
    Relation(
        "colour",
        [
            "{n}'s favourite colour is {v}.",
            "{n} likes the colour {v}.",
            "The colour {n} likes best is {v}.",
            "{n} prefers {v}.",
        ],
        ["What is {n}'s favourite colour?", "Which colour does {n} like?", "What colour does {n} prefer?"],
        "{n}'s favourite colour is {v}.",
        ["Whose favourite colour is {v}?", "Who likes {v}?"],
    ),
    Relation(
        "animal",
        ["{n} has a {v}.", "{n} owns a {v}.", "{n} keeps a {v}.", "{n}'s pet is a {v}."],
        ["What pet does {n} have?", "Which animal does {n} have?", "What animal does {n} keep?", "What is {n}'s pet?"],
        "{n} has a {v}.",
        ["Who has a {v}?", "Who owns the {v}?", "Whose pet is a {v}?"],
    ),
    Relation(
        "instrument",
        ["{n} plays the {v}.", "{n}'s instrument is the {v}.", "{n} is learning the {v}.", "{n} practises the {v}."],
        ["What does {n} play?", "Which instrument does {n} play?", "What is {n}'s instrument?"],
        "{n} plays the {v}.",
        ["Who plays the {v}?", "Whose instrument is the {v}?"],
    ),
    Relation(
        "food",
        ["{n} likes to eat {v}.", "{n}'s favourite food is {v}.", "{n} loves {v}.", "{n} always orders {v}."],
        ["What does {n} like to eat?", "What is {n}'s favourite food?", "Which food does {n} like?"],
        "{n} likes to eat {v}.",
        ["Who likes to eat {v}?", "Whose favourite food is {v}?"],
    ),
    Relation(
        "drink",
        ["{n} drinks {v}.", "{n} wants {v} to drink.", "For {n} it is {v}."],
        ["What does {n} drink?", "What does {n} want to drink?"],
        "{n} drinks {v}.",
        ["Who drinks {v}?"],
    ),
    Relation(
        "day",
        ["{n} comes on {v}.", "{n} will visit us on {v}.", "On {v} we meet {n}.", "{n} arrives on {v}."],
        ["When does {n} come?", "On which day does {n} come?", "When will {n} visit us?", "When do we meet {n}?"],
        "{n} comes on {v}.",
        ["Who comes on {v}?", "Who will visit us on {v}?"],
        "{n} has changed plans and comes on {v}.",
    ),
    Relation(
        "month",
        ["{n} was born in {v}.", "{n}'s birthday is in {v}.", "{n} has a birthday in {v}."],
        ["When was {n} born?", "When is {n}'s birthday?", "In which month was {n} born?"],
        "{n} was born in {v}.",
        ["Who was born in {v}?", "Whose birthday is in {v}?"],
    ),
    Relation(
        "language",
        ["{n} speaks {v}.", "{n}'s mother tongue is {v}.", "{n} is learning {v}."],
        ["Which language does {n} speak?", "What does {n} speak?", "What is {n}'s language?"],
        "{n} speaks {v}.",
        ["Who speaks {v}?"],
    ),
    Relation(
        "thing",
        ["{n} has the {v}.", "{n} took the {v}.", "The {v} belongs to {n}.", "{n} carries the {v}."],
        ["What did {n} take?", "What does {n} carry?", "What is {n} carrying?"],
        "{n} has the {v}.",
        ["Who has the {v}?", "Who took the {v}?", "To whom does the {v} belong?"],
    ),
    Relation(
        "place",
        ["{n} is in the {v}.", "{n} went to the {v}.", "{n} waits in the {v}.", "You find {n} in the {v}."],
        ["Where is {n}?", "Where did {n} go?", "Where do I find {n}?"],
        "{n} is in the {v}.",
        ["Who is in the {v}?", "Who went to the {v}?"],
        "{n} went to the {v}.",
    ),
    Relation(
        "number",
        ["{n}'s number is {v}.", "The number of {n} is {v}.", "You reach {n} under {v}.", "{n} has the number {v}."],
        ["What is {n}'s number?", "Which number does {n} have?", "What is the number of {n}?"],
        "{n}'s number is {v}.",
        ["Whose number is {v}?", "Who has the number {v}?"],
        "{n} has a new number, {v}.",
    ),
]

ACKNOWLEDGED = ["Noted.", "I will remember that.", "All right.", "Understood.", "I see."]
OPENINGS = ["", "", "", "Please remember this. ", "Remember: ", "Here are some facts. ", "Some facts: ", "Listen. "]
READ = ["Here is a text to read. ", "Read this. ", "This is from a book. ", ""]
UNKNOWN = "You have not told me that."
SYSTEM = ["You are a helpful assistant.", "You remember what you are told.", "Answer in one sentence."]
SMALL_TALK = [
    (["Hello!", "Hello", "Hi", "Hi there!", "Good morning.", "Hey"], "Hello! Tell me some facts, and ask me for them."),
    (
        ["Who are you?", "What are you?", "What is your name?"],
        "I am a small model with a memory. Tell me facts, and I will remember them.",
    ),
    (
        ["What can you do?", "How can you help me?", "Help"],
        "I remember what you tell me. Tell me facts and ask for them.",
    ),
    (["Thank you.", "Thanks!", "Thank you very much."], "You are welcome."),
    (["Goodbye.", "Bye", "See you later."], "Goodbye!"),
    (["How are you?", "How do you do?"], "I am well, thank you."),
]


def held_out(word: str) -> bool:
    """A fifth of all words, the same ones always."""
    return sum(word.encode()) % 5 == 0


SIDES = [  # the words of training and of tests; a kind with too few of them has them on both sides
    {kind: [word for word in words if held_out(word) == test] or words for kind, words in WORDS.items()}
    for test in (False, True)
]


LISTED = {word.lower() for words in WORDS.values() for word in words}


def made_up(draw: random.Random) -> str:
    """Two or three syllables that are no word of the list."""
    while True:
        syllables = draw.randint(2, 3)
        word = "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(syllables))
        word += draw.choice(["", "n", "s", "r", "l", "x"])
        if word not in LISTED:
            return word


@dataclass
class Fact:
    name: str
    relation: Relation
    value: str

    def say(self, form: str) -> str:
        text = form.format(n=self.name, v=self.value)
        return text.replace(" a a", " an a").replace(" a e", " an e").replace(" a i", " an i").replace(" a o", " an o")


class Chats:
    """Chats from one stream of random numbers. `test`: with held-out words alone; `prose`: paragraphs to read."""

    def __init__(self, seed: int, test: bool = False, prose: list[str] | None = None):
        self.draw, self.test, self.prose = random.Random(seed), test, prose or []

    def word(self, kind: str) -> str:
        return self.draw.choice(SIDES[self.test][kind])

    def name(self) -> str:
        return made_up(self.draw).capitalize() if self.draw.random() < NAMES_MADE_UP else self.word("name")

    def value(self, kind: str) -> str:
        if kind == "number":
            return str(self.draw.randrange(10, 10 ** self.draw.randint(2, 5)))
        listed = self.word(kind)
        if kind in ("day", "month") or self.draw.random() >= VALUES_MADE_UP:
            return listed
        word = made_up(self.draw)
        return word.capitalize() if listed[0].isupper() else word

    def facts(self, count: int) -> list[Fact]:
        """Different names per relation and different values, so that every question has one answer, both ways."""
        relations = self.draw.sample(RELATIONS, self.draw.choice([1, 1, 2, 3, 5, len(RELATIONS)]))
        names = {self.name() for _ in range(max(2, round(count * self.draw.choice([0.4, 0.7, 1.0, 1.3]))))}
        found: dict[tuple[str, str], Fact] = {}
        for _ in range(8 * count):
            relation = self.draw.choice(relations)
            name, value = self.draw.choice(sorted(names)), self.value(relation.value)
            taken = {(fact.relation.value, fact.value) for fact in found.values()}
            if (name, relation.value) not in found and (relation.value, value) not in taken:
                found[name, relation.value] = Fact(name, relation, value)
            if len(found) == count:
                break
        return list(found.values())

    def tell(self, facts: list[Fact]) -> str:
        sentences = [fact.say(self.draw.choice(fact.relation.told)) for fact in facts]
        form = self.draw.random()
        if form < 0.2:
            return "\n".join(f"- {sentence}" for sentence in sentences)
        if form < 0.3:
            return "\n".join(sentences)
        return " ".join(sentences)

    def question(self, fact: Fact, facts: list[Fact]) -> tuple[str, str]:
        """A question for the fact, or for one that nobody told; and its answer."""
        if self.draw.random() < 0.06:
            stranger = self.name()
            if all(stranger != other.name for other in facts):
                return self.draw.choice(fact.relation.asked).format(n=stranger), UNKNOWN
        if self.draw.random() < 0.3:
            return fact.say(self.draw.choice(fact.relation.back)), fact.say(fact.relation.answer)
        return fact.say(self.draw.choice(fact.relation.asked)), fact.say(fact.relation.answer)

    def chat(self) -> list[tuple[str, str]]:
        """Turns, (who, what); one of small talk now and then. Every fact is asked for before one is asked for again."""
        if self.draw.random() < 0.04:
            asked, answer = self.draw.choice(SMALL_TALK)
            return [("user", self.draw.choice(asked)), ("assistant", answer)]
        turns = [("system", self.draw.choice(SYSTEM))] if self.draw.random() < 0.2 else []
        known = self.facts(self.draw.choice([1, 2, 3, 4, 6, 8, 10, 10, 12, 16]))
        turns += self.telling(known)
        waiting = ""  # facts that were told in the message that asks
        if turns[-1][0] == "user":
            waiting = turns.pop()[1] + self.draw.choice([" ", "\n", "\n\n"])
        asked = self.draw.sample(known, len(known)) + self.draw.sample(known, len(known))
        most = 3 + len(known)
        for fact in asked[: max(self.draw.randint(1, most), self.draw.randint(1, most))]:
            if self.draw.random() < 0.07 and not waiting:
                turns += self.change(known)
            question, answer = self.question(fact, known)
            turns += [("user", waiting + question), ("assistant", answer)]
            waiting = ""
        return turns

    def telling(self, facts: list[Fact]) -> list[tuple[str, str]]:
        """One message or several; the last may be left to the question."""
        pieces = 1 if self.draw.random() < 0.6 else self.draw.randint(2, 4)
        size = -(-len(facts) // pieces)
        turns: list[tuple[str, str]] = []
        for first in range(0, len(facts), size):
            opening = self.draw.choice(OPENINGS) if first == 0 else ""
            turns += [("user", opening + self.tell(facts[first : first + size])), ("assistant", self.acknowledge())]
            if self.prose and self.draw.random() < 0.1:
                text = self.draw.choice(READ) + self.draw.choice(self.prose)
                turns += [("user", text), ("assistant", self.acknowledge())]
        if self.draw.random() < 0.5:
            turns.pop()
        return turns

    def acknowledge(self) -> str:
        return self.draw.choice(ACKNOWLEDGED)

    def change(self, facts: list[Fact]) -> list[tuple[str, str]]:
        fact = self.draw.choice(facts)
        value = self.value(fact.relation.value)
        taken = any(f.relation is fact.relation and f.value == value for f in facts)
        if not fact.relation.changed or taken:
            return []
        fact.value = value
        return [("user", fact.say(fact.relation.changed)), ("assistant", self.acknowledge())]


def as_text(turns: list[tuple[str, str]]) -> str:
    """As the chat template writes it."""
    return "".join(f"{START}{who}\n{what}{END}\n" for who, what in turns)


def test_items(seed: int, facts: int, count: int, back: bool) -> list[dict]:
    """Chats with one question each, from a name to a fact or `back`, for gka eval: the answer word for word."""
    chats = Chats(seed, test=True)
    items = []
    while len(items) < count:
        turns = chats.telling(known := chats.facts(facts))
        if len(known) < facts:
            continue
        waiting = turns.pop()[1] + "\n" if turns[-1][0] == "user" else ""
        fact = chats.draw.choice(known)
        question = fact.say(chats.draw.choice(fact.relation.back if back else fact.relation.asked))
        context = as_text([*turns, ("user", waiting + question)]) + f"{START}assistant\n"
        items.append({"context": context, "answers": [fact.say(fact.relation.answer)]})
    return items
