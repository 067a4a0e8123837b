"""What a head gives to the words of a role, and what it would give if it went by distance alone.

    M_w = Σ_i Σ_{j∈w} A_ij    U_w = Σ_i Σ_{j∈w} 1 / (i + 1)

w are the words of the role, i the tokens after w; for the object, i is only the token after which
the target is predicted. U is what a head would give w that looks at all it sees alike. Where i and
j are the same token the pair does not count: tied heads look for their own likes, "the" at "the".

    E_w = Σ_i Σ_{j∈w} r_i f(i − j) / Σ_{0<k≤i} f(i − k)

with r_i the row's weight outside of the first token, where heads put what they have no use for,
and f the head's own likelihood by distance, fitted over all sentences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prismlm.instruments.heads.role_cases import Role, RoleText

FITTING_STEPS = 200


def expected(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return what each head would give if it went by distance alone: E of the module's equation.

    f is its maximum-likelihood fit over all texts, by Hunter's iteration
    f_d ← Σ A_{i,i−d} / Σ_i r_i / Σ_{k<i} f_k. The column of the first token is that of the weights.

    Args:
        weights: of each text, float64 [heads, T, T].
    """
    heads, longest = len(weights[0]), max(one.shape[-1] for one in weights)
    at = weights[0].new_zeros(heads, longest - 1)  # of each distance
    outside = torch.zeros_like(at)  # of each row from the second, r
    for one in weights:
        inner = one[:, 1:, 1:]
        outside[:, : inner.shape[1]] += inner.sum(-1)
        for distance in range(inner.shape[1]):
            at[:, distance] += inner.diagonal(-distance, 1, 2).sum(-1)
    f = torch.ones_like(at)
    for _ in range(FITTING_STEPS):
        # A row whose distances all have no weight has none outside of the first token.
        share = outside / f.cumsum(1).clamp_min(1e-300)
        f = at / share.flip(1).cumsum(1).flip(1).clamp_min(1e-300)
    return [_by_distance(one, f) for one in weights]


def _by_distance(own: Tensor, f: Tensor) -> Tensor:
    inner = own[:, 1:, 1:]
    place = torch.arange(inner.shape[1])
    distance = place[:, None] - place
    likelihood = f[:, distance.clamp_min(0)] * (distance >= 0)
    total = likelihood.sum(-1, keepdim=True).clamp_min(1e-300)
    found = own.clone()
    found[:, 1:, 1:] = likelihood / total * inner.sum(-1, keepdim=True)
    return found


def word_sums(weights: Tensor, text: RoleText, role: Role) -> tuple[Tensor, Tensor]:
    """Return M [heads, words] and U [words] of the words that are seen; see the module.

    Args:
        weights: [heads, T, T].
        text: of T tokens.
        role: whose rows count.
    """
    masses: list[Tensor] = []
    uniform: list[float] = []
    for number in text.seen(role):
        rows, tokens = (list(side) for side in zip(*text.pairs(number, role), strict=True))
        masses.append(weights[:, rows, tokens].sum(1))
        uniform.append(sum(1 / (row + 1) for row in rows))
    return torch.stack(masses, 1), torch.tensor(uniform, dtype=weights.dtype)
