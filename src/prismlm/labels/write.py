"""Naming the prototypes of a lens: read its places, name them, score the names, keep both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from torch import nn

from prismlm.cost import Cost
from prismlm.errors import InputError
from prismlm.files import (
    WAY_OUT,
    atomic_file,
    room_to_write,
)
from prismlm.index import layout
from prismlm.index.lens import MIN_PLACES, Lens
from prismlm.labels.categories import CATEGORIES, subject_words
from prismlm.labels.embedded import Label, Weigh, embedded_labels
from prismlm.labels.places import Places, Text, sample_places
from prismlm.labels.scores import Scores, score_labels
from prismlm.labels.vocabulary import Vocabulary
from prismlm.models.sidecar import weight_of
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing
from prismlm.statistics import mean_intervals

if TYPE_CHECKING:
    from prismlm.labels.by_endpoint import EndpointLabeller

    class Labeller(Protocol):
        """What names prototypes: an endpoint, or answers that were read from a file."""

        source: str

        def labels(self, lens: Lens, made: Made, progress: Reporter = ...) -> dict[int, Label]:
            """Return the labels of those that it can name."""
            ...

        def report(
            self, made: Made, labels: Mapping[int, Label], progress: Reporter = ...
        ) -> dict[str, Any]:
            """Return what is noted of it."""
            ...


EMBEDDED, SIGNATURE = "embedded", "signature"
# Places of a cell that are looked at; documents whose places name nothing, but score the names.
PLACES, HELD_OUT, SEED = 256, 0.2, 0


@dataclass(frozen=True)
class Accuracy:
    """A mean balanced accuracy over prototypes, beside that of shuffled names.

    Attributes:
        mean: 0.5 says nothing.
        shuffled: of each prototype with the name of another.
        low, high: 95 % of a bootstrap of the difference over prototypes.
    """

    mean: float
    shuffled: float
    low: float
    high: float


@dataclass(frozen=True)
class Labelling:
    """What labelling a lens came to.

    Attributes:
        source: who named them.
        prototypes: K.
        named: prototypes that got a name; the others keep their signature's.
        scored: those with enough places in held-out documents.
        detection, fuzzing: how much the names say; None where none was scored.
        categories: how many prototypes each category has.
        documents: that names were made of.
        held_out: documents that scored them.
        asked: what another labeller than the embedded one did, and the scores of its names beside
            those of the embedded ones of the same prototypes; None where there was none.
    """

    source: str
    prototypes: int
    named: int
    scored: int
    detection: Accuracy | None
    fuzzing: Accuracy | None
    categories: dict[str, int]
    documents: int
    held_out: int
    asked: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def label_lens(
    lens: Lens,
    model: nn.Module,
    *,
    overwrite: bool = False,
    labeller: Labeller | None = None,
    progress: Reporter = SILENT,
) -> Labelling:
    """Name every prototype of a lens in ``prototypes.parquet``, and score the names.

    A fifth of the documents, drawn by seed, names nothing; the names are scored on their places.

    Args:
        lens: with cells, whose corpus is there.
        model: the lens is of.
        overwrite: replace labels that are there already.
        labeller: names better than the embedded one what it can. Prototypes with fewer than ten
            places then have no name.
        progress: shows the steps.

    Raises:
        InputError: as :func:`check_lens`, or by the labeller.
    """
    check_lens(lens, overwrite=overwrite)
    room = room_to_write(f"the names in {lens.path}", lens.path, WAY_OUT)
    with room, writing(lens.path):
        made = make_labels(lens, model, progress)
        better = {} if labeller is None else labeller.labels(lens, made, progress)
        labels = [better.get(cell, label) for cell, label in enumerate(made.labels)]
        if better:
            sizes = made.places.size.tolist()
            labels = [
                label if size >= MIN_PLACES else None
                for label, size in zip(labels, sizes, strict=True)
            ]
        scores = score_labels(labels, made.text, made.held_out, SEED, progress)
        found = _labelling(made._replace(labels=labels), scores)
        source = EMBEDDED
        if labeller is not None:
            everything = {cell: one for cell, one in enumerate(labels) if one is not None}
            asked = labeller.report(made, better or everything, progress)
            source = labeller.source if better else EMBEDDED
            asked = {"named": len(better), **asked, "scores": _beside(made, better)}
            found = replace(found, source=source, asked=asked)
        sources = dict.fromkeys(better, source)
        _write(lens, labels, sources, scores, found)
    return found


def estimate_labels(
    lens: Lens, model: nn.Module, labeller: EndpointLabeller, progress: Reporter = SILENT
) -> Cost:
    """Return what a labeller is expected to take; nothing is written.

    Raises:
        InputError: the lens has no cells or no corpus.
    """
    check_lens(lens, overwrite=True)
    return labeller.cost(lens, make_labels(lens, model, progress))


def check_lens(lens: Lens, *, overwrite: bool = False) -> None:
    """Check that a lens can be labelled.

    Raises:
        InputError: it has no cells or no corpus, or has labels already.
    """
    if lens.cells is None:
        raise InputError(
            f"{lens.path} keeps no positions, and names are made of them. Build a lens with "
            "`prismlm index`, which keeps them unless --positions none is given."
        )
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


class Made(NamedTuple):
    """Labels, and what they are to be scored on.

    Attributes:
        labels: of every prototype, None for one without any place.
        text: of the corpus.
        places: that may name them: of documents that score none.
        held_out: places of documents that named nothing.
        documents: how many named something, and how many did not.
    """

    labels: list[Label | None]
    text: Text
    places: Places
    held_out: Places
    documents: tuple[int, int]


def make_labels(
    lens: Lens,
    model: nn.Module,
    progress: Reporter = SILENT,
    *,
    weigh: Weigh | None = None,
) -> Made:
    """Name every prototype from four fifths of the documents; the lens has cells and a corpus.

    Args:
        lens: of the model.
        model: whose output embedding says what is near to what.
        progress: shows the steps.
        weigh: as of :func:`~prismlm.labels.embedded.embedded_labels`.
    """
    cells, corpus = lens.cells, lens.corpus
    assert cells is not None
    assert corpus is not None
    with progress.task("Reading places", 3, "steps") as task:
        weight = weight_of(model).detach()
        vocabulary = Vocabulary(corpus.tokenizer, len(weight))
        text = Text(corpus, vocabulary)
        task.advance()
        places = sample_places(cells, lens.num_prototypes, PLACES)
        drawn = np.random.default_rng(SEED).random(cells.documents.num_rows) < HELD_OUT
        held = drawn[places.document]
        # What has places in held-out documents alone is named by these, and not scored.
        elsewhere = np.bincount(places.cell[~held], minlength=lens.num_prototypes) > 0
        held &= elsewhere[places.cell]
        task.advance()
        subjects = subject_words(weight, vocabulary)
        task.advance()
    raised = lens.prototypes["top_tokens"].to_pylist()
    labels = embedded_labels(text, places.of(~held), cells, subjects, raised, weigh, progress)
    shown, documents = places.of(~drawn[places.document]), (int((~drawn).sum()), int(drawn.sum()))
    return Made(labels, text, shown, places.of(held), documents)


def _labelling(made: Made, scores: Scores) -> Labelling:
    seen = Counter(label.category for label in made.labels if label is not None)
    detection, fuzzing = _accuracies(scores)
    return Labelling(
        source=EMBEDDED,
        prototypes=len(made.labels),
        named=sum(label is not None for label in made.labels),
        scored=int(np.isfinite(scores.detection).sum()),
        detection=detection,
        fuzzing=fuzzing,
        categories={name: seen[name] for name in CATEGORIES},
        documents=made.documents[0],
        held_out=made.documents[1],
    )


def _accuracies(scores: Scores) -> list[Accuracy | None]:
    """Return those of detection and of fuzzing."""
    scored = np.isfinite(scores.detection)
    pairs = (
        (scores.detection, scores.shuffled_detection),
        (scores.fuzzing, scores.shuffled_fuzzing),
    )
    return [accuracy(own[scored], other[scored]) if scored.any() else None for own, other in pairs]


def _beside(made: Made, better: Mapping[int, Label]) -> dict[str, Any]:
    """Return how labels score by words, beside the embedded ones of the same prototypes."""
    found: dict[str, Any] = {}
    own = [better.get(cell) for cell in range(len(made.labels))]
    embedded = [label if cell in better else None for cell, label in enumerate(made.labels)]
    for name, labels in (("own", own), ("embedded", embedded)):
        scores = score_labels(labels, made.text, made.held_out, SEED)
        pairs = zip(("detection", "fuzzing"), _accuracies(scores), strict=True)
        found[name] = {kind: None if one is None else asdict(one) for kind, one in pairs}
        found["scored"] = int(np.isfinite(scores.detection).sum())
    return found


def accuracy(own: np.ndarray, shuffled: np.ndarray) -> Accuracy:
    """Return the mean of scores beside that of the control, pair by pair."""
    (difference,) = mean_intervals((own - shuffled)[:, None], seed=SEED)
    return Accuracy(float(own.mean()), float(shuffled.mean()), difference.low, difference.high)


def _write(
    lens: Lens,
    labels: list[Label | None],
    sources: Mapping[int, str],
    scores: Scores,
    found: Labelling,
) -> None:
    """Replace the labels of ``prototypes.parquet``, then say so in ``meta.json``."""
    columns = {
        "name": [
            ("" if sources else old) if label is None else label.name
            for label, old in zip(labels, lens.names, strict=True)
        ],
        **{
            column: [None if label is None else getattr(label, column) for label in labels]
            for column in ("description", "category", "role", "tags")
        },
        "label_source": [
            SIGNATURE if label is None else sources.get(cell, EMBEDDED)
            for cell, label in enumerate(labels)
        ],
        "label_score": [None if np.isnan(one) else float(one) for one in scores.detection],
    }
    write_columns(lens, columns, labels=found.to_dict())


def write_columns(
    lens: Lens, columns: Mapping[str, Sequence[Any] | np.ndarray], **noted: Any
) -> None:
    """Replace columns of ``prototypes.parquet``, then note in ``meta.json`` what made them."""
    table, schema = lens.prototypes, layout.PROTOTYPES_SCHEMA
    for name, values in columns.items():
        place = schema.get_field_index(name)
        table = table.set_column(place, schema.field(place), pa.array(values, schema.types[place]))
    with atomic_file(lens.path / layout.PROTOTYPES_FILE) as temporary:
        layout.write_prototypes(table, temporary, lens.meta.files)
    layout.write_meta(lens.path, replace(lens.meta, **noted))
