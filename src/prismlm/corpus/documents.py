"""What a document is, and which columns of a table or JSON record it is read from."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from prismlm.corpus.chat import Messages, question_of
from prismlm.corpus.encode import Mark
from prismlm.errors import InputError, check_text, suggest

# Columns that may hold chats; the first is the name of the role.
CHATS = ("messages", "conversations")
MESSAGES = CHATS[0]
METADATA = ("source", "domain", "license", "title", "url", "split")
ROLES = ("text", "id", *METADATA)
# Names of splits, of this package and of the Hugging Face Hub.
TRAIN_NAMES = ("train", "training")
HELDOUT_NAMES = (
    *("heldout", "held-out", "held_out", "validation", "valid", "val", "dev"),
    *("test", "testing", "eval", "evaluation"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its id and metadata.

    ``messages`` are those of a chat, None for a plain text. ``marks`` are the special tokens of
    the chat template, None unless messages contain some as text.
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
    marks: Sequence[Mark] | None = None

    @property
    def opening(self) -> str:
        """The text, or the last question of a chat."""
        return (question_of(self.messages) if self.messages else "") or self.text

    @property
    def part(self) -> str | None:
        """The normalised ``split``: ``train``, ``heldout`` or None."""
        name = None if self.split is None else self.split.strip().lower()
        if name is None or name in TRAIN_NAMES:
            return name and "train"
        if name in HELDOUT_NAMES:
            return "heldout"
        raise InputError(
            f"the document {self.doc_id!r} has the split {self.split!r}: expected train, or "
            "heldout, validation or test. Fix it, or split by id with --split-column '' "
            '(in Python: Columns(split="")).'
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns to read. None reads the column of the same name if it exists.

    A named column must exist; "" reads none. The id defaults to ``file-name:row`` and the source
    to the file's name without its extension. Without a ``text`` column, chats are read from
    ``messages`` or ``conversations``.
    """

    text: str = "text"
    id: str | None = None
    source: str | None = None
    domain: str | None = None
    license: str | None = None
    title: str | None = None
    url: str | None = None
    split: str | None = None

    def resolve(self, available: Collection[str], where: str) -> dict[str, str]:
        """Return the available column of each role (``text`` or ``messages``, ``id``, …).

        Args:
            available: the columns of a table, or the keys of a record.
            where: the file, or file and line, for the error message.
        """
        columns: dict[str, str] = {}
        for role in ROLES:
            named: str | None = getattr(self, role)
            if named == "" and role != "text":
                continue
            if (named or role) in available:
                columns[role] = named or role
            elif named == "text" and (chats := [name for name in CHATS if name in available]):
                columns[MESSAGES] = chats[0]
            elif named is not None:
                known = sorted(available)
                raise InputError(
                    f"{where}: there is no column {named!r}; the columns are: "
                    f"{', '.join(known)}.{suggest(named, known)} Rename the {role} column or "
                    f"choose it by --{role}-column (in Python: Columns({role}=…))."
                )
        if twice := [name for name in columns.values() if [*available].count(name) > 1]:
            raise InputError(
                f"{where}: several columns are named {twice[0]!r}. Rename all but one."
            )
        return columns


def as_metadata(value: Any, where: str, column: str) -> str | None:
    """Return a metadata value as text; missing and empty values are None.

    Decimals keep their digits, such as the last of 1503.00990; floats get the fewest digits that
    identify them, integral ones no fraction.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return check_text(f"{where}: column {column!r}", value)
    if isinstance(value, float):
        # NaN is a missing value. Beyond 2^53 floats do not hold every integer.
        integral = value.is_integer() and abs(value) < 2**53
        return None if math.isnan(value) else str(int(value) if integral else value)
    if isinstance(value, (int, Decimal)):
        return str(value)
    raise InputError(
        f"{where}: column {column!r} holds a {type(value).__name__}, expected text or a number."
    )
