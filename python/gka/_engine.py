"""The inference engine: continues and scores texts, many at once, without a server.

    engine = gka.Engine("model")
    print(engine.generate("Once upon a time", max_tokens=64).text)
    for token in engine.stream("Once upon a time", temperature=0.8, seed=1):
        print(token.text, end="")

``libgka_engine.so`` does the work (from C++: ``include/gka/engine.h``). This module declares its C interface.
"""

from __future__ import annotations

import codecs
import ctypes
import math
import operator
import os
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path

from ._library import path as _library_path

_FINISH = ["none", "stop", "length", "cancelled", "error"]
_PROMPT, _NEW, _END = 1, 2, 3


class _Options(ctypes.Structure):
    _fields_ = [
        ("device", c_char_p),
        ("dtype", c_char_p),
        ("weights", c_char_p),
        ("memories", c_char_p),
        ("slots", c_int64),
        ("context", c_int64),
        ("step_tokens", c_int64),
        ("snapshot_bytes", c_int64),
        ("cache_bytes", c_int64),
        ("deterministic", c_int32),
        ("kv_cache_dtype", c_char_p),
    ]


class _Request(ctypes.Structure):
    _fields_ = [
        ("prompt", POINTER(c_int64)),
        ("prompt_tokens", c_int64),
        ("stop", POINTER(c_int64)),
        ("stop_tokens", c_int64),
        ("bias", POINTER(c_int64)),
        ("bias_values", POINTER(c_float)),
        ("biases", c_int64),
        ("memory", c_char_p),
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("repetition_penalty", c_double),
        ("presence_penalty", c_double),
        ("frequency_penalty", c_double),
        ("top_k", c_int64),
        ("max_tokens", c_int64),
        ("min_tokens", c_int64),
        ("top_logprobs", c_int64),
        ("iterations", c_int64),
        ("seed", c_uint64),
        ("ignore_eos", c_int32),
        ("prompt_logprobs", c_int32),
        ("certainty", c_int32),
    ]


class _Event(ctypes.Structure):
    _fields_ = [
        ("kind", c_int32),
        ("finish", c_int32),
        ("token", c_int64),
        ("logprob", c_double),
        ("certainty", c_double),
        ("tops", c_int64),
        ("top_tokens", POINTER(c_int64)),
        ("top_logprobs", POINTER(c_float)),
        ("prompt_tokens", c_int64),
        ("completion_tokens", c_int64),
        ("remembered_tokens", c_int64),
        ("kept_tokens", c_int64),
        ("message", c_char_p),
    ]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("id", c_char_p),
        ("name", c_char_p),
        ("tokens", c_int64),
        ("state_bytes", c_int64),
        ("cache_bytes", c_int64),
        ("created", c_int64),
        ("kept_tokens", c_int64),
    ]


_SIGNATURES = {
    "gka_error": (c_char_p, []),
    "gka_engine_load": (c_void_p, [c_char_p, POINTER(_Options)]),
    "gka_engine_free": (None, [c_void_p]),
    "gka_engine_vocabulary": (c_int64, [c_void_p]),
    "gka_engine_context": (c_int64, [c_void_p]),
    "gka_engine_submit": (c_void_p, [c_void_p, POINTER(_Request)]),
    "gka_stream_next": (c_int32, [c_void_p, POINTER(_Event), c_int64]),
    "gka_stream_cancel": (None, [c_void_p]),
    "gka_stream_free": (None, [c_void_p]),
    "gka_memory_create": (
        c_int32,
        [c_void_p, c_char_p, POINTER(c_int64), c_int64, c_char_p, c_int64, POINTER(_Memory)],
    ),
    "gka_memory_list": (c_int64, [c_void_p, POINTER(_Memory), c_int64]),
    "gka_memory_delete": (c_int32, [c_void_p, c_char_p]),
    "gka_tokenizer_load": (c_void_p, [c_char_p]),
    "gka_tokenizer_free": (None, [c_void_p]),
    "gka_tokenizer_encode": (c_int64, [c_void_p, c_char_p, c_int64, POINTER(c_int64), c_int64]),
    "gka_tokenizer_decode": (c_int64, [c_void_p, POINTER(c_int64), c_int64, c_char_p, c_int64]),
    "gka_tokenizer_piece": (c_int64, [c_void_p, c_int64, POINTER(c_void_p)]),
}
_loaded: ctypes.CDLL | None = None


