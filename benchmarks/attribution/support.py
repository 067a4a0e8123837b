"""Does support tell what a corpus holds from what it does not? Writes docs/results/support.json.

    python -m benchmarks.attribution.support MODEL CORPUS --other news=FILE --synonyms TSV

MODEL has a lens of CORPUS with cells, of its train split; FILE is text of other domains (Parquet or
JSON lines); TSV has a word in its first column and synonyms, separated by semicolons, in its last.
All texts have some 32 tokens and are read by themselves. Held-out documents that the lens measured
its scale on are left out; of a corpus without any, ``--unseen`` names a file of other documents.

Beside support stands how much of a text's evidence is attributed; its control is what the cells
alone say: the evidence of prototypes whose own cell has a position with the predicted token.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.corpus.read import read_documents
from prismlm.explain.support import Support
from prismlm.explain.trace import Trace
from prismlm.files import write_json
from prismlm.index.support import calibration_stretches

TEXTS, TOKENS, CHARACTERS = 100, 32, 150
REPLACED = (0.3, 0.6, 1.0)
LETTERS = list("abcdefghijklmnopqrstuvwxyz     0123456789;:,.")


def main() -> None:
    """Measure and write the result."""
    parser = script_options(__doc__, RESULTS / "support.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--lens", help="where there are several")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--unseen", help="text of the corpus's kinds, where it holds none out")
    parser.add_argument("--synonyms", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    lm = prismlm.load(arguments.model, lens=arguments.lens)
    corpus = Corpus.open(arguments.corpus)
    generator = np.random.default_rng(arguments.seed)
    texts, changed = kinds(corpus, arguments, generator)
    traces = {name: [read(lm, text) for text in of_kind] for name, of_kind in texts.items()}
    found = {name: [supported(one) for one in of_kind] for name, of_kind in traces.items()}
    ways = {"explain": attributed, "cells alone": in_their_cells}
    shares = {way: _each(traces, take) for way, take in ways.items()}
    result = {
        "environment": environment(),
        "model": {"parameters": sum(p.numel() for p in lm.model.parameters())},
        "corpus": corpus.meta["counts"],
        "words_replaced": changed,
        "kinds": {name: figures(of_kind) for name, of_kind in found.items()},
        "auc": apart(_each(found, lambda one: one.score)),
        # Of what the score is made of, each by itself.
        "alone": {
            name: apart(_each(found, take))
            for name, take in (("states", of_states), ("words", of_words))
        },
        "attributed": {
            way: {
                "mean": {name: float(np.mean(some)) for name, some in of.items()},
                "auc": apart(of),
            }
            for way, of in shares.items()
        },
        # Of text from elsewhere nothing is quoted: its licence may not allow it.
        "examples": {n: t[0] for n, t in texts.items() if n not in named(arguments.other)},
    }
    write_json(arguments.out, result)
    print(f"wrote {arguments.out}")


def kinds(
    corpus: Corpus, given: argparse.Namespace, generator: np.random.Generator
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Return the texts of each kind, and how many words were replaced in those in other words."""
    texts = {"verbatim": stretches(corpus, corpus.split("train"), generator)}
    changed: dict[str, float] = {}
    words = {} if given.synonyms is None else read_synonyms(given.synonyms)
    for share in REPLACED if words else ():
        name = f"{share:.0%} in other words"
        pairs = [in_other_words(text, words, share, generator) for text in texts["verbatim"]]
        texts[name] = [text for text, _ in pairs]
        changed[name] = float(np.mean([count for _, count in pairs]))
    texts["unseen"] = beginnings(given.unseen) if given.unseen else held_out(corpus, generator)
    for other in given.other:
        name, _, path = other.partition("=")
        texts[name] = beginnings(path)
    texts["shuffled words"] = [
        " ".join(generator.permutation(text.split())) for text in texts["unseen"]
    ]
    texts["random letters"] = [
        "".join(generator.choice(LETTERS, size=CHARACTERS)) for _ in range(TEXTS)
    ]
    return texts, changed


