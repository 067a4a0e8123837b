"""A behaviour by examples: their split, who judges texts, reading, sampling, ways to suppress it.

The judge of a phrase looks for it. That of a topic or style weighs words w by log-odds, with
n counts of words plus 1,

    l_w = ln(n_w(examples) / n_w(keep)) − ln(Σ_v n_v(examples) / Σ_v n_v(keep))

or 0 within two standard errors, and a text shows it if the mean l of its words is above a
threshold.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prismlm.corpus.chat import ASSISTANT, Messages, is_messages
from prismlm.corpus.pieces import pieces_of
from prismlm.corpus.store import Corpus
from prismlm.errors import InputError, check_number, check_whole
from prismlm.interventions.controller import Controller
from prismlm.interventions.plan import applied, plan_for
from prismlm.lens.opened_model import OpenedModel, write_after
from prismlm.models.seam import capture, output_embedding
from prismlm.models.watch import Hook, watch

MAX_TOKENS, OPENING, BATCH_TOKENS, BATCH_TEXTS = 512, 16, 2048, 32
MIN_EXAMPLES, MIN_KEPT, WORD_ERRORS = 8, 4, 2.0
Prompt = str | Messages


@dataclass(frozen=True)
class SuppressOptions:
    """What is to become rare, how rare, and how that is measured."""

    phrases: tuple[str, ...] = ()  # the behaviour is writing one of them; else a topic or style
    target: float = 0.9  # share of the behaviour to remove
    max_cost: float = 0.02  # allowed growth of perplexity
    tokens: int = 40  # of a sampled text
    samples: int = 64  # texts sampled to report, and half as many at each strength to choose
    temperature: float = 0.7
    heldout: int = 6000  # tokens of the text to keep, for the fit and again for the report
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("the target", self.target, "more than 0 and at most 1", lambda x: 0 < x <= 1)
        check_number("the allowed cost", self.max_cost, "0 or more", lambda x: x >= 0)
        for name in ("tokens", "samples", "heldout"):
            check_whole(name, getattr(self, name), 1)
        if not all(phrase.split() for phrase in self.phrases):
            raise InputError("a phrase is empty: expected words that must not be written.")


class Examples(NamedTuple):
    """Texts or chats with the behaviour: to find its prototypes, to choose how far, to report."""

    find: Sequence[Prompt]
    choose: Sequence[Prompt]
    report: Sequence[Prompt]

    @classmethod
    def split(cls, texts: Sequence[Prompt], seed: int) -> Examples:
        """Divide texts at random: half, a quarter and a quarter."""
        if len(texts) < MIN_EXAMPLES:
            raise InputError(
                f"there are {len(texts)} examples of the behaviour: expected {MIN_EXAMPLES} or "
                "more. Half of them find the prototypes, the others choose and report."
            )
        order = np.random.default_rng(seed).permutation(len(texts)).tolist()
        parts = np.split(order, [len(texts) // 2, len(texts) * 3 // 4])
        return cls(*([texts[n] for n in part] for part in parts))


class Text(NamedTuple):
    """Tokens of a text; those from ``start`` on are predicted."""

    ids: list[int]
    start: int


class Read(NamedTuple):
    """States before N predicted tokens, these tokens, and the number of each one's text."""

    z: Tensor
    targets: Tensor
    text: Tensor

    def of(self, rows: Tensor) -> Read:
        """Return some rows."""
        return Read(*(column[rows] for column in self))


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"[^\W\d_]+", text.casefold())


def phrase_pattern(phrases: Sequence[str]) -> re.Pattern[str]:
    """Return what matches any phrase, whatever its case and blanks."""
    each = (r"\s+".join(map(re.escape, phrase.split())) for phrase in phrases)
    return re.compile("|".join(each), re.IGNORECASE)