def _library() -> ctypes.CDLL:
    global _loaded
    if _loaded is None:
        library = ctypes.CDLL(str(_library_path().with_name("libgka_engine.so")))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        _loaded = library
    return _loaded


def _checked(handle):
    if not handle:
        raise ValueError(_library().gka_error().decode())
    return handle


def _integers(values: Sequence[int]):
    """ctypes would cut larger numbers down to 64 bits."""
    try:
        return (c_int64 * len(values)).from_buffer(array("q", values))
    except OverflowError:
        raise ValueError(f"token {max(values, key=abs)} is no number of 64 bits") from None


def _bytes(text) -> bytes | None:
    return None if text is None else str(text).encode()


def _refuse_copy(self) -> None:
    """A copy would free the same engine a second time."""
    raise TypeError(f"gka's {type(self).__name__} cannot be copied or pickled; make one where it is needed")


@dataclass
class Token:
    """One generated token: its number, the model's own log-probability, and the text it adds."""

    id: int
    logprob: float | None
    text: str = ""
    #: Alternatives, likeliest first, as (number, log-probability).
    top: list[tuple[int, float]] = field(default_factory=list)
    #: How much of the queries the past explains, 0 to 1; None unless asked for.
    certainty: float | None = None


@dataclass
class Completion:
    text: str
    tokens: list[Token]
    #: "stop" or "length".
    finish: str
    prompt_tokens: int
    #: Of the prompt, taken from what earlier prompts left behind; and why not more.
    remembered_tokens: int
    why_not_more: str
    #: Of the memory's tokens, those that attention still sees; None without a memory.
    kept_tokens: int | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass
class Memory:
    """A text that was read once. Give its ``id`` to ``generate`` or ``stream``: the answer is as if the text stood
    before the prompt."""

    id: str
    name: str
    tokens: int
    #: Recurrent states, whose size is fixed, and attention's cache, which grows with the text.
    state_bytes: int
    cache_bytes: int
    #: Seconds since 1970.
    created: int
    #: Its last tokens, that attention still sees: all of them, unless ``keep_tokens`` asked for fewer.
    kept_tokens: int

    @classmethod
    def _from(cls, plain: _Memory) -> Memory:
        sizes = (plain.tokens, plain.state_bytes, plain.cache_bytes, plain.created, plain.kept_tokens)
        return cls(plain.id.decode(), plain.name.decode(), *sizes)


