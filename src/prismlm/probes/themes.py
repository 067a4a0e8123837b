"""Themes of prototypes, channels and attention heads: ProtoT's rubric, with a random control.

A unit is judged by the ten sequences that activate it most, with the words that do so marked. A
*prototype* is activated by single tokens: its sequences are the positions of a lens nearest to it,
each with 32 tokens on both sides, without overlaps. A *channel* ranks the sequences of a corpus
by Σ_j write_jk, and marks the ten tokens with the largest write gate; a *head* does the same by the
norm of what it writes into the residual stream. A random sequence is as long, has as many marks,
and lies anywhere in the documents that were read.

A language model judges, as in ProtoT, §5.1, or words do: docs/lens.md has the equations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor
from transformers import PreTrainedModel

from prismlm.corpus.store import Corpus, Split
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.lens.labels.contexts import FUNCTION, NAME_LENGTH
from prismlm.lens.labels.endpoint import Endpoint, Question, Session, one_line
from prismlm.lens.lens import Lens
from prismlm.lens.signatures import LINE
from prismlm.probes.channels.activations import Kind as Activation
from prismlm.probes.channels.activations import read_activations, read_passages
from prismlm.probes.results import Report, Row, Table
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap

SEQUENCES = 10
SIDE_TOKENS = 32
MARKED_TOKENS = 10
RANDOM_PASSAGES = 400
"""Random passages from which the judge by words takes rarity and thresholds."""
# Chosen on planted units.
QUANTILE = 0.95
MIN_MARKED, MAX_SIMILARITY = 0.5, 2.0
THEME_WORDS = 4
EXPLANATION_LENGTH = 400
FIGURES = ("disentanglement", "coverage", "themes")
T = TypeVar("T")
Kind = Literal["prototypes", "channels", "heads"]


class Span(NamedTuple):
    """A sequence of a corpus, by position."""

    document: int
    start: int
    length: int
    marked: tuple[int, ...]


class Unit(NamedTuple):
    """A unit of a model, with the sequences that activate it most, most first."""

    name: str
    spans: tuple[Span, ...]


class Passage(NamedTuple):
    """A sequence as words, each with the space before it, and the indices of its marked words."""

    words: tuple[str, ...]
    marked: tuple[int, ...]


@dataclass(frozen=True)
class Judgement:
    """The figures of one unit, 1 to 10."""

    theme: str  # the main one
    disentanglement: int  # of it from the others
    coverage: int  # sequences that hold it
    themes: int  # how many there are
    explanation: str = ""  # of a language model


class WordJudge:
    """Judges by words, with thresholds from ``random`` passages shaped like those to be judged."""

    source = "words"

    def __init__(self, random: Sequence[Passage]) -> None:
        counts = Counter(word for passage in random for word in set(_keys(passage)))
        rows = len(random) + 1
        rarities = {word: float(np.log(rows / (n + 0.5))) for word, n in counts.items()}
        self.rarities = defaultdict(lambda: float(np.log(rows / 0.5)), rarities)
        pairs = np.triu_indices(len(random), 1)
        text, marks = (cosines[pairs] for cosines in self._cosines(random))
        # Above 0, since otherwise pairs without a common word would count as alike.
        self.text_threshold = max(float(np.quantile(text, QUANTILE)), 1e-6)
        self.marks_threshold = max(float(np.quantile(marks, QUANTILE)), MIN_MARKED)
        self.chance = float(self._similarity(text, marks).mean())

    def judge(
        self, units: Sequence[Sequence[Passage]], progress: Reporter = SILENT
    ) -> list[Judgement | None]:
        """Return the figures of units, from their passages."""
        with progress.task("Judging themes", len(units), "units") as task:
            judgements: list[Judgement | None] = []
            for unit in units:
                judgements.append(self._judge(unit))
                task.advance()
        return judgements

    def similarities(self, unit: Sequence[Passage]) -> np.ndarray:
        """Return s of each pair of passages, float64 [n, n]."""
        return self._similarity(*self._cosines(unit))

    def _judge(self, unit: Sequence[Passage]) -> Judgement:
        similarities = self.similarities(unit)
        cluster = clusters(similarities)
        main = cluster == 0
        coverage, themes = int(main.sum()), int(cluster.max()) + 1
        if coverage == 1:
            return Judgement(self._theme(unit[:1]), 1, 1, themes)
        theme = self._theme([passage for passage, inside in zip(unit, main, strict=True) if inside])
        within = float(similarities[np.ix_(main, main)][np.triu_indices(coverage, 1)].mean())
        rest = float(similarities[np.ix_(main, ~main)].mean()) if themes > 1 else self.chance
        gap = max(0.0, within - rest) / within
        return Judgement(theme, 1 + round(9 * coverage / len(unit) * gap), coverage, themes)

    def _theme(self, passages: Sequence[Passage]) -> str:
        """Return the words marked in at least half of the passages, then the most distinctive."""
        repeated = min(2, len(passages))
        half = max(repeated, -(-len(passages) // 2))
        marks = Counter(word for p in passages for word in {_key(p.words[i]) for i in p.marked})
        around = Counter(word for p in passages for word in set(_keys(p)))
        marked = [word for word in self._ranked(marks) if marks[word] >= half][:2]
        content = (w for w in self._ranked(around) if w.isalpha() and w not in FUNCTION)
        others = (word for word in content if len(word) > 2 and around[word] >= repeated)
        words = [f"“{word}”" for word in marked] + [w for w in others if w not in marked]
        theme = " · ".join(words[:THEME_WORDS] or self._ranked(marks)[:1])
        return theme if len(theme) <= NAME_LENGTH else theme[: NAME_LENGTH - 1] + "…"

    def _ranked(self, counts: Counter[str]) -> list[str]:
        return sorted(counts, key=lambda word: (-counts[word] * self.rarities[word], word))

    def _cosines(self, passages: Sequence[Passage]) -> tuple[np.ndarray, np.ndarray]:
        marked = [[_key(p.words[i]) for i in p.marked] for p in passages]
        text = [
            [k for i, k in enumerate(_keys(p)) if i not in p.marked and any(map(str.isalnum, k))]
            for p in passages
        ]
        return self.cosine(text), self.cosine(marked)

    def cosine(self, bags: Sequence[Sequence[str]]) -> np.ndarray:
        """Return the cosine of each pair of bags of words, [n, n]; 0 for an empty one."""
        columns = {word: i for i, word in enumerate(dict.fromkeys(w for bag in bags for w in bag))}
        x = np.zeros((len(bags), len(columns)))
        for row, bag in zip(x, bags, strict=True):
            for word, count in Counter(bag).items():
                row[columns[word]] = (1 + np.log(count)) * self.rarities[word]
        norms = np.linalg.norm(x, axis=1, keepdims=True)
        x /= np.where(norms > 0, norms, 1)
        return x @ x.T

    def _similarity(self, text: np.ndarray, marks: np.ndarray) -> np.ndarray:
        relative = np.maximum(text / self.text_threshold, marks / self.marks_threshold)
        return np.minimum(relative, MAX_SIMILARITY)


def clusters(similarities: np.ndarray) -> np.ndarray:
    """Return the theme of each passage, numbered from 0, the largest first, int64 [n]."""
    distances = MAX_SIMILARITY - (similarities + similarities.T) / 2
    np.fill_diagonal(distances, 0.0)
    tree = linkage(squareform(distances, checks=False), "average")
    labels = fcluster(tree, MAX_SIMILARITY - 1, "distance") - 1
    order = np.argsort(-np.bincount(labels), kind="stable")
    return np.argsort(order)[labels]


def _key(word: str) -> str:
    return word.strip().lower() or (LINE if "\n" in word else "␣")


def _keys(passage: Passage) -> list[str]:
    return [_key(word) for word in passage.words]


class EndpointJudge:
    """Asks a language model; answers are stored in a file and not requested again."""

    def __init__(self, endpoint: Endpoint, answers: Path) -> None:
        self.session = Session(endpoint, answers)
        self.source = self.session.source

    def judge(
        self, units: Sequence[Sequence[Passage]], progress: Reporter = SILENT
    ) -> list[Judgement | None]:
        """Return the figures of units, None without a valid answer."""
        with progress.task("Asking for themes", len(units), "units") as task:
            answers = self.session.answers([theme_question(unit) for unit in units], task)
        return [None if answer is None else _judgement(answer) for answer in answers]


def _judgement(answer: Mapping[str, Any]) -> Judgement:
    lengths = {"theme": NAME_LENGTH, "explanation": EXPLANATION_LENGTH}
    shown = {name: one_line(answer[name], length) for name, length in lengths.items()}
    return Judgement(**{**answer, **shown})


def theme_question(unit: Sequence[Passage]) -> Question:
    """Return the question about one unit."""
    rows = [{"passage": n, "text": _marked_text(p)} for n, p in enumerate(unit, 1)]
    return Question.about(
        "themes",
        rows,
        {"theme": str, **dict.fromkeys(FIGURES, int), "explanation": str},
        is_valid=lambda answer: (
            bool(one_line(answer["theme"], NAME_LENGTH))
            and all(1 <= answer[name] <= SEQUENCES for name in FIGURES)
        ),
    )


def _marked_text(passage: Passage) -> str:
    """Return a passage with its marks; the text's own << and >> are replaced."""
    plain = (word.replace("<<", "‹‹").replace(">>", "››") for word in passage.words)
    return "".join(f"<<{w}>>" if i in passage.marked else w for i, w in enumerate(plain))


