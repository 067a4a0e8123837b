"""Themes of prototypes, channels and attention heads, with random sequences as a control.

A unit is judged by the ten sequences that activate it most: ProtoT's rubric.

A *prototype* is activated by single tokens: its sequences are the places of a lens nearest to it,
each with 32 tokens on both sides, that do not overlap. A *channel* ranks the sequences of a corpus
by Σ_j write_jk, and marks the ten tokens with the largest write gate; a *head* does the same by the
norm of what it writes into the residual stream. A random sequence is as long, has as many marks,
and lies anywhere in the documents that were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from prismlm.corpus.sequences import Sequences
from prismlm.corpus.words import worded
from prismlm.errors import InputError
from prismlm.probes.channels.activations import Kind as Activation
from prismlm.probes.channels.activations import read_activations
from prismlm.probes.results import Report, Row, Table
from prismlm.probes.theme_judges import (
    FIGURES,
    SEQUENCES,
    EndpointJudge,
    Judgement,
    Passage,
    WordJudge,
)
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus, Split
    from prismlm.lens.lens import Lens

SIDE = 32
MARKED = 10
CHANCE = 400
"""Random passages from which the judge by words takes rarity and thresholds."""
T = TypeVar("T")
Kind = Literal["prototypes", "channels", "heads"]
Judged = Sequence[Judgement | None]


class Span(NamedTuple):
    """A sequence of a corpus: its document, first token, length and marked tokens, by position."""

    document: int
    start: int
    length: int
    marked: tuple[int, ...]


class Unit(NamedTuple):
    """A unit of a model, with the sequences that activate it most, most first."""

    name: str
    spans: tuple[Span, ...]


def prototypes(
    lens: Lens, vectors: Tensor, count: int | None = None, seed: int = 0
) -> tuple[list[Unit], int]:
    """Return prototypes ``vectors`` of a lens, and how many have fewer than ten sequences.

    ``count`` are drawn by seed from those that have a context; None for all.
    """
    corpus = lens.corpus
    if corpus is None:
        raise InputError(
            f"the corpus that {lens.path} was built from, {lens.corpus_path}, is not there "
            "any more or has changed: what surrounds the places is read from it."
        )
    drawn = _draw(np.flatnonzero(np.diff(lens.first_rows)).tolist(), count, seed)
    directions = torch.nn.functional.normalize(vectors.detach().float().cpu(), dim=-1)
    units: list[Unit] = []
    for number in drawn:
        spans: list[Span] = []
        for position in _places(lens, number, directions[number]):
            document = corpus.document_at(position)
            begin = int(corpus.starts[document])
            end = begin + int(corpus.lengths[document]) - 1
            first, last = max(begin, position - SIDE), min(end, position + SIDE + 1)
            if all(last <= o.start or o.start + o.length <= first for o in spans):
                spans.append(Span(document, first, last - first, (position,)))
            if len(spans) == SEQUENCES:
                units.append(Unit(f"prototype {number}", tuple(spans)))
                break
    return units, len(drawn) - len(units)


def _places(lens: Lens, number: int, direction: Tensor) -> list[int]:
    """Return the places nearest to a prototype: its contexts, then the rest of its cell."""
    places = lens.index["position"].to_numpy()[lens.rows_of(number)].tolist()
    keys, starts = lens.cells.keys_and_starts
    bounds = np.searchsorted(keys, np.array([number, number + 1]) * lens.cells.meta.vocabulary)
    first, last = np.append(starts, len(lens.cells))[bounds].tolist()
    records = lens.cells.records(np.arange(first, last))
    owner = np.zeros(len(records), dtype=np.int64)
    cosines = lens.cells.codes.cosines(records, direction[None], owner)
    order = np.argsort(-cosines, kind="stable")
    places += records["position"][order].astype(np.int64).tolist()
    return list(dict.fromkeys(places))


def channels_or_heads(
    model: PreTrainedModel,
    sequences: Sequences,
    kind: Literal["channel", "head"],
    layer: int | None = None,
    count: int | None = None,
    seed: int = 0,
) -> tuple[list[Unit], int]:
    """Return channels of prototype mixers, or attention heads, as :func:`prototypes`."""
    kinds: tuple[Activation, ...] = ("write" if kind == "channel" else "heads",)
    layers = None if layer is None else (layer,)
    read = read_activations(model, sequences.batches(), kinds, layers)
    best = {
        number: read.top_sequences(kinds[0], number, kept=SEQUENCES, tokens=MARKED)
        for _, number in read.values
    }
    every = [(number, unit) for number, one in best.items() for unit in range(len(one))]
    drawn, units = _draw(every, count, seed), list[Unit]()
    for number, unit in drawn:
        spans = tuple(
            Span(s.document, s.start, s.length, tuple(token.position for token in s.tokens))
            for s in best[number][unit]
        )
        if len(spans) == SEQUENCES:
            units.append(Unit(f"layer {number} · {kind} {unit}", spans))
    return units, len(drawn) - len(units)


def _draw(every: list[T], count: int | None, seed: int) -> list[T]:
    if count is None or count >= len(every):
        return every
    chosen = np.random.default_rng(seed).choice(len(every), count, replace=False)
    return [every[i] for i in sorted(chosen.tolist())]


def theme_report(
    found: tuple[Sequence[Unit], int],
    corpus: Corpus,
    *,
    split: Split,
    name: str,
    of: Kind,
    judge: WordJudge | EndpointJudge | None = None,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Report:
    """Judge units, and as many of random sequences that are as long and have as many marks.

    ``found`` are units of the documents of a corpus and split, and how many were left out that
    have fewer than ten sequences. Without a judge there are words alone.

    Returns:
        The table ``figures``, of :func:`theme_figures`; ``units``, with the main theme of each,
        its figures, and how many ``documents`` its ten sequences are of: those of one are alike
        anyway; and ``random``, of as many units of random sequences. What an endpoint gave no
        answer for has no figures.
    """
    units, left_out = found
    if not units:
        raise InputError(
            f"none of the {left_out} {of} has {SEQUENCES} sequences: read more text, or a lens "
            "that holds more positions."
        )
    spans = [span for unit in units for span in unit.spans]
    control = random_spans(units, corpus, split, len(spans), seed)
    # The judge by words takes what is common by chance from further random passages.
    chance = [] if judge is not None else random_spans(units, corpus, split, CHANCE, seed + 1)
    text = read_spans(corpus, [*spans, *control, *chance])
    passages = [text[span] for span in (*spans, *control)]
    judge = judge or WordJudge([text[span] for span in chance])
    tens = range(0, len(passages), SEQUENCES)
    judged = judge.judge([passages[first : first + SEQUENCES] for first in tens], progress)
    own, random = judged[: len(units)], judged[len(units) :]
    rows = [
        {"unit": unit.name, "documents": len({span.document for span in unit.spans})}
        | ({} if one is None else asdict(one))
        for unit, one in zip(units, own, strict=True)
    ]
    facts = {"of": of, "corpus": corpus.name, "split": split, "judge": judge.source}
    columns = {"unit": "", "documents": "", **dict.fromkeys(FIGURES, ""), "theme": ""}
    tables = {
        "figures": theme_figures(own, random),
        "units": Table("Units", columns, tuple(rows)),
        "random": Table("", {}, tuple(asdict(one) for one in random if one is not None)),
    }
    return Report(name, facts | {"left_out_units": left_out}, tables)


def theme_figures(own: Judged, random: Judged) -> Table:
    """Return the three figures of units, and of as many of random sequences.

    Rows have the ``mean`` and the ``random_mean``; their ``difference``, with 95 % of a bootstrap
    over both; and how many units have each value from 1 to 10, ``histogram`` and
    ``random_histogram``. What was not judged does not count.
    """
    rows: list[Row] = []
    for figure in FIGURES:
        pairs = zip(own, random, strict=True)
        found = [[np.nan if x is None else getattr(x, figure) for x in pair] for pair in pairs]
        values = np.array(found, dtype=np.float64)
        row: Row = {"figure": figure}
        for name, column in zip(("", "random_"), values.T, strict=True):
            judged = column[np.isfinite(column)]
            counts = np.bincount(judged.astype(np.int64), minlength=SEQUENCES + 1)[1:]
            row[f"{name}mean"] = float(judged.mean()) if len(judged) else None
            row[f"{name}histogram"] = counts.tolist()
        # Random ones are as many, so that one draw of rows serves both.
        row["difference"] = bootstrap(np.nan_to_num(values), np.isfinite(values), (1, -1))
        rows.append(row)
    columns = {"figure": "", "mean": ".1f", "random_mean": ".1f", "difference": "+.1f",
               "histogram": "", "random_histogram": ""}  # fmt: skip
    return Table("Themes, values 1 to 10, beside ten random sequences", columns, tuple(rows))


def random_spans(
    units: Sequence[Unit], corpus: Corpus, split: Split, count: int, seed: int
) -> list[Span]:
    """Return ``count`` random sequences with the lengths and numbers of marks of units', in turn.

    Documents are drawn by their length.
    """
    draw = np.random.default_rng(seed)
    numbers = corpus.split(split)
    # Without the end of the text, which is not a word.
    lengths = corpus.lengths[numbers] - 1
    shapes = [(span.length, len(span.marked)) for unit in units for span in unit.spans]
    spans: list[Span] = []
    for i in range(count):
        length, marks = shapes[i % len(shapes)]
        room = np.maximum(lengths - length + 1, 0).astype(float)
        if not room.any():
            room = (lengths == lengths.max()).astype(float)
        chosen = int(draw.choice(len(numbers), p=room / room.sum()))
        length = min(length, int(lengths[chosen]))
        offset = int(draw.integers(lengths[chosen] - length + 1))
        start = int(corpus.starts[numbers[chosen]]) + offset
        marked = draw.choice(length, min(marks, length), replace=False) + start
        spans.append(Span(int(numbers[chosen]), start, length, tuple(marked.tolist())))
    return spans


def read_spans(corpus: Corpus, spans: Iterable[Span]) -> dict[Span, Passage]:
    """Return the words of spans, with those marked that hold a marked token.

    Each document is read and encoded once.
    """
    by_document: dict[int, set[Span]] = {}
    for span in spans:
        by_document.setdefault(span.document, set()).add(span)
    found: dict[Span, Passage] = {}
    for number, own in sorted(by_document.items()):
        text, places, first = corpus.text(number), corpus.spans(number), int(corpus.starts[number])
        for span in own:
            offset = span.start - first
            words = worded(text, places[offset : offset + span.length])
            marked = dict.fromkeys(words.word_of[place - span.start] for place in span.marked)
            found[span] = Passage(words.words, tuple(marked))
    return found
