"""Judges of two continuations, and their examination.

A judge is a language model at an endpoint, or one in this process. Both are asked the same,
``better`` of ``labels/prompts.md``: which is better by coherence, relevance, fluency and
correctness, A, B or Tie (ProtoT, B.1). Each pair is asked about in both orders, and an endpoint's
verdicts are kept.

The judge is examined first: does it tell text from words shuffled or repeated, whatever the order?
A judge that does not look at the texts prefers the real one half of the time. Its share is the mean
score of both orders, so that one who follows positions alone gets exactly a half.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prismlm.corpus.chat import asked, encode_chat
from prismlm.corpus.encode import encode_text
from prismlm.errors import InputError
from prismlm.eval.judging.continuations import Prompt
from prismlm.lens.labels.endpoint import (
    Answers,
    Endpoint,
    Question,
    Session,
    fenced,
    one_line,
    prompt,
)
from prismlm.models.checkpoint import read_checkpoint
from prismlm.progress import SILENT, Reporter, Task
from prismlm.statistics import Interval

# What each verdict is worth to A.
WORTH = {"A": 1.0, "B": 0.0, "Tie": 0.5}
AS_JSON = 'Answer as {"verdict": "..."}, with "A", "B" or "Tie".'
AS_TOKEN = "Reply with a single token: A, B or Tie."
NAME_LENGTH, CHARACTERS_PER_TOKEN = 48, 4
# What the interval of text against shuffled text must lie above, and the most pairs by position.
BAR, MAX_BY_POSITION = 0.75, 0.5
NORMAL_QUANTILE = 1.959963984540054
CONTROLS = ("shuffled", "elsewhere", "repeated")
# Words at the end of a prompt that are said again and again.
WORDS_REPEATED = 6


class Pair(NamedTuple):
    """A text and two responses to it."""

    text: str
    a: str
    b: str


class Judged(NamedTuple):
    """Verdicts of a pair in the order (a, b) and in the order (b, a); None: no answer."""

    first: str | None
    second: str | None

    @property
    def score(self) -> float | None:
        """What a gets: 1 for a win, 0.5 for a tie, the mean of both orders."""
        if self.first is None or self.second is None:
            return None
        return (WORTH[self.first] + 1 - WORTH[self.second]) / 2

    @property
    def changed(self) -> bool:
        """Whether another response is better in the other order."""
        return self.score is not None and WORTH[self.first or ""] != 1 - WORTH[self.second or ""]

    @property
    def by_position(self) -> bool:
        """Whether what stands first is better in both orders, or what stands second."""
        return self.first == self.second and self.first in ("A", "B")


class Judge(ABC):
    """Says which of two responses is better; ``source`` is what it is, for the reader."""

    source: str

    @abstractmethod
    def verdicts(self, orders: Sequence[Pair], task: Task) -> list[str | None]:
        """Return A, B or Tie for each pair in the order given; None: no answer that counts."""

    def left(self, pairs: Sequence[Pair]) -> tuple[int, int]:
        """Return how many questions about pairs would be asked of an endpoint, and tokens."""
        return 0, 0

    def asked(self) -> dict[str, Any]:
        """Return requests to an endpoint, tokens, and what failed how often."""
        return {}

    def judge(
        self, pairs: Sequence[Pair], what: str = "pairs", progress: Reporter = SILENT
    ) -> list[Judged]:
        """Return the verdicts of each pair in both orders; responses that are alike are tied."""
        orders = both_orders(pairs)
        with progress.task(f"Judging {what}", len(orders), "questions") as task:
            said = iter(self.verdicts(orders, task))
        tie = Judged("Tie", "Tie")
        return [tie if one.a == one.b else Judged(next(said), next(said)) for one in pairs]


def both_orders(pairs: Sequence[Pair]) -> list[Pair]:
    """Return each pair in both orders; of responses that are alike nothing is asked."""
    different = [pair for pair in pairs if pair.a != pair.b]
    return [order for one in different for order in (one, Pair(one.text, one.b, one.a))]


def asked_text(pair: Pair, how: str) -> str:
    """Return what a judge is asked about a pair; ``how`` is the form of its answer."""
    data = {name: fenced(text) for name, text in pair._asdict().items()}
    return prompt("better", **data, answer=how)


class EndpointJudge(Judge):
    """A language model at an endpoint, which answers by a schema; its verdicts are kept."""

    def __init__(self, endpoint: Endpoint, kept: Path) -> None:
        self.answers = Answers(kept, endpoint.model)
        self.source = f"endpoint:{one_line(endpoint.model, NAME_LENGTH)}"
        self._session = Session(endpoint, self.answers)

    def _questions(self, orders: Sequence[Pair]) -> list[Question]:
        messages = [{"role": "user", "content": asked_text(one, AS_JSON)} for one in orders]
        choices = {"verdict": tuple(WORTH)}
        return [Question((message,), {"verdict": str}, choices) for message in messages]

    def left(self, pairs: Sequence[Pair]) -> tuple[int, int]:
        """Return how many questions about pairs in both orders are not answered, and tokens."""
        questions = self._questions(both_orders(pairs))
        new = [question for question in questions if self.answers.get(question) is None]
        characters = sum(len(question.messages[0]["content"]) for question in new)
        return len(new), characters // CHARACTERS_PER_TOKEN

    def verdicts(self, orders: Sequence[Pair], task: Task) -> list[str | None]:
        """Return what is said to each question, some of which are asked at once."""
        ask, questions, jobs = self._session.ask, self._questions(orders), range(len(orders))
        said = dict(self._session.each(jobs, lambda i: ask(questions[i])["verdict"], task))
        return [said[number] for number in jobs]

    def asked(self) -> dict[str, Any]:
        """Return requests, tokens in and out, and what failed how often."""
        return self._session.usage()


class LocalJudge(Judge):
    """A causal language model, which says the most probable of the three answers.

    log P(answer | question) is the sum over the answer's tokens. Its chat template is used, where
    it has one.
    """

    def __init__(self, directory: Path) -> None:
        opened: tuple[Any, Any] = read_checkpoint(directory)
        self._model, self._tokenizer = opened
        self._chat = self._tokenizer.chat_template is not None
        self.source = one_line(directory.resolve().name, NAME_LENGTH)

    def _ids(self, text: str, *, start: bool = False) -> list[int]:
        return encode_text(self._tokenizer, text, start=start, end=False)

    @torch.no_grad()
    def _log_after(self, start: Sequence[int], more: Sequence[int]) -> Tensor:
        """Return ln p [len(more) + 1, V] of what comes after ``start`` and after each of more."""
        longest = getattr(self._model.config, "max_position_embeddings", None)
        ids = [*start, *more]
        if longest is not None and len(ids) > longest:
            raise InputError(
                f"a question to the judge {self.source} has {len(ids)} tokens, and it reads "
                f"{longest}: give shorter prompts with --prompt-words, or another judge."
            )
        logits = self._model(torch.tensor([ids], device=self._model.device)).logits[0]
        return logits[len(start) - 1 :].float().log_softmax(-1)

    def scores(self, pair: Pair) -> dict[str, float]:
        """Return log P of each answer about a pair."""
        text = asked_text(pair, AS_TOKEN)
        if self._chat:
            start = encode_chat(self._tokenizer, asked(text))
        else:
            start = self._ids(f"{text}\n\nAnswer:", start=True)
        answers = {name: self._ids(name if self._chat else f" {name}") for name in WORTH}
        # One pass for all answers of a single token.
        begun = {tuple(ids[:-1]) for ids in answers.values()}
        log = {more: self._log_after(start, more) for more in begun}
        return {
            name: sum(float(log[tuple(ids[:-1])][n, token]) for n, token in enumerate(ids))
            for name, ids in answers.items()
        }

    def verdicts(self, orders: Sequence[Pair], task: Task) -> list[str | None]:
        """Return the answer of the highest score for each pair."""
        said: list[str | None] = []
        for pair in orders:
            scores = self.scores(pair)
            said.append(max(scores, key=lambda name: scores[name]))
            task.advance()
        return said


class LikelihoodJudge(LocalJudge):
    """A model that is asked nothing: it prefers by what it finds probable, per token.

        l(r | x) = 1/|r| Σ_t ln p(r_t | x, r_<t)

    of a response r of |r| tokens to a text x. By ``likelihood``, the larger l is preferred; text
    that says again what it has said is very probable too, which its examination shows. By
    ``typical``, the response that is as probable as the text itself has been, the smaller

        |l(r | x) − l(x₂ | x₁)|

    where x₁ and x₂ are the halves of the text's words: people's text is neither the most nor the
    least probable (Holtzman et al. 2020). Neither has a position to follow.
    """

    def __init__(self, directory: Path, by: str = "likelihood") -> None:
        super().__init__(directory)
        self._typical = by == "typical"
        self._means: dict[tuple[str, str], float] = {}
        self.source += ", by typicality" if self._typical else ", by likelihood"

    def scores(self, pair: Pair) -> dict[str, float]:
        """Return what each response is preferred by; a tie is what lies between."""
        a, b = self._mean(pair.text, pair.a), self._mean(pair.text, pair.b)
        if self._typical:
            words = pair.text.split()
            half = len(words) // 2
            if not half:
                raise InputError(
                    f"the text {pair.text!r} has no two words, and --by typical compares what is "
                    "written after it with its own second half: give longer prompts."
                )
            usual = self._mean(" ".join(words[:half]), " ".join(words[half:]))
            a, b = -abs(a - usual), -abs(b - usual)
        return {"Tie": (a + b) / 2, "A": a, "B": b}

    def _mean(self, text: str, response: str) -> float:
        # Both orders of a pair ask for the same.
        if (text, response) not in self._means:
            start, own = self._ids(text.rstrip(), start=True), self._ids(f" {response.strip()}")
            log = self._log_after(start, own[:-1])
            chosen = log.gather(1, torch.tensor(own, device=log.device)[:, None])
            self._means[text, response] = float(chosen.mean())
        return self._means[text, response]


def judge_opener(
    directory: Path | None, url: str | None, name: str | None, *, by: str = "asked"
) -> Callable[[Path], Judge] | None:
    """Return what opens a judge, given the file of an endpoint's verdicts; None: none is named."""
    if by != "asked" and directory is None:
        raise InputError(f"--by {by} is of a model directory: name it by --judge DIR.")
    if (url is None) != (name is None):
        raise InputError("--endpoint URL and --endpoint-model NAME go together: give both.")
    if directory is not None and url is not None:
        raise InputError("--judge and --endpoint are two judges: give one.")
    if url is not None and name is not None:
        return partial(EndpointJudge, Endpoint(url, name))
    if directory is None:
        return None
    if by == "asked":
        return lambda kept: LocalJudge(directory)
    return lambda kept: LikelihoodJudge(directory, by)


