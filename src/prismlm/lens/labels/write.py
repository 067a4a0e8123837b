"""Naming the prototypes of a lens: sample positions, name, score the names, and write them.

Names are embedded ones, or by a language model, which is asked for a name, a description, category,
role and domain tags, given the signature and passages.

A score says how much a name tells: can the positions of a prototype be told from others by its
words? *Detection* asks whether the prototype is nearest somewhere in a passage, *fuzzing* whether
it is at the marked position, as in delphi (Paulo et al. 2024). The score of a passage is the rarity
of the words w that it shares with the name,

    Σ_w ln(N / n_w),   n_w of N passages having w.

The half of the passages with the larger scores is predicted positive, with ties split evenly. The
result is the balanced accuracy, 0.5 for an uninformative name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from torch import nn

from prismlm.errors import InputError, check_whole
from prismlm.files import atomic_file
from prismlm.lens import layout
from prismlm.lens.labels import contexts
from prismlm.lens.labels.contexts import (
    CATEGORIES,
    FUNCTION,
    NAME_LENGTH,
    Label,
    Namer,
    Places,
    Text,
)
from prismlm.lens.labels.endpoint import Endpoint, Question, Session, one_line
from prismlm.lens.lens import MIN_PLACES, Lens
from prismlm.lens.signatures import LINE
from prismlm.models.sidecar import weight_of
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing
from prismlm.statistics import mean_intervals

EMBEDDED, SIGNATURE = "embedded", "signature"
# Positions sampled from a cell; the share of documents held out to score the names.
PLACES, HELD_OUT, SEED = 256, 0.2, 0
# Passages in a question, and tokens of each before and after the position.
PASSAGES, BEFORE, AFTER = 12, 32, 8
LABEL_COLUMNS = ("name", "description", "category", "role", "tags")
DESCRIPTION_LENGTH, SHORT, MAX_TAGS = 240, 32, 3
# Of an answer, with their types.
FIELDS: dict[str, Any] = {
    "name": str, "description": str, "role": str, "category": CATEGORIES, "tags": list[str]
}  # fmt: skip
# Positive passages of a label at most, and at least for it to be scored.
MOST, LEAST = 16, 3
PASSAGE = 24
# Quoted signs are words of a name; the others separate them.
NAME_SIGNS = re.compile(r"“([^”]*)”|, |[()→…]")
TOKEN = re.compile(r"[^\W_]+|[^\w\s]|_")


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


class Scores(NamedTuple):
    """Balanced accuracies of labels, and of labels of other cells as a control; nan if unscored."""

    detection: np.ndarray
    fuzzing: np.ndarray
    shuffled_detection: np.ndarray
    shuffled_fuzzing: np.ndarray


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
        ``named`` and ``scored``; the accuracy of ``detection`` and ``fuzzing``; prototypes by
        ``categories``; ``documents`` that name, and ``held_out`` ones; ``asked``, the usage of the
        labeller, and scores of its names next to the embedded names of the same prototypes.
    """
    lens.files.check_local("label")
    if lens.meta.labels is not None and not overwrite:
        raise InputError(
            f"the prototypes of {lens.path} have names already ({lens.meta.labels['source']}): "
            "give --overwrite to replace them."
        )
    with writing(lens.path):
        made = make_labels(lens, model, progress)
        named = Named({}, EMBEDDED, {}) if labeller is None else labeller(lens, made, progress)
        least = MIN_PLACES if named.labels else 0
        labels = [
            named.labels.get(cell, label) if size >= least else None
            for cell, (label, size) in enumerate(zip(made.labels, made.places.size, strict=True))
        ]
        scores = score_labels(labels, made.text, made.held_out, progress)
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
        write_columns(lens, _columns(lens, labels, named, scores), labels=record)
    return record


def _columns(
    lens: Lens, labels: list[Label | None], named: Named, scores: Scores
) -> dict[str, list[Any]]:
    """Return the columns of ``prototypes.parquet`` that labels fill."""
    columns: dict[str, list[Any]] = {
        column: [None if label is None else getattr(label, column) for label in labels]
        for column in LABEL_COLUMNS
    }
    # Next to names of a labeller, what a prototype raises would look alike.
    others = [""] * len(labels) if named.labels else lens.names
    columns["name"] = [new or old for new, old in zip(columns["name"], others, strict=True)]
    columns["label_source"] = [
        SIGNATURE if label is None else named.source if cell in named.labels else EMBEDDED
        for cell, label in enumerate(labels)
    ]
    columns["label_score"] = [None if np.isnan(x) else float(x) for x in scores.detection]
    return columns


