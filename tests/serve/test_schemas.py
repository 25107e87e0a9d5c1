"""Answers in a schema: what fits comes as the model says it, what does not becomes something that fits, and what the
people who write schemas by pydantic get is what they asked for."""

import datetime
import json
import random
import re
import uuid
from enum import Enum
from typing import Annotated, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field
from servers import fake


@pytest.fixture(scope="module")
def server():
    with fake(slots=4) as running:
        yield running


def answer(server, schema, text=None, **more):
    """What comes of a text that the model wants to say; without one it says whatever it may."""
    prompt = {"prompt": "x" if text is None else "SAY:" + text, "max_tokens": 600}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return server.post("/v1/completions", {**prompt, "response_format": form, **more})["choices"][0]


def says(server, schema, text):
    return answer(server, schema, text)["text"] == text


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
    },
}
LONG = {"enum": [f"name {i}" for i in range(300)]}
MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(100)}}
BOTH = {
    "allOf": [
        {"$ref": "#/$defs/base"},
        {"type": "object", "properties": {"b": {"type": "integer", "minimum": 2}}, "required": ["b"]},
    ],
    "properties": {"b": {"maximum": 5}},
    "$defs": {"base": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}},
}
EITHER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
}


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"äöü"', r'"\n\""'], ['"a"', '"abcd"', '"ääää"']),
        ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ['"AB-1"', '"XY-0042"'], ['"AB-"', '"ABC-1"', '"AB-1x"']),
        ({"type": "string", "pattern": "b", "maxLength": 4}, ['"b"', '"aabc"'], ['"aa"', '"aaaab"']),
        ({"type": "string", "pattern": r"^\"\\$"}, [r'"\"\\"'], ['"ab"']),
        ({"type": "string", "format": "date"}, ['"2026-02-28"'], ['"2026-02-30"', '"26-02-28"']),
        ({"type": "string", "format": "made-up"}, ['"anything"'], []),
        ({"type": "integer", "minimum": 10, "maximum": 120}, ["10", "99", "120"], ["9", "121", "-11", "1000"]),
        ({"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 0}, ["-4", "-1"], ["-5", "0", "3"]),
        ({"type": "number", "minimum": 0, "maximum": 0.3}, ["0", "0.3", "0.25"], ["0.31", "-0.1", "1"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.5", "12"], ["0", "-1"]),
        ({"minimum": 3}, ["3.5"], ["2"]),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "a"}], "items": False},
            ['[1,"a"]', "[1]"],
            ['["a"]', '[1,"a",2]'],
        ),
        (
            {"type": "array", "items": [{"type": "integer"}, {"const": "a"}], "additionalItems": {"type": "null"}},
            ['[1,"a"]', "[1]", '[1,"a",null]'],
            ['["a"]', '[1,"a",2]'],
        ),
        ({"items": [{"const": "a"}], "additionalItems": False}, ['["a"]'], ['["a",1]']),
        (
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
            ['{"x":1,"y":2}', "{}"],
            ['{"x":"1"}'],
        ),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}, "required": ["b"]},
            ['{"a":1,"b":2}', '{"b":2}'],
            ['{"a":1}', '{"c":1}', '{"b":"2"}'],
        ),
        (TREE, ['{"v":1,"next":{"v":2,"next":null}}'], ['{"v":1,"next":2}']),
        (LONG, ['"name 0"', '"name 299"'], ['"name 300"']),
        (MANY, ['{"p99":1}', '{"p0":1,"p80":2}'], ['{"q":1}']),
        (BOTH, ['{"b":3,"a":1}'], ['{"b":6,"a":1}', '{"b":1,"a":1}', '{"a":1}']),
        (EITHER, ['{"a":1}', '{"b":1}', '{"a":1,"b":2}'], ["{}", "3"]),
        ({"type": "string", "maxLength": 1, "nullable": True}, ["null", '"a"'], ["1"]),
        ({"type": "object", "required": ["k"]}, ['{"k":[1]}'], ["{}"]),
    ],
)
def test_what_fits_is_said_and_nothing_else(server, schema, fits, does_not):
    for text in fits:
        assert says(server, schema, text), text
    for text in does_not:
        assert not says(server, schema, text), text


def test_an_answer_is_laid_out_as_people_lay_json_out(server):
    value = {"a": [1, {"b": {}}, []], "c": {"d": "x", "e": [{"f": None}]}}
    schemas = [{"type": "object"}, {"type": "object", "properties": {"a": {}, "c": {}}, "required": ["a", "c"]}]
    for schema in schemas:
        for layout in ({}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}):
            assert says(server, schema, json.dumps(value, **layout))
        for odd in ('\n{"a":1,"c":1}', '{"a" :1,"c":1}', '{"a":1 ,"c":1}', '{"a":  1,"c":1}', '{"a":1,\n\n"c":1}'):
            assert not says(server, schema, odd)