def wilson(successes: float, count: int) -> Interval:
    """Return a share with Wilson's 95 % interval; halves count as such."""
    if not count:
        return Interval(np.nan, np.nan, np.nan)
    share, square = successes / count, NORMAL_QUANTILE**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    inner = share * (1 - share) / count + square / (4 * count**2)
    half = NORMAL_QUANTILE * inner**0.5 / (1 + square / count)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def examination_pairs(prompts: Sequence[Prompt], seed: int = 0) -> dict[str, list[Pair]]:
    """Return what a judge is examined with, the real continuation first, by control.

    ``shuffled`` has the same words in another order, ``elsewhere`` the continuation of another
    prompt, ``repeated`` as many words: the prompt's last six again and again. Prompts without a
    reference give none, nor do words that cannot be told from the real ones.
    """
    whole = [one for one in prompts if one.reference]
    real = [" ".join(one.reference.split()) for one in whole]
    pairs: dict[str, list[Pair]] = {name: [] for name in CONTROLS}
    for number, one in enumerate(whole):
        words = np.array(real[number].split(), dtype=object)
        mixed = " ".join(np.random.default_rng([seed, number]).permutation(words))
        last = one.text.split()[-WORDS_REPEATED:]
        again = " ".join(islice(cycle(last), len(words)))
        for name, other in zip(CONTROLS, (mixed, real[number - 1], again), strict=True):
            pairs[name] += [Pair(one.text, real[number], other)] if other != real[number] else []
    return pairs