def held_out(corpus: Corpus, generator: np.random.Generator) -> list[str]:
    """Return stretches of held-out documents that the lens did not measure its scale on."""
    known = {corpus.document_at(start) for start, _ in calibration_stretches(corpus, "train")}
    unseen = [n for n in corpus.split("heldout").tolist() if n not in known]
    return stretches(corpus, np.array(unseen, dtype=np.int64), generator)


def beginnings(path: str) -> list[str]:
    """Return how the first documents of a file begin."""
    read = (document.text[:CHARACTERS] for document in read_documents(path))
    return [text for text, _ in zip(read, range(TEXTS), strict=False)]


def named(others: list[str]) -> set[str]:
    """Return the names of ``NAME=FILE``."""
    return {other.partition("=")[0] for other in others}


def stretches(corpus: Corpus, documents: np.ndarray, generator: np.random.Generator) -> list[str]:
    """Return stretches of documents that are long enough, one of each."""
    long_enough = documents[corpus.lengths[documents] > TOKENS + 1]
    chosen = generator.permutation(long_enough)[:TEXTS].tolist()
    found: list[str] = []
    for number in chosen:
        room = int(corpus.lengths[number]) - 1 - TOKENS
        start = int(corpus.starts[number]) + int(generator.integers(room + 1))
        found.append(corpus.excerpt(start, TOKENS))
    return found


def read_synonyms(path: Path) -> dict[str, str]:
    """Return the first single-word synonym of each word that has one."""
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        word, *_, last = line.split("\t")
        single = [w for w in re.split(r"[;,|]\s*", last) if w.isalpha() and w.lower() != word]
        if word.isalpha() and single:
            found.setdefault(word.lower(), single[0])
    return found


def in_other_words(
    text: str, words: dict[str, str], share: float, generator: np.random.Generator
) -> tuple[str, int]:
    """Return a text with a share of its words of four letters or more replaced by synonyms."""
    count = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal count
        word = match.group()
        other = words.get(word.lower())
        if other is None or generator.random() >= share:
            return word
        count += 1
        return other.capitalize() if word[0].isupper() else other

    return re.sub(r"[A-Za-z]{4,}", replaced, text), count


def read(lm: prismlm.PrismLM, text: str) -> Trace:
    """Return the predictions of a text's own tokens, the first left out."""
    trace = lm.explain(text)
    return trace[: len(trace) - 1]


def supported(trace: Trace) -> Support:
    """Return the support of a text."""
    found = trace.support
    assert found is not None, "the lens has no cells"
    return found


def attributed(trace: Trace) -> float:
    """Return the share of a text's evidence that is attributed."""
    return 1 - trace.sources().unattributed


def in_their_cells(trace: Trace) -> float:
    """Return the share of evidence whose prototype's own cell has the predicted token."""
    assert trace.lens is not None
    assert trace.lens.cells is not None
    table, uses = trace.table, trace.table.uses("evidence")
    first, last = trace.lens.cells.ranges(uses.prototype, table.targets.numpy()[uses.position])
    return float(uses.weight[last > first].sum() / table.total)


def figures(found: list[Support]) -> dict[str, Any]:
    """Return how many texts have each level, and their mean score."""
    levels = Counter(one.level for one in found)
    return {
        "texts": len(found),
        "levels": {level: levels[level] / len(found) for level in ("strong", "weak", "none")},
        "score": float(np.mean([one.score for one in found])),
    }


def of_states(found: Support) -> float:
    """Return mean F: how near hidden states come."""
    return float(np.mean([token.score for token in found.tokens]))


def of_words(found: Support) -> float:
    """Return mean m: how many tokens stand together in the corpus."""
    assert found.words is not None, "the lens has no suffix array"
    return found.words


def _each(found: dict[str, list[Any]], value: Callable[[Any], float]) -> dict[str, list[float]]:
    return {name: [value(one) for one in of_kind] for name, of_kind in found.items()}


def apart(values: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return how often one kind of text has a larger value than another."""
    return {
        above: {below: auc(values[above], values[below]) for below in values if below != above}
        for above in values
    }


def auc(above: list[float], below: list[float]) -> float:
    """Return how often the first is larger than the second, over all pairs; ties count half."""
    a, b = np.array(above)[:, None], np.array(below)[None]
    return float((a > b).mean() + 0.5 * (a == b).mean())


if __name__ == "__main__":
    main()
