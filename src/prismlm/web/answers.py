"""The server's recent answers, which the explorer looks up by the ids of their responses."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from prismlm.corpus.chat import ASSISTANT, Messages
from prismlm.errors import InputError
from prismlm.explain.trace import Trace

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """An answer that the model wrote, or that a client sent to have it attributed.

    Attributes:
        prompt: the text or the messages before it; empty if a text alone was sent.
        text: the answer.
        trace: what the answer relies on.
    """

    prompt: str | Messages
    text: str
    trace: Trace

    @property
    def messages(self) -> Messages:
        """The chat up to the answer, for a follow-up question; empty if the prompt is a text."""
        if isinstance(self.prompt, str):
            return []
        before, text = [*self.prompt], self.text
        # The model continues a last message of the assistant: both are one message.
        if before and before[-1]["role"] == ASSISTANT:
            text = before.pop()["content"] + text
        return [*before, {"role": ASSISTANT, "content": text}]


class Recent(Generic[T]):
    """The values that were added last, by id.

    Args:
        what: the values are called in errors, such as ``answer``.
        limit: on how many are stored; a newer one replaces the oldest.
    """

    def __init__(self, what: str, limit: int) -> None:
        self._what, self._limit = what, limit
        self._values: OrderedDict[str, T] = OrderedDict()

    def add(self, key: str, value: T) -> None:
        """Store a value; drop the oldest beyond the limit."""
        self._values[key] = value
        while len(self._values) > self._limit:
            self._values.popitem(last=False)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> T:
        """Return a value; InputError if it was never added, or has been dropped."""
        try:
            return self._values[key]
        except KeyError:
            raise InputError(
                f"there is no {self._what} {key!r}: the last {self._limit} are kept. Ask again."
            ) from None
