"""Names by a language model: PRISM's two passes, asked of an endpoint.

First a name and a description from a card, which has the signature of the prototype and passages
where it is nearest; then, in the same conversation, category, syntactic role and domain tags.

What names are worth to it is asked as delphi defines *detection* and *fuzzing* (Paulo et al. 2024):
given name and description, which of some passages fire, and in which is the marked token rightly
marked? The same passages are asked about with the name of another prototype, which is the control.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from prismlm.cost import Cost, peak_memory
from prismlm.errors import check_whole
from prismlm.files import json_text
from prismlm.index.lens import MIN_PLACES, Lens
from prismlm.labels.answers import Answers, Question, fenced, one_line, prompt
from prismlm.labels.categories import CATEGORIES
from prismlm.labels.embedded import NAME_LENGTH, Label
from prismlm.labels.endpoint import Endpoint, Session
from prismlm.labels.places import marked
from prismlm.labels.scores import PASSAGE, draw_passages, words_of
from prismlm.labels.vocabulary import FUNCTION
from prismlm.labels.write import SEED, Made, accuracy
from prismlm.progress import SILENT, Reporter

# Passages on a card, and tokens of each before and after the place.
SHOWN, BEFORE, AFTER = 12, 32, 8
DESCRIPTION_LENGTH, SHORT, MOST_TAGS = 240, 32, 3
# An estimate looks at so many questions, and takes answers to have so many tokens.
SAMPLED, NAME_TOKENS, CATEGORY_TOKENS, JUDGE_TOKENS = 256, 50, 40, 25
BYTES_PER_ANSWER = 300
KINDS = ("detection", "fuzzing")
# Passages of each kind that are shown at once to judge a name.
TRIED = 8


class EndpointLabeller:
    """Names prototypes by a language model; the embedded labeller has named all of them before.

    Every answer is kept beside the lens, in ``.NAME.answers.jsonl``, and not asked for again.

    Args:
        endpoint: where the language model is.
        prototypes: how many are named, those with the most text; None: all.
        judged: how many names, drawn by seed, it judges as well.
        prices: of a million tokens in and out; None: nothing, or not known where both are.
        announce: callback, receives the expected cost before the first request.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        prototypes: int | None = None,
        judged: int = 0,
        prices: tuple[float | None, float | None] = (None, None),
        announce: Callable[[Cost], object] = lambda cost: None,
    ) -> None:
        self.most = None if prototypes is None else check_whole("the prototypes", prototypes)
        self.judged = check_whole("the names to judge", judged)
        self.endpoint, self.prices, self.announce = endpoint, prices, announce
        self.source = f"endpoint:{one_line(endpoint.model, NAME_LENGTH)}"

    def labels(self, lens: Lens, made: Made, progress: Reporter = SILENT) -> dict[int, Label]:
        """Return the labels of those prototypes that it has good answers for.

        Raises:
            InputError: the endpoint cannot be used, or more than half of its answers cannot.
            ModuleNotFoundError: openai is not installed, of the extra ``label``.
        """
        self._session = session = Session(self.endpoint, self.answers(lens))
        self.announce(self.cost(lens, made))
        cells, cards = self._cells(lens, made), _Cards(lens, made)

        def label(cell: int) -> Label:
            first = cards.question(cell)
            named = _cleaned(session.ask(first))
            return _label(named, session.ask(category_question(first, named)))

        with progress.task("Asking for names", len(cells), "prototypes") as task:
            found = dict(session.each(cells, label, task))
        return {cell: one for cell, one in found.items() if one is not None}

    def report(
        self, made: Made, labels: Mapping[int, Label], progress: Reporter = SILENT
    ) -> dict[str, Any]:
        """Return what asking came to, and what the names are worth to the model that is asked.

        Args:
            made: what the names were made of.
            labels: that are judged, by prototype.
            progress: shows the judging.
        """
        session = self._session
        judged = judge(session, made, labels, self.judged, progress) if self.judged else None
        return session.asked() | {"judged": judged}

    def cost(self, lens: Lens, made: Made) -> Cost:
        """Return what asking is expected to take; nothing is asked."""
        answers, cards, cells = self.answers(lens), _Cards(lens, made), self._cells(lens, made)
        sample = cells[:: max(1, len(cells) // SAMPLED)]
        share, left = len(cells) / max(1, len(sample)), list[tuple[float, Question, int]]()
        for cell in sample:
            first = cards.question(cell)
            named = answers.get(first)
            second = category_question(first, _cleaned(named or dict.fromkeys(first.fields, "")))
            left += [(share, first, NAME_TOKENS)] if named is None else []
            left += [(share, second, CATEGORY_TOKENS)] if answers.get(second) is None else []
        labels = {cell: one for cell, one in enumerate(made.labels) if one is not None}
        judging = trials(made, labels, self.judged)
        left += [(1.0, trial.question, JUDGE_TOKENS) for trial in judging]
        requests = sum(times for times, _, _ in left)
        tokens_in = sum(times * _tokens(made, question) for times, question, _ in left)
        tokens_out = sum(times * expected for times, _, expected in left)
        figures: dict[str, Any] = {
            "requests": round(requests),
            "tokens_in": round(tokens_in),
            "tokens_out": round(tokens_out),
        }
        if self.prices != (None, None):
            price = (tokens_in * (self.prices[0] or 0) + tokens_out * (self.prices[1] or 0)) / 1e6
            figures["price"] = f"{price:,.2f}"
        return Cost(
            seconds=None,
            memory_bytes=peak_memory(),
            disk_bytes=round(requests * BYTES_PER_ANSWER),
            figures=figures,
            basis="Tokens as the corpus's tokenizer counts them. Names that were answered before "
            "are not asked for again.",
            unknown=("how fast the endpoint is, and whether it thinks before it answers.",),
        )

    def answers(self, lens: Lens) -> Answers:
        """Return the answers that are kept beside a lens."""
        path = lens.path.with_name(f".{lens.path.name}.answers.jsonl")
        return Answers(path, self.endpoint.model)

    def _cells(self, lens: Lens, made: Made) -> list[int]:
        """Return the prototypes to name, those with the most text first."""
        there = made.places.size >= MIN_PLACES
        there &= np.bincount(made.places.cell, minlength=len(made.labels)) > 0
        return lens.leading[there[lens.leading]][: self.most].tolist()


class _Cards:
    """What is shown of each prototype."""

    def __init__(self, lens: Lens, made: Made) -> None:
        self.made = made
        self.tokens = lens.prototypes["top_tokens"].to_pylist()
        self.values = lens.prototypes["top_values"].to_pylist()
        self.first = np.searchsorted(made.places.cell, np.arange(len(made.labels) + 1))

    def question(self, cell: int) -> Question:
        """Return what its name is asked for with."""
        first, end = self.first[cell : cell + 2].tolist()
        # Evenly through the places, which are in the order of next tokens.
        rows = np.unique(np.linspace(first, end - 1, min(SHOWN, end - first)).astype(int))
        raised = zip(self.tokens[cell] or [], self.values[cell] or [], strict=True)
        lines = [json_text({token: round(value, 2) for token, value in raised})]
        for row in rows.tolist():
            shown = marked(self.made.text, self.made.places, row, BEFORE, AFTER)
            lines.append(json_text({"passage": shown.text, "next": shown.next}))
        asked = f"{prompt('system')}\n\n{prompt('name', data=fenced(chr(10).join(lines)))}"
        # No message of role "system": some models' templates refuse one.
        return Question(
            ({"role": "user", "content": asked},),
            {"name": str, "description": str},
            holds=lambda answer: all(_cleaned(answer).values()),
        )


def category_question(first: Question, named: Mapping[str, str]) -> Question:
    """Return what a category is asked for with, in the conversation that gave the name.

    Args:
        first: question of it.
        named: the name and description that it gave.
    """
    said = {"role": "assistant", "content": json_text(named)}
    return Question(
        (*first.messages, said, {"role": "user", "content": prompt("category")}),
        {"category": str, "role": str, "tags": list[str]},
        {"category": CATEGORIES},
    )


def _cleaned(answer: Mapping[str, Any]) -> dict[str, str]:
    return {
        "name": one_line(answer["name"], NAME_LENGTH),
        "description": one_line(answer["description"], DESCRIPTION_LENGTH),
    }


def _label(named: Mapping[str, str], sorted_as: Mapping[str, Any]) -> Label:
    tags = filter(None, (one_line(tag, SHORT) for tag in sorted_as["tags"][:MOST_TAGS]))
    words = dict.fromkeys(words_of(named["description"]))
    return Label(
        name=named["name"],
        description=named["description"],
        category=sorted_as["category"],
        role=one_line(sorted_as["role"], SHORT),
        tags=tuple(dict.fromkeys(tags)),
        # What scores an embedded name looks for: words of the description that have content.
        topic=tuple(word for word in words if word.isalnum() and word not in FUNCTION),
    )


def _tokens(made: Made, question: Question) -> int:
    tokenizer = made.text.corpus.tokenizer
    # Not verbose: it is no matter that this model could not read as much at once.
    return sum(len(tokenizer.encode(m["content"], verbose=False)) for m in question.messages)


class Trial(NamedTuple):
    """One question about one name.

    Attributes:
        cell: whose passages are shown.
        kind: of ``KINDS``.
        own: whether the name is that of the prototype, or the control's.
        question: what is asked.
        firing: the numbers of those that fire, half of all.
    """

    cell: int
    kind: str
    own: bool
    question: Question
    firing: frozenset[int]


def trials(made: Made, labels: Mapping[int, Label], count: int) -> list[Trial]:
    """Return four questions about each of ``count`` names, drawn by seed."""
    if not count:
        return []
    listed = [labels.get(cell) for cell in range(len(made.labels))]
    drawn = draw_passages(listed, made.held_out, SEED)
    cells = np.random.default_rng(SEED).permutation(list(drawn.asked))[:count]
    found: list[Trial] = []
    for cell in cells.tolist():
        rows = [row for half in drawn.asked[cell] for row in half[:TRIED]]
        order = np.random.default_rng([SEED, cell]).permutation(len(rows))
        shown = [marked(made.text, made.held_out, rows[i], PASSAGE, 1) for i in order]
        firing = frozenset(np.flatnonzero(order < len(rows) // 2).tolist())
        for kind in KINDS:
            texts = [one.text if kind == "fuzzing" else one.plain for one in shown]
            for owner in (cell, drawn.owner[cell]):
                question = _judging_question(kind, labels[owner], texts)
                found.append(Trial(cell, kind, owner == cell, question, firing))
    return found


def _judging_question(kind: str, label: Label, texts: list[str]) -> Question:
    described = fenced(json_text({"name": label.name, "description": label.description}))
    data = "\n".join(json_text({str(i): text}) for i, text in enumerate(texts))
    asked = f"{prompt('system')}\n\n{prompt(kind, label=described, data=fenced(data))}"
    return Question(
        ({"role": "user", "content": asked},),
        {"passages": list[int]},
        holds=lambda answer: set(answer["passages"]) <= set(range(len(texts))),
    )


def judge(
    session: Session, made: Made, labels: Mapping[int, Label], count: int, progress: Reporter
) -> dict[str, Any]:
    """Return the balanced accuracy of names by a language model, beside that of shuffled ones.

    Args:
        session: asks it.
        made: has the text, and places of documents that named nothing.
        labels: to be judged, by prototype.
        count: how many of them, drawn by seed.
        progress: shows how far it is.
    """
    asked = trials(made, labels, count)
    found: dict[tuple[str, bool], dict[int, float]] = {}
    with progress.task("Judging names", len(asked), "questions") as task:
        for trial, answer in session.each(asked, lambda trial: session.ask(trial.question), task):
            if answer is not None:
                said, half = set(answer["passages"]), len(trial.firing)
                right = len(said & trial.firing) / half
                wrong = len(said - trial.firing) / half
                scores = found.setdefault((trial.kind, trial.own), {})
                scores[trial.cell] = (right + 1 - wrong) / 2
    return {
        kind: _pairs(found.get((kind, True), {}), found.get((kind, False), {})) for kind in KINDS
    }


def _pairs(own: Mapping[int, float], shuffled: Mapping[int, float]) -> dict[str, Any] | None:
    cells = sorted(own.keys() & shuffled.keys())
    if not cells:
        return None
    pairs = np.array([(own[cell], shuffled[cell]) for cell in cells])
    return {"scored": len(cells), **asdict(accuracy(pairs[:, 0], pairs[:, 1]))}
