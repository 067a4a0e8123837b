"""Edits of what a prediction is made of, as values: scale, ablate, clamp, and act on a group.

An edit gives prototypes another activation α′ and leaves the rest of the state as it is:

    z′ = z + Σ_i (α′_i − α_i) p_i        logits = W z′

so that a contribution changes by exactly scale · (α′_i − α_i) W p_i; a clamp adds the part of p_i
that its card shows. Activations of other prototypes stay as they were routed.
:meth:`prismlm.PrismLM.edit` applies edits.
Source: PRISM: Training Data Prototypes for Language Models (Guide Labs, 2025), the two demos of
interventions; docs/edits.md says where it leaves things open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow.compute as pc

from prismlm.errors import (
    InputError,
    check_kind,
    check_number,
    check_text,
    check_whole,
    suggest,
)
from prismlm.lens.lens import Lens

CATEGORIES_LISTED = 20

Only = Literal["prototypes", "residual"]


@dataclass(frozen=True)
class _OfPrototype:
    prototype: int

    def __post_init__(self) -> None:
        check_whole("the prototype", self.prototype, None)


@dataclass(frozen=True)
class Scale(_OfPrototype):
    """α′ = factor · α wherever the prototype is active.

    Attributes:
        prototype: its number.
        factor: 0 removes the contribution, 1 changes nothing, 2 doubles it; not negative.
    """

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "a finite number of 0 or more, since activations are not negative"
        check_number("the factor of Scale", self.factor, expected, lambda number: number >= 0)


@dataclass(frozen=True)
class Ablate(_OfPrototype):
    """α′ = 0: the prototype's contribution is taken out of every logit.

    Attributes:
        prototype: its number.
    """


@dataclass(frozen=True)
class Clamp(_OfPrototype):
    """Hold what a prototype gives its first listed token v at a fraction of the top evidence.

        α′ = fraction · (ℓ[top] − ℓ̄) / (scale · (W p)[v])        z′ = z + (α′ − α) p̂

    at every position, whether the prototype is active there or not. ℓ are the unedited logits
    before any soft-cap, top their largest, ℓ̄ their mean, v the token that the prototype's card
    lists first. p̂ is the part of p that the card shows, see
    :func:`prismlm.interventions.plan.shown_part`.

    Attributes:
        prototype: its number.
        fraction: 0 < fraction ≤ 1; :func:`prismlm.interventions.strength.strongest` finds the
            largest that does not make a text repeat itself.
    """

    fraction: float

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = (
            "more than 0 and at most 1, a fraction of the unedited top logit. To take a prototype "
            "out, use Ablate"
        )
        check_number("the fraction of Clamp", self.fraction, expected, lambda f: 0 < f <= 1)


@dataclass(frozen=True)
class Group:
    """Strengthen or take out what a set of prototypes contributes together.

        z′ = z + strength · Σ_{i in set} α_i p_i                            strength ≤ 0
        z′ = z + strength · (ℓ[top] − ℓ̄) / (scale · max_v (W D)[v]) · D     strength > 0
        D  = Σ_{i in set} α_i p̂_i

    p̂_i is the part of p_i that raises the tokens that tell the set from other prototypes, see
    :func:`prismlm.lens.signatures.tokens_of_group` and
    :func:`prismlm.interventions.plan.part_for`; the largest is over those tokens, and
    ℓ is as for :class:`Clamp`. Where no member is active, or they raise none of the tokens,
    nothing changes.

    Attributes:
        strength: −1 (taken out) to 1 (the token that the set raises most gets as much as the top).
        category: all prototypes that the lens gives this category, or
        prototypes: these, or
        document: those whose kept contexts in the lens are in this document.
    """

    strength: float
    category: str | None = None
    prototypes: frozenset[int] | None = None
    document: str | None = None

    def __post_init__(self) -> None:
        expected = "−1 (taken out) to 1 (as much as the top token has)"
        check_number("the strength of Group", self.strength, expected, lambda s: -1 <= s <= 1)
        if sum(x is not None for x in (self.category, self.prototypes, self.document)) != 1:
            raise InputError("Group needs exactly one of category, prototypes and document.")
        for what in ("category", "document"):
            if getattr(self, what) is not None:
                check_text(f"the {what} of Group", getattr(self, what))
        if self.prototypes is not None:
            kinds = (list, tuple, set, frozenset, range)
            given = check_kind("prototypes", self.prototypes, kinds, "a list of whole numbers")
            members = frozenset(check_whole("the prototype", number, None) for number in given)
            if not members:
                raise InputError("Group names no prototypes: give at least one.")
            object.__setattr__(self, "prototypes", members)


Edit = Scale | Ablate | Clamp | Group


def members_of(edit: Edit, num_prototypes: int, lens: Lens | None) -> list[int]:
    """Return the prototypes an edit acts on, ascending.

    Raises:
        InputError: an unknown prototype, category or document, or no lens to look those up in.
    """
    if isinstance(edit, Group) and edit.prototypes is None:
        return _looked_up(edit, lens)
    found = sorted(edit.prototypes or ()) if isinstance(edit, Group) else [edit.prototype]
    for prototype in found:
        if not 0 <= prototype < num_prototypes:
            raise InputError(
                f"there is no prototype {prototype}: expected 0 to {num_prototypes - 1}."
            )
    return found


def _looked_up(group: Group, lens: Lens | None) -> list[int]:
    """Return the members of a category or a document, which a lens has."""
    what, name = (
        ("category", group.category) if group.category is not None else ("document", group.document)
    )
    if lens is None:
        raise InputError(
            f"the model has no lens, so there is no {what} {name!r}. "
            "Build one with `prismlm index`, or name prototypes by number."
        )
    if what == "document":
        members = lens.index.filter(pc.field("doc_id") == name)["prototype"].to_pylist()
        known = "no prototype stands for a place in it, or its id is another."
    else:
        members = [i for i, category in enumerate(lens.categories) if category == name]
        known = _known_categories(str(name), lens)
    if not members:
        raise InputError(f"there is no {what} {name!r} in the lens {lens.name}: {known}")
    return sorted(set(members))


def _known_categories(category: str, lens: Lens) -> str:
    known = sorted({name for name in lens.categories if name is not None})
    if not known:
        return (
            "it has no categories yet. Run `prismlm label`, which fills them, or name prototypes "
            "by number."
        )
    listed = ", ".join(known[:CATEGORIES_LISTED])
    more = f" and {len(known) - CATEGORIES_LISTED} more" if len(known) > CATEGORIES_LISTED else ""
    return f"it has {listed}{more}.{suggest(category, known)}"
