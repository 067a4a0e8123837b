"""Judges of two continuations, and their examination.

A judge is a language model at an endpoint, or one in this process. Both are asked the same,
``better`` of ``labels/prompts.md``: which is better by coherence, relevance, fluency and
correctness, A, B or Tie (ProtoT, B.1). Each pair is asked about in both orders, and verdicts are
kept.

The judge is examined first: does it tell text from words shuffled or repeated, whatever the order?
A judge that does not look at the texts prefers the real one half of the time. Its share is the mean
score of both orders, so that one who follows positions alone gets exactly a half.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prismlm import fingerprints
from prismlm.corpus.chat import asked, encode_chat
from prismlm.corpus.encode import encode_text
from prismlm.errors import InputError
from prismlm.eval.judging.continuations import Prompt
from prismlm.files import json_text
from prismlm.lens.labels.answers import Answers, Question, fenced, one_line, prompt
from prismlm.lens.labels.endpoint import Endpoint, Session
from prismlm.models.checkpoint import read_checkpoint
from prismlm.progress import SILENT, Reporter, Task
from prismlm.statistics import Interval

# What each verdict is worth to A.
WORTH = {"A": 1.0, "B": 0.0, "Tie": 0.5}
AS_JSON = 'Answer as {"verdict": "..."}, with "A", "B" or "Tie".'
AS_TOKEN = "Reply with a single token: A, B or Tie."
# What is said of a judge that runs here and is not asked.
SAID_OF = {"likelihood": "by likelihood", "typical": "by typicality"}
NAME_LENGTH, CHARACTERS_PER_TOKEN = 48, 4


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
    """Says which of two responses is better.

    Attributes:
        source: what it is, for the reader.
        answers: verdicts that are kept.
        how: the form of an answer, in words.
    """

    source: str
    answers: Answers
    how: str

    def question(self, pair: Pair) -> Question:
        """Return what is asked about a pair in one order."""
        data = {name: fenced(text) for name, text in pair._asdict().items()}
        return _question(prompt("better", **data, answer=self.how))

    def left(self, pairs: Sequence[Pair]) -> tuple[int, int]:
        """Return how many questions about pairs in both orders are not answered, and tokens."""
        questions = [self.question(one) for one in _orders(pairs)]
        new = [q.messages[0]["content"] for q in questions if self.answers.get(q) is None]
        return len(new), sum(map(len, new)) // CHARACTERS_PER_TOKEN

    def judge(
        self, pairs: Sequence[Pair], what: str = "pairs", progress: Reporter = SILENT
    ) -> list[Judged]:
        """Return the verdicts of each pair in both orders; responses that are alike are tied."""
        questions = [self.question(one) for one in _orders(pairs)]
        with progress.task(f"Judging {what}", len(questions), "questions") as task:
            found = iter(self.verdicts(questions, task))
        return [
            Judged(next(found), next(found)) if one.a != one.b else Judged("Tie", "Tie")
            for one in pairs
        ]

    @abstractmethod
    def verdicts(self, questions: Sequence[Question], task: Task) -> list[str | None]:
        """Return what is said to each question; None where there is no answer that counts."""

    @abstractmethod
    def asked(self) -> dict[str, Any]:
        """Return what asking came to."""


def _question(text: str) -> Question:
    message = {"role": "user", "content": text}
    return Question((message,), {"verdict": str}, {"verdict": tuple(WORTH)})


def _orders(pairs: Sequence[Pair]) -> list[Pair]:
    """Return both orders of each pair; of responses that are alike nothing is asked."""
    return [
        one for pair in pairs if pair.a != pair.b for one in (pair, Pair(pair.text, pair.b, pair.a))
    ]


class EndpointJudge(Judge):
    """A language model at an endpoint, which answers by a schema.

    Verdicts are kept in the file ``kept``.
    """

    how = AS_JSON

    def __init__(self, endpoint: Endpoint, kept: Path) -> None:
        self.answers = Answers(kept, endpoint.model)
        self.source = f"endpoint:{one_line(endpoint.model, NAME_LENGTH)}"
        self._session = Session(endpoint, self.answers)

    def verdicts(self, questions: Sequence[Question], task: Task) -> list[str | None]:
        """Return what is said to each question, some of which are asked at once."""
        ask = self._session.ask
        jobs = range(len(questions))
        found = dict(self._session.each(jobs, lambda i: ask(questions[i])["verdict"], task))
        return [found[number] for number in jobs]

    def asked(self) -> dict[str, Any]:
        """Return requests, tokens in and out, and what failed how often."""
        return self._session.asked()


class LocalJudge(Judge):
    """A model directory, which says the most probable of the three answers and nothing else.

    log P(answer | question) is the sum over the answer's tokens; one forward pass where A and B
    are a token each.

    Args:
        directory: of any causal language model; its chat template is used, where it has one.
        kept: the file of its verdicts.
    """

    how = AS_TOKEN

    def __init__(self, directory: Path, kept: Path) -> None:
        opened: tuple[Any, Any] = read_checkpoint(directory)
        self._model, self._tokenizer = opened
        self._chat = self._tokenizer.chat_template is not None
        self.source = one_line(directory.resolve().name, NAME_LENGTH)
        kind = [fingerprints.of_model(self._model), str(self._tokenizer.chat_template)]
        self.answers = Answers(kept, fingerprints.of_json(kind))
        self._tally = Counter(passes=0, tokens_in=0)
        words = {name: name if self._chat else f" {name}" for name in WORTH}
        self._spelled = {name: self._ids(word) for name, word in words.items()}

    def _ids(self, text: str, *, start: bool = False) -> tuple[int, ...]:
        return tuple(encode_text(self._tokenizer, text, start=start, end=False))

    def _prompt(self, question: Question) -> tuple[int, ...]:
        text = question.messages[0]["content"]
        if self._chat:
            return tuple(encode_chat(self._tokenizer, asked(text)))
        return self._ids(f"{text}\n\nAnswer:", start=True)

    @torch.no_grad()
    def _log_probabilities_after(self, start: Sequence[int], more: Sequence[int]) -> Tensor:
        """Return ln p [len(more) + 1, V] of what comes after ``start`` and after each of more."""
        longest = getattr(self._model.config, "max_position_embeddings", None)
        count = len(start) + len(more)
        if longest is not None and count > longest:
            raise InputError(
                f"a question to the judge {self.source} has {count} tokens, and it reads "
                f"{longest}: give shorter prompts with --prompt-words, or another judge."
            )
        self._tally.update(passes=1, tokens_in=count)
        ids = torch.tensor([[*start, *more]], device=self._model.device)
        return self._model(input_ids=ids).logits[0, len(start) - 1 :].float().log_softmax(-1)

    def log_probabilities(self, question: Question) -> dict[str, float]:
        """Return log P of each answer."""
        start, found = self._prompt(question), dict[str, float]()
        # The longest first: what begins as it does is read with it.
        for path in sorted({ids[:-1] for ids in self._spelled.values()}, key=len, reverse=True):
            spelled = {n: s for n, s in self._spelled.items() if s[:-1] == path[: len(s) - 1]}
            if not spelled.keys() <= found.keys():
                log = self._log_probabilities_after(start, path)
                for name, answer in spelled.items():
                    found[name] = sum(float(log[i, token]) for i, token in enumerate(answer))
        return {name: found[name] for name in WORTH}

    def verdicts(self, questions: Sequence[Question], task: Task) -> list[str | None]:
        """Return what is most probable after each question."""
        found: list[str | None] = []
        for question in questions:
            answer = self.answers.get(question)
            if answer is None:
                log = self.log_probabilities(question)
                answer = {"verdict": max(log, key=lambda name: log[name])}
                self.answers.add(question, answer)
            found.append(answer["verdict"])
            task.advance()
        return found

    def asked(self) -> dict[str, Any]:
        """Return how many passes were made, over how many tokens."""
        return {**self._tally, "failures": {}}


class LikelihoodJudge(LocalJudge):
    """A model directory that is asked nothing: it prefers by what it finds probable, a token.

        l(r | x) = 1/|r| Σ_t ln p(r_t | x, r_<t)

    of a response r of |r| tokens to a text x. By ``likelihood``, the larger l is preferred; text
    that says again what it has said is very probable too, which its examination shows. By
    ``typical``, the response that is as probable as the text itself has been, the smaller

        |l(r | x) − l(x₂ | x₁)|

    where x₁ and x₂ are the halves of the text's words: people's text is neither the most nor the
    least probable (Holtzman et al. 2020). Neither has a position to follow.
    """

    def __init__(self, directory: Path, kept: Path, by: str = "likelihood") -> None:
        super().__init__(directory, kept)
        self._by = by
        self.source = f"{self.source}, {SAID_OF[by]}"
        self._means: dict[tuple[str, str], float] = {}

    def question(self, pair: Pair) -> Question:
        """Return what verdicts of a pair in one order are kept by."""
        return _question(json_text([self._by, *pair]))

    def log_probabilities(self, question: Question) -> dict[str, float]:
        """Return what each response is preferred by; a tie is what lies between."""
        _, text, *responses = json.loads(question.messages[0]["content"])
        a, b = (self._mean(text, response) for response in responses)
        if self._by == "typical":
            usual = self._mean(*_halves(text))
            a, b = -abs(a - usual), -abs(b - usual)
        return {"Tie": (a + b) / 2, "A": a, "B": b}

    def _mean(self, text: str, response: str) -> float:
        if (text, response) not in self._means:
            start, own = self._ids(text.rstrip(), start=True), self._ids(f" {response.strip()}")
            log = self._log_probabilities_after(start, own)[:-1]
            chosen = log.gather(1, torch.tensor(own, device=log.device)[:, None])
            self._means[text, response] = float(chosen.mean())
        return self._means[text, response]


def _halves(text: str) -> tuple[str, str]:
    """Return the first half of a text's words and the second."""
    words = text.split()
    half = len(words) // 2
    if not half:
        raise InputError(
            f"the text {text!r} has no two words, and --by typical compares what is written after "
            "it with its own second half: give longer prompts."
        )
    return " ".join(words[:half]), " ".join(words[half:])


