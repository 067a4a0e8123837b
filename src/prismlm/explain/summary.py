"""What an answer relies on, in a sentence or two, and signs that model or head do not work."""

from __future__ import annotations

import math

from prismlm.explain.attribution import Passage, Share, Sources
from prismlm.explain.prediction import Predictions
from prismlm.explain.support import Support
from prismlm.lens.where import UNKNOWN

# A domain with more than half of what is attributed is mostly what the answer draws on. How often
# such a domain is the text's own is in docs/results/domains.md.
HALF = 0.5
# Where less of the evidence is attributed, the summary names no source.
LEAST = 0.05
# A domain below so many times its share of the corpus is no more than usual.
LEAST_LIFT = 1.25
# A smaller share is "less than 1%".
LEAST_SAID = 0.005
# Median explained shares beyond these are not those of a head that was fitted to the model.
LOWEST_EXPLAINED, HIGHEST_EXPLAINED = -0.5, 1.5


def in_words(
    subject: str,
    shares: Sources,
    document: Passage | None,
    support: Support | None,
    documents: int,
) -> str:
    """Return what some predictions draw on, in at most two sentences with one figure each.

    The domain that is named has the largest p log(p / q), with its part p of what is attributed and
    its share q of the corpus: a large part of a large domain says little. Figures are shares of
    all evidence, as tables have them.

    Args:
        subject: of the sentence, such as "the answer".
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
    unknown, capital = first.key == UNKNOWN, subject[0].upper() + subject[1:]
    name = f"text of unknown {shares.by}" if unknown else f"the {shares.by} “{first.key}”"
    if first.base_rate is not None and first.base_rate > 1 - 1e-9:
        said = f"{traced} this corpus."
    elif first.lift and first.lift < attributed * LEAST_LIFT:
        said = f"{capital} draws on no {shares.by} much more than the corpus holds of it."
    else:
        how = f"draws on {name} more than on any other"
        if first is not shares.items[0]:
            how = f"draws more than usual on {name}"
        elif first.share > HALF * attributed:
            how = f"draws mostly on {name}"
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


def doubts(predictions: Predictions) -> list[str]:
    """Return what is wrong with model or head, by figures that no working ones have."""
    count, parts = len(predictions), predictions.parts
    if not count:
        return []
    dead = int((~(predictions.states.norm(dim=1) > HALF)).sum())
    if dead:
        return [
            f"The hidden states of {dead:,} of {count:,} predictions are zero, so nothing in the "
            "corpus is near to them: the model's weights, such as its final norm, are damaged."
        ]
    share = float(parts.explained_share.median())
    if not parts.evidence.any():
        why = "no prototype is active"
    elif not fits(share):
        why = f"the median explained share is {share:,.0%}, where 0% to 100% can be"
    else:
        return []
    return [f"The prototype head does not fit this model: {why}. Attach a new one."]
