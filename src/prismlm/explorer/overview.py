"""What the model is and has, what it lacks, and what to begin with: for the page's first view."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter

from prismlm.corpus.layout import held_out
from prismlm.corpus.store import Corpus
from prismlm.direction_marks import MARK
from prismlm.errors import FormatError
from prismlm.explorer.session import Session
from prismlm.lens.labels.map import first_prototype
from prismlm.lens.layout import trained_on_words
from prismlm.lens.lens import Lens
from prismlm.models.sidecar import load_sidecar
from prismlm.pages.colours import colour
from prismlm.pages.frame import rounded

# Domains or sources whose shares are shown.
SHOWN = 12
# Documents to begin with are looked for at some places of a large corpus, so many at each.
PLACES, AT_EACH = 16, 256
# Texts of domains, and of a corpus that has no domains.
DOMAINS, DOCUMENTS = 12, 6
# Characters of a text, of a prompt and of what a text is called; words of a prompt.
TEXT, PROMPT, NAME, WORDS = 800, 90, 60, 9
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def routes(session: Session) -> APIRouter:
    """Return ``/model``."""
    router = APIRouter(tags=["model"])
    # Once, and before the model's thread reads the same files.
    texts = held_out_texts(session.lm.lens)

    @router.get("/model", summary="What the model is and has")
    def model() -> dict[str, Any]:
        session.look_again()
        lens = session.lm.lens
        return _overview(session) | {
            "texts": texts,
            "prompts": prompts_for(lens, session.prompts, texts),
            "questions": session.questions,
        }

    return router


def _overview(session: Session) -> dict[str, Any]:
    lm, lens = session.lm, session.lm.lens
    seen = Counter(filter(None, [] if lens is None else lens.categories))
    return {
        "name": session.server.name,
        "base": load_sidecar(lm.path).base.name.removesuffix(".gguf"),
        "path": str(lm.path),
        "parameters": sum(parameter.numel() for parameter in lm.model.parameters()),
        "prototypes": lm.head.num_prototypes,
        "lens": None if lens is None else _lens(lens),
        "missing": _missing(str(lm.path), lens),
        "categories": [
            {"name": name, "prototypes": count, "colour": colour(name)}
            for name, count in seen.most_common()
        ],
        "chat": bool(lm.tokenizer.chat_template),
        "limits": {"audited": session.limits.audited},
    }


def _lens(lens: Lens) -> dict[str, Any]:
    meta = lens.meta
    trained = meta.trained_on
    return {
        "tokens": meta.tokens,
        "documents": meta.documents,
        "trained_on": None if trained is None else trained_on_words(trained, meta.split),
        "map": meta.map is not None,
        "corpus": lens.corpus is not None,
        "readable": lens.text_source is not None,
        "opening": first_prototype(lens),
        "shares": _shares(lens),
    }


def _shares(lens: Lens) -> dict[str, Any] | None:
    """Return the share of each domain, or else source, in all positions; None where that is one."""
    for by in ("domain", "source"):
        rates = lens.cells.base_rates(by).tolist()
        names = lens.cells.keys(by).names
        items = sorted(zip(names, rates, strict=True), key=lambda item: -item[1])
        if len(items) > 1:
            shown = [{"key": key, "share": share} for key, share in items[:SHOWN]]
            others = [rate for _, rate in items[SHOWN:]]
            return rounded({"by": by, "items": shown, "others": [len(others), sum(others)]})
    return None


def _missing(name: str, lens: Lens | None) -> list[dict[str, str]]:
    """Return what the model could have, and the command that makes it."""
    index = f"prismlm index {name} --corpus DIR"
    if lens is None:
        return [{"what": "a lens: no training text can be named", "command": index}]
    places = f"the corpus at {lens.corpus_path}: it is not there, or has changed"
    parts = (
        (
            lens.cells,
            "cells: documents are named, no passages",
            f"{index} --positions 1 --overwrite",
        ),
        (lens.meta.labels, "names of prototypes", f"prismlm label {name}"),
        (lens.meta.map, "a map of prototypes", f"prismlm map {name}"),
        (lens.corpus, places, f"{index} --overwrite"),
    )
    return [{"what": what, "command": command} for part, what, command in parts if part is None]


def prompts_for(
    lens: Lens | None, prompts: Mapping[str, str], texts: Mapping[str, str]
) -> dict[str, str]:
    """Return prompts to try.

    Of those given, the ones of domains that the lens has; where it has none of them, the opening
    words of ``texts``; without these, all.
    """
    domains = set() if lens is None else set(lens.keys("mass", "domain").names)
    own = {domain: prompt for domain, prompt in prompts.items() if domain in domains}
    return own or {name: _opening(text) for name, text in texts.items()} or dict(prompts)


def held_out_texts(lens: Lens | None) -> dict[str, str]:
    """Return beginnings of held-out documents: of each domain by its name, or a few by titles.

    There are none where the corpus is gone, has changed or holds nothing out.
    """
    corpus = None if lens is None else lens.corpus
    try:
        return {} if corpus is None else _texts(corpus)
    except (FormatError, OSError):
        return {}


def _texts(corpus: Corpus) -> dict[str, str]:
    starts = np.linspace(0, max(0, len(corpus) - AT_EACH), PLACES, dtype=np.int64)
    numbers = np.unique(starts[:, None] + np.arange(AT_EACH))
    numbers = numbers[numbers < len(corpus)]
    rows = corpus.documents.take(numbers)
    held = np.flatnonzero(held_out(rows, corpus.meta["split"]))
    found = list(zip(numbers[held].tolist(), rows.take(held).to_pylist(), strict=True))
    by_domain = len({row["domain"] for _, row in found} - {None}) > 1
    # Neighbours are often of one kind.
    spread = found if by_domain else found[:: max(1, len(found) // DOCUMENTS)]
    texts: dict[str, str] = {}
    for number, row in spread:
        own_name = row["domain"] or "other" if by_domain else row["title"] or row["doc_id"]
        name = _cut(" ".join(_plain(own_name).split()), NAME)
        if name not in texts and len(texts) < (DOMAINS if by_domain else DOCUMENTS):
            text = _plain(corpus.text(number)[: 2 * TEXT]).strip()
            texts |= {name: _cut(text, TEXT)} if text else {}
    return dict(sorted(texts.items()))


def _opening(text: str) -> str:
    """Return the first words of a text, of the first line that has as many."""
    lines = [line.split() for line in text.splitlines()]
    words = next((line for line in lines if len(line) >= WORDS), text.split())
    return _cut(" ".join(words[:WORDS]), PROMPT)


def _plain(text: str) -> str:
    """Return a text without what would turn its direction, or do something in a terminal."""
    return CONTROLS.sub(" ", MARK.sub(" ", text))


def _cut(text: str, most: int) -> str:
    """Return the beginning of a text, to the end of a word."""
    return text if len(text) <= most else re.sub(r"\s\S*$", "", text[: most + 1])[:most]
