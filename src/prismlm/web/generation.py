"""One text being generated: its next token, where it ends, and the chunks sent to its client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from prismlm.corpus.chat import Messages
from prismlm.corpus.pieces import BROKEN
from prismlm.explain.language_model import PrismLM
from prismlm.explain.prediction import split_predictions, split_states
from prismlm.explain.trace import Trace
from prismlm.lens.opened_model import MIN_TEMPERATURE, settings_not_applied

FinishReason = Literal["stop", "length"]


class TokenLogProbs(NamedTuple):
    """The model's own log-probability of a generated token, and those of the top tokens."""

    token: int
    offset: int  # of its first character in the generated text
    log_probability: float
    alternatives: list[tuple[int, float]]


class Chunk(NamedTuple):
    """The next part of a text, as sent to its client."""

    text: str = ""  # complete characters, and no part of a stop sequence
    tokens: Sequence[TokenLogProbs] = ()  # that end in it, if log-probabilities were requested
    error: Exception | None = None  # what ended the generation early


@dataclass(frozen=True)
class Sampling:
    """How to generate a text."""

    max_tokens: int
    temperature: float = 0.0  # 0 takes the top token
    top_p: float = 1.0  # sample from the smallest set of tokens with this probability
    seed: int = 0
    stop: tuple[str, ...] = ()  # strings before which the text ends
    alternatives: int | None = None  # top tokens to report with each; None: no log-probabilities
    traced: bool = True  # whether the text will be attributed


@dataclass(eq=False)
class Generation:
    """A continuation that the engine's thread generates and an event loop sends."""

    lm: PrismLM
    source: str | Messages
    prompt: Tensor  # its tokens, [1, T]
    sampling: Sampling
    started: float = 0.0  # when the request came, by time.monotonic
    ids: list[int] = field(default_factory=list[int])
    text: str = ""  # of the generated tokens, cut at a stop sequence
    finish_reason: FinishReason | None = None
    abandoned: bool = False  # the client has gone, or an error ended it
    stop_requested: bool = False  # the next token is to be the last
    chunks: asyncio.Queue[Chunk | None] = field(default_factory=asyncio.Queue)
    # Uncertainty codes that were fed back, if ``generate`` wrote the text; otherwise what the batch
    # read, and the model's own logit of each token before any soft-cap.
    codes: list[Tensor] | None = None
    states: list[Tensor] = field(default_factory=list[Tensor])
    logits: list[Tensor] = field(default_factory=list[Tensor])

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._generator = torch.Generator().manual_seed(self.sampling.seed)
        self._sent_characters, self._sent_tokens = 0, 0
        self._log_probs: list[TokenLogProbs] = []
        eos = self.lm.model.generation_config.eos_token_id
        self._end_ids = set(eos if isinstance(eos, list) else [eos])

    @property
    def finished(self) -> bool:
        """Whether no more tokens are needed."""
        return self.abandoned or self.finish_reason is not None

    def sample(self, states: Tensor, embedded: Tensor, logits: Tensor) -> None:
        """Choose the next token after reading states [n, d]; W z + b and the logits are [V]."""
        token = pick(logits, self.sampling, self._generator)
        if self.sampling.traced:
            self.states.append(states)
            self.logits.append(self.lm.logit_map.before_softcap(embedded[token].clone()))
        self.accept(token, logits)

    def accept(self, token: int, logits: Tensor) -> None:
        """Append a token that was chosen from logits [V], and send what is ready."""
        self.ids.append(token)
        settings = self.sampling
        if token in self._end_ids:
            self.finish_reason = "stop"
        elif settings.alternatives is not None:
            offset = len(self.text.rstrip(BROKEN))  # an incomplete character is of this one too
            self._log_probs.append(_log_probs(token, offset, logits, settings.alternatives))
        self.text = self.lm.words(self.ids)
        stops = [at for stop in settings.stop if (at := self.text.find(stop)) >= 0]
        if stops:
            self.text, self.finish_reason = self.text[: min(stops)], "stop"
            self.ids = self.ids[: self._count_tokens(self.text)]
        elif self.finish_reason is None:
            if self.stop_requested:
                self.finish_reason = "stop"
            elif len(self.ids) >= settings.max_tokens:
                self.finish_reason = "length"
        self._send_ready()

    def _count_tokens(self, beginning: str) -> int:
        """Return the smallest number of tokens that spell the beginning of the text."""
        count = len(self.ids)
        while count and self.lm.words(self.ids[: count - 1]).startswith(beginning):
            count -= 1
        return count

    def _send_ready(self) -> None:
        ready, count = self.text, len(self.ids)
        if self.finish_reason is None:
            # Incomplete characters, and beginnings of stop sequences, wait.
            ready = ready.rstrip(BROKEN)
            partial = (
                size
                for stop in self.sampling.stop
                for size in range(1, min(len(stop), len(ready) + 1))
                if ready.endswith(stop[:size])
            )
            ready = ready[: len(ready) - max(partial, default=0)]
            count = self._count_tokens(ready)
        if len(ready) > self._sent_characters or self.finish_reason is not None:
            tokens = self._log_probs[self._sent_tokens : count]
            self.send(Chunk(ready[self._sent_characters :], tokens))
            self._sent_characters = max(len(ready), self._sent_characters)
            self._sent_tokens += len(tokens)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.abandoned = True
        self.send(Chunk(error=error))

    def send(self, chunk: Chunk | None) -> None:
        """Put a chunk, or the end, into the client's queue."""
        self._loop.call_soon_threadsafe(self.chunks.put_nowait, chunk)

    @torch.no_grad()
    def trace(self) -> Trace:
        """Return the trace of the text, which has a token at least."""
        lm, ids = self.lm, torch.cat([self.prompt, torch.tensor([self.ids]).to(self.prompt)], 1)
        count, output = ids.shape[1] - 1, lm.output_layer
        if self.codes is not None:
            split = split_predictions(lm.model, lm.head, output, ids, count, self.codes)
        else:
            logits = torch.stack(self.logits[: len(self.ids)])
            states, tokens = torch.cat(self.states)[:count], (ids[0, :-1], ids[0, 1:])
            split = split_states(output, lm.head, states, *tokens, target_logits=logits).cpu()
        settings = settings_not_applied(lm.model, self.sampling.temperature)
        return lm.trace_of(self.source, ids, self.prompt.shape[1], split, settings=settings)


def pick(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return the next token from float32 logits [V], as ``generate`` takes or samples it."""
    if sampling.temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    scores = logits.cpu()[None] / sampling.temperature
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(torch.LongTensor(), scores)
    return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))


def _log_probs(token: int, offset: int, logits: Tensor, alternatives: int) -> TokenLogProbs:
    log_probs = logits.log_softmax(-1)
    values, ids = log_probs.topk(min(alternatives, len(log_probs)))
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogProbs(token, offset, float(log_probs[token]), top)
