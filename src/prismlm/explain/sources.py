"""Where one training document shows up: its prototypes, and texts whose predictions rely on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from prismlm.corpus.documents import Document
from prismlm.errors import InputError, suggest
from prismlm.explain.audit import OPENING, read_texts
from prismlm.explain.language_model import PrismLM
from prismlm.lens.lens import Lens

IDS_COMPARED = 20_000  # ids searched for a similar one
# Lifts between this and its inverse are as usual.
USUAL = 0.8


@dataclass(frozen=True)
class DocumentSources:
    """Where a document shows up."""

    doc_id: str
    source: str | None
    domain: str | None
    license: str | None
    title: str | None
    url: str | None
    # The prototypes with its positions in their cells, the fullest first, then by share:
    # prototype, name, the number of positions, and their share of the cell.
    cells: list[dict[str, Any]]
    # Σ usage_i · its share of cell i, relative to Σ usage_i: its share of the text near to an
    # average use of a prototype.
    neighbourhood: float
    base_rate: float  # its share of all positions of the lens

    def sentence(self, texts: Mapping[str, Any] | None = None) -> str:
        """Say how many times its share of the corpus its share in texts, or near answers, is."""
        title = " ".join((self.title or self.doc_id).split())
        share = self.neighbourhood if texts is None else texts["share"]
        expected = self.base_rate * (1.0 if texts is None else texts["traced"])
        lift = share / expected if expected else 0.0
        if not share:
            nothing = "is not behind any of these texts" if texts else "is near to no prediction"
            return f"“{title}” {nothing}."
        subject = f"Predictions of the model come near to “{title}”"
        if texts is not None:
            count = texts["texts_read"]
            these = "this text" if count == 1 else f"these {count:,} texts"
            subject = f"“{title}” is behind {these}"
        if USUAL < lift < 1 / USUAL:
            return f"{subject} about as often as usual for its length."
        return (
            f"{subject} {'more' if lift > 1 else 'less'} often than usual: {lift:,.1f} times as "
            "much as its share of the corpus suggests."
        )


def document_sources(lens: Lens, doc_id: str) -> DocumentSources:
    """Return the prototypes with a document in their cells."""
    check_document(lens, doc_id)
    document = lens.cells.document_number(doc_id)
    positions, sizes = lens.cells.cells_of(document, lens.num_prototypes)
    if not positions.any():
        raise InputError(
            f"none of the positions of the document {doc_id!r} was indexed: the lens {lens.name} "
            "keeps a sample of positions. An index with --positions 1 has every one."
        )
    usage, shares = np.nan_to_num(lens.prototypes["usage"].to_numpy()), positions / sizes.clip(1)
    fullest = np.lexsort((-shares, -positions))[: np.count_nonzero(positions)].tolist()
    return DocumentSources(
        **lens.cells.facts(document),
        cells=[
            {"prototype": i, "name": lens.names[i]}
            | {"positions": int(positions[i]), "share": float(shares[i])}
            for i in fullest
        ],
        neighbourhood=float(usage @ shares / max(usage.sum(), 1e-300)),
        base_rate=float(lens.cells.document_rates[document]),
    )


def check_document(lens: Lens, doc_id: str, or_also: str = "") -> None:
    """Refuse a document that the lens does not have: unknown, held out, or never indexed.

    ``or_also`` names what was expected beside an id.
    """
    if lens.cells.document_number(doc_id) >= 0:
        return
    corpus, split = lens.corpus, lens.meta.split
    if corpus is None or doc_id not in corpus.doc_ids:
        ids = lens.cells.documents.chunks("doc_id")
        names = list(islice(chain.from_iterable(map(pa.Array.to_pylist, ids)), IDS_COMPARED))
        unknown = " The corpus is not at hand, so whether it is held out is unknown."
        raise InputError(
            f"the lens {lens.name} has no document {doc_id!r}.{suggest(doc_id, names)} Expected "
            f"the id of a document of its corpus{or_also}.{unknown if corpus is None else ''}"
        )
    held_out = corpus.doc_ids.index(doc_id) in corpus.split("heldout")
    raise InputError(
        f"the document {doc_id!r} is {'held out' if held_out else 'not held out'}, and the lens "
        f"{lens.name} was built of the corpus's {split} split: it was never indexed. `prismlm "
        "index --split all` indexes it too."
    )


def texts_that_rely(lm: PrismLM, doc_id: str, documents: Iterable[Document]) -> dict[str, Any]:
    """Return where a document has a share.

    ``texts`` has id, beginning and share of each such text, the largest share first; ``texts_read``
    counts all texts, and ``share`` is the document's in an average one, ``traced`` that of all.
    """
    check_document(lm.lens_for("document to find"), doc_id)
    sharing, read, traced = list[dict[str, Any]](), 0, 0.0
    for text in read_texts(lm, documents):
        if text.attribution is None:
            continue
        read += 1
        traced += text.attribution.traced
        if (share := text.attribution.document_share(doc_id)) > 0:
            facts = {"text_id": text.document.doc_id, "opening": text.document.opening[:OPENING]}
            sharing.append(facts | {"share": share})
    sharing.sort(key=lambda text: -text["share"])
    share = sum(text["share"] for text in sharing) / max(1, read)
    mean = {"share": share, "traced": traced / max(1, read)}
    return {"texts": sharing, "texts_read": read, **mean}
