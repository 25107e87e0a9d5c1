"""The tokenizer of the command line."""

import os

import torch
from torch import Tensor

from ._library import load_floors


class Tokenizer:
    """Text to token numbers and back: ``bytes``, a ``tokenizer.json``, or a folder that holds one.

    >>> tokenizer = gka.Tokenizer("model/")
    >>> tokenizer.decode(tokenizer.encode("text"))
    'text'
    """

    def __init__(self, name: str | os.PathLike[str]) -> None:
        load_floors()
        self.name = os.fspath(name)
        try:
            self._tokenizer = torch.classes.gka.Tokenizer(self.name)
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from None

    def __reduce__(self) -> tuple:
        return Tokenizer, (self.name,)  # copies and other processes load it again

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """``special``: with the special tokens the tokenizer puts around a text."""
        if not isinstance(text, str):
            raise TypeError(f"encode takes a text, got {type(text).__name__}.")
        return self._tokenizer.encode(text.encode(), special).tolist()

    def decode(self, ids: list[int] | Tensor, *, special: bool = True) -> str:
        """``special=False`` leaves special tokens out. Bytes of a character that is not whole become U+FFFD."""
        ids = torch.as_tensor(ids, dtype=torch.long)
        return bytes(self._tokenizer.decode(ids, special).tolist()).decode("utf-8", "replace")

    def find(self, token: str) -> int | None:
        """The number of a token spelt as in the vocabulary."""
        found = self._tokenizer.find(token)
        return None if found < 0 else found

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size()

    @property
    def end_of_document(self) -> int | None:
        found = self._tokenizer.end_of_document()
        return None if found < 0 else found

    def __repr__(self) -> str:
        return f"gka.Tokenizer({self.name!r}): {self._tokenizer.describe()}"
