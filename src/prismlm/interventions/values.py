"""Edits of prototype activations, as values: scale, ablate, clamp, act on a group or many at once.

An edit gives prototypes another activation α′ and leaves the rest of the state unchanged:

    z′ = z + Σ_i (α′_i − α_i) p_i        logits = W z′

so a contribution changes by exactly scale · (α′_i − α_i) W p_i; a clamp adds the part of p_i that
its card shows. :meth:`prismlm.PrismLM.edit` applies edits. Source: PRISM's two intervention demos;
docs/edits.md lists what they leave open.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from prismlm.errors import FormatError, InputError, check_number, check_path, suggest
from prismlm.files import json_text
from prismlm.lens.lens import Lens
from prismlm.outputs import output_file

MAX_CATEGORIES_LISTED = 20
FORMAT_VERSION, META = 1, "prismlm_controller"

Only = Literal["prototypes", "residual"]


@dataclass(frozen=True)
class Scale:
    """α′ = factor · α wherever the prototype is active.

    ``factor``: 0 removes the contribution, 1 changes nothing, 2 doubles it; not negative.
    """

    prototype: int
    factor: float

    def __post_init__(self) -> None:
        expected = "a finite number of 0 or more, since activations are not negative"
        check_number("the factor of Scale", self.factor, expected, lambda factor: factor >= 0)


@dataclass(frozen=True)
class Ablate:
    """α′ = 0: the prototype's contribution is removed from every logit."""

    prototype: int


@dataclass(frozen=True)
class Clamp:
    """Fix the contribution to the card's first token v at a fraction, in (0, 1], of top evidence.

        α′ = fraction · (ℓ[top] − ℓ̄) / (scale · (W p)[v])        z′ = z + (α′ − α) p̂

    at every position, whether the prototype is active there or not. ℓ are the unedited logits
    before any soft-cap, top the largest, ℓ̄ their mean, v the first token on the prototype's card,
    p̂ the part of p that the card shows: :func:`prismlm.interventions.plan.card_direction`.
    :func:`prismlm.interventions.steering.strongest` finds the largest without repetitive text.
    """

    prototype: int
    fraction: float

    def __post_init__(self) -> None:
        expected = (
            "more than 0 and at most 1, a fraction of the unedited top logit. To take a prototype "
            "out, use Ablate"
        )
        check_number("the fraction of Clamp", self.fraction, expected, lambda f: 0 < f <= 1)


@dataclass(frozen=True)
class Group:
    """Strengthen or remove the joint contribution of a set of prototypes.

        z′ = z + strength · Σ_{i in set} α_i p_i                            strength ≤ 0
        z′ = z + strength · (ℓ[top] − ℓ̄) / (scale · max_v (W D)[v]) · D     strength > 0
        D  = Σ_{i in set} α_i p̂_i

    The set is a category of the lens, or prototypes by number. p̂_i is the part of p_i that raises
    the set's distinctive tokens
    (:func:`prismlm.lens.signatures.tokens_of_group`,
    :func:`prismlm.interventions.plan.token_directions`); v ranges over these tokens, ℓ is as for
    :class:`Clamp`. Nothing changes where no member is active or they raise none of the tokens.
    """

    strength: float  # −1 (removed) to 1 (the most raised token gets as much as the top)
    category: str | None = None
    prototypes: frozenset[int] | None = None

    def __post_init__(self) -> None:
        expected = "−1 (taken out) to 1 (as much as the top token has)"
        check_number("the strength of Group", self.strength, expected, lambda s: -1 <= s <= 1)
        if (self.category is None) == (self.prototypes is None):
            raise InputError("Group needs exactly one of category and prototypes.")
        if self.prototypes is not None:
            object.__setattr__(self, "prototypes", frozenset(self.prototypes))


