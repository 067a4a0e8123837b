"""A trace as the JSON that the explorer and its static page show, and that page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prismlm.corpus.pieces import DITTO, Piece, visible
from prismlm.explain.attribution import Passage
from prismlm.explain.subject import CANDIDATES, worth_showing
from prismlm.lens.cells import UNKNOWN
from prismlm.lens.layout import trained_on_words
from prismlm.lens.lens import Around, Lens
from prismlm.pages.frame import called, colour, html_fragment, html_page, largest_shares, rounded

if TYPE_CHECKING:
    from prismlm.explain.chain import PrototypeChain
    from prismlm.explain.trace import Step, Trace

CAVEAT = (
    "Shares show which learned patterns carry a prediction and where they occur in the corpus; "
    "they are no proof that removing a document changes the answer."
)
NO_LENS = "This model has no lens, so no training text is shown. `prismlm index` builds one."
NO_SCALE = (
    "How well this corpus supports the answer is not known: the lens has no scale of support. "
    "`prismlm index` builds one with it."
)
SCRIPT = "trace_page.js"
FIELDS = ("doc_id", "title", "source", "license", "url")
CONTEXTS_PER_PROTOTYPE = 3
# The largest of each step: contexts of all would be most of a page.
PROTOTYPES_WITH_CONTEXTS = 6
PASSAGES_PER_STEP = 3
DOCUMENTS, PASSAGES, QUOTES = 5, 8, 6


def page(
    traces: Sequence[Trace], title: str = "Where the answer comes from", *, against: int = 0
) -> str:
    """Return a complete HTML document of traces, each with ``against`` opposing passages."""
    return html_page(title, SCRIPT, _data(traces, against))


def fragment(trace: Trace) -> str:
    """Return the HTML of a trace for a notebook, which may contain any number of them."""
    return html_fragment(SCRIPT, _data([trace], 0))


def _data(traces: Sequence[Trace], against: int) -> dict[str, Any]:
    """Return the data of traces, with one pool for each lens."""
    pools: dict[int, Pool] = {}
    answers: list[dict[str, Any]] = []
    for trace in traces:
        pool = pools.setdefault(id(trace.lens), Pool(trace.lens))
        number = list(pools).index(id(trace.lens))
        answers.append(trace_data(trace, pool, against) | {"shared": number})
    return {"answers": answers, "shared": [pool.to_dict() for pool in pools.values()]}


@dataclass
class Pool:
    """Prototypes, places and documents that the traces of one lens share."""

    lens: Lens | None
    # By id: name, category, colour, and the numbers of contexts if they are shown.
    prototypes: dict[int, list[Any]] = field(default_factory=dict[int, list[Any]])
    # Text before, token, text after, number of the document, and position in the corpus. Text with
    # other marked tokens is a list that alternates unmarked and marked parts.
    places: dict[tuple[Any, ...], int] = field(default_factory=dict[tuple[Any, ...], int])
    documents: dict[tuple[Any, ...], int] = field(default_factory=dict[tuple[Any, ...], int])

    def to_dict(self) -> dict[str, Any]:
        """Return the pool as the page's script reads it."""
        return {
            "prototypes": self.prototypes,
            "places": list(self.places),
            "documents": [dict(zip(FIELDS, values, strict=True)) for values in self.documents],
        }

    def place(
        self, document: dict[str, Any], around: Around | None, also: Sequence[tuple[int, int]] = ()
    ) -> int:
        """Return the number of a place in a document; ``also`` marks other spans of its text."""
        before, token, after = around or (None, None, None)
        if also and around is not None:
            text, end = "".join(around), len(around.before + around.token)
            before = _split_at_marks(text, 0, len(around.before), also)
            after = _split_at_marks(text, end, len(text), also)
        key = tuple(document[name] for name in FIELDS)
        number = self.documents.setdefault(key, len(self.documents))
        place = (before, token, after, number, document["position"])
        return self.places.setdefault(place, len(self.places))

    def shared(self, passage: Passage) -> dict[str, Any]:
        """Return a passage's share and place, and the token that an opposing passage predicts."""
        place = self.place(vars(passage), passage.around, passage.also)
        data = {"share": passage.share, "place": place}
        if passage.predicted is not None:
            data |= {"predicted": visible(passage.predicted), "probability": passage.probability}
        return data

    def uses(self, step: Step) -> list[list[float]]:
        """Return id, contribution, evidence and cosine of each prototype, and add it to the pool.

        Those that contribute most get their nearest contexts.
        """
        largest = sorted(step.prototypes, key=lambda use: -abs(use.contribution))
        with_contexts = {use.id for use in largest[:PROTOTYPES_WITH_CONTEXTS]}
        for use in step.prototypes:
            new = [called(use.name, use.id), use.category, colour(use.category)]
            entry = self.prototypes.setdefault(use.id, new)
            if len(entry) == 3 and use.id in with_contexts:
                entry.append(self._contexts(use.id))
        return [[use.id, use.contribution, use.evidence, use.cosine] for use in step.prototypes]

    def _contexts(self, prototype: int) -> list[int]:
        if self.lens is None:
            return []
        rows = self.lens.rows_of(prototype)
        count = min(CONTEXTS_PER_PROTOTYPE, rows.stop - rows.start)
        contexts = self.lens.index.slice(rows.start, count).to_pylist()
        return [self.place(row, Around(*(row[n] for n in Around._fields))) for row in contexts]


