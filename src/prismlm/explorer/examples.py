"""Texts to begin with: of documents that the corpus holds out, and so of anyone's own subject."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from prismlm.corpus.layout import held_out
from prismlm.corpus.store import Corpus
from prismlm.direction_marks import MARK
from prismlm.errors import FormatError
from prismlm.lens.lens import Lens

# Documents are looked for at some places of a large corpus, so many at each.
PLACES, AT_EACH = 16, 256
# Texts of domains, and of a corpus that has no domains.
DOMAINS, DOCUMENTS = 12, 6
# Characters: of a text, of a prompt and of what a text is called, at most and at least.
TEXT, PROMPT, NAME = (800, 600), (90, 45), (60, 30)
READ = 2_000
WORDS = 9
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def held_out_texts(lens: Lens | None) -> dict[str, str]:
    """Return beginnings of held-out documents: of each domain by its name, or a few by titles.

    There are none where the corpus is gone, has changed or holds nothing out.
    """
    corpus = None if lens is None else lens.corpus
    try:
        return {} if corpus is None else _texts(corpus)
    except (FormatError, OSError):
        return {}


def prompts_for(
    lens: Lens | None, prompts: Mapping[str, str], texts: Mapping[str, str]
) -> dict[str, str]:
    """Return prompts to try.

    Of those given, the ones of domains that the lens has; where it has none of them, the opening
    words of ``texts``; without these, all.
    """
    own = of_domains(lens, prompts)
    return own or {name: opening(text) for name, text in texts.items()} or dict(prompts)


def of_domains(lens: Lens | None, prompts: Mapping[str, str]) -> dict[str, str]:
    """Return the prompts of domains that the lens has."""
    domains = set() if lens is None else set(lens.keys("mass", "domain").names)
    return {domain: prompt for domain, prompt in prompts.items() if domain in domains}


def opening(text: str) -> str:
    """Return the first words of a text, of the first line that has as many."""
    lines = [line.split() for line in text.splitlines()]
    words = next((line for line in lines if len(line) >= WORDS), text.split())
    return _cut(" ".join(words[:WORDS]), PROMPT)


def _texts(corpus: Corpus) -> dict[str, str]:
    numbers = _looked_at(len(corpus))
    rows = corpus.documents.take(numbers)
    held = np.flatnonzero(held_out(rows, corpus.meta["split"]))
    found = list(zip(numbers[held].tolist(), rows.take(held).to_pylist(), strict=True))
    by_domain = len({row["domain"] for _, row in found} - {None}) > 1
    most = DOMAINS if by_domain else DOCUMENTS
    # Neighbours are often of one kind.
    spread = found if by_domain else found[:: max(1, len(found) // DOCUMENTS)]
    texts: dict[str, str] = {}
    for number, row in spread:
        called = _called(row, by_domain=by_domain)
        if called in texts or len(texts) == most:
            continue
        text = _plain(corpus.text(number)[:READ]).strip()
        if text:
            texts[called] = _cut(text, TEXT)
    return dict(sorted(texts.items()))


def _looked_at(documents: int) -> np.ndarray:
    """Return numbers of documents, ascending: all of a corpus that has only so many."""
    starts = np.linspace(0, max(0, documents - AT_EACH), PLACES, dtype=np.int64)
    numbers = np.unique(starts[:, None] + np.arange(AT_EACH))
    return numbers[numbers < documents]


def _called(row: dict[str, Any], *, by_domain: bool) -> str:
    name = row["domain"] or "other" if by_domain else row["title"] or row["doc_id"]
    return _cut(" ".join(_plain(name).split()), NAME)


def _plain(text: str) -> str:
    """Return a text without what would turn its direction, or do something in a terminal."""
    return CONTROLS.sub(" ", MARK.sub(" ", text))


def _cut(text: str, bounds: tuple[int, int]) -> str:
    """Return the beginning of a text: to the last end of a sentence, or else of a word."""
    most, least = bounds
    if len(text) <= most:
        return text
    for end in (r"(?<=[.!?])\s", r"\s"):
        places = [found.start() for found in re.finditer(end, text[: most + 1])]
        if places and places[-1] >= least:
            return text[: places[-1]]
    return text[:most]