def examine(
    judge: Judge, prompts: Sequence[Prompt], seed: int = 0, progress: Reporter = SILENT
) -> dict[str, Any]:
    """Return how often a judge prefers real text, how often it follows the order, and a verdict."""
    pairs = examination_pairs(prompts, seed)
    judged = {name: judge.judge(pairs[name], f"{name} text", progress) for name in CONTROLS}
    shares: dict[str, dict[str, Any]] = {}
    for name, verdicts in judged.items():
        scores = [one.score for one in verdicts if one.score is not None]
        shares[name] = {"count": len(scores), **asdict(wilson(sum(scores), len(scores)))}
    order = order_figures([one for verdicts in judged.values() for one in verdicts])
    reasons = [
        f"it must prefer real text to {what}: "
        + (f"its 95 % interval begins at {shares[name]['low']:.0%}"
           if shares[name]["count"] else "nothing was judged")
        for name, bar, what in (
            ("shuffled", BAR, f"the same words shuffled in more than {BAR:.0%}"),
            ("repeated", 0.5, "the prompt's last words again and again more often than not"),
        )
        if not shares[name]["low"] > bar
    ]  # fmt: skip
    if (followed := order["by_position"]["value"]) > MAX_BY_POSITION:
        reasons.append(f"it follows the position, not the text, in {followed:.0%} of the pairs")
    return {
        "preferred": shares,
        "order": order,
        "bar": BAR,
        "most_by_position": MAX_BY_POSITION,
        "usable": not reasons,
        "reasons": reasons,
    }


def order_figures(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return how often verdicts change with the order, follow it, name A, and are ties."""
    both = [one for one in judged if one.score is not None]
    verdicts = [verdict for one in both for verdict in one]
    ties = verdicts.count("Tie")
    return {
        "pairs": len(both),
        "failed": len(judged) - len(both),
        "changed": asdict(wilson(sum(one.changed for one in both), len(both))),
        "by_position": asdict(wilson(sum(one.by_position for one in both), len(both))),
        "first": asdict(wilson(verdicts.count("A"), len(verdicts) - ties)),
        "ties": ties / len(verdicts) if verdicts else np.nan,
    }
