"""Names by a language model, in PRISM's two requests.

The first asks for a name and a description, given the signature of the prototype and passages
where it is nearest; the second, in the same conversation, for category, role and domain tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from prismlm.errors import check_whole
from prismlm.files import json_text
from prismlm.lens.labels.categories import CATEGORIES
from prismlm.lens.labels.embedded import NAME_LENGTH, Label
from prismlm.lens.labels.endpoint import (
    Answers,
    Endpoint,
    Question,
    Session,
    fenced,
    one_line,
    prompt,
)
from prismlm.lens.labels.places import marked
from prismlm.lens.labels.scores import content_words
from prismlm.lens.labels.write import Labelling, Named
from prismlm.lens.lens import MIN_PLACES, Lens
from prismlm.progress import SILENT, Reporter

# Passages in a question, and tokens of each before and after the position.
PASSAGES, BEFORE, AFTER = 12, 32, 8
DESCRIPTION_LENGTH, SHORT, MAX_TAGS = 240, 32, 3


def ask_for_names(
    lens: Lens,
    made: Labelling,
    progress: Reporter = SILENT,
    *,
    endpoint: Endpoint,
    prototypes: int | None = None,
) -> Named:
    """Ask a language model for names: a labeller of :func:`~prismlm.lens.labels.write.label_lens`.

    Answers are kept in ``.NAME.answers.jsonl`` next to the lens. ``prototypes`` limits how many are
    named, those with the most positions first.

    Raises:
        InputError: the endpoint cannot be used, or more than half of its answers cannot.
        ModuleNotFoundError: openai, of the extra ``label``, is not installed.
    """
    if prototypes is not None:
        check_whole("the prototypes", prototypes)
    path = lens.path.with_name(f".{lens.path.name}.answers.jsonl")
    session = Session(endpoint, Answers(path, endpoint.model))
    nameable = made.places.size >= MIN_PLACES
    nameable &= np.bincount(made.places.cell, minlength=len(made.labels)) > 0
    cells = lens.by_size[nameable[lens.by_size]][:prototypes].tolist()
    first = np.searchsorted(made.places.cell, np.arange(len(made.labels) + 1))
    rows = lens.prototypes.select(["top_tokens", "top_values"]).to_pylist()

    def label(cell: int) -> Label:
        raised = dict(zip(*(row or [] for row in rows[cell].values()), strict=True))
        question = name_question(made, raised, *first[cell : cell + 2].tolist())
        name = _trimmed(session.ask(question))
        answer = session.ask(category_question(question, name))
        tags = filter(None, (one_line(tag, SHORT) for tag in answer["tags"][:MAX_TAGS]))
        return Label(
            **name,
            category=answer["category"],
            role=one_line(answer["role"], SHORT),
            tags=tuple(dict.fromkeys(tags)),
            topic=content_words(name["description"]),
        )

    with progress.task("Asking for names", len(cells), "prototypes") as task:
        labels = {cell: one for cell, one in session.each(cells, label, task) if one is not None}
    return Named(labels, f"endpoint:{one_line(endpoint.model, NAME_LENGTH)}", session.usage())


def name_question(made: Labelling, raised: Mapping[str, float], first: int, end: int) -> Question:
    """Return the request for a name, from some of the places ``first`` to ``end``."""
    # Evenly spaced, since places are sorted by next token.
    rows = np.unique(np.linspace(first, end - 1, min(PASSAGES, end - first)).astype(int))
    lines = [json_text({token: round(value, 2) for token, value in raised.items()})]
    for row in rows.tolist():
        text, following = marked(made.text, made.places, row, BEFORE, AFTER)
        lines.append(json_text({"passage": text, "next": following}))
    data = fenced("\n".join(lines))
    # Some chat templates refuse a system message.
    content = f"{prompt('system')}\n\n{prompt('name', data=data)}"
    return Question(
        ({"role": "user", "content": content},),
        {"name": str, "description": str},
        is_valid=lambda answer: all(_trimmed(answer).values()),
    )


def category_question(first: Question, name: Mapping[str, str]) -> Question:
    """Return the request for a category, in the conversation that gave the name."""
    said = {"role": "assistant", "content": json_text(name)}
    return Question(
        (*first.messages, said, {"role": "user", "content": prompt("category")}),
        {"category": str, "role": str, "tags": list[str]},
        {"category": CATEGORIES},
    )


def _trimmed(answer: Mapping[str, Any]) -> dict[str, str]:
    lengths = {"name": NAME_LENGTH, "description": DESCRIPTION_LENGTH}
    return {field: one_line(answer[field], length) for field, length in lengths.items()}
