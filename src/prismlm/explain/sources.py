"""The reverse question: where does one training document show up?"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prismlm.errors import InputError, suggest
from prismlm.explain.audit import audit_identity
from prismlm.explain.audit_files import read_audit
from prismlm.explain.texts import TextOptions, read_texts
from prismlm.index.lens import Lens

if TYPE_CHECKING:
    from prismlm.corpus.documents import Document
    from prismlm.explain.language_model import PrismLM

TEXTS_LISTED = 20
IDS_COMPARED = 20_000  # ids looked through for a similar one


@dataclass(frozen=True)
class DocumentUse:
    """A document among the contexts of one prototype.

    Attributes:
        prototype, name: the prototype.
        rank: of the document's place among the contexts, from 0.
        cosine: of that place to the prototype.
        contexts: how many contexts the prototype has.
        share: 1 / contexts, what the document makes up of them (one place per document is kept).
        usage: the share of all tokens of the corpus that use the prototype.
        position: the place, as an offset into the corpus.
        text: the characters around it, or None if the index holds offsets only.
    """

    prototype: int
    name: str
    rank: int
    cosine: float
    contexts: int
    share: float
    usage: float
    position: int
    text: str | None


@dataclass(frozen=True)
class CellUse:
    """The positions of a document in the cell of one prototype.

    Attributes:
        prototype, name: the prototype that is nearest to these positions.
        positions: how many.
        share: of all positions of that cell.
    """

    prototype: int
    name: str
    positions: int
    share: float


@dataclass(frozen=True)
class TextUse:
    """A text that relied on the document: its id, its beginning and the document's share."""

    text_id: str
    opening: str
    share: float


