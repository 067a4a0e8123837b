"""Names by a language model: PRISM's two passes, asked of an endpoint.

First a name and a description from a card, which has the signature of the prototype and passages
where it is nearest; then, in the same conversation, category, syntactic role and domain tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from prismlm.errors import check_whole
from prismlm.files import json_text
from prismlm.lens.labels.answers import Answers, Question, fenced, one_line, prompt
from prismlm.lens.labels.categories import CATEGORIES
from prismlm.lens.labels.embedded import NAME_LENGTH, Label
from prismlm.lens.labels.endpoint import Endpoint, Session
from prismlm.lens.labels.places import marked
from prismlm.lens.labels.scores import content_words
from prismlm.lens.labels.write import Made, Named
from prismlm.lens.lens import MIN_PLACES, Lens
from prismlm.progress import SILENT, Reporter

# Passages on a card, and tokens of each before and after the place.
SHOWN, BEFORE, AFTER = 12, 32, 8
DESCRIPTION_LENGTH, SHORT, MAX_TAGS = 240, 32, 3


def ask_for_names(
    lens: Lens,
    made: Made,
    progress: Reporter = SILENT,
    *,
    endpoint: Endpoint,
    prototypes: int | None = None,
) -> Named:
    """Ask a language model for names, as :func:`~prismlm.lens.labels.write.label_lens` wants them.

    Every answer is kept beside the lens, in ``.NAME.answers.jsonl``, and not asked for again.

    Args:
        lens, made: the lens, with what the embedded labels are made of.
        progress: shows prototypes done.
        endpoint: where the language model is.
        prototypes: how many are named, those with the most text; None: all.

    Raises:
        InputError: the endpoint cannot be used, or more than half of its answers cannot.
        ModuleNotFoundError: openai is not installed, of the extra ``label``.
    """
    if prototypes is not None:
        check_whole("the prototypes", prototypes)
    path = lens.path.with_name(f".{lens.path.name}.answers.jsonl")
    session = Session(endpoint, Answers(path, endpoint.model))
    nameable = made.places.size >= MIN_PLACES
    nameable &= np.bincount(made.places.cell, minlength=len(made.labels)) > 0
    cells = lens.leading[nameable[lens.leading]][:prototypes].tolist()
    first = np.searchsorted(made.places.cell, np.arange(len(made.labels) + 1))
    rows = lens.prototypes.select(["top_tokens", "top_values"]).to_pylist()

    def label(cell: int) -> Label:
        raised = dict(zip(*(row or [] for row in rows[cell].values()), strict=True))
        question = name_question(made, raised, *first[cell : cell + 2].tolist())
        named = _cleaned(session.ask(question))
        return _label(named, session.ask(category_question(question, named)))

    with progress.task("Asking for names", len(cells), "prototypes") as task:
        found = dict(session.each(cells, label, task))
    labels = {cell: one for cell, one in found.items() if one is not None}
    return Named(labels, f"endpoint:{one_line(endpoint.model, NAME_LENGTH)}", session.asked())


def name_question(made: Made, raised: Mapping[str, float], first: int, end: int) -> Question:
    """Return what the name of a prototype is asked for with."""
    # Evenly through the places, which are in the order of next tokens.
    rows = np.unique(np.linspace(first, end - 1, min(SHOWN, end - first)).astype(int))
    lines = [json_text({token: round(value, 2) for token, value in raised.items()})]
    for row in rows.tolist():
        text, following = marked(made.text, made.places, row, BEFORE, AFTER)
        lines.append(json_text({"passage": text, "next": following}))
    data = fenced("\n".join(lines))
    # No message of role "system": some models' templates refuse one.
    content = f"{prompt('system')}\n\n{prompt('name', data=data)}"
    return Question(
        ({"role": "user", "content": content},),
        {"name": str, "description": str},
        holds=lambda answer: all(_cleaned(answer).values()),
    )


def category_question(first: Question, named: Mapping[str, str]) -> Question:
    """Return what a category is asked for with, in the conversation that gave the name."""
    said = {"role": "assistant", "content": json_text(named)}
    return Question(
        (*first.messages, said, {"role": "user", "content": prompt("category")}),
        {"category": str, "role": str, "tags": list[str]},
        {"category": CATEGORIES},
    )


def _cleaned(answer: Mapping[str, Any]) -> dict[str, str]:
    lengths = {"name": NAME_LENGTH, "description": DESCRIPTION_LENGTH}
    return {field: one_line(answer[field], most) for field, most in lengths.items()}


def _label(named: Mapping[str, str], sorted_as: Mapping[str, Any]) -> Label:
    tags = filter(None, (one_line(tag, SHORT) for tag in sorted_as["tags"][:MAX_TAGS]))
    return Label(
        name=named["name"],
        description=named["description"],
        category=sorted_as["category"],
        role=one_line(sorted_as["role"], SHORT),
        tags=tuple(dict.fromkeys(tags)),
        # What scores an embedded name looks for: words of the description that have content.
        topic=content_words(named["description"]),
    )