def make_labels(lens: Lens, model: nn.Module, progress: Reporter = SILENT) -> Labelling:
    """Name every prototype from four fifths of the documents."""
    corpus = lens.corpus_for("names are made of its text")
    cells, count = lens.cells, lens.num_prototypes
    with progress.task("Reading places", 1, "steps") as task:
        weight = weight_of(model).detach()
        text = Text(corpus, len(weight))
        sample = contexts.sample_places(cells, count, PLACES)
        task.advance()
    held_out = np.random.default_rng(SEED).random(len(cells.starts)) < HELD_OUT
    scoring = held_out[sample.document]
    places = sample.of(~scoring)
    # Cells with positions in held-out documents alone are named by these, and not scored.
    scoring &= (np.bincount(places.cell, minlength=count) > 0)[sample.cell]
    labels = Namer(text, sample.of(~scoring), lens, weight).labels(progress)
    documents = int((~held_out).sum()), int(held_out.sum())
    return Labelling(labels, text, places, sample.of(scoring), documents)


def described(scores: Scores) -> dict[str, Any]:
    """Return how many labels are scored, and the accuracy of detection and of fuzzing.

    The ``mean`` is over prototypes, ½ being chance; ``shuffled`` is that with the names of other
    prototypes; ``low`` and ``high`` bound the difference by a 95 % bootstrap over prototypes.
    """
    scored = np.isfinite(scores.detection)
    figures: dict[str, Any] = {"scored": int(scored.sum()), "detection": None, "fuzzing": None}
    for name in ("detection", "fuzzing") if scored.any() else ():
        own, shuffled = getattr(scores, name)[scored], getattr(scores, f"shuffled_{name}")[scored]
        (difference,) = mean_intervals((own - shuffled)[:, None], seed=SEED)
        means = {"mean": float(own.mean()), "shuffled": float(shuffled.mean())}
        figures[name] = means | {"low": difference.low, "high": difference.high}
    return figures


def _compared(named: Named, made: Labelling) -> dict[str, Any]:
    """Return the usage of a labeller, and its scores next to embedded names of the same cells."""
    cells, scores = range(len(made.labels)), dict[str, Any]()
    for name, given in (("own", named.labels), ("embedded", dict(enumerate(made.labels)))):
        labels = [given[cell] if cell in named.labels else None for cell in cells]
        scores[name] = described(score_labels(labels, made.text, made.held_out))
        scores["scored"] = scores[name].pop("scored")
    return {"named": len(named.labels), **named.report, "scores": scores}


def write_columns(
    lens: Lens, columns: Mapping[str, Sequence[Any] | np.ndarray], **records: Any
) -> None:
    """Replace columns of ``prototypes.parquet``, then record their origin in ``meta.json``."""
    table, schema = lens.prototypes, layout.PROTOTYPES_SCHEMA
    for name, values in columns.items():
        i = schema.get_field_index(name)
        table = table.set_column(i, schema.field(i), pa.array(values, schema.types[i]))
    with atomic_file(lens.path / layout.PROTOTYPES_FILE) as temporary:
        layout.write_prototypes(table, temporary, lens.meta.files)
    layout.write_meta(lens.path, replace(lens.meta, **records))
    lens.check_unchanged()  # which reads them


def ask_for_names(
    lens: Lens,
    labelling: Labelling,
    progress: Reporter = SILENT,
    *,
    endpoint: Endpoint,
    prototypes: int | None = None,
) -> Named:
    """Ask a language model for names: a labeller of :func:`label_lens`.

    Answers are kept in ``.NAME.answers.jsonl`` next to the lens. ``prototypes`` limits how many are
    named, those with the most positions first.
    """
    if prototypes is not None:
        check_whole("the prototypes", prototypes)
    path = lens.path.with_name(f".{lens.path.name}.answers.jsonl")
    session, places = Session(endpoint, path), labelling.places
    first = np.searchsorted(places.cell, np.arange(len(labelling.labels) + 1))
    nameable = (places.size >= MIN_PLACES) & (np.diff(first) > 0)
    cells = lens.by_size[nameable[lens.by_size]][:prototypes].tolist()
    signatures = lens.prototypes.select(["top_tokens", "top_values"]).to_pylist()

    def label(cell: int) -> Label:
        raised = dict(zip(*(row or [] for row in signatures[cell].values()), strict=True))
        rows: list[dict[str, Any]] = [{token: round(value, 2) for token, value in raised.items()}]
        # Evenly spaced, since places are sorted by next token.
        count = min(PASSAGES, int(np.diff(first)[cell]))
        for place in np.unique(np.linspace(first[cell], first[cell + 1] - 1, count).astype(int)):
            text, following = contexts.marked(labelling.text, places, int(place), BEFORE, AFTER)
            rows.append({"passage": text, "next": following})
        question = Question.about("name", rows, FIELDS, lambda reply: all(_trimmed(reply)))
        answer = session.ask(question)
        name, description = _trimmed(answer)
        tags = filter(None, (one_line(tag, SHORT) for tag in answer["tags"][:MAX_TAGS]))
        return Label(
            name,
            description,
            category=answer["category"],
            role=one_line(answer["role"], SHORT),
            tags=tuple(dict.fromkeys(tags)),
            topic=content_words(description),
        )

    with progress.task("Asking for names", len(cells), "prototypes") as task:
        answers = zip(cells, session.each(cells, label, task), strict=True)
    labels = {cell: answer for cell, answer in answers if answer is not None}
    return Named(labels, session.source, session.usage())