PIECES = [
    "a",
    "b",
    ".",
    "[ab]",
    "[^a]",
    r"\d",
    "é",
    "(a|bé)",
    "(?:ab)?",
    "a{2}",
    "b{1,2}",
    r"\w+",
    "(a|b)*?",
    "[a-cé-ü]",
    "x*",
]


@pytest.mark.parametrize("seed", range(60))
def test_a_pattern_matches_what_python_says_it_matches(server, seed):
    rng = random.Random(seed)
    pattern = "".join(rng.choices(PIECES, k=rng.randint(1, 3)))
    pattern = rng.choice(["", "^"]) + pattern + rng.choice(["", "$"])
    pattern = rng.choice([pattern, f"{pattern}|^é$", f"({pattern})"])
    for _ in range(6):
        text = "".join(rng.choices("abé1x", k=rng.randint(0, 4)))
        same = says(server, {"type": "string", "pattern": pattern}, json.dumps(text, ensure_ascii=False))
        assert same == bool(re.search(pattern, text, re.ASCII)), (pattern, text)
    if "$" not in pattern:  # which may have no text of that length
        most = rng.randint(6, 9)
        choice = answer(server, {"type": "string", "pattern": pattern, "minLength": 6, "maxLength": most}, seed=seed)
        value = json.loads(choice["text"])
        assert re.search(pattern, value, re.ASCII) and 6 <= len(value) <= most, (pattern, value)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string", "pattern": "(?=a)"}, "look-ahead"),
        ({"type": "string", "pattern": r"(a)\1"}, r"has \1"),
        ({"type": "string", "pattern": "(a"}, "without its )"),
        ({"type": "string", "pattern": "(x{1000}){1000}"}, "is too large"),
        ({"type": "string", "pattern": "(.*a.{9}){9}"}, "is too large"),
        (  # each would do, and they have one budget
            {"properties": {f"p{n}": {"type": "string", "pattern": f"a[ab]{{9}}{n}"} for n in range(99)}},
            "is too large",
        ),
        ({"type": "string", "pattern": "^ab$", "minLength": 3}, "no text of the length"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "leave no number"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems above its maxItems"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "leads back to itself"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "two things at once in 'type'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems', which is not supported"),
        ({"not": {}}, "'not', which is not supported"),
        ({"propertyNames": {"pattern": "^a"}}, "propertyNames that are no list"),
        ({"propertyNames": {"enum": ["a"]}, "properties": {"a": {}}, "additionalProperties": {}}, "beside properties"),
    ],
)
def test_what_a_schema_cannot_ask_for_is_said(server, schema, said):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    error = server.post("/v1/completions", {"prompt": "x", "response_format": form}, status=400)["error"]
    assert (error["param"], error["code"]) == ("response_format", "unsupported_schema")
    assert said in error["message"]


class Colour(Enum):
    red = "red"
    blue = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: Annotated[list[Annotated[str, Field(max_length=3)]], Field(max_length=2)]


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: uuid.UUID
    day: datetime.date
    at: datetime.datetime
    code: Annotated[str, Field(pattern=r"^[A-Z]{3}\d{2,4}$")]
    size: tuple[Annotated[int, Field(gt=0, lt=10)], Annotated[float, Field(ge=0, le=1)]]
    colour: Colour | None
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    parts: Annotated[list["Order"], Field(max_length=0)] = []


def test_a_model_of_pydantic_is_filled_in_whatever_the_model_wants(server):
    client = OpenAI(base_url=f"{server.address}/v1", api_key="none", _strict_response_validation=True)
    ended = 0
    for seed in range(8):
        body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1500, "seed": seed}
        form = {"type": "json_schema", "json_schema": {"name": "order", "schema": Order.model_json_schema()}}
        got = client.chat.completions.create(**body, response_format=form).choices[0]
        if got.finish_reason == "stop":
            Order.model_validate_json(got.message.content)
            ended += 1
    assert ended >= 6


class Step(BaseModel):
    step: Annotated[str, Field(max_length=5)]


class Plan(BaseModel):
    steps: list[Step]


def test_the_clients_own_parse_takes_such_a_model(server):
    client = OpenAI(base_url=f"{server.address}/v1", api_key="none", _strict_response_validation=True)
    text = '{"steps":[{"step":"one"},{"step":"two"}]}'
    said = [{"role": "user", "content": f"SAY:{text}\nassistant:"}]
    got = client.chat.completions.parse(model="fake", messages=said, response_format=Plan, max_tokens=100)
    assert [one.step for one in got.choices[0].message.parsed.steps] == ["one", "two"]
