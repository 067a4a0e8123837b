"""One text being written: which token is next, where it ends, and what its reader was told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from prismlm.corpus.chat import Messages
from prismlm.corpus.pieces import BROKEN
from prismlm.explain.language_model import PrismLM
from prismlm.explain.prediction import Kept, Recorded
from prismlm.explain.trace import Trace
from prismlm.lens.opened_model import MIN_TEMPERATURE, settings_not_applied

FinishReason = Literal["stop", "length"]


class Choice(NamedTuple):
    """A token that was written, and what else might have been.

    Attributes:
        token: its number.
        log_probability: the model's own, whatever temperature and top_p it was drawn with.
        others: the likeliest tokens with theirs.
    """

    token: int
    log_probability: float
    others: list[tuple[int, float]]


class Written(NamedTuple):
    """What is told of a text while it is written.

    Attributes:
        text: what is new of it; no part of a stop sequence, and whole characters.
        choices: the tokens that end in it, where log-probabilities were asked for.
        error: what ended it before its time.
    """

    text: str = ""
    choices: Sequence[Choice] = ()
    error: Exception | None = None


@dataclass(frozen=True)
class Wanted:
    """How a text is to be written.

    Attributes:
        tokens: at most so many.
        temperature: 0 takes the top token.
        top_p: draw from the fewest tokens that hold so much of the probability.
        seed: of the drawing.
        stop: strings that the text ends before.
        alternatives: likeliest tokens told with each; None for no log-probabilities at all.
        traced: whether it will be asked what it relies on.
    """

    tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    alternatives: int | None = None
    traced: bool = True


@dataclass(eq=False)
class Writing:
    """A text that is written after a prompt, in the engine's thread, and read by an event loop.

    Attributes:
        lm: the model.
        text: what was asked.
        prompt: its tokens, [1, T].
        wanted: how it is to be written.
        ids: what has been written.
        words: the same in words, cut at a stop sequence.
        finish_reason: once it has ended by itself.
        left: its reader has gone.
        stopped: the next token is to be the last.
        told: what was told; None at the end.
        recorded: what passed the output embedding, where ``generate`` wrote it.
        states: those that were read, where the engine's batch did.
        own: the model's own logit of each token, before any soft-cap; likewise.
    """

    lm: PrismLM
    text: str | Messages
    prompt: Tensor
    wanted: Wanted
    ids: list[int] = field(default_factory=list[int])
    words: str = ""
    finish_reason: FinishReason | None = None
    left: bool = False
    stopped: bool = False
    told: asyncio.Queue[Written | None] = field(default_factory=asyncio.Queue)
    recorded: Recorded | None = None
    states: list[Tensor] = field(default_factory=list[Tensor])
    own: list[Tensor] = field(default_factory=list[Tensor])

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._generator = torch.Generator().manual_seed(self.wanted.seed)
        self._sent, self._choices = (0, 0), list[Choice]()
        own = self.lm.model.generation_config.eos_token_id
        self._ends = set(own if isinstance(own, list) else [own])

    @property
    def over(self) -> bool:
        """Whether nothing more is to be written."""
        return self.left or self.finish_reason is not None

    def next(self, state: Tensor, embedded: Tensor, logits: Tensor) -> None:
        """Write the next token, after states [n, d] that were read; W z + b and logits, [V]."""
        token = pick(logits, self.wanted, self._generator)
        if self.wanted.traced:
            self.states.append(state)
            self.own.append(self.lm.logit_map.before_softcap(embedded[token].clone()))
        self.accept(token, logits)

    def accept(self, token: int, logits: Tensor) -> None:
        """Take a token that was written, with the logits [V] that it was taken from."""
        self.ids.append(token)
        if token in self._ends:
            self.finish_reason = "stop"
        elif self.wanted.alternatives is not None:
            self._choices.append(_choice(token, logits, self.wanted.alternatives))
        self.words = self.lm.words(self.ids)
        stops = [at for one in self.wanted.stop if (at := self.words.find(one)) >= 0]
        if stops:
            self.words, self.finish_reason = self.words[: min(stops)], "stop"
            self.ids = self.ids[: self._tokens_of(self.words)]
        elif self.finish_reason is None and (self.stopped or len(self.ids) >= self.wanted.tokens):
            self.finish_reason = "stop" if self.stopped else "length"
        self._tell_new()

    def _tokens_of(self, words: str) -> int:
        """Return the fewest tokens that spell the beginning ``words`` of the text."""
        count = len(self.ids)
        while count and self.lm.words(self.ids[: count - 1]).startswith(words):
            count -= 1
        return count

    def _tell_new(self) -> None:
        ready, count = self.words, len(self.ids)
        if self.finish_reason is None:
            # What may still become a character, or a stop sequence, waits.
            ready = ready.rstrip(BROKEN)
            begun = (
                size
                for one in self.wanted.stop
                for size in range(1, len(one))
                if ready.endswith(one[:size])
            )
            ready = ready[: len(ready) - max(begun, default=0)]
            count = self._tokens_of(ready)
        characters, choices = self._sent
        if len(ready) > characters or self.finish_reason is not None:
            spelt = min(count, len(self._choices))
            self._sent = max(len(ready), characters), max(spelt, choices)
            self.tell(Written(ready[characters:], self._choices[choices:spelt]))

    def fail(self, error: Exception) -> None:
        """Tell that it cannot go on."""
        self.left = True
        self.tell(Written(error=error))

    def tell(self, written: Written | None) -> None:
        """Tell the reader, in its own thread."""
        self._loop.call_soon_threadsafe(self.told.put_nowait, written)

    @torch.no_grad()
    def trace(self) -> Trace | None:
        """Return what stands behind the text; None of an empty one.

        Raises:
            DecompositionError: parts that do not sum to the model's logit.
        """
        if not self.ids:
            return None
        ids = torch.cat([self.prompt, torch.tensor([self.ids]).to(self.prompt)], dim=1)
        recorded: Recorded | Kept | None = self.recorded
        if recorded is None:
            states, own = torch.cat(self.states), torch.stack(self.own)
            recorded = Kept(states[: ids.shape[1] - 1], own[: len(self.ids)])
        settings = settings_not_applied(self.lm.model, self.wanted.temperature)
        return self.lm.trace_of(self.text, ids, self.prompt.shape[1], recorded, settings=settings)


def pick(logits: Tensor, wanted: Wanted, generator: torch.Generator) -> int:
    """Return the next token, as ``generate`` takes or draws it: from logits, float32 [V]."""
    if wanted.temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    scores = logits.cpu() / wanted.temperature
    if wanted.top_p < 1:
        ascending, order = scores.sort()
        left_out = ascending.softmax(-1).cumsum(-1) <= 1 - wanted.top_p
        left_out[-1] = False
        scores[order[left_out]] = -torch.inf
    return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))


def _choice(token: int, logits: Tensor, alternatives: int) -> Choice:
    every = logits.log_softmax(-1)
    values, ids = every.topk(min(alternatives, len(every)))
    others = list(zip(ids.tolist(), values.tolist(), strict=True))
    return Choice(token, float(every[token]), others)
