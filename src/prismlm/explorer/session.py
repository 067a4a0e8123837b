"""What one explorer holds: the model, the line of those who ask it, and the last answers."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from prismlm.corpus.chat import Messages, asked
from prismlm.errors import InputError
from prismlm.explain.audit import Audit
from prismlm.explain.language_model import PrismLM
from prismlm.explain.trace import Trace
from prismlm.explorer.examples import held_out_texts, prompts_for
from prismlm.lens.labels.catalogue import Catalogue

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Bounds of what one request may ask for.

    Attributes:
        body: bytes.
        tokens: of a prompt and what is written after it.
        audited: characters of all texts of an audit.
        waiting: requests that wait for the model; more are told that it is busy.
        answers: kept for questions about them, the latest.
    """

    body: int = 16_000_000
    tokens: int = 2048
    audited: int = 2_000_000
    waiting: int = 8
    answers: int = 32


class Busy(Exception):
    """As many requests wait for the model as may."""


class Line:
    """One at a time uses the model, in the order they came; the others wait, up to a number.

    Args:
        waiting: how many may wait.
    """

    def __init__(self, waiting: int) -> None:
        self._turn = asyncio.Semaphore(1)
        self._most = waiting
        self.waiting = 0

    @property
    def before(self) -> int:
        """How many would be served before another one."""
        return self.waiting + self._turn.locked()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the model and hold it during the block.

        Raises:
            Busy: too many wait.
        """
        self.check()
        self.waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._turn.release()

    def check(self) -> None:
        """Raise Busy where nobody else may wait."""
        if self.waiting >= self._most:
            raise Busy

    async def run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, in a thread of its own, once it is its turn.

        Raises:
            Busy: too many wait.
        """
        async with self.turn():
            task = asyncio.ensure_future(run_in_threadpool(work))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                # A thread cannot be stopped from outside: the next in line waits for its end.
                await asyncio.wait([task])
                raise


@dataclass
class Answer:
    """A text that was read or written, to be asked about.

    Attributes:
        id: unguessable.
        stop: set where it is to end.
        trace: once it has ended; None before, and of an audit.
        messages: of a chat, once it has ended the answer last; none of a text.
        audit: of an audit, once it has ended.
        rows, summary: of an audit, one for each text, and the whole.
    """

    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    stop: threading.Event = field(default_factory=threading.Event)
    trace: Trace | None = None
    messages: Messages = ()
    audit: Audit | None = None
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    summary: dict[str, Any] = field(default_factory=dict[str, Any])


class Prompt(BaseModel):
    """What a model is to go on from: a text, or with ``chat`` what a user asks it."""

    text: str = Field(min_length=1)
    chat: bool = False

    @property
    def put(self) -> str | Messages:
        """What the model is given."""
        return asked(self.text) if self.chat else self.text


def within(lm: PrismLM, text: str | Messages, room: int, most: int, instead: str) -> list[int]:
    """Return the tokens of a text or a chat; what is refused is told the bound that is met first.

    Args:
        lm: whose tokens.
        text: of at least one token.
        room: tokens that are to be written after it.
        most: tokens, with these.
        instead: the command without such a bound.

    Raises:
        InputError: it has more, or none, or more than the model reads.
    """
    written = lm.as_text(text)
    if most <= (lm.context_length or most):
        lm.check_length(written, most, "the explorer")
    length = len(lm.tokens_of(text))
    if length + room > most <= (lm.context_length or most):
        asked = f" and {room:,} are asked for" if room else ""
        raise InputError(
            f"the text has {length:,} tokens{asked}: the explorer reads {most:,}. Shorten it, or "
            f"use `prismlm {instead}`."
        )
    return lm.encode(text, room)[0].tolist()


class Session:
    """A model being explored.

    Attributes:
        lm: the model.
        limits: of requests.
        texts: beginnings of held-out documents, by domain or title.
        prompts: to try, by domain or title.
        questions: to ask a model that has a chat template, by topic; there may be none.
        line: of those who wait for it.
        catalogue: its prototypes to be searched; None without a lens.
    """

    def __init__(
        self,
        lm: PrismLM,
        limits: Limits,
        prompts: Mapping[str, str],
        questions: Mapping[str, str],
    ) -> None:
        self.lm, self.limits = lm, limits
        self.texts = held_out_texts(lm.lens)
        self.prompts = prompts_for(lm.lens, prompts, self.texts)
        self.questions = dict(questions) if lm.tokenizer.chat_template else {}
        self.line = Line(limits.waiting)
        self.catalogue = None if lm.lens is None else Catalogue(lm.lens)
        self._answers: OrderedDict[str, Answer] = OrderedDict()

    def look_again(self) -> None:
        """Search the names of the prototypes anew, where they were written meanwhile.

        Raises:
            StaleLensError: the lens is gone, or was built again and so is another one.
        """
        lens, before = self.lm.lens, None if self.lm.lens is None else self.lm.lens.meta
        if lens is None:
            return
        lens.check_unchanged()
        if lens.meta is not before:
            self.catalogue = Catalogue(lens)

    def keep(self, answer: Answer) -> Answer:
        """Keep an answer; the oldest is forgotten where there are too many."""
        self._answers[answer.id] = answer
        while len(self._answers) > self.limits.answers:
            _, forgotten = self._answers.popitem(last=False)
            forgotten.stop.set()
        return answer

    def answer(self, key: str) -> Answer:
        """Return an answer that was kept.

        Raises:
            InputError: it is not here, or no longer.
        """
        if key not in self._answers:
            raise InputError(
                f"there is no answer {key!r}: the last {self.limits.answers} are kept. Ask again."
            )
        return self._answers[key]

    def trace(self, key: str) -> Trace:
        """Return the trace of an answer that has ended.

        Raises:
            InputError: there is none, or it is still being written.
        """
        trace = self.answer(key).trace
        if trace is None:
            raise InputError(f"the answer {key!r} is not a text that has been read to its end.")
        return trace
