"""Judges of two continuations, and their examination.

A judge is a language model, local or at an endpoint. Both get the prompt ``better`` of
``labels/prompts.md``: which is better by coherence, relevance, fluency and correctness, A, B or Tie
(ProtoT, B.1). Each pair is judged in both orders; the score is the mean, so that a judge that
follows positions alone gets exactly a half.

The judge is examined first: does it prefer text to its words shuffled, or to repetition? One that
ignores the texts prefers the real one half of the time.
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

from prismlm.corpus.chat import as_chat, encode_chat
from prismlm.corpus.encode import encode_text
from prismlm.errors import InputError
from prismlm.lens.labels.endpoint import Answers, Endpoint, Question, Session, fenced, one_line
from prismlm.lens.labels.endpoint import prompt as fill_template
from prismlm.models.checkpoint import read_checkpoint
from prismlm.progress import SILENT, Reporter, Task
from prismlm.statistics import Interval

# Score of A for each verdict.
SCORES = {"A": 1.0, "B": 0.0, "Tie": 0.5}
AS_JSON = 'Answer as {"verdict": "..."}, with "A", "B" or "Tie".'
AS_TOKEN = "Reply with a single token: A, B or Tie."
NAME_LENGTH = 48
NORMAL_QUANTILE = 1.959963984540054
# The interval of text against shuffled text must lie above; maximum share decided by position.
BAR, MAX_BY_POSITION = 0.75, 0.5
CONTROLS = ("shuffled", "elsewhere", "repeated")
# Last words of a prompt that a control repeats.
WORDS_REPEATED = 6


class Prompt(NamedTuple):
    """The first words of a text, and its reference: the words that follow, empty if too few.

    Its ``id`` is the document's, or the number of the line.
    """

    id: str
    text: str
    reference: str


class Pair(NamedTuple):
    """A text and two responses to it."""

    text: str
    a: str
    b: str


class Judged(NamedTuple):
    """Verdicts on a pair in the order (a, b) and in the order (b, a); None: no valid answer."""

    first: str | None
    second: str | None

    @property
    def score(self) -> float | None:
        """The score of a: 1 for a win, 0.5 for a tie, the mean of both orders."""
        if self.first is None or self.second is None:
            return None
        return (SCORES[self.first] + 1 - SCORES[self.second]) / 2

    @property
    def by_position(self) -> bool:
        """Whether the first response wins in both orders, or the second."""
        return self.first == self.second and self.first in ("A", "B")


class Judge(ABC):
    """Decides which of two responses is better; ``source`` is its name for the reader."""

    source: str

    @abstractmethod
    def verdicts(self, pairs: Sequence[Pair], task: Task) -> list[str | None]:
        """Return A, B or Tie for each pair in this order; None: no valid answer."""

    def usage(self) -> dict[str, Any]:
        """Return requests to an endpoint, tokens, and counts of failures, if there are any."""
        return {}

    def judge(
        self, pairs: Sequence[Pair], subject: str = "pairs", progress: Reporter = SILENT
    ) -> list[Judged]:
        """Return the verdicts on each pair in both orders; equal responses are tied."""
        different = [pair for pair in pairs if pair.a != pair.b]
        orders = [order for p in different for order in (p, Pair(p.text, p.b, p.a))]
        with progress.task(f"Judging {subject}", len(orders), "questions") as task:
            verdicts = iter(self.verdicts(orders, task))
        return [
            Judged("Tie", "Tie") if pair.a == pair.b else Judged(next(verdicts), next(verdicts))
            for pair in pairs
        ]


def question(pair: Pair, answer: str) -> str:
    """Return the question about a pair; ``answer`` describes the form of the answer."""
    data = {name: fenced(text) for name, text in pair._asdict().items()}
    return fill_template("better", **data, answer=answer)


class EndpointJudge(Judge):
    """A language model at an endpoint, which answers by a schema; its verdicts are stored."""

    def __init__(self, endpoint: Endpoint, file: Path) -> None:
        self.source = f"endpoint:{one_line(endpoint.model, NAME_LENGTH)}"
        self._session = Session(endpoint, Answers(file, endpoint.model))

    def usage(self) -> dict[str, Any]:
        """Return requests, tokens in and out, and counts of failures."""
        return self._session.usage()

    def verdicts(self, pairs: Sequence[Pair], task: Task) -> list[str | None]:
        """Return the answer to each question; questions are sent concurrently."""

        def verdict(number: int) -> str:
            message = {"role": "user", "content": question(pairs[number], AS_JSON)}
            request = Question((message,), {"verdict": tuple(SCORES)})
            return self._session.ask(request)["verdict"]

        answers = dict(self._session.each(range(len(pairs)), verdict, task))
        return [answers[number] for number in range(len(pairs))]


class LocalJudge(Judge):
    """A causal language model; its verdict is the most probable of the three answers.

    log P(answer | question) is the sum over the answer's tokens, after its chat template if it has
    one.
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
        """Return ln p [len(more) + 1, V] after ``start`` and after each token of ``more``."""
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
        """Return log P of each answer."""
        text = question(pair, AS_TOKEN)
        if self._chat:
            start = encode_chat(self._tokenizer, as_chat(text))
        else:
            start = self._ids(f"{text}\n\nAnswer:", start=True)
        answers = {name: self._ids(name if self._chat else f" {name}") for name in SCORES}
        # One pass for all answers of a single token.
        prefixes = {tuple(ids[:-1]) for ids in answers.values()}
        log = {prefix: self._log_after(start, prefix) for prefix in prefixes}
        return {
            name: sum(float(log[tuple(ids[:-1])][n, token]) for n, token in enumerate(ids))
            for name, ids in answers.items()
        }

    def verdicts(self, pairs: Sequence[Pair], task: Task) -> list[str | None]:
        """Return the answer with the highest score for each pair."""
        verdicts: list[str | None] = []
        for pair in pairs:
            scores = self.scores(pair)
            verdicts.append(max(scores, key=lambda name: scores[name]))
            task.advance()
        return verdicts