class _Stops:
    """Tokens on their way to a reader, held back while their text may be the beginning of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, deque()
        self.found = False

    def push(self, token: Token) -> list[Token]:
        self._held.append(token)
        text = "".join(held.text for held in self._held)
        at = min((place for place in map(text.find, self._stops) if place >= 0), default=-1)
        if at >= 0:
            self.found = True
            return self.end(at)
        begun = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        free, ready = len(text) - max(begun, default=0), []
        while self._held and len(self._held[0].text) <= free:
            free -= len(self._held[0].text)
            ready.append(self._held.popleft())
        return ready

    def end(self, most: int | None = None) -> list[Token]:
        """All remaining tokens, with their texts cut to so many characters."""
        ready, self._held = list(self._held), deque()
        for token in ready if most is not None else ():
            token.text, most = token.text[:most], max(most - len(token.text), 0)
        return ready


class Stream:
    """The tokens of one request as they come. Loop over it once.

    ``close`` cancels what still runs, and so does dropping the stream or closing its engine.
    """

    def __init__(self, engine: Engine, handle, stops: Sequence[str] = ()) -> None:
        self._engine, self._handle = engine, handle
        self._stops, self._ready = _Stops(stops), deque()
        self._process = os.getpid()
        self._lock = threading.Lock()  # close() in one thread waits for next() in another
        self._text = codecs.getincrementaldecoder("utf-8")("replace")  # holds back what is no whole character yet
        self._end: tuple | None = None  # what a Completion ends with
        self._closed = False  # by its owner

    __reduce__ = _refuse_copy

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        event = _Event()
        while True:  # lets go of the lock and looks up now and then, so that close() and Ctrl-C work
            with self._lock:
                if self._ready and not self._closed:
                    return self._ready.popleft()
                if self._handle is None:
                    if self._end is None and not self._closed:
                        self._engine._open()  # says that it was closed before the request was over
                    if self._end is not None and self._end[0] == "error":
                        raise RuntimeError(self._end[3])
                    raise StopIteration
                if _library().gka_stream_next(self._handle, byref(event), 100) <= 0:
                    continue
                if event.kind == _END:
                    self._finish(event)
                elif not self._stops.found:  # what was drawn before the engine heard of it is nobody's
                    self._ready.extend(self._stops.push(self._token(event)))
                    if self._stops.found:
                        _library().gka_stream_cancel(self._handle)

    def _finish(self, event: _Event) -> None:
        finish = "stop" if self._stops.found else _FINISH[event.finish]
        kept = None if event.kept_tokens < 0 else event.kept_tokens
        self._end = finish, event.prompt_tokens, event.remembered_tokens, event.message.decode(), kept
        self._ready.extend(self._stops.end())
        self._free()

    def _token(self, event: _Event) -> Token:
        text = self._text.decode(self._engine._piece(event.token))
        top = [(event.top_tokens[i], event.top_logprobs[i]) for i in range(event.tops)]
        logprob = None if math.isnan(event.logprob) else event.logprob
        certainty = None if math.isnan(event.certainty) else event.certainty
        return Token(event.token, logprob, text, top, certainty)

    def _free(self) -> None:
        handle, self._handle = self._handle, None
        if handle and self._process == os.getpid():
            _library().gka_stream_free(handle)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._free()

    def __del__(self) -> None:
        self._free()

    def _complete(self) -> Completion:
        tokens = list(self)
        rest = "" if self._stops.found else self._text.decode(b"", final=True)
        return Completion("".join(token.text for token in tokens) + rest, tokens, *self._end)


class Engine:
    """The engine for a model folder or a training run. Prompts are texts or lists of token numbers.

    ``tokenizer`` names one where the folder has none ("bytes", or a tokenizer.json); without any, prompts are numbers.
    ``weights`` is "stored" (bfloat16 on the CPU is mapped and not copied), "float32", "bfloat16" or "int8".
    ``kv_cache_dtype`` is "auto" (keys and values have the activations' type) or "int8", half of bfloat16.
    The engine chooses ``slots``, ``context``, ``step_tokens``, ``snapshot_bytes`` and ``cache_bytes`` where they are 0.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str | None = None,
        dtype: str | None = None,
        weights: str | None = None,
        kv_cache_dtype: str | None = None,
        tokenizer: str | Path | None = None,
        slots: int = 0,
        context: int = 0,
        step_tokens: int = 0,
        snapshot_bytes: int = 0,
        cache_bytes: int = 0,
        deterministic: bool = False,
        memories: str | Path | None = None,
    ):
        self._engine = self._tokenizer = None
        self._model = os.fspath(model)
        self._process = os.getpid()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        options = _Options(
            _bytes(device),
            _bytes(dtype),
            _bytes(weights),
            _bytes(memories),
            slots,
            context,
            step_tokens,
            snapshot_bytes,
            cache_bytes,
            deterministic,
            _bytes(kv_cache_dtype),
        )
        library = _library()
        if tokenizer is None:
            folder = Path(model)
            if not (folder / "config.json").exists() and (folder / "latest").exists():
                folder = folder / "latest"
            if (folder / "tokenizer.json").exists() or (folder / "vocab.json").exists():
                tokenizer = folder
        if tokenizer is not None:
            self._tokenizer = _checked(library.gka_tokenizer_load(_bytes(tokenizer)))
        self._engine = _checked(library.gka_engine_load(_bytes(model), byref(options)))

    def close(self) -> None:
        """Stops everything that runs, open streams too, and frees the memory. ``with`` and the destructor call it."""
        engine, tokenizer, self._engine, self._tokenizer = self._engine, self._tokenizer, None, None
        if self._process != os.getpid():
            return  # a fork has the engine's memory and not its thread
        for stream in list(self._streams):
            with stream._lock:
                stream._free()
        if engine:
            _library().gka_engine_free(engine)
        if tokenizer:
            _library().gka_tokenizer_free(tokenizer)

    __reduce__ = _refuse_copy

    def __repr__(self) -> str:
        return f"gka.Engine({self._model!r})" + ("" if self._engine else ", closed")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        if hasattr(self, "_streams"):
            self.close()

    @property
    def vocabulary(self) -> int:
        return _library().gka_engine_vocabulary(self._open())

    @property
    def context(self) -> int:
        return _library().gka_engine_context(self._open())

    def encode(self, text: str) -> list[int]:
        data, tokenizer = text.encode(), self._known_tokenizer()
        ids = (c_int64 * (len(data) + 64))()
        count = _library().gka_tokenizer_encode(tokenizer, data, len(data), ids, len(ids))
        if count > len(ids):
            ids = (c_int64 * count)()
            count = _library().gka_tokenizer_encode(tokenizer, data, len(data), ids, count)
        if count < 0:
            raise ValueError(_library().gka_error().decode())
        return list(ids[:count])

    def decode(self, ids: Sequence[int]) -> str:
        return self._decoded(ids).decode(errors="replace")

    def generate(self, prompt, **options):
        """Returns a ``Completion``; for a list of texts, or of lists of numbers, a list of them, generated together.

        Takes the options of ``stream``.
        """
        if isinstance(prompt, str):
            return self.stream(prompt, **options)._complete()
        if not hasattr(prompt, "__len__"):
            raise TypeError(f"a prompt is a text or token numbers, or a list of such, and not {type(prompt).__name__}")
        if len(prompt) > 0 and not isinstance(prompt[0], Sequence) and getattr(prompt[0], "ndim", 0) == 0:
            return self.stream(prompt, **options)._complete()
        streams: list[Stream] = []
        try:
            for one in prompt:
                streams.append(self.stream(one, **options))
            return [stream._complete() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        top_logprobs: int = 0,
        iterations: int | str | None = None,
        certainty: bool = False,
        memory: str | None = None,
    ) -> Stream:
        """Yields each token as it comes. ``temperature=0`` takes the likeliest; ``iterations`` may be "auto".

        ``stop``: a text, or several, at which the answer ends; the answer does not contain it. Leaving the loop
        cancels the request.
        """
        bias = logit_bias or {}
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise ValueError(f"stop takes a text or a list of texts, none of them empty, and is {stop!r}")
        if stops:
            self._known_tokenizer()
        return self._submit(
            prompt,
            stops,
            stop=_integers(stop_tokens),
            stop_tokens=len(stop_tokens),
            bias=_integers(list(bias)),
            bias_values=(c_float * len(bias))(*bias.values()),
            biases=len(bias),
            memory=_bytes(memory),
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            top_k=top_k,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            top_logprobs=top_logprobs,
            iterations=-1 if iterations is None else -2 if iterations == "auto" else iterations,
            seed=seed,
            ignore_eos=ignore_eos,
            certainty=certainty,
        )

    def score(self, text: str | Sequence[int], *, top_logprobs: int = 0) -> list[Token]:
        """Returns every token of a text with its log-probability given the tokens before it (the first has None)."""
        stream = self._submit(
            text,
            (),
            temperature=1,
            top_p=1,
            repetition_penalty=1,
            iterations=-1,
            prompt_logprobs=1,
            top_logprobs=top_logprobs,
        )
        return list(stream)

    def create_memory(
        self,
        text: str | Sequence[int],
        *,
        name: str = "",
        after: str | None = None,
        keep_tokens: int | None = None,
    ) -> Memory:
        """Reads a text (or token numbers) once and keeps what the model remembers of it.

        ``after`` is the id of a memory to continue; that memory stays as it is. With a folder (``memories`` of the
        engine) memories survive the program. With ``keep_tokens`` attention's cache, which grows with the text, keeps
        only the pages (of 64 tokens) of that many last tokens; recurrent states are still those of the whole text.
        """
        if keep_tokens is not None and keep_tokens < 0:
            raise ValueError(f"keep_tokens must be 0 or more, and is {keep_tokens}")
        ids = self._ids(text)
        made = _Memory()
        keep = -1 if keep_tokens is None else keep_tokens
        done = _library().gka_memory_create(
            self._open(), _bytes(after), _integers(ids), len(ids), _bytes(name), keep, byref(made)
        )
        if done < 0:
            raise ValueError(_library().gka_error().decode())
        return Memory._from(made)

    def memories(self) -> list[Memory]:
        """All memories, those of the folder included."""
        room = 64
        while True:
            found = (_Memory * room)()
            count = _library().gka_memory_list(self._open(), found, room)
            if count < 0:
                raise ValueError(_library().gka_error().decode())
            if count <= room:
                return [Memory._from(memory) for memory in found[:count]]
            room = count

    def delete_memory(self, id: str) -> None:
        state = _library().gka_memory_delete(self._open(), str(id).encode())
        if state <= 0:
            raise ValueError(f"there is no memory '{id}'" if state == 0 else _library().gka_error().decode())

    def _ids(self, prompt) -> list[int]:
        return self.encode(prompt) if isinstance(prompt, str) else [operator.index(token) for token in prompt]

    def _open(self):
        if not self._engine:
            raise ValueError("the engine is closed")
        if self._process != os.getpid():
            raise ValueError("the engine belongs to the process that made it; make one in each process")
        return self._engine

    def _known_tokenizer(self):
        self._open()
        if not self._tokenizer:
            raise ValueError("the model has no tokenizer; name one (tokenizer='bytes') or use token numbers")
        return self._tokenizer

    def _decoded(self, ids: Sequence[int]) -> bytes:
        values, tokenizer = _integers(ids), self._known_tokenizer()
        text = ctypes.create_string_buffer(64 * len(ids) + 1)
        count = _library().gka_tokenizer_decode(tokenizer, values, len(ids), text, len(text))
        if count > len(text):
            text = ctypes.create_string_buffer(count)
            count = _library().gka_tokenizer_decode(tokenizer, values, len(ids), text, count)
        if count < 0:
            raise ValueError(_library().gka_error().decode())
        return text.raw[:count]

    def _piece(self, token: int) -> bytes:
        """The bytes one token adds to a text, which may be a part of a character."""
        if not self._tokenizer:
            return b""
        start = c_void_p()
        count = _library().gka_tokenizer_piece(self._tokenizer, token, byref(start))
        return ctypes.string_at(start, count) if count else b""

    def _submit(self, prompt, stops: Sequence[str], **fields) -> Stream:
        engine = self._open()
        ids = self._ids(prompt)
        request = _Request(prompt=_integers(ids), prompt_tokens=len(ids))
        for name, value in fields.items():
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise ValueError(f"{name} is {value}, which is no number of 64 bits")
            try:
                setattr(request, name, value)
            except TypeError:
                raise TypeError(f"{name} is {value!r}, which is no number that it takes") from None
        stream = Stream(self, _checked(_library().gka_engine_submit(engine, byref(request))), stops)
        self._streams.add(stream)
        return stream
