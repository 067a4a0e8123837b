"""What the page of a trace shows, as plain data; each context of the corpus is held once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prismlm.explain.shares import DocumentShare, Passage, Sources, worth_showing
from prismlm.explain.steps import Step
from prismlm.lens.lens import Lens
from prismlm.lens.text import Around
from prismlm.lens.where import UNKNOWN
from prismlm.pages.colours import colour

if TYPE_CHECKING:
    from prismlm.explain.chain import PrototypeChain
    from prismlm.explain.trace import Trace

CONTEXTS_PER_PROTOTYPE = 3
# Of each step, the largest: contexts of all would be most of a page.
PROTOTYPES_WITH_CONTEXTS = 6
# Characters of a context's line, which is cut at its ends in any case.
SHOWN_BEFORE, SHOWN_AFTER = 60, 48
DOCUMENTS_PER_STEP = 3
DOCUMENTS_OF_TEXT = 5
PASSAGES_OF_TEXT = 8
QUOTES_OF_TEXT = 6
KEYS_SHOWN = 5


def safe_link(url: str | None) -> str | None:
    """Return the address if it is http or https; anything else is not made a link."""
    if not url:
        return None
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        return None
    return url.strip() if parts.scheme in ("http", "https") and parts.netloc else None


def visible(token: str) -> str:
    """Return a token with the whitespace at its ends, or all it has, made visible."""
    marks = str.maketrans({"\n": "↵", "\r": "↵", "\t": "⇥"})
    inner = token.strip(" ")
    if not inner:
        return "␣" * len(token) if token else "∅"
    before, after = token[: token.index(inner)], token[token.rindex(inner) + len(inner) :]
    return ("·" * len(before) + inner + "·" * len(after)).translate(marks)


@dataclass
class Pool:
    """What the traces of one lens share, each held once: prototypes, places of text, documents.

    Attributes:
        lens: theirs; None without one.
        prototypes: by id, name, category, colour and the numbers of contexts, if they are kept.
        places: text before, token, text after, number of the document, and position in the corpus.
            Text in which other tokens are marked is a list: as it stands, marked, as it stands, ...
        documents: doc_id, title, source, license and safe address.
    """

    lens: Lens | None
    prototypes: dict[int, list[Any]] = field(default_factory=dict[int, list[Any]])
    places: list[list[Any]] = field(default_factory=list[list[Any]])
    documents: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _numbers: dict[Any, int] = field(default_factory=dict[Any, int])

    def to_dict(self) -> dict[str, Any]:
        """Return what is shared as the page's script reads it."""
        return {name: getattr(self, name) for name in ("prototypes", "places", "documents")}

    def add(self, place: dict[str, Any], *, cut: bool = False) -> int:
        """Return the number of a place; a cut one keeps what a line has room for."""
        also = place.get("also", [])
        key = place["position"], cut, tuple(also)
        if key not in self._numbers:
            before, token, after = (place[name] for name in Around._fields)
            if also:
                text, end = before + token + after, len(before + token)
                before = _parted(text, 0, len(before), also)
                after = _parted(text, end, len(text), also)
            if cut and token is not None:
                before, after = before[-SHOWN_BEFORE:], after[:SHOWN_AFTER]
            self._numbers[key] = len(self.places)
            at = place["position"]
            self.places.append([before, token, after, self._document(place), at])
        return self._numbers[key]

    def _document(self, place: dict[str, Any]) -> int:
        known = {key: place[key] for key in ("doc_id", "title", "source", "license")}
        known["url"] = safe_link(place["url"])
        key = tuple(known.values())
        if key not in self._numbers:
            self._numbers[key] = len(self.documents)
            self.documents.append(known)
        return self._numbers[key]

    def use(self, step: Step) -> list[list[float]]:
        """Return id, contribution, evidence and cosine of each prototype, and keep their names.

        Those that carry most get their nearest contexts.
        """
        largest = sorted(step.prototypes, key=lambda use: -abs(use.contribution))
        with_contexts = {use.id for use in largest[:PROTOTYPES_WITH_CONTEXTS]}
        for use in step.prototypes:
            name = use.name or f"prototype {use.id}"
            known = self.prototypes.setdefault(
                use.id, [name, use.category or 0, colour(use.category)]
            )
            if len(known) == 3 and (self.lens is None or use.id in with_contexts):
                known.append(self._nearest(use.id))
        return [
            [u.id, round(u.contribution, 5), round(u.evidence, 5), round(u.cosine, 2)]
            for u in step.prototypes
        ]

    def _nearest(self, prototype: int) -> list[int]:
        if self.lens is None:
            return []
        rows = self.lens.rows_of(prototype)
        count = min(CONTEXTS_PER_PROTOTYPE, rows.stop - rows.start)
        places = self.lens.index.slice(rows.start, count).to_pylist()
        return [self.add(place, cut=True) for place in places]

    def document(self, document: DocumentShare) -> dict[str, Any]:
        """Return a document's share and place; of what speaks against, what it speaks against."""
        around = document.around
        words = dict.fromkeys(Around._fields) if around is None else around._asdict()
        words["also"] = document.also if isinstance(document, Passage) else []
        value = {"share": document.share, "place": self.add(vars(document) | words)}
        if isinstance(document, Passage) and document.predicted is not None:
            value |= {"predicted": visible(document.predicted), "probability": document.probability}
        return value


