"""What the page of a trace shows, as plain data; each context of the corpus is held once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prismlm.explain.passages import Passage
from prismlm.explain.shares import DocumentShare, Sources
from prismlm.explain.steps import PrototypeUse, Step
from prismlm.explain.verbatim import Quote
from prismlm.index.around import Around
from prismlm.index.lens import Lens

if TYPE_CHECKING:
    from prismlm.explain.chain import PrototypeChain
    from prismlm.explain.trace import Trace

CONTEXTS_PER_PROTOTYPE = 3
# Of each step, the largest: contexts of all would be most of a page.
PROTOTYPES_WITH_CONTEXTS = 6
DOCUMENTS_PER_STEP = 3
DOCUMENTS_OF_TEXT = 6
QUOTES_OF_TEXT = 6
KEYS_SHOWN = {"domain": 8, "source": 6, "license": 6}
# A full turn times the golden ratio's lesser part: neighbouring ids get hues far apart.
GOLDEN_ANGLE = 137.508


def hue(use: PrototypeUse) -> int:
    """Return a hue in degrees that a category, or else a prototype, has on every page."""
    number = use.id
    if use.category:
        number = sum(ord(letter) * (place + 1) for place, letter in enumerate(use.category))
    return round(number * GOLDEN_ANGLE) % 360


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
class _Pool:
    """Places in the corpus by their global position, numbered in the order they are met."""

    lens: Lens
    numbers: dict[int, int] = field(default_factory=dict[int, int])
    entries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    of_prototype: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def add(self, place: dict[str, Any]) -> int:
        """Return the number of a row of the index."""
        position = place["position"]
        if position not in self.numbers:
            self.numbers[position] = len(self.entries)
            kept = ("before", "token", "after", "doc_id", "title", "source", "license")
            self.entries.append(
                {key: place[key] for key in kept} | {"url": safe_link(place["url"])}
            )
        return self.numbers[position]

    def nearest(self, prototype: int) -> list[int]:
        """Return the numbers of a prototype's nearest contexts."""
        if prototype not in self.of_prototype:
            rows = self.lens.rows_of(prototype)
            count = min(CONTEXTS_PER_PROTOTYPE, rows.stop - rows.start)
            places = self.lens.index.slice(rows.start, count).to_pylist()
            self.of_prototype[prototype] = [self.add(place) for place in places]
        return self.of_prototype[prototype]

    def document(self, document: DocumentShare) -> dict[str, Any]:
        """Return a document's share and the number of its place."""
        around = document.around
        words = dict.fromkeys(Around._fields) if around is None else around._asdict()
        return {"share": document.share, "place": self.add(vars(document) | words)}

    def opponent(self, passage: Passage) -> dict[str, Any]:
        """Return a passage that speaks against predictions."""
        assert passage.predicted is not None
        opposed = {"predicted": visible(passage.predicted), "probability": passage.probability}
        return self.document(passage) | opposed


def trace_data(trace: Trace, against: int = 0) -> dict[str, Any]:
    """Return steps, prototypes, contexts and shares as the page's script reads them.

    Args:
        trace: what is shown.
        against: how many passages that speak against its predictions.
    """
    pool = None if trace.lens is None else _Pool(trace.lens)
    prototypes: dict[int, dict[str, Any]] = {}
    steps: list[dict[str, Any]] = []
    for t, step in enumerate(trace.steps):
        steps.append(_step(step, float(trace.table.bias[t])) | _behind(trace[t : t + 1], pool))
        for use in step.prototypes:
            if use.id not in prototypes:
                prototypes[use.id] = {
                    "name": use.name or f"prototype {use.id}",
                    "category": use.category,
                    "hue": hue(use),
                    "contexts": [] if pool is None else None,
                }
        if pool is not None:
            largest = sorted(step.prototypes, key=lambda use: -abs(use.contribution))
            for use in largest[:PROTOTYPES_WITH_CONTEXTS]:
                prototypes[use.id]["contexts"] = pool.nearest(use.id)
    whole = _whole(trace, pool, against)
    return {
        "steps": steps,
        "prototypes": prototypes,
        # Of a model with feedback the first token has none; of others, no token.
        "feedback": has_feedback(trace),
        "whole": whole,
        "places": "Passages" if has_passages(trace) else "Documents",
        "contexts": [] if pool is None else pool.entries,
    }


def has_passages(trace: Trace) -> bool:
    """Say whether passages stand behind a trace, or documents alone."""
    return trace.lens is not None and trace.lens.cells is not None


def has_feedback(trace: Trace) -> bool:
    """Say whether uncertainty was fed back to some token of a trace."""
    return any(step.uncertainty is not None for step in trace.steps)


def _step(step: Step, bias_evidence: float) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if step.chains is not None:
        extra["chains"] = [_chain(chain) for chain in step.chains]
    if step.uncertainty is not None:
        extra["fed"] = [step.uncertainty, step.uncertainty_code]
    return extra | {
        "token": visible(step.token),
        "target": visible(step.target),
        "from": step.target_from,
        "position": step.position,
        "probability": step.probability,
        "logit": step.logit,
        "model": step.model_logit,
        "explained": step.explained_share,
        "bias": [step.bias, bias_evidence],
        "residual": [step.residual, step.residual_evidence],
        "uses": [[u.id, u.contribution, u.evidence, u.cosine] for u in step.prototypes],
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


def _behind(trace: Trace, pool: _Pool | None) -> dict[str, Any]:
    if pool is None:
        return {"shares": [], "documents": []}
    return {
        "shares": [shown_shares(trace.sources(by), KEYS_SHOWN[by]) for by in ("domain", "source")],
        "documents": [pool.document(d) for d in trace.places(DOCUMENTS_PER_STEP)],
    }


def _whole(trace: Trace, pool: _Pool | None, against: int) -> dict[str, Any] | None:
    if pool is None:
        return None
    value: dict[str, Any] = {
        "shares": [shown_shares(trace.sources(by), count) for by, count in KEYS_SHOWN.items()],
        "documents": [pool.document(d) for d in trace.places(DOCUMENTS_OF_TEXT)],
    }
    if against:
        value["against"] = [pool.opponent(p) for p in trace.against(against)]
    if pool.lens.suffixes is not None:
        value["verbatim"] = [_quote(quote) for quote in trace.verbatim(QUOTES_OF_TEXT)]
    return value


def _quote(quote: Quote) -> dict[str, Any]:
    span, first = quote.span, quote.places[0]
    return {"text": quote.text, "length": span.length, "count": span.count, "place": first}


def shown_shares(sources: Sources, count: int) -> dict[str, Any]:
    """Return the largest shares, and what all others come to, so that the bars sum to 1."""
    shown, others = sources.items[:count], sources.items[count:]
    return {
        "by": sources.by,
        "items": [[item.key, item.share, item.base_rate] for item in shown],
        "others": [len(others), sum(item.share for item in others)],
        "unattributed": sources.unattributed,
    }
