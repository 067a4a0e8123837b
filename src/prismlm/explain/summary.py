"""What an answer relies on, in a sentence or two."""

from __future__ import annotations

from collections.abc import Sequence

from prismlm.explain.shares import DocumentShare, Sources
from prismlm.explain.support import Support

# Of text that a model never read, a domain with more than MOST of what is attributed is the text's
# own in 99 of 100, one with more than HALF in 91: docs/results/domains.md.
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
    start = "Not in this corpus. " if absent else ""
    if attributed < LEAST or not shares.items:
        return f"{start}None of the evidence is attributed to text of this corpus."
    start += "What comes nearest is" if absent else f"{subject} relies"
    on = "" if absent else " on"
    first, *others = [(item.key, item.share / attributed) for item in shares.items[:2]]
    if first[1] > MOST:
        said = f"mostly{on} {first[0]}: {first[1]:.0%} of what is attributed"
    elif first[1] > HALF:
        said = f"{on[1:]} {first[0]} before all others: {first[1]:.0%} of what is attributed"
    else:
        shown = ", ".join(f"{key} {part:.0%}" for key, part in (first, *others))
        said = f"{on[1:]} no one {shares.by}: {shown} of what is attributed"
    for one in documents[:1]:
        said += f", {one.share / attributed:.0%} one document, “{one.title or one.doc_id}”"
    return f"{start} {said.strip()}. {attributed:.0%} of the evidence is attributed."
