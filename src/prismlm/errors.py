"""Errors that a user can act on, and checks of single values.

Each message names the input, what was expected and how to fix it.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

MAX_SHOWN = 80


class PrismError(Exception):
    """Base of all deliberate errors of prismlm. The CLI prints them without a traceback."""


class InputError(PrismError, ValueError):
    """An invalid argument, file or text."""


class BadRow(InputError):
    """An invalid row of an otherwise usable file; ``reason`` is a short category of the error."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotFiniteError(InputError):
    """Infinity or NaN, as from weights after a diverged training."""


class FormatError(PrismError):
    """A corpus, model or lens directory that is incomplete, damaged or of another version."""


class DivergenceError(PrismError):
    """Training diverged: a loss, gradient or weight is no longer finite."""


class Interrupted(KeyboardInterrupt):
    """A signal ended resumable work; the message says where it resumes.

    ``exit_code`` is 128 plus the signal.
    """

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StaleLensError(FormatError):
    """A lens that was built for other weights, another tokenizer or another corpus."""


class DecompositionError(PrismError):
    """Parts that do not sum to the model's own logit, so no result based on them is valid."""


@contextmanager
def no_panics() -> Iterator[None]:
    """Convert a Rust library's panic, a BaseException, to a FormatError."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise FormatError(
            f"the tokenizer cannot be used, a step of it fails ({first_line(error)}): put back the "
            "tokenizer.json that was saved with the model."
        ) from error


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise InputError unless a value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise InputError(
            f"{name} is {shown(value)}: expected {expected}.{suggest(value, list(choices))}"
        )


def check_kind(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> Any:
    """Return a value of a type, or raise InputError."""
    if not isinstance(value, kind):
        raise InputError(f"{name} is {shown(value)}: expected {expected}.")
    return value


def check_text(name: str, value: object) -> str:
    """Return a string, or raise InputError; also for a lone surrogate in it."""
    text = check_kind(name, value, str, "one text; give several one after another")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} holds half of a surrogate pair at character {error.start}, which is not "
            "valid Unicode. Remove it or write the whole character."
        ) from error
    return text


def check_path(name: str, value: object) -> Path:
    """Return a path, or raise InputError; also for one that is empty, or a whole text."""
    check_kind(name, value, (str, os.PathLike), "a path, as text or as pathlib.Path")
    given: object = os.fspath(cast("str | os.PathLike[str]", value))
    if not isinstance(given, str) or not given or "\0" in given:
        raise InputError(f"{name} is {shown(value)}: expected the path of a file or directory.")
    if any(len(part) > 255 for part in Path(given).parts):
        raise InputError(f"{name} is {shown(value)}, which is longer than a name can be.")
    return Path(given)


def check_whole(name: str, value: object, least: int | None = 0, most: int | None = None) -> int:
    """Return an integer of any type from ``least`` to ``most`` as an int, or raise InputError.

    Neither True nor 1.0 is an integer here.
    """
    number = None
    with suppress(TypeError):
        number = None if isinstance(value, bool) else operator.index(cast("int", value))
    low = least is not None and number is not None and number < least
    if number is None or low or (most is not None and number > most):
        span = "" if least is None else f" from {least} on"
        span = span if most is None else f" from {least} to {most}"
        raise InputError(f"{name} is {shown(value)}: expected a whole number{span}.")
    return number


def check_number(
    name: str, value: object, expected: str, holds: Callable[[float], bool] = math.isfinite
) -> float:
    """Return a finite number of any type as a float, or raise InputError.

    Args:
        name: of the input.
        value: to check.
        expected: in words, such as "a number from 0 to 1".
        holds: whether a finite number is in range.
    """
    number = math.nan
    # float() also accepts strings and booleans, and fails for huge integers.
    if not isinstance(value, (str, bytes, bool)):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(cast("float", value))
    if not math.isfinite(number) or not holds(number):
        raise InputError(f"{name} is {shown(value)}: expected {expected}.")
    return number


def check_finite(what: str, *tensors: Any) -> None:
    """Raise NotFiniteError if a tensor has NaN or infinity; ``what`` is a plural noun."""
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise NotFiniteError(
            f"{what} are not finite: the model's weights hold NaN or infinity. Take a checkpoint "
            "from before its training went wrong."
        )


def shown(value: object) -> str:
    """Return the repr of a value for a message, truncated."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 2]} …"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def suggest(word: object, known: Sequence[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
