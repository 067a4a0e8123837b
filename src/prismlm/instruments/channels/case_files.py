"""Test cases of interventions: a context, and the word that the model may put next.

A file is JSON lines, ``{"concept": "women", "context": "…", "target": "women"}``. Context and
target are joined by one space.

Source: ProtoT, A.3.1 to A.3.3, whose sentences are others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prismlm.corpus.encode import encode_text
from prismlm.corpus.pieces import pieces_of
from prismlm.errors import InputError, check_text, suggest
from prismlm.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEYS = ("concept", "context", "target")


@dataclass(frozen=True)
class Case:
    """A context with the word whose probability is measured after it.

    Attributes:
        concept: what the word belongs to.
        context: without the space at its end.
        target: the word, without the space before it.
    """

    concept: str
    context: str
    target: str


@dataclass(frozen=True)
class Probe(Case):
    """A case as the model reads it.

    Attributes:
        ids: the tokens of the context.
        target_id: the token whose probability is measured after them.
        document: the number of its document, where it comes from a corpus.
        first: the text of the first token, where the target is several and it alone is measured.
    """

    ids: tuple[int, ...]
    target_id: int
    document: int | None = None
    first: str | None = None

    @property
    def measured(self) -> str:
        """The text whose probability is measured: the target, or its first token."""
        return self.target if self.first is None else self.first

    @property
    def label(self) -> str:
        """The target, or what of it is measured, in words."""
        return self.target if self.first is None else f"{self.first}… of {self.target}"


def case_sets() -> tuple[str, ...]:
    """Return the names of the bundled sets of cases."""
    return tuple(sorted(path.stem for path in _directory().glob("*.jsonl")))


def load_cases(source: str | os.PathLike[str]) -> tuple[Case, ...]:
    """Read cases from a file, or a bundled set by its name.

    Raises:
        InputError: no such set or file, or a line that is no case: the message has its number.
    """
    bundled = _directory() / f"{source}.jsonl"
    path = bundled if str(source) in case_sets() else Path(source)
    if not os.path.isfile(path):
        names = list(case_sets())
        raise InputError(
            f"{str(source)!r} is neither a file of cases nor one of the bundled sets "
            f"{', '.join(names)}.{suggest(str(source), names)}"
        )
    return tuple(Case(**row) for row in read_rows(path, KEYS).values())


def read_rows(path: Path, keys: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the texts of each line of a file of cases, by the line's place for messages.

    Raises:
        InputError: the file cannot be read, has no lines, or one that is no JSON object of these
            keys, each with some text.
    """
    rows: dict[str, dict[str, str]] = {}
    # Texts may hold other ends of lines, such as U+2028.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            rows[place] = _row(line, place, keys)
    if not rows:
        raise InputError(
            f"{path} holds no cases: expected a JSON object in each line, with {', '.join(keys)}."
        )
    return rows


def probe_of(tokenizer: PreTrainedTokenizerBase, case: Case, *, first_token: bool = False) -> Probe:
    """Return a case in tokens: context and target are encoded together, then taken apart.

    Args:
        tokenizer: the model's.
        case: the case.
        first_token: measure the first token of a target that is several.

    Raises:
        InputError: the target is several tokens, or the context's tokens are others when the
            target follows.
    """
    context, target = case.context.rstrip(), case.target.strip()
    before, whole = _encoded(tokenizer, context), _encoded(tokenizer, f"{context} {target}")
    ids = whole[len(before) :]
    if not before or whole[: len(before)] != before or not ids:
        raise InputError(
            f"the target {target!r} changes the tokens of the context {_end(context)!r} before it, "
            "so it has no probability after it: move words between the two."
        )
    if len(ids) > 1 and not first_token:
        tokens = ", ".join(map(repr, _tokens(tokenizer, ids)))
        raise InputError(
            f"the target {target!r} after {_end(context)!r} is {len(ids)} tokens, {tokens}: "
            f"expected one.{_in_lower_case(tokenizer, context, target, before)} Choose another "
            "target, or measure the first of them alone (first_token, --first-token)."
        )
    first = _tokens(tokenizer, ids)[0].strip() or "␣" if len(ids) > 1 else None
    return Probe(case.concept, context, target, tuple(before), ids[0], first=first)


def words_of(cases: Iterable[Case]) -> tuple[str, ...]:
    """Return the targets of cases, each once."""
    return tuple(dict.fromkeys(case.target.strip() for case in cases))


def _row(line: str, place: str, keys: Sequence[str]) -> dict[str, str]:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not a JSON object ({error}).") from error
    if not isinstance(value, dict):
        raise InputError(f"{place}: a {type(value).__name__}, expected a JSON object.")
    for key in keys:
        if key not in value:
            raise InputError(
                f"{place}: there is no {key!r}; expected {', '.join(keys)} and nothing else, "
                f"found {', '.join(value) or 'nothing'}."
            )
        if not isinstance(value[key], str) or not value[key].strip():
            raise InputError(f"{place}: {key!r} is {value[key]!r}, expected some text.")
        check_text(f"{place}: {key!r}", value[key])
    for key in value:
        if key not in keys:
            raise InputError(f"{place}: {key!r} is not one of {', '.join(keys)}.")
    return value


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return encode_text(tokenizer, text, end=False)


def _tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    return [piece.label for piece in pieces_of(tokenizer, ids)]


def _in_lower_case(
    tokenizer: PreTrainedTokenizerBase, context: str, target: str, before: list[int]
) -> str:
    lower = target.lower()
    if lower == target or len(_encoded(tokenizer, f"{context} {lower}")) != len(before) + 1:
        return ""
    return f" In lower case, {lower!r}, it is one."


def _end(context: str) -> str:
    return context if len(context) <= 30 else f"…{context[-30:]}"


def _directory() -> Path:
    return Path(str(files("prismlm.instruments.channels"))) / "cases"
