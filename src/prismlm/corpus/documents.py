"""What a document is, and which columns of a table or JSON record it is read from."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from prismlm.corpus.chat import Messages, text_of
from prismlm.errors import InputError, check_text, suggest

# Above it a double does not hold every whole number.
LARGEST_WHOLE = 2**53
# The column that chats are in where a table has no text.
MESSAGES = "messages"
# Columns of chats, in the order in which they are looked for.
CHATS = (MESSAGES, "conversations")
METADATA = ("source", "domain", "license", "title", "url", "split")
Part = Literal["train", "heldout"]
# The names of splits that the Hugging Face Hub takes for one another, and those of this package.
_TRAIN = ("train", "training")
_HELD_OUT = (
    *("heldout", "held-out", "held_out"),
    *("validation", "valid", "val", "dev"),
    *("test", "testing", "eval", "evaluation"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """One text with its identity and where it comes from.

    ``messages`` are those that the text was made of by a chat template; None for a plain text.
    """

    doc_id: str
    text: str
    source: str | None = None
    domain: str | None = None
    license: str | None = None
    title: str | None = None
    url: str | None = None
    split: str | None = None
    messages: Messages | None = None

    @property
    def opening(self) -> str:
        """What a reader knows it by: its text, or of a chat what was asked last."""
        asked = [
            text_of(one.get("content")) for one in self.messages or () if one["role"] == "user"
        ]
        return asked[-1] if asked else self.text


def stated_part(document: Document) -> Part | None:
    """Return the part of a corpus that a document says it belongs to, or None.

    Raises:
        InputError: its ``split`` is no name of a part.
    """
    if document.split is None:
        return None
    name = document.split.strip().lower()
    if name in _TRAIN or name in _HELD_OUT:
        return "train" if name in _TRAIN else "heldout"
    raise InputError(
        f"the document {document.doc_id!r} has the split {document.split!r}: expected train, or "
        "heldout, validation or test. Fix it, or let ids decide with --split-column '' (in "
        'Python: Columns(split="")).'
    )


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns to read. A column left at None is read under its own name where it exists.

    A column that is named must exist; one that is named "" is not read. Without an ``id`` the id is
    ``file-name:row``; without a ``source`` the source is the file's name without its extension.
    Where there is no ``text``, chats are read from ``messages``, if there are any.
    """

    text: str = "text"
    id: str | None = None
    source: str | None = None
    domain: str | None = None
    license: str | None = None
    title: str | None = None
    url: str | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        for role in ("text", "id", *METADATA):
            if role == "text" or getattr(self, role) is not None:
                check_text(f"the name of the {role} column", getattr(self, role))

    def resolve(self, available: Collection[str], where: str) -> dict[str, str]:
        """Return the available column of each role (``text`` or ``messages``, ``id``, …).

        Args:
            available: the columns of a table, or the keys of a record.
            where: the file, or file and line, to name in the error.

        Raises:
            InputError: the text column, or another one that was named, is not available.
        """
        found: dict[str, str] = {}
        for role in ("text", "id", *METADATA):
            named: str | None = getattr(self, role)
            if named == "" and role != "text":
                continue
            if (named or role) in available:
                found[role] = named or role
            elif named == "text" and (chats := [name for name in CHATS if name in available]):
                found[MESSAGES] = chats[0]
            elif named is not None:
                raise InputError(_missing(role, named, available, where))
        return found


def _missing(role: str, named: str, available: Collection[str], where: str) -> str:
    known = sorted(available)
    listed = ", ".join(known) if known else "none"
    return (
        f"{where}: there is no column {named!r}; the columns are: {listed}."
        f"{suggest(named, known)} Name the {role} column with --{role}-column "
        f"(in Python: Columns({role}=…))."
    )


def as_metadata(value: Any, where: str, column: str) -> str | None:
    """Return a metadata value as text; missing and empty values are None.

    A number is given as it was written: 1503.00990 in JSON keeps its last digit. What a table holds
    in binary is given in the fewest digits that mean it, a whole number without a fraction.

    Raises:
        InputError: the value is a list, a record or another thing that is not text or a number, or
            text that is not valid Unicode.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return check_text(f"{where}: column {column!r}", value)
    if isinstance(value, float):
        # A table that lacks a number has NaN in its place.
        whole = abs(value) < LARGEST_WHOLE and value.is_integer()
        return None if math.isnan(value) else str(int(value) if whole else value)
    if isinstance(value, (int, Decimal)):
        return str(value)
    raise InputError(
        f"{where}: column {column!r} holds a {type(value).__name__}, expected text or a number."
    )
