"""The page's first view: what the model is, has and lacks, and examples to start with."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from fastapi import APIRouter

from prismlm.corpus.layout import held_out
from prismlm.errors import InputError
from prismlm.explain.language_model import PrismLM
from prismlm.explorer.session import Session
from prismlm.lens.layout import find_lens, trained_on_words
from prismlm.lens.lens import Lens
from prismlm.models.sidecar import load_sidecar
from prismlm.pages.frame import colour, largest_shares, rounded

# Domains or sources whose shares are shown.
MAX_SHARES = 12
# Example texts come from runs of documents, evenly spaced in the corpus.
RUNS, RUN_LENGTH = 16, 256
TEXTS = 12
# Characters of a text, a prompt and a name; words of a prompt.
TEXT, PROMPT, NAME, WORDS = 800, 90, 60, 9


def routes(session: Session) -> APIRouter:
    """Return ``/model``."""
    router = APIRouter(tags=["model"])
    lm, lens = session.lm, session.lm.lens
    # Once, before the model's thread reads the same files.
    texts = held_out_texts(lens)

    @router.get("/model", summary="What the model is and has")
    def model() -> dict[str, Any]:
        session.refresh()
        categories = Counter(filter(None, [] if lens is None else lens.categories))
        return {
            "name": session.server.name,
            "base": load_sidecar(lm.path).base.name.removesuffix(".gguf"),
            "path": str(lm.path),
            "parameters": sum(parameter.numel() for parameter in lm.model.parameters()),
            "prototypes": lm.head.num_prototypes,
            "lens": None if lens is None else _lens(lens),
            "lens_options": lens_options(lm),
            "missing": _missing(lm),
            "categories": [
                {"name": name, "prototypes": count, "colour": colour(name)}
                for name, count in categories.most_common()
            ],
            "controllers": controllers_of(lm),
            "chat": bool(lm.tokenizer.chat_template),
            "limits": {"audited": session.limits.audited},
            "texts": texts,
            "prompts": prompts_for(lens, session.prompts, texts),
            "questions": session.questions,
        }

    return router


def controllers_of(lm: PrismLM) -> list[str]:
    """Return the files of controllers in the model's directory, by their path there."""
    return sorted(f"controllers/{path.name}" for path in lm.path.glob("controllers/*.safetensors"))


def _lens(lens: Lens) -> dict[str, Any]:
    meta = lens.meta
    trained_on = meta.trained_on
    return {
        "tokens": meta.tokens,
        "sampled": meta.sampled,
        "documents": meta.documents,
        "trained_on": None if trained_on is None else trained_on_words(trained_on, meta.split),
        "map": meta.map is not None,
        "corpus": lens.corpus is not None,
        "readable": lens.text_source is not None,
        "opening": int(lens.by_size[0]),
        "shares": _shares(lens),
    }


def _shares(lens: Lens) -> dict[str, Any] | None:
    """Return the share of each domain, or of each source if there is only one domain."""
    for by in ("domain", "source"):
        items = [{"key": key, "share": share} for key, share in lens.shares(by).items()]
        if len(items) > 1:
            return rounded(largest_shares({"by": by, "items": items}, MAX_SHARES))
    return None


def lens_options(lm: PrismLM) -> list[str]:
    """Return the options by which commands open the same lens; none if it is the default."""
    if lm.lens is None:
        return []
    with suppress(InputError):
        if str(find_lens(lm.path, None)) == lm.lens.address:
            return []
    own = lm.lens.path.parent == lm.path / "lens"
    return ["--lens", lm.lens.name if own else lm.lens.address]


def _missing(lm: PrismLM) -> list[dict[str, str]]:
    """Return what the model lacks, and the commands that add it."""
    lens, name = lm.lens, shlex.join([str(lm.path), *lens_options(lm)])
    index = f"prismlm index {name} --corpus DIR"
    if lens is None:
        return [{"what": "a lens: no training text can be named", "command": index}]
    corpus = f"the corpus at {lens.corpus_path}: it is not there, or has changed"
    parts = (
        (lens.meta.labels, "names of prototypes", f"prismlm label {name}"),
        (lens.meta.map, "a map of prototypes", f"prismlm map {name}"),
        (lens.corpus, corpus, f"{index} --overwrite"),
    )
    return [{"what": what, "command": command} for part, what, command in parts if part is None]


def prompts_for(
    lens: Lens | None, prompts: Mapping[str, str], texts: Mapping[str, str]
) -> dict[str, str]:
    """Return the prompts of domains that the lens has.

    Without any, the first words of ``texts``; without these, all prompts.
    """
    domains = set() if lens is None else set(lens.cells.keys("domain").names)
    matching = {domain: prompt for domain, prompt in prompts.items() if domain in domains}
    return matching or {n: _first_words(text) for n, text in texts.items()} or dict(prompts)


def held_out_texts(lens: Lens | None) -> dict[str, str]:
    """Return the beginnings of some held-out documents: of each of several domains, or by title
    or first words.

    Empty if the corpus is missing or has no held-out documents.
    """
    corpus, texts = None if lens is None else lens.corpus, dict[str, str]()
    if corpus is None:
        return texts
    starts = np.linspace(0, max(0, len(corpus) - RUN_LENGTH), RUNS, dtype=np.int64)
    numbers = np.unique(starts[:, None] + np.arange(RUN_LENGTH))
    numbers = numbers[numbers < len(corpus)]
    table = corpus.documents.take(numbers)
    held = np.flatnonzero(held_out(table, corpus.meta["split"]))
    by_domain = len(set(table["domain"].take(held).to_pylist()) - {None}) > 1
    # Neighbours are often alike.
    for index in np.random.default_rng(0).permutation(held).tolist():
        (row,) = table.slice(index, 1).to_pylist()
        if len(texts) == TEXTS:
            break
        label = (by_domain and row["domain"]) or row["title"]
        if label and _name(label) in texts:
            continue
        text = _cut(corpus.text(int(numbers[index]))[: 2 * TEXT].strip(), TEXT)
        texts |= {_name(label or _first_words(text)): text} if text else {}
    return dict(sorted(texts.items()))


def _name(label: str) -> str:
    return _cut(" ".join(label.split()), NAME)


def _first_words(text: str) -> str:
    """Return the first words of the first line that has enough of them, or of the text."""
    lines = [line.split() for line in text.splitlines()]
    words = next((line for line in lines if len(line) >= WORDS), text.split())
    return _cut(" ".join(words[:WORDS]), PROMPT)


def _cut(text: str, limit: int) -> str:
    """Return the beginning of a text, cut after a word."""
    return text if len(text) <= limit else re.sub(r"\s\S*$", "", text[: limit + 1])[:limit]