def judge_opener(
    directory: Path | None, url: str | None, name: str | None, *, by: str = "asked"
) -> Callable[[Path], Judge] | None:
    """Return what opens a judge, given the file of its verdicts; None where none is named."""
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
        return partial(LocalJudge, directory)
    return partial(LikelihoodJudge, directory, by=by)


# What the interval of text against shuffled text must lie above, and the most pairs by position.
BAR, MOST_BY_POSITION = 0.75, 0.5
DEVIATIONS = 1.959963984540054
CONTROLS = ("shuffled", "elsewhere", "repeated")
# Words at the end of a prompt that are said again and again.
WORDS_REPEATED = 6


def wilson(successes: float, count: int) -> Interval:
    """Return a share with Wilson's 95 % interval; halves count as such."""
    if not count:
        return Interval(np.nan, np.nan, np.nan)
    share, square = successes / count, DEVIATIONS**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    inner = share * (1 - share) / count + square / (4 * count**2)
    half = DEVIATIONS * inner**0.5 / (1 + square / count)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def examination_pairs(prompts: Sequence[Prompt], seed: int = 0) -> dict[str, list[Pair]]:
    """Return what a judge is examined with, the real continuation first, by control.

    ``shuffled`` has the same words in another order, ``elsewhere`` the continuation of another
    prompt, ``repeated`` as many words: the prompt's last six again and again. Prompts without a
    reference give none, nor do words that cannot be told from the real ones.
    """
    whole = [one for one in prompts if one.reference]
    real = [" ".join(one.reference.split()) for one in whole]
    found: dict[str, list[Pair]] = {name: [] for name in CONTROLS}
    for number, one in enumerate(whole):
        words = np.array(real[number].split(), dtype=object)
        mixed = " ".join(np.random.default_rng([seed, number]).permutation(words))
        last = one.text.split()[-WORDS_REPEATED:]
        again = " ".join(islice(cycle(last), len(words)))
        for name, other in zip(CONTROLS, (mixed, real[number - 1], again), strict=True):
            found[name] += [Pair(one.text, real[number], other)] if other != real[number] else []
    return found