def _split_at_marks(
    text: str, begin: int, end: int, marked: Sequence[tuple[int, int]]
) -> str | tuple[str, ...]:
    """Return a part of a text, split where marks begin and end."""
    inside = [edge for span in marked if span[0] < end and span[1] > begin for edge in span]
    edges = [begin, *(min(max(edge, begin), end) for edge in inside), end]
    parts = tuple(text[left:right] for left, right in pairwise(edges))
    return parts if inside else parts[0]


def trace_data(trace: Trace, pool: Pool, against: int = 0, *, each: bool = True) -> dict[str, Any]:
    """Return a trace as the scripts read it; with ``each``, with the sources of every step."""
    steps = trace.steps
    last = [steps[-1].pieces[1]] if steps and steps[-1].target_from == "generated" else []
    facts = [("model", trace.model)]
    if trace.lens is not None:
        meta = trace.lens.meta
        facts.append(("lens", trace.lens.name))
        facts.append(("corpus", meta.size()))
        if meta.trained_on is not None:
            facts.append(("trained on it", trained_on_words(meta.trained_on, meta.split)))
    data = {
        "question": trace.question if trace.first or trace.written else "",
        "answer": trace.answer.strip() or _ending(trace),
        "support": _support(trace),
        "notes": trace.notes,
        "facts": facts,
        "tokens": [spelt(piece) for piece in [*(step.pieces[0] for step in steps), *last]],
        "steps": [
            step_data(step, pool)
            | (sources_data(trace[t : t + 1], pool, PASSAGES_PER_STEP) if each else {})
            for t, step in enumerate(steps)
        ],
        # In a model with feedback, only the first token has none.
        "feedback": any(step.uncertainty is not None for step in steps),
        "softcap": trace.softcap,
        "whole": _whole(trace, pool, against) if steps else None,
    }
    return rounded(data)


def _ending(trace: Trace) -> str:
    """Return the special token that selected predictions without words end in, if any."""
    selected = trace.parent is not None and trace.steps
    return visible(trace.steps[-1].pieces[1].label) if selected else ""


def spelt(piece: Piece) -> str:
    """Return a token's text; the first of several tokens of one character has the character."""
    return piece.text if piece.number == 1 else DITTO


def step_data(step: Step, pool: Pool) -> dict[str, Any]:
    """Return one prediction and its parts, each with its evidence."""
    data: dict[str, Any] = {
        "token": visible(step.pieces[0].label),
        "target": visible(step.pieces[1].label),
        "text": spelt(step.pieces[1]),
        "from": step.target_from,
        "position": step.position,
        "probability": step.probability,
        "logit": step.logit,
        "model": step.model_logit,
        "explained": step.explained_share,
        "bias": [step.bias, step.bias_evidence],
        "residual": [step.residual, step.residual_evidence],
        "uses": pool.uses(step),
    }
    if step.uncertainty is not None:
        data["fed"] = [step.uncertainty, step.uncertainty_code]
    if step.chains is not None:
        data["chains"] = [_chain(chain) for chain in step.chains]
    return data


def _chain(chain: PrototypeChain) -> dict[str, Any]:
    return {
        "activation": chain.activation,
        "parts": [chain.embedding, sum(chain.mlps), sum(chain.mixers), chain.edit],
        "channels": [
            [
                *(use.layer, use.channel, use.half_life, use.activation_part, use.contribution),
                [[source.position, visible(source.token), source.part] for source in use.tokens],
            ]
            for use in chain.channels
        ],
    }


def sources_data(trace: Trace, pool: Pool, passages: int) -> dict[str, Any]:
    """Return shares by domain and source, and the passages with the largest shares."""
    if trace.lens is None:
        return {"shares": [], "documents": []}
    return {
        "shares": _shares(trace, ("domain", "source")),
        "documents": [pool.shared(passage) for passage in trace.passages(passages)],
    }


def _whole(trace: Trace, pool: Pool, against: int) -> dict[str, Any] | None:
    if trace.lens is None:
        return None
    passages: dict[str, list[dict[str, Any]]] = {}
    for passage in trace.passages(PASSAGES):
        passages.setdefault(passage.doc_id, []).append(pool.shared(passage))
    documents: list[dict[str, Any]] = []
    for document in worth_showing(trace.documents(CANDIDATES), DOCUMENTS, trace.subject):
        shared = pool.shared(document)
        documents.append(shared | {"passages": passages.get(document.doc_id, [shared])})
    shares = _shares(trace, ("domain", "source", "license"))
    data: dict[str, Any] = {"shares": shares, "documents": documents}
    if against:
        data["against"] = [pool.shared(passage) for passage in trace.against(against)]
    if trace.lens.suffixes is not None:
        data["verbatim"] = [
            {"text": q.text, "length": q.length, "count": q.count, "place": q.places[0]}
            for q in trace.verbatim(QUOTES)
        ]
    return data


def _shares(trace: Trace, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the largest shares by each column that the lens has values for."""
    assert trace.lens is not None
    known = [by for by in columns if trace.lens.cells.keys(by).names != [UNKNOWN]]
    return [largest_shares(trace.sources(by).to_dict()) for by in known]


def _support(trace: Trace) -> dict[str, str]:
    if trace.support is not None:
        return {"level": trace.support.level, "sentence": trace.support.sentence}
    return {"level": "unknown", "sentence": NO_LENS if trace.lens is None else NO_SCALE}