def _parted(text: str, begin: int, end: int, marked: Sequence[tuple[int, int]]) -> str | list[str]:
    """Return what lies from one place of a text to another, parted where marks begin and end."""
    inside = [edge for span in marked if span[0] < end and span[1] > begin for edge in span]
    edges = [begin, *(min(max(edge, begin), end) for edge in inside), end]
    parts = [text[left:right] for left, right in pairwise(edges)]
    return parts if inside else parts[0]


def trace_data(
    trace: Trace, pool: Pool | None = None, against: int = 0, *, each: bool = True
) -> dict[str, Any]:
    """Return steps and shares as the page's script reads them, six digits of each figure.

    Args:
        trace: what is shown.
        pool: where what it shares with other traces is put.
        against: how many passages that speak against its predictions.
        each: say what stands behind each step, not behind all alone.
    """
    pool = Pool(trace.lens) if pool is None else pool
    value = {
        "steps": [
            _step(step, float(trace.table.bias[t]), pool)
            | (behind(trace[t : t + 1], pool, DOCUMENTS_PER_STEP) if each else {})
            for t, step in enumerate(trace.steps)
        ],
        # Of a model with feedback the first token has none; of others, no token.
        "feedback": has_feedback(trace),
        "softcap": trace.softcap,
        "whole": _whole(trace, pool, against),
        "places": "Documents" if trace.lens is None else "Passages",
    }
    return rounded(value)


def rounded(value: Any) -> Any:
    """Return values with six digits of each figure: of float32, more is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def has_feedback(trace: Trace) -> bool:
    """Say whether uncertainty was fed back to some token of a trace."""
    return any(step.uncertainty is not None for step in trace.steps)


def _step(step: Step, bias_evidence: float, pool: Pool) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if step.chains is not None:
        extra["chains"] = [_chain(chain) for chain in step.chains]
    if step.uncertainty is not None:
        extra["fed"] = [step.uncertainty, step.uncertainty_code]
    return extra | {
        "token": visible(step.pieces[0].label),
        "target": visible(step.pieces[1].label),
        "from": step.target_from,
        "position": step.position,
        "probability": step.probability,
        "logit": step.logit,
        "model": step.model_logit,
        "explained": step.explained_share,
        "bias": [step.bias, bias_evidence],
        "residual": [step.residual, step.residual_evidence],
        "uses": pool.use(step),
    }


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


def behind(trace: Trace, pool: Pool, places: int) -> dict[str, Any]:
    """Return shares by domain and source, and the places with the largest shares."""
    if trace.lens is None:
        return {"shares": [], "documents": []}
    return {
        "shares": [
            shown_shares(trace.sources(by)) for by in ("domain", "source") if _tells(trace.lens, by)
        ],
        "documents": [pool.document(d) for d in trace.places(places)],
    }


def _tells(lens: Lens, by: str) -> bool:
    """Say whether a lens knows anything of its documents by a column."""
    return lens.keys("mass", by).names != [UNKNOWN]


def _whole(trace: Trace, pool: Pool, against: int) -> dict[str, Any] | None:
    if trace.lens is None:
        return None
    value: dict[str, Any] = {
        "shares": [
            shown_shares(trace.sources(by))
            for by in ("domain", "source", "license")
            if _tells(trace.lens, by)
        ],
        "documents": _documents(trace, pool),
    }
    if against:
        value["against"] = [pool.document(p) for p in trace.against(against)]
    if trace.lens.suffixes is not None:
        value["verbatim"] = [
            {
                "text": one.text,
                "length": one.span.length,
                "count": one.span.count,
                "place": one.places[0],
            }
            for one in trace.verbatim(QUOTES_OF_TEXT)
        ]
    return value


def _documents(trace: Trace, pool: Pool) -> list[dict[str, Any]]:
    """Return the documents worth showing, each with its own of the first passages."""
    passages: dict[str, list[dict[str, Any]]] = {}
    for place in trace.places(PASSAGES_OF_TEXT):
        passages.setdefault(place.doc_id, []).append(pool.document(place))
    documents = worth_showing(trace.documents(DOCUMENTS_OF_TEXT))
    shown = [(one, pool.document(one)) for one in documents]
    return [value | {"passages": passages.get(one.doc_id, [value])} for one, value in shown]


def support_line(trace: Trace) -> dict[str, str] | None:
    """Return how well the corpus supports the answer, in a sentence; None without a lens."""
    if trace.lens is None:
        return None
    if trace.support is not None:
        return {"level": trace.support.level, "sentence": trace.support.sentence}
    sentence = (
        "How well this corpus supports the answer is not known: the lens has no scale of support. "
        "`prismlm index` builds one with it."
    )
    return {"level": "unknown", "sentence": sentence}


def shown_shares(sources: Sources) -> dict[str, Any]:
    """Return the largest shares, and what all others come to, so that the bars sum to 1."""
    shown, others = sources.items[:KEYS_SHOWN], sources.items[KEYS_SHOWN:]
    return {
        "by": sources.by,
        "items": [[item.key, item.share, item.base_rate] for item in shown],
        "others": [len(others), sum(item.share for item in others)],
        "unattributed": sources.unattributed,
    }
