"""The engine's C interface as a program in C may misuse it: what gka.Engine, which declares it again, never does."""

from ctypes import byref, c_char_p, c_int64, c_void_p, create_string_buffer
from pathlib import Path

import pytest

from gka import _engine

MODEL = str(Path(__file__).resolve().parents[1] / "goldens/tiny-hqwen3-gka").encode()
PROMPT = (c_int64 * 3)(5, 17, 3)


@pytest.fixture(scope="module")
def c():
    return _engine._library()


@pytest.fixture(scope="module")
def engine(c):
    made = c.gka_engine_load(MODEL, None)  # no options are the defaults
    assert made, c.gka_error()
    yield made
    c.gka_engine_free(made)


def request(**changes):
    good = {
        "prompt": PROMPT,
        "prompt_tokens": 3,
        "top_p": 1,
        "repetition_penalty": 1,
        "max_tokens": 4,
        "iterations": -1,
    }
    return _engine._Request(**{**good, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt": None}, "prompt is null"),
        ({"prompt_tokens": -1}, "the length of prompt takes at least 0, got -1"),
        ({"stop_tokens": 2}, "stop is null"),
        ({"bias": PROMPT, "biases": 1}, "bias_values is null"),
        ({"iterations": -7}, "iterations must be from 0"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused_in_a_sentence(c, engine, changes, sentence):
    assert c.gka_engine_submit(engine, byref(request(**changes))) is None
    assert c.gka_error().decode().startswith(sentence)


@pytest.mark.parametrize(
    ("call", "failed", "sentence"),
    [
        (lambda c, _: c.gka_engine_load(None, None), None, "model is null"),
        (lambda c, _: c.gka_engine_vocabulary(None), -1, "engine is null"),
        (lambda c, _: c.gka_engine_submit(None, byref(request())), None, "engine is null"),
        (lambda c, engine: c.gka_engine_submit(engine, None), None, "request is null"),
        (lambda c, _: c.gka_stream_next(None, byref(_engine._Event()), 1), -1, "stream is null"),
        (lambda c, engine: c.gka_memory_create(engine, None, PROMPT, 3, None, -1, None), -1, "memory is null"),
        (lambda c, engine: c.gka_memory_delete(engine, None), -1, "id is null"),
        (lambda c, _: c.gka_tokenizer_load(None), None, "name is null"),
        (lambda c, _: c.gka_tokenizer_encode(None, b"a", 1, None, 0), -1, "tokenizer is null"),
    ],
)
def test_a_null_is_refused_by_its_name(c, engine, call, failed, sentence):
    """Where it is not, this process ends."""
    assert call(c, engine) == failed
    assert c.gka_error().decode() == sentence


def test_what_frees_takes_a_null(c):
    for free in [c.gka_engine_free, c.gka_stream_free, c.gka_tokenizer_free]:
        free(None)
    c.gka_stream_cancel(None)


def test_a_wait_may_be_as_long_as_a_number_is(c, engine):
    """It once came back at once, for the clock had passed its end."""
    stream, event, kinds = c.gka_engine_submit(engine, byref(request())), _engine._Event(), []
    while (state := c.gka_stream_next(stream, byref(event), 2**63 - 1)) >= 0:
        kinds.append((state, event.kind))
        assert len(kinds) < 10
    assert kinds[-1] == (1, 3) and set(kinds[:-1]) <= {(1, 2)}
    c.gka_stream_free(stream)
    stream = c.gka_engine_submit(engine, byref(request()))
    assert c.gka_stream_next(stream, byref(event), -(10**13)) >= 0, "one of less than nothing is none"
    c.gka_stream_free(stream)


def test_numbers_that_are_no_tokens_add_nothing(c):
    """Those of more than 32 bits were once taken for the token with their lower half."""
    bytes_of = c.gka_tokenizer_load(b"bytes")
    ids = (c_int64 * 5)(ord("a"), 2**32 + ord("b"), -1, 10**6, ord("c"))
    text, place = create_string_buffer(8), c_void_p()
    assert c.gka_tokenizer_decode(bytes_of, ids, 5, text, 8) == 2
    assert text.value == b"ac"
    assert [c.gka_tokenizer_piece(bytes_of, number, byref(place)) for number in ids] == [1, 0, 0, 0, 1]
    assert c_char_p(place.value).value[:1] == b"c"
    c.gka_tokenizer_free(bytes_of)
