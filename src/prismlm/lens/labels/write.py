"""Naming the prototypes of a lens: sample positions, name, score the names, and write them.

Names are embedded ones, or by a language model in PRISM's two requests: for a name and a
description, given the signature and passages, then for category, role and domain tags.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from torch import nn

from prismlm.errors import InputError, check_whole
from prismlm.files import WAY_OUT, atomic_file, json_text, room_to_write
from prismlm.lens import layout
from prismlm.lens.labels.categories import CATEGORIES, Vocabulary, subject_words
from prismlm.lens.labels.embedded import NAME_LENGTH, Label, embedded_labels
from prismlm.lens.labels.endpoint import (
    Answers,
    Endpoint,
    Question,
    Session,
    fenced,
    one_line,
    prompt,
)
from prismlm.lens.labels.places import Places, Text, marked, sample_places
from prismlm.lens.labels.scores import Scores, content_words, score_labels
from prismlm.lens.lens import MIN_PLACES, Lens
from prismlm.models.sidecar import weight_of
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing
from prismlm.statistics import mean_intervals

EMBEDDED, SIGNATURE = "embedded", "signature"
# Positions sampled from a cell; the share of documents held out to score the names.
PLACES, HELD_OUT, SEED = 256, 0.2, 0
# Passages in a question, and tokens of each before and after the position.
PASSAGES, BEFORE, AFTER = 12, 32, 8
DESCRIPTION_LENGTH, SHORT, MAX_TAGS = 240, 32, 3


class Labelling(NamedTuple):
    """Embedded labels, None for an empty cell, and the positions that name and score them.

    ``documents`` counts those that name and those that are held out.
    """

    labels: list[Label | None]
    text: Text
    places: Places
    held_out: Places
    documents: tuple[int, int]


class Named(NamedTuple):
    """The labels of those prototypes that a labeller could name, its name and usage."""

    labels: dict[int, Label]
    source: str
    report: dict[str, Any]


# Replaces embedded labels where it can: a language model, or answers read from a file.
Labeller = Callable[[Lens, Labelling, Reporter], Named]


def label_lens(
    lens: Lens,
    model: nn.Module,
    *,
    overwrite: bool = False,
    labeller: Labeller | None = None,
    progress: Reporter = SILENT,
) -> dict[str, Any]:
    """Name every prototype of a lens in ``prototypes.parquet``, and score the names.

    A fifth of the documents, drawn by seed, is held out from naming; names are scored on it.
    Labels of a ``labeller`` replace the embedded ones; prototypes with fewer than ten positions
    then have no name.

    Returns:
        What ``meta.json`` records: the ``source`` of the names; how many of the ``prototypes`` are
        ``named`` and ``scored``; :func:`accuracy` of ``detection`` and ``fuzzing``; prototypes by
        ``categories``; ``documents`` that name, and ``held_out`` ones; ``asked``, the usage of the
        labeller, and scores of its names next to the embedded names of the same prototypes.

    Raises:
        InputError: the corpus of the lens is missing, or it is labelled already.
    """
    if lens.corpus is None:
        raise InputError(
            f"the corpus of {lens.path} is not at {lens.corpus_path}, or has changed, and "
            "names are made of its text. Put it back, or build the lens again."
        )
    if lens.meta.labels is not None and not overwrite:
        raise InputError(
            f"the prototypes of {lens.path} are labelled already, by {lens.meta.labels['source']}."
            " Give --overwrite to replace the labels."
        )
    room = room_to_write(f"the names in {lens.path}", lens.path, WAY_OUT)
    with room, writing(lens.path):
        made = make_labels(lens, model, progress)
        named = Named({}, "", {}) if labeller is None else labeller(lens, made, progress)
        labels = [named.labels.get(cell, label) for cell, label in enumerate(made.labels)]
        if named.labels:
            few = (made.places.size < MIN_PLACES).tolist()
            labels = [None if small else label for label, small in zip(labels, few, strict=True)]
        scores = score_labels(labels, made.text, made.held_out, SEED, progress)
        categories = Counter(label.category for label in labels if label is not None)
        record = {
            "source": named.source if named.labels else EMBEDDED,
            "prototypes": len(labels),
            "named": categories.total(),
            **described(scores),
            "categories": {name: categories[name] for name in CATEGORIES},
            "documents": made.documents[0],
            "held_out": made.documents[1],
            "asked": None if labeller is None else _compared(named, made),
        }
        _write(lens, labels, scores, named, record)
    return record


def make_labels(lens: Lens, model: nn.Module, progress: Reporter = SILENT) -> Labelling:
    """Name every prototype from four fifths of the documents; the lens has its corpus."""
    cells, corpus, count = lens.cells, lens.corpus, lens.num_prototypes
    assert corpus is not None
    with progress.task("Reading places", 1, "steps") as task:
        weight = weight_of(model).detach()
        text = Text(corpus, Vocabulary(corpus.tokenizer, len(weight)))
        sample = sample_places(cells, count, PLACES)
        subjects = subject_words(weight, text.vocabulary)
        task.advance()
    held_out = np.random.default_rng(SEED).random(cells.documents.num_rows) < HELD_OUT
    scoring = held_out[sample.document]
    places = sample.of(~scoring)
    # Cells with positions in held-out documents alone are named by these, and not scored.
    scoring &= (np.bincount(places.cell, minlength=count) > 0)[sample.cell]
    raised = lens.prototypes["top_tokens"].to_pylist()
    labels = embedded_labels(text, sample.of(~scoring), cells, subjects, raised, progress)
    documents = int((~held_out).sum()), int(held_out.sum())
    return Labelling(labels, text, places, sample.of(scoring), documents)


def described(scores: Scores) -> dict[str, Any]:
    """Return how many labels are scored, and :func:`accuracy` of detection and fuzzing."""
    return {
        "scored": int(np.isfinite(scores.detection).sum()),
        "detection": accuracy(scores.detection, scores.shuffled_detection),
        "fuzzing": accuracy(scores.fuzzing, scores.shuffled_fuzzing),
    }


def accuracy(values: np.ndarray, shuffled: np.ndarray) -> dict[str, float] | None:
    """Return the ``mean`` balanced accuracy over prototypes, ½ being chance; None without any.

    ``shuffled`` is that with the names of other prototypes; ``low`` and ``high`` bound the
    difference, a 95 % bootstrap interval over prototypes. NaN values are not scored.
    """
    scored = np.isfinite(values)
    values, shuffled = values[scored], shuffled[scored]
    if not len(values):
        return None
    (difference,) = mean_intervals((values - shuffled)[:, None], seed=SEED)
    means = {"mean": float(values.mean()), "shuffled": float(shuffled.mean())}
    return means | {"low": difference.low, "high": difference.high}


def _compared(named: Named, made: Labelling) -> dict[str, Any]:
    """Return the usage of a labeller, and its scores next to embedded names of the same cells."""
    own = [named.labels.get(cell) for cell in range(len(made.labels))]
    embedded = [label if cell in named.labels else None for cell, label in enumerate(made.labels)]
    scores: dict[str, Any] = {}
    for name, labels in (("own", own), ("embedded", embedded)):
        scores[name] = described(score_labels(labels, made.text, made.held_out, SEED))
        scores["scored"] = scores[name].pop("scored")
    return {"named": len(named.labels), **named.report, "scores": scores}


def _write(
    lens: Lens, labels: list[Label | None], scores: Scores, named: Named, record: dict[str, Any]
) -> None:
    # Names from signatures would look like those of the labeller.
    names = [""] * len(labels) if named.labels else lens.names
    columns: dict[str, Any] = {
        column: [None if label is None else getattr(label, column) for label in labels]
        for column in ("description", "category", "role", "tags")
    }
    columns["name"] = [
        old if label is None else label.name for label, old in zip(labels, names, strict=True)
    ]
    columns["label_source"] = [
        SIGNATURE if label is None else named.source if cell in named.labels else EMBEDDED
        for cell, label in enumerate(labels)
    ]
    columns["label_score"] = [None if np.isnan(x) else float(x) for x in scores.detection]
    write_columns(lens, columns, labels=record)


def write_columns(
    lens: Lens, columns: Mapping[str, Sequence[Any] | np.ndarray], **noted: Any
) -> None:
    """Replace columns of ``prototypes.parquet``, then record their origin in ``meta.json``."""
    table, schema = lens.prototypes, layout.PROTOTYPES_SCHEMA
    for name, values in columns.items():
        i = schema.get_field_index(name)
        table = table.set_column(i, schema.field(i), pa.array(values, schema.types[i]))
    with atomic_file(lens.path / layout.PROTOTYPES_FILE) as temporary:
        layout.write_prototypes(table, temporary, lens.meta.files)
    layout.write_meta(lens.path, replace(lens.meta, **noted))


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