def prototype_units(
    lens: Lens, vectors: Tensor, count: int | None = None, seed: int = 0
) -> tuple[list[Unit], int]:
    """Return prototypes of a lens with their ``vectors``, and how many have too few sequences.

    ``count`` are drawn from those that have a context; None for all.
    """
    corpus = lens.corpus_for("the text around positions is read from it")
    numbers = _draw(np.flatnonzero(np.diff(lens.first_rows)).tolist(), count, seed)
    directions = torch.nn.functional.normalize(vectors.detach().float().cpu(), dim=-1)
    units: list[Unit] = []
    for number in numbers:
        spans: list[Span] = []
        for position in _nearest_positions(lens, number, directions[number]):
            document = corpus.document_at(position)
            begin = int(corpus.starts[document])
            end = begin + int(corpus.lengths[document]) - 1
            start, stop = max(begin, position - SIDE_TOKENS), min(end, position + SIDE_TOKENS + 1)
            if all(stop <= s.start or s.start + s.length <= start for s in spans):
                spans.append(Span(document, start, stop - start, (position,)))
            if len(spans) == SEQUENCES:
                units.append(Unit(f"prototype {number}", tuple(spans)))
                break
    return units, len(numbers) - len(units)


def _nearest_positions(lens: Lens, number: int, direction: Tensor) -> list[int]:
    """Return the positions nearest to a prototype: its contexts, then the rest of its cell."""
    contexts = lens.index["position"].to_numpy()[lens.rows_of(number)].tolist()
    records = lens.cells.records(lens.cells.rows_of(number))
    owner = np.zeros(len(records), dtype=np.int64)
    cosines = lens.cells.codes.cosines(records, direction[None], owner)
    order = np.argsort(-cosines, kind="stable")
    return list(dict.fromkeys(contexts + records["position"][order].astype(np.int64).tolist()))


