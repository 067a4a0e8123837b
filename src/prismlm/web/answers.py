"""The last answers of a server, to be asked about by their ids."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from prismlm.corpus.chat import ASSISTANT, Messages, question_of
from prismlm.errors import InputError
from prismlm.explain.trace import Trace

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """What was written, or read.

    Attributes:
        asked: the text or the messages that it answers.
        said: the answer.
        trace: what stands behind it.
    """

    asked: str | Messages
    said: str
    trace: Trace

    @property
    def question(self) -> str:
        """What was asked last; of a text that was only read, all of it."""
        return question_of(self.asked) or self.said

    @property
    def messages(self) -> Messages:
        """The chat with the answer last; none of a text."""
        said = {"role": ASSISTANT, "content": self.said}
        return [] if isinstance(self.asked, str) else [*self.asked, said]


class Latest(Generic[T]):
    """Values by their ids, the last so many of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[str, T] = OrderedDict()

    def keep(self, key: str, value: T) -> None:
        """Keep a value; the oldest is forgotten where there are too many."""
        self._values[key] = value
        while len(self._values) > self._most:
            self._values.popitem(last=False)

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
