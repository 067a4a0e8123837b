"""Which position of a changed text is which of the original's."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from prismlm.edits.channels.clamp import OWN

LEAST_SHARE = 0.5
"""Of the longer text's positions, those that must have a counterpart."""


def align(original: Sequence[int], changed: Sequence[int]) -> list[int] | None:
    """Return for each token of ``changed`` its position in ``original``, or −1 for none.

    Texts of equal length go position by position. Otherwise tokens that difflib finds unchanged
    are their own counterparts, and what was replaced between them goes token by token from its
    end: a word that falls into more pieces is whole at its last.

    Returns:
        None where nothing is the same in both, or less than ``LEAST_SHARE`` has a counterpart.
    """
    if len(original) == len(changed):
        return list(range(len(changed)))
    found = [OWN] * len(changed)
    blocks = SequenceMatcher(None, original, changed, autojunk=False).get_opcodes()
    for kind, start, end, first, last in blocks:
        if kind in ("equal", "replace"):
            count = min(end - start, last - first)
            found[last - count : last] = range(end - count, end)
    aligned = sum(place != OWN for place in found)
    anchored = any(kind == "equal" for kind, *_ in blocks)
    longest = max(len(original), len(changed))
    return found if anchored and aligned >= LEAST_SHARE * longest else None