@dataclass(frozen=True)
class Judge:
    """Whether a text shows the behaviour."""

    phrases: tuple[str, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    threshold: float = 0.0
    accuracy: float = 1.0  # balanced, on the texts that the threshold was chosen with

    def score(self, text: str) -> float:
        """Return the mean log-odds of a text's words."""
        words = words_of(text)
        return sum(self.weights.get(word, 0.0) for word in words) / max(1, len(words))

    def __call__(self, text: str) -> bool:
        """Judge a text."""
        if self.phrases:
            return phrase_pattern(self.phrases).search(text) is not None
        return self.score(text) > self.threshold

    @property
    def description(self) -> str:
        """What it goes by."""
        if self.phrases:
            return "the text has " + " or ".join(f"“{phrase}”" for phrase in self.phrases)
        return (
            "the mean log-odds of the text's words, examples against text to keep, is above "
            f"{self.threshold:.2f} (right for {self.accuracy:.0%} of texts that are not reported)"
        )

    @classmethod
    def trained(cls, find: Sequence[str], keep: Sequence[str], choose: Sequence[str]) -> Judge:
        """Weigh words by examples and every other kept text; set the threshold on the rest.

        It is the one with the best balanced accuracy, examples for choosing against kept texts.
        """
        inside, outside = (
            Counter(word for text in texts for word in words_of(text))
            for texts in (find, keep[::2])
        )
        known = sorted(inside | outside)
        n = np.array([[count[word] + 1 for word in known] for count in (inside, outside)])
        odds = np.log(n / n.sum(1, keepdims=True))
        clear = np.abs(odds[0] - odds[1]) > WORD_ERRORS * np.sqrt((1 / n).sum(0))
        weights = np.where(clear, odds[0] - odds[1], 0.0).tolist()
        judge = cls(weights=dict(zip(known, weights, strict=True)))
        shown, others = (
            np.array([judge.score(text) for text in texts]) for texts in (choose, keep[1::2])
        )
        both = np.unique(np.concatenate([shown, others]))
        cuts = (both[1:] + both[:-1]) / 2 if len(both) > 1 else both
        right = [((shown > cut).mean() + (others <= cut).mean()) / 2 for cut in cuts]
        best = int(np.argmax(right))
        return cls((), judge.weights, float(cuts[best]), float(right[best]))


class Way(NamedTuple):
    """A way to suppress: scales of prototypes, tokens whose logits are lowered, or words before."""

    scales: tuple[tuple[int, float], ...] = ()
    tokens: tuple[int, ...] = ()
    bias: float = 0.0
    words: str = ""


@contextmanager
def using(lm: OpenedModel, way: Way) -> Iterator[None]:
    """Apply scales and biases to every forward pass of the block; words are the prompt's matter."""

    def lowered(_: Any, args: Any, kwargs: Any, embedded: Tensor) -> Tensor:
        embedded = embedded.clone()
        embedded[..., list(way.tokens)] -= way.bias / lm.logit_map.scale
        return embedded

    with ExitStack() as stack:
        if way.scales:
            stack.enter_context(applied(lm.model, plan_for(lm, [Controller(way.scales)])))
        if way.bias:
            hook = Hook(output_embedding(lm.model), None, lowered)
            stack.enter_context(watch([hook], unwatched_too=True))
        yield


def encoded(lm: OpenedModel, text: Prompt) -> Text:
    """Return a text's first tokens; of a chat, the last answer is predicted."""
    ids = lm.tokens_of(text)[:MAX_TOKENS]
    if is_messages(text) and len(text) > 1 and cast("Messages", text)[-1]["role"] == ASSISTANT:
        before = lm.tokens_of(text[:-1])
        # A template may write earlier messages differently if the last one is not answered yet.
        if ids[: len(before)] == before and len(ids) > len(before):
            return Text(ids, len(before))
    return Text(ids, 1)


def prompt_of(lm: OpenedModel, text: Prompt, words: str = "") -> list[int]:
    """Return what is continued to see the behaviour: a chat without its last answer, or an opening.

    ``words`` are the system prompt, or come before the text.
    """
    if not is_messages(text):
        before = lm.tokens_of(f"{words}\n\n") if words else []
        return before + lm.tokens_of(text)[:OPENING]
    messages = [*cast("Messages", text)]
    if len(messages) > 1 and messages[-1]["role"] == ASSISTANT:
        messages.pop()
    return lm.tokens_of([{"role": "system", "content": words}, *messages] if words else messages)


def held_out(corpus: Corpus, tokens: int, seed: int) -> list[Text]:
    """Return held-out documents of a corpus, in random order, with so many tokens if it has them.

    Long ones are cut.
    """
    texts: list[Text] = []
    for number in np.random.default_rng(seed).permutation(corpus.split("heldout")).tolist():
        length = min(int(corpus.lengths[number]), MAX_TOKENS)
        if tokens <= 0 or length < 2:
            continue
        texts.append(Text(corpus.tokens(int(corpus.starts[number]), length).tolist(), 1))
        tokens -= length
    return texts


@torch.no_grad()
def read(lm: OpenedModel, texts: Sequence[Text], before: Sequence[int] = ()) -> Read:
    """Run the model over texts, each after the tokens ``before``, in batches of like lengths."""
    order = sorted(range(len(texts)), key=lambda n: len(texts[n].ids))
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    while order:
        size = max(1, BATCH_TOKENS // (len(texts[order[-1]].ids) + len(before)))
        batch, order = order[-size:], order[:-size]
        rows = [torch.tensor([*before, *texts[n].ids], device=lm.model.device) for n in batch]
        with capture(lm.model, logits=False) as captured:
            lm.model(input_ids=pad_sequence(rows, batch_first=True), use_cache=False)
        for z, row, n in zip(captured.z, rows, batch, strict=True):
            first = len(before) + texts[n].start
            number = torch.full_like(row[first:], n)
            parts.append((z[first - 1 : len(row) - 1], row[first:], number))
    return Read(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def summed_losses(lm: OpenedModel, text: Read, way: Way, count: int) -> np.ndarray:
    """Return −Σ log p of the tokens of each of ``count`` texts under a way's scales and biases."""
    embedding, losses = output_embedding(lm.model), np.zeros(count)
    with using(lm, way):
        for rows in torch.arange(len(text.targets), device=text.z.device).split(256):
            part = text.of(rows)
            logits = lm.logit_map(embedding(part.z).float())
            own = logits.gather(1, part.targets[:, None])[:, 0]
            loss = (logits.logsumexp(1) - own).double().cpu().numpy()
            losses += np.bincount(part.text.cpu().numpy(), loss, count)
    return losses


def sample(
    lm: OpenedModel,
    prompts: Sequence[Prompt],
    count: int,
    way: Way,
    options: SuppressOptions,
    seed: int,
) -> list[str]:
    """Return ``count`` sampled continuations, of each prompt in turn, under a way to suppress."""
    numbers = [n % len(prompts) for n in range(count)]
    ids = [prompt_of(lm, prompts[n], way.words) for n in range(min(count, len(prompts)))]
    order = sorted(range(count), key=lambda n: len(ids[numbers[n]]))
    texts = [""] * count
    padding = lm.tokenizer.eos_token_id
    with using(lm, way):
        for first in range(0, count, BATCH_TEXTS):
            batch = order[first : first + BATCH_TEXTS]
            rows = [ids[numbers[n]] for n in batch]
            longest = max(map(len, rows))
            padded = torch.tensor([[padding] * (longest - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
            written = write_after(
                lm.model,
                lm.tokenizer,
                padded.to(lm.model.device),
                options.tokens,
                options.temperature,
                seed + first,
                mask=mask.to(lm.model.device),
            )
            for n, row in zip(batch, written, strict=True):
                texts[n] = lm.words(row[longest:])
    return texts


def phrase_rows(lm: OpenedModel, texts: Sequence[Text], phrases: Sequence[str]) -> list[list[bool]]:
    """Return for each predicted token of each text whether it spells a part of a phrase."""
    pattern, marks = phrase_pattern(phrases), []
    for ids, start in texts:
        pieces = [piece.shown for piece in pieces_of(lm.tokenizer, ids[start:])]
        ends = np.cumsum([0, *map(len, pieces)]).tolist()
        spans = [match.span() for match in pattern.finditer("".join(pieces))]
        marks.append(
            [any(b < stop and e > first for first, stop in spans) for b, e in pairwise(ends)]
        )
    return marks
