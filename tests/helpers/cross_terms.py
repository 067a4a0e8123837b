"""Cross terms of pairs of heads, from their content and position."""

from prismlm.probes.heads.resonance import content_term


def cross_term(first, second, position):
    """Return K(u, v) = Σ_jl E[C_uj C_vl] · E_τ[cos ω_j τ cos ω_l τ] for each pair of heads."""
    return (content_term(first, second) * position).sum((2, 3))