class LikelihoodJudge(LocalJudge):
    """Compares responses by their probability per token, without a question.

        l(r | x) = 1/|r| Σ_t ln p(r_t | x, r_<t)

    for a response r of |r| tokens to a text x. By ``likelihood`` the larger l is preferred, which
    repetition wins. By ``typical`` the response is preferred that is about as probable as the text
    itself (human text is neither the most nor the least probable, Holtzman et al. 2020), with the
    smaller |l(r | x) − l(x₂ | x₁)|, where x₁ and x₂ are the halves of the text's words.
    """

    def __init__(self, directory: Path, by: str = "likelihood") -> None:
        super().__init__(directory)
        self._typical = by == "typical"
        # Both orders of a pair need the same means.
        self._means: dict[tuple[str, str], float] = {}
        self.source += ", by typicality" if self._typical else ", by likelihood"

    def scores(self, pair: Pair) -> dict[str, float]:
        """Return the figure that decides; that of a tie lies between."""
        a, b = self._mean(pair.text, pair.a), self._mean(pair.text, pair.b)
        if self._typical:
            words = pair.text.split()
            half = len(words) // 2
            if not half:
                raise InputError(
                    f"the text {pair.text!r} has no two words, and --by typical compares responses "
                    "with its second half: give longer prompts."
                )
            typical = self._mean(" ".join(words[:half]), " ".join(words[half:]))
            a, b = -abs(a - typical), -abs(b - typical)
        return {"Tie": (a + b) / 2, "A": a, "B": b}

    def _mean(self, text: str, response: str) -> float:
        if (text, response) not in self._means:
            start, ids = self._ids(text.rstrip(), start=True), self._ids(f" {response.strip()}")
            log = self._log_after(start, ids[:-1])
            log_p = log.gather(1, torch.tensor(ids, device=log.device)[:, None])
            self._means[text, response] = float(log_p.mean())
        return self._means[text, response]