@dataclass(frozen=True)
class Controller:
    """α′_i = s_i α_i for the listed prototypes, wherever they are active; kept in a file.

        z′ = z + Σ_i (s_i − 1) α_i p_i        s_i ≥ 0

    so a logit changes by exactly scale · Σ (s_i − 1) α_i W p_i, and every other prototype and the
    residual stay. Source: *Prototype Language Models*, arXiv 2607.00510.

    Attributes:
        scales: (prototype, s) pairs, each prototype once; sorted when made.
        head: :func:`prismlm.lens.layout.prototypes_fingerprint` of the head that it was made for;
            "" fits any head with these prototypes.
        description: for people.
        made: how it was made, as JSON values.
    """

    scales: tuple[tuple[int, float], ...]
    head: str = ""
    description: str = ""
    made: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        limits = "a number of 0 or more, since activations are not negative"
        scales = {
            index(i): check_number(f"the scale of prototype {i}", s, limits, lambda s: s >= 0)
            for i, s in self.scales
        }
        if len(scales) < len(self.scales):
            raise InputError("a prototype has two scales: give it one.")
        object.__setattr__(self, "scales", tuple(sorted(scales.items())))

    @property
    def prototypes(self) -> list[int]:
        """The listed prototypes, ascending."""
        return [number for number, _ in self.scales]

    @property
    def factors(self) -> list[float]:
        """s of each listed prototype."""
        return [factor for _, factor in self.scales]

    def save(self, path: Path | str) -> None:
        """Write ``prototypes`` int64 and ``scales`` float32 with metadata, as safetensors."""
        meta = {"format_version": FORMAT_VERSION, "head": self.head}
        meta |= {"description": self.description, "made": dict(self.made)}
        prototypes = torch.tensor(self.prototypes, dtype=torch.int64)
        scales = torch.tensor(self.factors, dtype=torch.float32)
        with output_file(path) as temporary:
            tensors = {"prototypes": prototypes, "scales": scales}
            save_file(tensors, str(temporary), metadata={META: json_text(meta)})

    @classmethod
    def load(cls, path: Path | str) -> Controller:
        """Read a controller. FormatError, naming the file, for one that is not valid."""
        path = check_path("the controller", path)
        try:
            with safe_open(str(path), "pt") as file:
                meta = json.loads((file.metadata() or {})[META])
                columns = [file.get_tensor(name).tolist() for name in ("prototypes", "scales")]
            if (version := meta["format_version"]) != FORMAT_VERSION:
                raise FormatError(
                    f"{path} has format version {version!r}; this prismlm reads {FORMAT_VERSION}: "
                    "use the prismlm that wrote it, or make it anew."
                )
            pairs = tuple(zip(*columns, strict=True))
            return cls(pairs, meta["head"], meta["description"], meta["made"])
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            raise FormatError(
                f"{path} is not a controller ({error}): expected a file that `prismlm calibrate` "
                "or `prismlm suppress` writes."
            ) from error


Edit = Scale | Ablate | Clamp | Group | Controller


def members_of(edit: Edit, num_prototypes: int, lens: Lens | None) -> list[int]:
    """Return the prototypes an edit acts on, ascending."""
    if isinstance(edit, Group) and edit.category is not None:
        return _members_of_category(edit.category, lens)
    several = isinstance(edit, (Group, Controller))
    members = sorted(edit.prototypes or ()) if several else [edit.prototype]
    for prototype in members:
        if prototype not in range(num_prototypes):
            raise InputError(
                f"there is no prototype {prototype}: expected 0 to {num_prototypes - 1}."
            )
    return members


def _members_of_category(name: str, lens: Lens | None) -> list[int]:
    if lens is None:
        raise InputError(
            f"the model has no lens, so there is no category {name!r}. "
            "Build one with `prismlm index`, or name prototypes by number."
        )
    members = [i for i, category in enumerate(lens.categories) if category == name]
    if not members:
        known = sorted({category for category in lens.categories if category})
        hint = f"it has {', '.join(known[:MAX_CATEGORIES_LISTED])}.{suggest(name, known)}"
        if not known:
            hint = "it has no categories yet. Run `prismlm label`, or name prototypes by number."
        raise InputError(f"there is no category {name!r} in the lens {lens.name}: {hint}")
    return members