@dataclass(frozen=True)
class DocumentSources:
    """Where a document shows up.

    Attributes:
        doc_id, source, domain, license, title, url: the document.
        cells: the prototypes whose cells its positions are in, the fullest first; None without
            cells.
        uses: the prototypes that have it among their contexts, by usage-weighted share.
        neighbourhood: Σ usage_i / contexts_i over those, relative to Σ usage_i of all prototypes:
            how much of the neighbourhood of an average use it makes up.
        expected: the same, averaged over all documents among the contexts of the lens.
    """

    doc_id: str
    source: str | None
    domain: str | None
    license: str | None
    title: str | None
    url: str | None
    cells: list[CellUse] | None
    uses: list[DocumentUse]
    neighbourhood: float
    expected: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of ``prismlm sources --json``."""
        return asdict(self)


def document_sources(lens: Lens, doc_id: str) -> DocumentSources:
    """Return the prototypes whose cells hold a document, or that have it among their contexts.

    Raises:
        InputError: the lens has no such document; without cells, no context is from it. The
            message says whether the corpus has it, where the corpus is at hand.
    """
    check_document(lens, doc_id)
    names = lens.documents.names
    number = names.index(doc_id) if doc_id in names else -1
    rows = np.flatnonzero(lens.documents.codes == number)
    usage = np.nan_to_num(lens.prototypes["usage"].to_numpy())
    prototype = lens.index["prototype"].to_numpy()
    counts = np.diff(lens.first_rows)
    total = max(float(usage.sum()), 1e-300)
    uses: list[DocumentUse] = []
    for row in rows.tolist():
        entry = lens.index.slice(row, 1).to_pylist()[0]
        i = int(prototype[row])
        text = None
        if entry["token"] is not None:
            text = f"{entry['before']}{entry['token']}{entry['after']}"
        uses.append(
            DocumentUse(
                prototype=i,
                name=lens.names[i],
                rank=entry["rank"],
                cosine=entry["cosine"],
                contexts=int(counts[i]),
                share=1 / int(counts[i]),
                usage=float(usage[i]),
                position=entry["position"],
                text=text,
            )
        )
    uses.sort(key=lambda use: (-use.usage * use.share, use.prototype))
    if lens.cells is None:
        place = lens.place(int(rows[0]))
    else:
        place = lens.cells.facts(lens.cells.document_number(doc_id))
    placed = float(usage[counts > 0].sum()) / total
    return DocumentSources(
        doc_id,
        *(place[key] for key in ("source", "domain", "license", "title", "url")),
        cells=_cells(lens, doc_id),
        uses=uses,
        neighbourhood=sum(use.usage * use.share for use in uses) / total,
        expected=placed / len(lens.documents.names),
    )


def _cells(lens: Lens, doc_id: str) -> list[CellUse] | None:
    if lens.cells is None:
        return None
    held, sizes = lens.cells.cells_of(lens.cells.document_number(doc_id), lens.num_prototypes)
    order = np.argsort(-held, kind="stable")[: np.count_nonzero(held)].tolist()
    return [CellUse(i, lens.names[i], int(held[i]), float(held[i] / sizes[i])) for i in order]


def check_document(lens: Lens, doc_id: str) -> None:
    """Check that a lens can say where a document shows up.

    Raises:
        InputError: it cannot.
    """
    names = lens.documents.names
    if lens.cells is not None:
        if lens.cells.document_number(doc_id) >= 0:
            return
        if lens.corpus is not None and doc_id in lens.corpus.doc_ids:
            raise InputError(
                f"the document {doc_id!r} is in the corpus, but not in its {lens.meta.split} "
                f"split, of which the lens {lens.name} was built."
            )
        names = lens.cells.documents["doc_id"].slice(0, IDS_COMPARED).to_pylist()
    elif doc_id in names:
        return
    elif lens.corpus is not None and doc_id in lens.corpus.doc_ids:
        raise InputError(
            f"the document {doc_id!r} is in the corpus, but none of its places is among the "
            f"{lens.meta.contexts} nearest of any prototype, so the lens {lens.name} cannot point "
            "to it. An index with --positions has every document."
        )
    raise InputError(
        f"the lens {lens.name} has no document {doc_id!r}.{suggest(doc_id, names[:IDS_COMPARED])} "
        "Expected the id of a document of the corpus it was built from."
    )


def texts_that_rely(
    lm: PrismLM,
    doc_id: str,
    documents: Iterable[Document],
    options: TextOptions,
    limit: int = TEXTS_LISTED,
) -> list[TextUse]:
    """Read texts and return those in which a document has the largest share.

    Raises:
        InputError: the model has no lens, or the lens no such document.
    """
    if lm.lens is None:
        raise InputError(f"{lm.path} has no lens: build one with `prismlm index`.")
    check_document(lm.lens, doc_id)
    found = (
        TextUse(
            of_text.document.doc_id,
            of_text.document.text[:120],
            of_text.attribution.document_share(doc_id),
        )
        for of_text in read_texts(lm, documents, options)
        if of_text.attribution is not None
    )
    return _largest(found, limit)


def audited_texts_that_rely(
    lens: Lens, doc_id: str, audit: Path, limit: int = TEXTS_LISTED
) -> list[TextUse]:
    """Return the texts of an audit's Parquet that list a document among their largest shares.

    Raises:
        InputError: the audit was made with another model or lens, or there is no such file.
        FormatError: it is damaged, or not an audit.
    """
    identity, rows = read_audit(audit)
    wanted = audit_identity(lens, "evidence")
    differing = [key for key in wanted if key != "method" and identity.get(key) != wanted[key]]
    if differing:
        raise InputError(
            f"{audit} was made with another model or lens ({', '.join(differing)} differ). Run "
            "`prismlm audit` again with this one."
        )
    return _largest(_listed(rows, doc_id), limit)


def _listed(rows: Iterator[dict[str, Any]], doc_id: str) -> Iterator[TextUse]:
    for row in rows:
        for document in row["documents"] or ():
            if document["doc_id"] == doc_id:
                yield TextUse(row["text_id"], row["opening"], document["share"])


def _largest(texts: Iterable[TextUse], limit: int) -> list[TextUse]:
    return heapq.nlargest(limit, (t for t in texts if t.share > 0), key=lambda text: text.share)