def layer_units(
    model: PreTrainedModel,
    sequences: Sequences,
    kind: Literal["channel", "head"],
    layer: int | None = None,
    count: int | None = None,
    seed: int = 0,
) -> tuple[list[Unit], int]:
    """Return channels of prototype mixers, or attention heads, as :func:`prototype_units`."""
    activation: Activation = "write" if kind == "channel" else "heads"
    layers = None if layer is None else (layer,)
    activations = read_activations(model, sequences, (activation,), layers)
    size = {"count": SEQUENCES, "tokens": MARKED_TOKENS}
    rows_by_name = {
        f"layer {number} · {kind} {unit}": rows
        for _, number in activations.values
        for unit, rows in enumerate(activations.top_sequences(activation, number, **size))
    }
    names, units = _draw(list(rows_by_name), count, seed), list[Unit]()
    for name in names:
        spans: list[Span] = []
        for row in rows_by_name[name]:
            marked = tuple(token["position"] for token in row["tokens"])
            spans.append(Span(row["document"], row["position"], row["length"], marked))
        if len(spans) == SEQUENCES:
            units.append(Unit(name, tuple(spans)))
    return units, len(names) - len(units)


def _draw(items: list[T], count: int | None, seed: int) -> list[T]:
    if count is None or count >= len(items):
        return items
    indices = np.random.default_rng(seed).choice(len(items), count, replace=False)
    return [items[i] for i in sorted(indices.tolist())]


