"""Naming the prototypes of a lens: read its places, name them, score the names, keep both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from torch import nn

from prismlm.errors import InputError
from prismlm.files import WAY_OUT, atomic_file, room_to_write
from prismlm.lens import layout
from prismlm.lens.labels.categories import CATEGORIES, subject_words
from prismlm.lens.labels.embedded import Label, Weigh, embedded_labels
from prismlm.lens.labels.places import Places, Text, sample_places
from prismlm.lens.labels.scores import Scores, score_labels
from prismlm.lens.labels.vocabulary import Vocabulary
from prismlm.lens.lens import MIN_PLACES, Lens
from prismlm.models.sidecar import weight_of
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing
from prismlm.statistics import mean_intervals

EMBEDDED, SIGNATURE = "embedded", "signature"
# Places of a cell that are looked at; documents whose places name nothing, but score the names.
PLACES, HELD_OUT, SEED = 256, 0.2, 0


class Made(NamedTuple):
    """Labels, None for a prototype without any place, and what they are to be scored on.

    ``places`` may name them, ``held_out`` are of documents that name nothing; ``documents`` counts
    both kinds.
    """

    labels: list[Label | None]
    text: Text
    places: Places
    held_out: Places
    documents: tuple[int, int]


class Named(NamedTuple):
    """The labels of those prototypes that a labeller could name, who that is, what it took."""

    labels: dict[int, Label]
    source: str
    report: dict[str, Any]


# Names prototypes better than the embedded labels: an endpoint, or answers read from a file.
Labeller = Callable[[Lens, Made, Reporter], Named]


def label_lens(
    lens: Lens,
    model: nn.Module,
    *,
    overwrite: bool = False,
    labeller: Labeller | None = None,
    progress: Reporter = SILENT,
) -> dict[str, Any]:
    """Name every prototype of a lens in ``prototypes.parquet``, and score the names.

    A fifth of the documents, drawn by seed, names nothing; the names are scored on their places.

    A ``labeller`` names what it can in place of the embedded labels; prototypes with fewer than ten
    places then have no name.

    Returned is what ``meta.json`` keeps of it: ``source``, who named them; ``prototypes``, K, and
    how many are ``named`` and ``scored``, those with enough places that named nothing;
    ``detection``, whether passages of the prototype can be told from others by its name, and
    ``fuzzing``, whether marked places can, both as :func:`accuracy`; ``categories``, the prototypes
    of each; ``documents`` that named prototypes, and ``held_out`` ones that scored the names;
    ``asked``, what a labeller did, and how its names score beside the embedded ones of the same
    prototypes, None without one.

    Raises:
        InputError: the lens has no corpus, or labels already; or by the labeller.
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
            labels = [None if small else one for one, small in zip(labels, few, strict=True)]
        scores = score_labels(labels, made.text, made.held_out, SEED, progress)
        seen = Counter(label.category for label in labels if label is not None)
        record = {
            "source": named.source if named.labels else EMBEDDED,
            "prototypes": len(labels),
            "named": seen.total(),
            **described(scores),
            "categories": {name: seen[name] for name in CATEGORIES},
            "documents": made.documents[0],
            "held_out": made.documents[1],
            "asked": None if labeller is None else _asked(named, made),
        }
        _write(lens, labels, scores, named, record)
    return record


def make_labels(
    lens: Lens, model: nn.Module, progress: Reporter = SILENT, *, weigh: Weigh | None = None
) -> Made:
    """Name every prototype from four fifths of the documents; the lens has its corpus."""
    cells, corpus, count = lens.cells, lens.corpus, lens.num_prototypes
    assert corpus is not None
    with progress.task("Reading places", 1, "steps") as task:
        weight = weight_of(model).detach()
        text = Text(corpus, Vocabulary(corpus.tokenizer, len(weight)))
        places = sample_places(cells, count, PLACES)
        subjects = subject_words(weight, text.vocabulary)
        task.advance()
    drawn = np.random.default_rng(SEED).random(cells.documents.num_rows) < HELD_OUT
    held = drawn[places.document]
    shown = places.of(~held)
    # What has places in held-out documents alone is named by these, and not scored.
    held &= (np.bincount(shown.cell, minlength=count) > 0)[places.cell]
    raised = lens.prototypes["top_tokens"].to_pylist()
    labels = embedded_labels(text, places.of(~held), cells, subjects, raised, weigh, progress)
    documents = int((~drawn).sum()), int(drawn.sum())
    return Made(labels, text, shown, places.of(held), documents)


def described(scores: Scores) -> dict[str, Any]:
    """Return how many labels are scored, and :func:`accuracy` of detection and fuzzing."""
    return {
        "scored": int(np.isfinite(scores.detection).sum()),
        "detection": accuracy(scores.detection, scores.shuffled_detection),
        "fuzzing": accuracy(scores.fuzzing, scores.shuffled_fuzzing),
    }


def accuracy(own: np.ndarray, shuffled: np.ndarray) -> dict[str, float] | None:
    """Return the ``mean`` balanced accuracy over prototypes; None where nothing is scored.

    Beside it that of each with the name of another, ``shuffled``, and of the difference ``low`` and
    ``high``, 95 % of a bootstrap over prototypes. ½ says nothing; nan is not scored.
    """
    scored = np.isfinite(own)
    own, shuffled = own[scored], shuffled[scored]
    if not len(own):
        return None
    (difference,) = mean_intervals((own - shuffled)[:, None], seed=SEED)
    means = {"mean": float(own.mean()), "shuffled": float(shuffled.mean())}
    return means | {"low": difference.low, "high": difference.high}


def _asked(named: Named, made: Made) -> dict[str, Any]:
    """Return what a labeller did, and its scores beside the embedded ones of the same."""
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
    """Replace the labels of ``prototypes.parquet``, then say so in ``meta.json``."""
    # Beside the names of a labeller, those of signatures would look like more of them.
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
    columns["label_score"] = [None if np.isnan(one) else float(one) for one in scores.detection]
    write_columns(lens, columns, labels=record)


def write_columns(
    lens: Lens, columns: Mapping[str, Sequence[Any] | np.ndarray], **noted: Any
) -> None:
    """Replace columns of ``prototypes.parquet``, then note in ``meta.json`` what made them."""
    table, schema = lens.prototypes, layout.PROTOTYPES_SCHEMA
    for name, values in columns.items():
        i = schema.get_field_index(name)
        table = table.set_column(i, schema.field(i), pa.array(values, schema.types[i]))
    with atomic_file(lens.path / layout.PROTOTYPES_FILE) as temporary:
        layout.write_prototypes(table, temporary, lens.meta.files)
    layout.write_meta(lens.path, replace(lens.meta, **noted))
