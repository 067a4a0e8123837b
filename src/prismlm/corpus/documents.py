"""What a document is, and which columns of a table or JSON record it is read from."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from prismlm.corpus.chat import Messages, question_of
from prismlm.errors import InputError, check_text, suggest

# Beyond it a double does not hold every whole number.
MAX_WHOLE = 2**53
# Columns of chats, in the order in which they are looked for; the first names the role.
CHATS = ("messages", "conversations")
MESSAGES = CHATS[0]
METADATA = ("source", "domain", "license", "title", "url", "split")
ROLES = ("text", "id", *METADATA)
# The names that the Hugging Face Hub has for parts of a dataset, and those of this package.
PARTS: dict[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("heldout", "held-out", "held_out"), "heldout"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "heldout"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "heldout"),
}


@dataclass(frozen=True, slots=True)
class Document:
    """One text with its identity and where it comes from.

    ``messages`` are those that a chat template made the text of; None for a plain text.
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
        """What a reader knows it by: its text, or the last question of a chat."""
        asked = any(one["role"] == "user" for one in self.messages or ())
        return question_of(self.messages) if asked and self.messages else self.text

    @property
    def part(self) -> str | None:
        """The part of a corpus that its ``split`` names, ``train`` or ``heldout``; None without."""
        if self.split is None:
            return None
        part = PARTS.get(self.split.strip().lower())
        if part is None:
            raise InputError(
                f"the document {self.doc_id!r} has the split {self.split!r}: expected train, or "
                "heldout, validation or test. Fix it, or let ids decide with --split-column '' "
                '(in Python: Columns(split="")).'
            )
        return part


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
        for role in ROLES:
            if role == "text" or getattr(self, role) is not None:
                check_text(f"the name of the {role} column", getattr(self, role))

    def resolve(self, available: Collection[str], where: str) -> dict[str, str]:
        """Return the available column of each role (``text`` or ``messages``, ``id``, …).

        Args:
            available: the columns of a table, or the keys of a record.
            where: the file, or file and line, to name in the error.
        """
        found: dict[str, str] = {}
        for role in ROLES:
            named: str | None = getattr(self, role)
            if named == "" and role != "text":
                continue
            if (named or role) in available:
                found[role] = named or role
            elif named == "text" and (chats := [name for name in CHATS if name in available]):
                found[MESSAGES] = chats[0]
            elif named is not None:
                known = sorted(available)
                raise InputError(
                    f"{where}: there is no column {named!r}; the columns are: "
                    f"{', '.join(known) or 'none'}.{suggest(named, known)} Name the {role} column "
                    f"with --{role}-column (in Python: Columns({role}=…))."
                )
        return found


def as_metadata(value: Any, where: str, column: str) -> str | None:
    """Return a metadata value as text; missing and empty values are None.

    A number is given as it was written: 1503.00990 in JSON keeps its last digit. A binary number of
    a table is given in the fewest digits that mean it, a whole number without a fraction.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return check_text(f"{where}: column {column!r}", value)
    if isinstance(value, float):
        # A table that lacks a number has NaN in its place.
        whole = abs(value) < MAX_WHOLE and value.is_integer()
        return None if math.isnan(value) else str(int(value) if whole else value)
    if isinstance(value, (int, Decimal)):
        return str(value)
    raise InputError(
        f"{where}: column {column!r} holds a {type(value).__name__}, expected text or a number."
    )