def theme_report(
    units: Sequence[Unit],
    corpus: Corpus,
    *,
    split: Split,
    name: str,
    of: Kind,
    left_out: int = 0,
    judge: WordJudge | EndpointJudge | None = None,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Report:
    """Judge units of the documents of a corpus and split, and as many units of random sequences.

    ``left_out`` units have fewer than ten sequences. The default judge is :class:`WordJudge`. The
    tables are ``figures``, of :func:`theme_figures`, and ``units``, with the number of
    ``documents`` of their sequences, since those of one document are alike anyway. Units without a
    valid answer of an endpoint have no figures.
    """
    if not units:
        raise InputError(
            f"none of the {left_out} {of} has {SEQUENCES} sequences: read more text, or use a lens "
            "with more positions."
        )
    spans = [span for unit in units for span in unit.spans]
    control = random_spans(units, corpus, split, len(spans), seed)
    chance = [] if judge else random_spans(units, corpus, split, RANDOM_PASSAGES, seed + 1)
    text = mark_passages(corpus, [*spans, *control, *chance])
    passages = [text[span] for span in (*spans, *control)]
    judge = judge or WordJudge([text[span] for span in chance])
    starts = range(0, len(passages), SEQUENCES)
    judgements = judge.judge([passages[first : first + SEQUENCES] for first in starts], progress)
    actual, random = judgements[: len(units)], judgements[len(units) :]
    rows = [
        {"unit": unit.name, "documents": len({span.document for span in unit.spans})}
        | ({} if judgement is None else asdict(judgement))
        for unit, judgement in zip(units, actual, strict=True)
    ]
    facts = {"of": of, "corpus": corpus.name, "split": split, "judge": judge.source}
    columns = f"unit documents {' '.join(FIGURES)} theme"
    tables = {
        "figures": theme_figures(actual, random),
        "units": Table("Units", columns, tuple(rows)),
    }
    return Report(name, facts | {"left_out_units": left_out}, tables)


def theme_figures(actual: Sequence[Judgement | None], random: Sequence[Judgement | None]) -> Table:
    """Return the three figures of units, and of as many units of random sequences.

    Rows have the ``mean`` and the ``random_mean``; their ``difference``, with 95 % of a bootstrap
    over both; and how many units have each value from 1 to 10, ``histogram`` and
    ``random_histogram``. Units without a judgement do not count.
    """
    rows: list[Row] = []
    for figure in FIGURES:
        pairs = zip(actual, random, strict=True)
        values = np.array(
            [[np.nan if j is None else getattr(j, figure) for j in pair] for pair in pairs],
            dtype=np.float64,
        )
        row: Row = {"figure": figure}
        for name, column in zip(("", "random_"), values.T, strict=True):
            judged = column[np.isfinite(column)]
            counts = np.bincount(judged.astype(np.int64), minlength=SEQUENCES + 1)[1:]
            row[f"{name}mean"] = float(judged.mean()) if len(judged) else None
            row[f"{name}histogram"] = counts.tolist()
        # There are as many random units, so resampled rows serve both.
        row["difference"] = bootstrap(np.nan_to_num(values), np.isfinite(values), (1, -1))
        rows.append(row)
    columns = "figure mean:.1f random_mean:.1f difference:+.1f histogram random_histogram"
    title = "Themes, values 1 to 10, compared with ten random sequences"
    return Table(title, columns, tuple(rows))


def random_spans(
    units: Sequence[Unit], corpus: Corpus, split: Split, count: int, seed: int
) -> list[Span]:
    """Return ``count`` random sequences with the lengths and numbers of marks of the units'.

    Documents are drawn by their length.
    """
    generator = np.random.default_rng(seed)
    numbers = corpus.split(split)
    # Without the end-of-text token, which is not a word.
    lengths = corpus.lengths[numbers] - 1
    shapes = [(span.length, len(span.marked)) for unit in units for span in unit.spans]
    spans: list[Span] = []
    for i in range(count):
        length, marks = shapes[i % len(shapes)]
        weights = np.maximum(lengths - length + 1, 0).astype(float)
        if not weights.any():
            weights = (lengths == lengths.max()).astype(float)
        index = int(generator.choice(len(numbers), p=weights / weights.sum()))
        length = min(length, int(lengths[index]))
        offset = int(generator.integers(lengths[index] - length + 1))
        start = int(corpus.starts[numbers[index]]) + offset
        marked = generator.choice(length, min(marks, length), replace=False) + start
        spans.append(Span(int(numbers[index]), start, length, tuple(marked.tolist())))
    return spans


def mark_passages(corpus: Corpus, spans: Iterable[Span]) -> dict[Span, Passage]:
    """Return the words of spans, with those marked that hold a marked token."""
    spans = list(spans)
    passages = read_passages(corpus, (span[:3] for span in spans))
    marked: dict[Span, Passage] = {}
    for span in spans:
        text = passages[span[:3]].text
        words = dict.fromkeys(text.word_of[position - span.start] for position in span.marked)
        marked[span] = Passage(text.words, tuple(words))
    return marked
