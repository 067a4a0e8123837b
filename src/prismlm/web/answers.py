"""The server's recent answers, which the explorer looks up by their response ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from prismlm.corpus.chat import ASSISTANT, Messages
from prismlm.errors import InputError
from prismlm.explain.trace import Trace

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """An answer that the model generated, or that a client sent for attribution.

    ``prompt`` is the text or the messages before it, empty if only a text was sent.
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
    """The last ``limit`` values by id; errors call them ``noun``, such as "answer"."""

    def __init__(self, noun: str, limit: int) -> None:
        self._noun, self._limit = noun, limit
        self._values: dict[str, T] = {}

    def add(self, key: str, value: T) -> None:
        """Store a value; drop the oldest beyond the limit."""
        self._values[key] = value
        while len(self._values) > self._limit:
            del self._values[next(iter(self._values))]

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> T:
        """Return a value; InputError if it is unknown or has been dropped."""
        if key not in self._values:
            raise InputError(
                f"there is no {self._noun} {key!r}: the last {self._limit} are kept. Ask again."
            )
        return self._values[key]
