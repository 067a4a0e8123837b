"""The last answers of a server, to be asked about by their ids."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from prismlm.corpus.chat import ASSISTANT, Messages
from prismlm.errors import InputError
from prismlm.explain.trace import Trace
from prismlm.web.writing import Writing

T = TypeVar("T")


@dataclass
class Answer:
    """What was written, or read.

    Attributes:
        asked: the text or the messages that it answers.
        writing: what writes it; None where somebody else did.
        said: what was read, where nothing was written.
        trace: what stands behind it, once it has ended.
    """

    asked: str | Messages
    writing: Writing | None = None
    said: str = ""
    trace: Trace | None = None

    @property
    def messages(self) -> Messages:
        """The chat with the answer last; none of a text."""
        said = self.said if self.writing is None else self.writing.words
        chat = [] if isinstance(self.asked, str) else [*self.asked]
        return [*chat, {"role": ASSISTANT, "content": said}] if chat and said else chat


class Latest(Generic[T]):
    """Values by their ids, the last so many of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[str, T] = OrderedDict()

    def keep(self, key: str, value: T) -> T:
        """Keep a value; the oldest is forgotten where there are too many."""
        self._values[key] = value
        while len(self._values) > self._most:
            self._values.popitem(last=False)
        return value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> T:
        """Return a value; InputError if it is not here, or no longer."""
        try:
            return self._values[key]
        except KeyError:
            raise InputError(
                f"there is no answer {key!r}: the last {self._most} are kept. Ask again."
            ) from None