def examine(
    judge: Judge, prompts: Sequence[Prompt], seed: int = 0, progress: Reporter = SILENT
) -> dict[str, Any]:
    """Return how often a judge prefers real text, how often it follows the order, and a verdict."""
    pairs = examination_pairs(prompts, seed)
    judged = {name: judge.judge(pairs[name], f"{name} text", progress) for name in CONTROLS}
    shares: dict[str, dict[str, Any]] = {}
    for name, found in judged.items():
        scores = [one.score for one in found if one.score is not None]
        shares[name] = {"count": len(scores), **asdict(wilson(sum(scores), len(scores)))}
    order = order_figures([one for found in judged.values() for one in found])
    reasons: list[str] = []
    for name, least, what in (
        ("shuffled", BAR, f"the same words shuffled in more than {BAR:.0%}"),
        ("repeated", 0.5, "the prompt's last words again and again more often than not"),
    ):
        share = shares[name]
        if not share["low"] > least:
            interval = f"its 95 % interval begins at {share['low']:.0%}"
            found = interval if share["count"] else "nothing was judged"
            reasons.append(f"it must prefer real text to {what}: {found}")
    if (followed := order["by_position"]["value"]) > MOST_BY_POSITION:
        reasons.append(f"it follows the position, not the text, in {followed:.0%} of the pairs")
    return {
        "preferred": shares,
        "order": order,
        "bar": BAR,
        "most_by_position": MOST_BY_POSITION,
        "usable": not reasons,
        "reasons": reasons,
    }


def order_figures(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return how often verdicts change with the order, follow it, name A, and are ties."""
    both = [one for one in judged if one.score is not None]
    verdicts = [verdict for one in both for verdict in one]
    ties = verdicts.count("Tie")

    def share(count: int, of: int) -> dict[str, Any]:
        return asdict(wilson(count, of))

    return {
        "pairs": len(both),
        "failed": len(judged) - len(both),
        "changed": share(sum(one.changed for one in both), len(both)),
        "by_position": share(sum(one.by_position for one in both), len(both)),
        "first": share(verdicts.count("A"), len(verdicts) - ties),
        "ties": ties / len(verdicts) if verdicts else np.nan,
    }
