"""What an answer relies on, in a sentence or two."""

from __future__ import annotations

from collections.abc import Sequence

from prismlm.explain.shares import DocumentShare, Sources
from prismlm.explain.support import Support

# How often a domain with so large a part of what is attributed is the text's own, of texts of 128
# tokens that a model never read, is in docs/results/domains.md.
MOST, HALF = 0.7, 0.5
# Less than this is not worth telling apart.
LEAST = 0.005


def in_words(
    subject: str, shares: Sources, documents: Sequence[DocumentShare], support: Support | None
) -> str:
    """Return what stands behind some predictions, in words.

    Percentages are of what is attributed at all, which is told as well.

    Args:
        subject: what they are, such as "The answer".
        shares: by domain, or by source where domains tell nothing apart.
        documents: those with the largest shares; the first is named.
        support: how well the corpus supports them, if that is known.
    """
    attributed = 1 - shares.unattributed
    absent = support is not None and support.level == "none"
    if attributed < LEAST or not shares.items:
        said = "None of the evidence is attributed to text of this corpus."
        return f"Not in this corpus. {said}" if absent else said
    who = "Not in this corpus. What comes nearest" if absent else subject
    rests, mostly = ("is", "is mostly") if absent else ("relies on", "relies mostly on")
    first, *others = [(item.key, item.share / attributed) for item in shares.items[:2]]
    if first[1] > MOST:
        said = f"{mostly} {first[0]}: {first[1]:.0%}"
    elif first[1] > HALF:
        said = f"{rests} {first[0]} before all others: {first[1]:.0%}"
    else:
        parts = ", ".join(f"{key} {part:.0%}" for key, part in (first, *others))
        said = f"{rests} no one {shares.by}: {parts}"
    said += " of what is attributed"
    for one in documents[:1]:
        said += f", {one.share / attributed:.0%} one document, “{one.title or one.doc_id}”"
    return f"{who} {said}. {attributed:.0%} of the evidence is attributed."
