"""What names are worth to a language model: detection and fuzzing as delphi defines them.

Given name and description, which of some passages fire (*detection*), and in which is the marked
token rightly marked (*fuzzing*; Paulo et al. 2024)? The same passages are asked about with the name
of another prototype, which is the control.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from prismlm.files import json_text
from prismlm.labels.answers import Question, fenced, prompt
from prismlm.labels.embedded import Label
from prismlm.labels.endpoint import Session
from prismlm.labels.places import marked
from prismlm.labels.scores import PASSAGE, draw_passages
from prismlm.labels.write import SEED, Made, accuracy
from prismlm.progress import Reporter

KINDS = ("detection", "fuzzing")
# Passages of each kind that are shown at once.
SHOWN = 8


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
        rows = [row for half in drawn.asked[cell] for row in half[:SHOWN]]
        order = np.random.default_rng([SEED, cell]).permutation(len(rows))
        shown = [marked(made.text, made.held_out, rows[i], PASSAGE, 1) for i in order]
        firing = frozenset(np.flatnonzero(order < len(rows) // 2).tolist())
        for kind in KINDS:
            texts = [one.text if kind == "fuzzing" else one.plain for one in shown]
            for owner in (cell, drawn.owner[cell]):
                question = _question(kind, labels[owner], texts)
                found.append(Trial(cell, kind, owner == cell, question, firing))
    return found


def _question(kind: str, label: Label, texts: list[str]) -> Question:
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
