"""What an answer relies on, in a sentence or two, and what casts doubt on its figures."""

from __future__ import annotations

import math

from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.shares import DocumentShare, Share, Sources
from prismlm.explain.support import Support

# How often a domain with so large a part of what is attributed is the text's own, of texts of 128
# tokens that a model never read, is in docs/results/domains.md.
MOST, HALF = 0.7, 0.5
# Where less of the evidence is attributed, nothing is said of what it falls on.
LEAST = 0.05
# A part of what is attributed that is fewer times the domain's share of the corpus says nothing.
LEAST_LIFT = 1.25
# Median explained shares beyond these are not those of a head that was fitted to the model.
LOWEST_EXPLAINED, HIGHEST_EXPLAINED = -0.5, 1.5


def in_words(
    subject: str,
    shares: Sources,
    document: tuple[DocumentShare, float] | None,
    support: Support | None,
) -> str:
    """Return what stands behind some predictions, in words.

    The domain that is named first has the largest p log(p / q), with its part p of what is
    attributed and its share q of the corpus: a large part of a large domain tells little.

    Args:
        subject: what they are, such as "The answer".
        shares: by domain, or by source where domains tell nothing apart.
        document: one that is shown beside, and its share.
        support: how well the corpus supports them, if that is known.
    """
    attributed = 1 - shares.unattributed
    absent = support is not None and support.level == "none"
    if attributed < LEAST or not shares.items:
        part = f"Almost none of the evidence ({attributed:.1%})" if shares.items else "No evidence"
        said = f"{part} is attributed to text of this corpus."
        return f"Not in this corpus. {said}" if absent else said
    who = "Not in this corpus. What comes nearest" if absent else subject
    rests, mostly = ("is", "is mostly") if absent else ("relies on", "relies mostly on")
    parts = [Share(one.key, one.share / attributed, one.base_rate) for one in shares.items]
    parts.sort(key=_information, reverse=True)
    first, of = parts[0], "of what is attributed"
    beside = [f" ({one.base_rate:.0%} of the corpus)" if one.base_rate else "" for one in parts[:2]]
    if (first.lift or LEAST_LIFT) < LEAST_LIFT:
        said = f"{rests} no {shares.by} more than the corpus holds of it: {first.key} "
        said += f"{first.share:.0%} {of}{beside[0]}"
    elif first.share > MOST:
        said = f"{mostly} {first.key}: {first.share:.0%} {of}{beside[0]}"
    elif first.share > HALF:
        said = f"{rests} {first.key} before all others: {first.share:.0%} {of}{beside[0]}"
    else:
        both = zip(parts, beside, strict=False)
        listed = ", ".join(f"{one.key} {one.share:.0%}{base}" for one, base in both)
        said = f"{rests} no one {shares.by}: {listed} {of}"
    if document is not None:
        shown, share = document
        said += f"; {share / attributed:.0%} one document, “{shown.title or shown.doc_id}”"
    return f"{who} {said}. {attributed:.0%} of the evidence is attributed."


def _information(part: Share) -> float:
    """Return p log(p / q) of a part p; p itself where q is not known."""
    return part.share * math.log(part.lift) if part.lift else part.share


def doubts(table: EvidenceTable) -> list[str]:
    """Return what is wrong with model or head, to see by figures that no working ones have."""
    if not len(table.states):
        return []
    # Unit states, or else zero.
    dead = int((~(table.states.norm(dim=1) > HALF)).sum())
    if dead:
        return [
            f"The hidden states of {dead:,} of {len(table.states):,} predictions are zero, so "
            "nothing in the corpus is near to them: the model's weights, such as its final norm, "
            "are damaged."
        ]
    explained = table.evidence.sum(1)
    share = float((explained / (explained + table.residual + table.bias)).median())
    if not table.evidence.any():
        why = "no prototype is active"
    elif not LOWEST_EXPLAINED <= share <= HIGHEST_EXPLAINED:
        why = f"the median explained share is {share:,.0%}, where 0% to 100% can be"
    else:
        return []
    return [f"The prototype head does not fit this model: {why}. Attach a new one."]
