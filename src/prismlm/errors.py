"""Errors that a user can act on: each names the input, what was expected and how to mend it."""

from __future__ import annotations


class PrismError(Exception):
    """Base of every error that prismlm raises on purpose. The CLI prints it without a traceback."""


class InputError(PrismError, ValueError):
    """An argument, file or text that cannot be used as it is."""


class NotFiniteError(InputError):
    """A figure that is infinite or no number: weights that training has broken give such."""


class FormatError(PrismError):
    """A corpus, model or lens directory that is incomplete, damaged or of another version."""


class DivergenceError(PrismError):
    """Training that cannot go on: a loss, a gradient or a weight is no longer finite."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended something that can go on; the message says from where."""


class StaleLensError(FormatError):
    """A lens that was built for other weights, another tokenizer or another corpus."""


class DecompositionError(PrismError):
    """Parts that do not add up to the model's own logit; nothing built on them can be trusted."""


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InputError unless a setting has one of its names."""
    if value not in choices:
        raise InputError(
            f"{name} is {value!r}: expected {', '.join(map(repr, choices[:-1]))} or "
            f"{choices[-1]!r}.{suggest(str(value), list(choices))}"
        )


def changes(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """Return what a run has now that it did not have before, as ``key: before → now``."""
    return [
        f"{key}: {before.get(key, 'not set')} → {now.get(key, 'not set')}"
        for key in sorted(before | now)
        if before.get(key) != now.get(key)
    ]


def suggest(word: str, known: list[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest known word, or an empty string."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