def judge_opener(
    directory: Path | None, url: str | None, name: str | None, *, by: str = "asked"
) -> Callable[[Path], Judge] | None:
    """Return a function that opens a judge, given the file of its verdicts; None without one."""
    if by != "asked" and directory is None:
        raise InputError(f"--by {by} needs a model directory: name it by --judge DIR.")
    if (url is None) != (name is None):
        raise InputError("--endpoint URL and --endpoint-model NAME go together: give both.")
    if directory is not None and url is not None:
        raise InputError("--judge and --endpoint are two judges: give one.")
    if url is not None and name is not None:
        return partial(EndpointJudge, Endpoint(url, name))
    if directory is None:
        return None
    if by == "asked":
        return lambda file: LocalJudge(directory)
    return lambda file: LikelihoodJudge(directory, by)


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
    """Return the pairs of an examination by control, the real continuation first.

    ``shuffled`` has the same words in another order, ``elsewhere`` the continuation of another
    prompt, ``repeated`` as many words: the prompt's last six again and again. Prompts without a
    reference are left out, and controls that equal the real words.
    """
    usable = [prompt for prompt in prompts if prompt.reference]
    real = [" ".join(prompt.reference.split()) for prompt in usable]
    pairs: dict[str, list[Pair]] = {name: [] for name in CONTROLS}
    for number, prompt in enumerate(usable):
        words = np.array(real[number].split(), dtype=object)
        shuffled = " ".join(np.random.default_rng([seed, number]).permutation(words))
        last = prompt.text.split()[-WORDS_REPEATED:]
        repeated = " ".join(islice(cycle(last), len(words)))
        controls = (shuffled, real[number - 1], repeated)
        for name, control in zip(CONTROLS, controls, strict=True):
            if control != real[number]:
                pairs[name].append(Pair(prompt.text, real[number], control))
    return pairs


def examine(
    judge: Judge, prompts: Sequence[Prompt], seed: int = 0, progress: Reporter = SILENT
) -> dict[str, Any]:
    """Return how often a judge prefers real text or follows the order, and if it is usable."""
    pairs = examination_pairs(prompts, seed)
    judged = {name: judge.judge(pairs[name], f"{name} text", progress) for name in CONTROLS}
    shares: dict[str, dict[str, Any]] = {}
    for name, verdicts in judged.items():
        scores = [pair.score for pair in verdicts if pair.score is not None]
        shares[name] = {"count": len(scores), **asdict(wilson(sum(scores), len(scores)))}
    order = order_figures([pair for verdicts in judged.values() for pair in verdicts])
    reasons: list[str] = []
    for name, bar, alternative in (
        ("shuffled", BAR, f"the same words shuffled in more than {BAR:.0%}"),
        ("repeated", 0.5, "the prompt's last words again and again more often than not"),
    ):
        share = shares[name]
        if not share["low"] > bar:
            figure = f"its 95 % interval begins at {share['low']:.0%}"
            figure = figure if share["count"] else "nothing was judged"
            reasons.append(f"it must prefer real text to {alternative}: {figure}")
    if (by_position := order["by_position"]["value"]) > MAX_BY_POSITION:
        reasons.append(f"it follows the position, not the text, in {by_position:.0%} of the pairs")
    return {
        "preferred": shares,
        "order": order,
        "bar": BAR,
        "most_by_position": MAX_BY_POSITION,
        "usable": not reasons,
        "reasons": reasons,
    }


def order_figures(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return how many pairs have verdicts, and how often these follow the position."""
    valid = [pair for pair in judged if pair.score is not None]
    by_position = asdict(wilson(sum(pair.by_position for pair in valid), len(valid)))
    return {
        "pairs": len(valid),
        "failed": len(judged) - len(valid),
        "by_position": by_position,
    }
