"""What an answer relies on, in a sentence or two, and what casts doubt on its figures."""

from __future__ import annotations

import math

from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.shares import DocumentShare, Share, Sources
from prismlm.explain.support import Support
from prismlm.lens.where import UNKNOWN

# A domain with more than half of what is attributed is mostly what the answer draws on. How often
# such a domain is the text's own is in docs/results/domains.md.
HALF = 0.5
# Where less of the evidence is attributed, nothing is said of what it falls on.
LEAST = 0.05
# A domain that has less than so many times its share of the corpus is no more than usual.
LEAST_LIFT = 1.25
# A smaller share is less than 1 %.
LEAST_SAID = 0.005
# Median explained shares beyond these are not those of a head that was fitted to the model.
LOWEST_EXPLAINED, HIGHEST_EXPLAINED = -0.5, 1.5


def in_words(
    subject: str,
    shares: Sources,
    document: DocumentShare | None,
    support: Support | None,
    documents: int,
) -> str:
    """Return what some predictions draw on, in at most two sentences with one figure each.

    The domain that is named has the largest p log(p / q), with its part p of what is attributed and
    its share q of the corpus: a large part of a large domain tells little. Figures are shares of
    all evidence, as tables have them.

    Args:
        subject: what they are, such as "the answer".
        shares: by domain, or by source where domains tell nothing apart.
        document: the one with the largest share.
        support: how well the corpus supports them, if that is known.
        documents: how many the corpus has.
    """
    if support is not None and support.level == "none":
        return support.sentence
    attributed = 1 - shares.unattributed
    if not shares.items or attributed < LEAST:
        return f"Almost none of the evidence for {subject} could be traced to this corpus."
    traced = f"{percent(attributed)} of the evidence for {subject} was traced to"
    if documents == 1:
        return f"{traced} the only document of this corpus."

    def information(share: Share) -> float:
        p = share.share / attributed
        return p * math.log(p / share.base_rate) if share.base_rate else p

    first = max(shares.items, key=information)
    name = "text of unknown" if first.key == UNKNOWN else "the"
    name = f"{name} {shares.by}" + ("" if first.key == UNKNOWN else f" “{first.key}”")
    capital = subject[0].upper() + subject[1:]
    if first.base_rate is not None and first.base_rate > 1 - 1e-9:
        said = f"{traced} this corpus."
    elif first.lift and first.lift < attributed * LEAST_LIFT:
        said = f"{capital} draws on no {shares.by} much more than the corpus holds of it."
    else:
        if first is not shares.items[0]:
            how = f"draws more than usual on {name}"
        elif first.share > HALF * attributed:
            how = f"draws mostly on {name}"
        else:
            how = f"draws on {name} more than on any other"
        said = f"{capital} {how}: {percent(first.share)} of its evidence."
    if document is None:
        return said
    title = " ".join((document.title or document.doc_id).split())
    most = f"The document that contributes most is “{title}”, with {percent(document.share)}."
    return f"{said} {most}"


def percent(share: float) -> str:
    """Return a share in whole per cent, as people say it."""
    return f"{share:.0%}" if share >= LEAST_SAID else "less than 1%"


def fits(explained: float) -> bool:
    """Say whether a median explained share, or what is recovered, can be a working head's."""
    return LOWEST_EXPLAINED <= explained <= HIGHEST_EXPLAINED


def doubts(table: EvidenceTable) -> list[str]:
    """Return what is wrong with model or head, to see by figures that no working ones have."""
    if not len(table.states):
        return []
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
    elif not fits(share):
        why = f"the median explained share is {share:,.0%}, where 0% to 100% can be"
    else:
        return []
    return [f"The prototype head does not fit this model: {why}. Attach a new one."]
