"""The reverse question: where does one training document show up?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prismlm.errors import InputError, suggest
from prismlm.explain.audit import OPENING
from prismlm.explain.texts import TextOptions, read_texts
from prismlm.lens.lens import Lens
from prismlm.lens.text import Around

if TYPE_CHECKING:
    from prismlm.corpus.documents import Document
    from prismlm.explain.language_model import PrismLM

IDS_COMPARED = 20_000  # ids searched for a similar one
# Lifts between this and its inverse are as usual.
USUAL = 0.8


class TextUse(NamedTuple):
    """A text that relied on the document: its id, its beginning and the document's share."""

    text_id: str
    opening: str
    share: float


class TextUses(NamedTuple):
    """Texts that relied on a document."""

    texts: list[TextUse]  # those in which it has a share, the largest first
    read: int  # the number of all texts

    @property
    def share(self) -> float:
        """The document's share in an average text."""
        return sum(text.share for text in self.texts) / max(1, self.read)


@dataclass(frozen=True)
class DocumentSources:
    """Where a document shows up."""

    doc_id: str
    source: str | None
    domain: str | None
    license: str | None
    title: str | None
    url: str | None
    # The prototypes with its positions in their cells, the fullest first: prototype, name, the
    # number of positions, and their share of the cell.
    cells: list[dict[str, Any]]
    # The prototypes with it among their contexts, by usage-weighted share: prototype, name, rank of
    # the context (from 0) and its cosine, the number of contexts and its share of them, the
    # prototype's usage, the context's position, and the characters around, if they are stored.
    uses: list[dict[str, Any]]
    # Σ usage_i / contexts_i over those, relative to Σ usage_i of all prototypes: its share of the
    # neighbourhood of an average use.
    neighbourhood: float
    base_rate: float  # its share of all positions of the lens

    def sentence(self, texts: TextUses | None = None) -> str:
        """Say how many times its share of the corpus its share in texts, or near answers, is."""
        title = " ".join((self.title or self.doc_id).split())
        share = self.neighbourhood if texts is None else texts.share
        lift = share / self.base_rate if self.base_rate else 0.0
        if not share:
            nothing = "is not behind any of these texts" if texts else "is near to no prediction"
            return f"“{title}” {nothing}."
        if texts is None:
            subject = f"Predictions of the model come near to “{title}”"
        else:
            these = "this text" if texts.read == 1 else f"these {texts.read:,} texts"
            subject = f"“{title}” is behind {these}"
        if USUAL < lift < 1 / USUAL:
            return f"{subject} about as often as usual for its length."
        comparison = "more" if lift > 1 else "less"
        return (
            f"{subject} {comparison} often than usual: {lift:,.1f} times as much as its share of "
            "the corpus suggests."
        )


def document_sources(lens: Lens, doc_id: str) -> DocumentSources:
    """Return the prototypes with a document in their cells or among their contexts."""
    check_document(lens, doc_id)
    usage, counts = np.nan_to_num(lens.prototypes["usage"].to_numpy()), np.diff(lens.first_rows)
    total = max(float(usage.sum()), 1e-300)
    uses = [
        {
            "prototype": (i := int(row["prototype"])),
            "name": lens.names[i],
            "rank": row["rank"],
            "cosine": row["cosine"],
            "contexts": int(counts[i]),
            "share": 1 / int(counts[i]),
            "usage": float(usage[i]),
            "position": row["position"],
            "text": None if row["token"] is None else "".join(map(row.get, Around._fields)),
        }
        for row in lens.index.filter(pc.field("doc_id") == doc_id).to_pylist()
    ]
    uses.sort(key=lambda use: (-use["usage"] * use["share"], use["prototype"]))
    document = lens.cells.document_number(doc_id)
    positions, sizes = lens.cells.cells_of(document, lens.num_prototypes)
    if not positions.any():
        raise InputError(
            f"none of the positions of the document {doc_id!r} was indexed: the lens {lens.name} "
            "keeps a sample of positions. An index with --positions 1 has every one."
        )
    fullest = np.argsort(-positions, kind="stable")[: np.count_nonzero(positions)].tolist()
    return DocumentSources(
        **lens.cells.facts(document),
        cells=[
            {"prototype": i, "name": lens.names[i], "positions": n, "share": n / int(sizes[i])}
            for i in fullest
            for n in [int(positions[i])]
        ],
        uses=uses,
        neighbourhood=sum(use["usage"] * use["share"] for use in uses) / total,
        base_rate=float(lens.cells.document_rates[document]),
    )


def check_document(lens: Lens, doc_id: str) -> None:
    """Refuse a document that the lens does not have: unknown, held out, or never indexed."""
    if lens.cells.document_number(doc_id) >= 0:
        return
    corpus, split = lens.corpus, lens.meta.split
    if corpus is None or doc_id not in corpus.doc_ids:
        ids = lens.cells.documents.chunks("doc_id")
        names = list(islice(chain.from_iterable(map(pa.Array.to_pylist, ids)), IDS_COMPARED))
        unknown = " The corpus is not at hand, so whether it is held out is unknown."
        raise InputError(
            f"the lens {lens.name} has no document {doc_id!r}.{suggest(doc_id, names)} Expected "
            f"the id of a document of its corpus.{unknown if corpus is None else ''}"
        )
    held_out = corpus.doc_ids.index(doc_id) in corpus.split("heldout")
    raise InputError(
        f"the document {doc_id!r} is {'held out' if held_out else 'not held out'}, and the lens "
        f"{lens.name} was built of the corpus's {split} split: it was never indexed. `prismlm "
        "index --split all` indexes it too."
    )


def texts_that_rely(
    lm: PrismLM, doc_id: str, documents: Iterable[Document], options: TextOptions
) -> TextUses:
    """Return the texts in which a document has a share."""
    check_document(lm.lens_for("document to find"), doc_id)
    sharing, read = list[TextUse](), 0
    for text in read_texts(lm, documents, options):
        if text.attribution is None:
            continue
        read += 1
        if (share := text.attribution.document_share(doc_id)) > 0:
            document = text.document
            sharing.append(TextUse(document.doc_id, document.opening[:OPENING], share))
    return TextUses(sorted(sharing, key=lambda text: -text.share), read)