def _trimmed(answer: Mapping[str, Any]) -> list[str]:
    """Return the name and the description of an answer."""
    lengths = {"name": NAME_LENGTH, "description": DESCRIPTION_LENGTH}
    return [one_line(answer[field], length) for field, length in lengths.items()]


def score_labels(
    labels: Sequence[Label | None], text: Text, places: Places, progress: Reporter = SILENT
) -> Scores:
    """Score labels on held-out places."""
    drawn, control = _draw_passages(labels, places)
    words = {
        cell: frozenset([*words_of(bare(label.name)), *label.topic])
        for cell, label in enumerate(labels)
        if label is not None
    }
    rows = sorted({row for rows in drawn.values() for row in rows})
    sample = places.of(np.array(rows, dtype=np.int64))
    texts = np.array([*text.texts, ""], dtype=object)
    around = ["".join(texts[window]) for window in text.window(sample, PASSAGE, 1)]
    marked = [f"{text.beginning(p)} {text.end(p + 1)}" for p in sample.position.tolist()]
    scores = np.full((4, len(labels)), np.nan)
    with progress.task("Scoring names", 2 * len(drawn), "names") as task:
        for kind, read in enumerate((around, marked)):
            found = (frozenset(words_of(passage)) for passage in read)
            passages = dict(zip(rows, found, strict=True))
            counts = Counter(word for passage in passages.values() for word in passage)
            rarity = {word: float(np.log(len(passages) / n)) for word, n in counts.items()}
            for cell, chosen in drawn.items():
                drawn_passages = [passages[row] for row in chosen]
                scores[kind, cell] = _accuracy(words[cell], drawn_passages, rarity)
                scores[kind + 2, cell] = _accuracy(words[control[cell]], drawn_passages, rarity)
                task.advance()
    return Scores(*scores)


def _draw_passages(
    labels: Sequence[Label | None], places: Places
) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Draw rows of places for each label, and the label that is its control.

    The first half of the rows is of the label's cell, the others are not.
    """
    generator = np.random.default_rng(SEED)
    first: list[int] = np.searchsorted(places.cell, np.arange(len(labels) + 1)).tolist()
    named = np.array([label is not None for label in labels], dtype=bool)
    scored = np.flatnonzero((np.diff(first) >= LEAST) & named)
    drawn: dict[int, list[int]] = {}
    for cell in scored.tolist():
        positive = generator.permutation(np.arange(first[cell], first[cell + 1]))[:MOST]
        # More than needed, since some may be of the cell itself.
        others = generator.integers(len(places.cell), size=4 * len(positive))
        negative = others[places.cell[others] != cell][: len(positive)]
        if len(negative) == len(positive):
            drawn[cell] = [*positive.tolist(), *negative.tolist()]
    order = scored[generator.permutation(len(scored))]
    return drawn, dict(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True))


def bare(name: str) -> str:
    """Return a name without separators: “(”, the → a (fur) becomes ( the a fur."""
    return NAME_SIGNS.sub(lambda sign: f" {sign[1] or ''} ", name)


def content_words(text: str) -> tuple[str, ...]:
    """Return the distinct content words of a text."""
    words = dict.fromkeys(words_of(text))
    return tuple(word for word in words if word.isalnum() and word not in FUNCTION)


def words_of(text: str) -> list[str]:
    """Return the words and signs of a text, in lower case; a line break is a sign."""
    return TOKEN.findall(text.lower().replace("\n", LINE))


def _accuracy(
    label: frozenset[str], passages: Sequence[frozenset[str]], rarity: dict[str, float]
) -> float:
    """Return the balanced accuracy of a label; the first half of the passages is positive."""
    scores = np.array([sum(rarity[word] for word in label & passage) for passage in passages])
    half = len(scores) // 2
    threshold = np.sort(scores)[half]
    above, equal = scores > threshold, scores == threshold
    # Ties at the threshold share what is left of the positive half.
    predicted = above + equal * ((half - above.sum()) / equal.sum())
    return float((predicted[:half].mean() + 1 - predicted[half:].mean()) / 2)
