"""From prototypes to training text: which sources and documents carry a prediction.

By ``evidence``, over the predictions asked about, e⁺ = max(e, 0):

    share(s) = Σ_n∈s a_n / Σ (Σ_i e⁺_i + e⁺_residual + e⁺_bias)

with a_n the evidence that falls on position n of the corpus (explain/positions.py). Documents,
sources, domains and licences are sums over the same positions. Unattributed is the share of
residual, bias and prototypes that no position which carries the prediction relies on.

By ``contexts``, what a lens without cells can say, the evidence of a prototype is spread over its
kept contexts c by e⁺_i exp(cos(state, c) / 0.02), whatever token they predicted; roll-ups by
source, domain and licence take each prototype's activation over the whole corpus.

By ``source``, the measure of PRISM, normalised to a sum of 1 over the positions:

    A_t = Σ_i α_ti μ_{S_i},   share(s) = Σ_t A_t(s) / Σ_t Σ_i α_ti

with S_i the kept contexts of prototype i and μ uniform over them, for every roll-up. It knows
neither the predicted token nor the residual, so only prototypes without contexts are unattributed.
"""

from __future__ import annotations

from typing import cast

from prismlm.explain.contexts import ContextAttribution, ContextSum, by_contexts
from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.passages import (
    PositionAttribution,
    PositionSum,
    by_position,
    merge_positions,
)
from prismlm.explain.positions import DocumentsSoFar
from prismlm.explain.shares import Attribution, Method
from prismlm.index.lens import Lens


def attribute(
    table: EvidenceTable,
    lens: Lens,
    method: Method = "evidence",
    *,
    so_far: DocumentsSoFar | None = None,
) -> Attribution:
    """Gather what the predictions rely on.

    Args:
        table: their evidence.
        lens: the lens; without cells, ``evidence`` is ``contexts``.
        method: ``evidence``, ``contexts`` or ``source``.
        so_far: of ``evidence``, what carried the predictions of the text before these, which are
            added to it; left out where the table knows its whole text.

    Raises:
        InputError: no such method, or the table lacks the activations it needs.
    """
    if method == "evidence" and lens.cells is not None:
        return by_position(table, lens, lens.cells, so_far)
    return by_contexts(table, lens, method)


def merge_attributions(parts: list[Attribution]) -> Attribution:
    """Return the attribution of all positions of the parts, which are of one lens and method."""
    if isinstance(parts[0], PositionAttribution):
        return merge_positions(cast(list[PositionAttribution], parts))
    total = ContextSum(parts[0].lens, parts[0].method)
    for part in cast(list[ContextAttribution], parts):
        total.add(part)
    return total.result()


def sum_of(lens: Lens, method: Method) -> PositionSum | ContextSum:
    """Return what adds up the attributions of many texts in memory that the lens alone sets."""
    if method == "evidence" and lens.cells is not None:
        return PositionSum(lens, lens.cells)
    return ContextSum(lens, method)
