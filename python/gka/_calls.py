"""Calls the library's operators. Their own checks raise plain sentences; torch's checks of Python types, which come
first, do not."""

import re
from collections.abc import Callable

_WRONG_TYPE = re.compile(
    r"gka::(\w+)\(\) Expected a value of type '(.+?)' for argument '(\w+)' but .* found type '(.+?)'"
)
_KINDS = {
    "Tensor": "a tensor",
    "Optional[Tensor]": "a tensor or None",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "True or False",
}
_NAMES = {"h0": "initial_state h", "u0": "initial_state u", "ridge_diagonal": "ridge"}


def plain(error: RuntimeError) -> Exception:
    """The same error in one sentence, if it is about the type of an argument."""
    found = _WRONG_TYPE.match(str(error))
    if found is None:
        return error
    operator, wanted, argument, got = found.groups()
    return TypeError(
        f"{operator}: {_NAMES.get(argument, argument)} takes {_KINDS.get(wanted, wanted)}, got one of type {got}"
    )


def call(operator: Callable, *arguments: object, **options: object) -> object:
    try:
        return operator(*arguments, **options)
    except RuntimeError as error:
        raise plain(error) from None
