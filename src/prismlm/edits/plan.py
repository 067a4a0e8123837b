"""Edits made ready for one model: which activations they change, and the state that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from prismlm.edits.values import Ablate, Clamp, Edit, Group, Only, Scale, members_of
from prismlm.errors import InputError, check_choice
from prismlm.index.opened_model import OpenedModel
from prismlm.index.signatures import signature_ids
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, output_embedding
from prismlm.ops.edits import activations_of, move
from prismlm.ops.prototype_head import Routing, reconstruct

# Of W, where the energy of a direction is measured.
ROWS = 16_384


class Changes(NamedTuple):
    """What edits do to N states: E edited prototypes, k routed.

    Attributes:
        routing: of the unedited states.
        before: activations of the edited prototypes, [N, E].
        after: their activations α′, [N, E].
    """

    routing: Routing
    before: Tensor
    after: Tensor

    @property
    def difference(self) -> Tensor:
        """α′ − α, [N, E]."""
        return self.after - self.before

    @property
    def touched(self) -> Tensor:
        """States in which an activation changes, bool [N]."""
        return (self.difference != 0).any(1)


@dataclass(frozen=True)
class Plan:
    """Edits of one model, checked, in the order in which they act.

    Attributes:
        embedding: the model's output embedding; nothing else of the model is needed.
        head: the prototype head.
        logit_map: what the model does after its output embedding.
        listed: the tokens that a prototype's card lists, the first ones first.
        edits: each with the prototypes it acts on.
        only: ``"prototypes"`` drops the residual, ``"residual"`` drops the prototypes.
    """

    embedding: nn.Module
    head: PrototypeHead
    logit_map: LogitMap
    listed: Callable[[int], list[int]]
    edits: tuple[tuple[Edit, tuple[int, ...]], ...] = ()
    only: Only | None = None

    def __post_init__(self) -> None:
        if self.only is not None:
            check_choice("only", self.only, ("prototypes", "residual"))
        if self.only == "residual" and self.edits:
            raise InputError(
                "only='residual' leaves no prototypes, so there is nothing to edit: drop the other "
                "edits, or only='residual'."
            )

    def then(self, inner: Plan) -> Plan:
        """Return the plan that does this one's edits first and those of ``inner`` after them.

        Raises:
            InputError: the two are of different heads, or ask for different parts alone.
        """
        if inner.head is not self.head:
            raise InputError("edits of two different heads on one model cannot be nested.")
        if None not in (self.only, inner.only) and self.only != inner.only:
            raise InputError(
                f"only={inner.only!r} inside only={self.only!r} would leave nothing of a state."
            )
        return replace(inner, edits=self.edits + inner.edits, only=self.only or inner.only)

    @cached_property
    def prototypes(self) -> Tensor:
        """The edited prototypes, ascending, int64 [E]."""
        ids = sorted({i for _, members in self.edits for i in members})
        return torch.tensor(ids, dtype=torch.int64, device=self.head.prototypes.device)

    @cached_property
    def clamped(self) -> Tensor:
        """Which of the edited prototypes are clamped, bool [E]."""
        held = {edit.prototype for edit, _ in self.edits if isinstance(edit, Clamp)}
        return torch.tensor([i in held for i in self.prototypes.tolist()], dtype=torch.bool)

    @cached_property
    def rows(self) -> Tensor:
        """What one unit of activation of each edited prototype adds to a state, [E, d]."""
        rows = self.head.prototypes[self.prototypes].detach().clone()
        chosen = self.prototypes[self.clamped]
        rows[self.clamped] = self.shown(chosen).to(rows.dtype)
        return rows

    def shown(self, prototypes: Tensor) -> Tensor:
        """Return :func:`shown_part` of prototypes [n], [n, d]."""
        weight = cast("Tensor", self.embedding.weight)
        rows = [
            shown_part(weight, self.head.prototypes[i].detach().float(), self.listed(i))
            for i in prototypes.tolist()
        ]
        return torch.stack(rows) if rows else self.head.prototypes[:0]

    def apply(self, z: Tensor) -> Tensor:
        """Return z′ for states [..., d]; where no edit changes anything, z itself."""
        if z.numel() == 0 or not (self.edits or self.only):
            return z
        flat = z.flatten(0, -2)
        with torch.autocast(device_type=z.device.type, enabled=False):
            edited = self.edited(flat, self.changes(flat))
        return z if edited is flat else edited.view_as(z)

    def log_probabilities(self, z: Tensor) -> Tensor:
        """Return the model's own log-probabilities [N, V] from states [N, d], in float32."""
        # forward itself, not the module, whose hooks would edit them.
        return self.logit_map(self.embedding.forward(z).float()).log_softmax(-1)

    def edited(self, z: Tensor, changes: Changes) -> Tensor:
        """Return z′ [N, d] of states and what changes in them; z itself where nothing does."""
        difference = changes.difference
        if self.only is None:
            return move(z, self._rows(z), difference) if bool(difference.any()) else z
        mixture = reconstruct(changes.routing, self.head.prototypes)
        if self.only == "residual":
            return (z.to(mixture.dtype) - mixture).to(z.dtype)
        return move(mixture, self._rows(mixture), difference).to(z.dtype)

    def changes(self, z: Tensor) -> Changes:
        """Return what the edits change in states [N, d]."""
        routing = self.head(z).routing
        count, chosen = self.head.num_prototypes, self.prototypes
        before = activations_of(routing.indices, routing.activations, chosen, count)
        after = before.clone()
        for edit, members in self.edits:
            columns = torch.searchsorted(chosen, torch.tensor(members, device=chosen.device))
            if isinstance(edit, Clamp):
                after[:, columns] = self._held(edit, z)[:, None]
            else:
                factor = 0.0 if isinstance(edit, Ablate) else _factor(edit)
                after[:, columns] = factor * after[:, columns]
        return Changes(routing, before, after)

    def _held(self, edit: Clamp, z: Tensor) -> Tensor:
        """Return the activation that a clamp holds in each state, [N]."""
        # forward itself, not the module: its hooks would edit the logits that are to be unedited.
        logits = self.logit_map.before_softcap(self.embedding.forward(z).float())
        target = cast("Tensor", self.embedding.weight)[self.listed(edit.prototype)[0]].float()
        # The part that the card shows gives it what the prototype does.
        given = self.logit_map.scale * (target @ self.head.prototypes[edit.prototype].float())
        return edit.fraction * (logits.max(-1).values - logits.mean(-1)) / given

    def _rows(self, like: Tensor) -> Tensor:
        return self.rows.to(torch.promote_types(like.dtype, self.rows.dtype))


def _factor(edit: Scale | Group) -> float:
    return edit.factor if isinstance(edit, Scale) else 1 + edit.strength


def shown_part(weight: Tensor, prototype: Tensor, listed: Sequence[int]) -> Tensor:
    """Return p̂ [d], the part of a prototype that its card shows.

        p̂ = argmin_x xᵀ (M + λI) x   with (W x)[u] = min((W p)[u], (W p)[v]) for the listed u

    Of all directions that give the listed tokens u what the prototype gives them, and none more
    than the first of them, v, the one that moves the other logits least: M = WᵀW / V, and λ is a
    thousandth of its mean eigenvalue. p itself moves many others as much, most of all rows of W
    that were hardly ever trained. Where the conditions exclude one another they are met by least
    squares, and the first one exactly.

    Args:
        weight: W, [V, d].
        prototype: p, [d].
        listed: the tokens of its card, of which those count that it raises; p̂ is zero where the
            first is not one of them.
    """
    own = weight.detach()[list(listed)].float()
    given = own @ prototype
    if float(given[0]) <= 0:
        return torch.zeros_like(prototype)
    rows = own[given > 0]
    moved = torch.linalg.solve(_energy(weight), rows.T)
    wanted = given[given > 0].clamp_max(given[0])
    part = moved @ (torch.linalg.pinv(rows @ moved, rtol=1e-5) @ wanted)
    return part * (given[0] / (rows[0] @ part))


@lru_cache(maxsize=2)
def _energy(weight: Tensor) -> Tensor:
    """Return M + λI [d, d], M from at most ``ROWS`` rows of W, evenly spaced."""
    sampled = weight.detach()[:: -(-len(weight) // ROWS)].float()
    energy = sampled.T @ sampled / len(sampled)
    energy.diagonal().add_(1e-3 * energy.diagonal().mean())
    return energy


def plan_for(lm: OpenedModel, edits: Iterable[Edit], only: Only | None = None) -> Plan:
    """Check edits against an opened model, its head and its lens.

    Raises:
        InputError: what is not an edit, an unknown prototype, category or document, a clamp that
            nothing can hold, or edits that exclude one another.
    """
    head = lm.head
    members: list[tuple[Edit, tuple[int, ...]]] = []
    for edit in edits:
        if not isinstance(edit, (Scale, Ablate, Clamp, Group)):
            raise InputError(
                f"{edit!r} is not an edit: expected prismlm.Scale, Ablate, Clamp or Group."
            )
        members.append((edit, tuple(members_of(edit, head.num_prototypes, lm.lens))))
    plan = Plan(
        output_embedding(lm.model),
        head,
        lm.logit_map,
        lru_cache(maxsize=None)(lambda prototype: signature_ids(lm, [prototype])[0]),
        tuple(members),
        only,
    )
    for prototype in plan.prototypes[plan.clamped & ~plan.rows.any(1).cpu()].tolist():
        raise InputError(
            f"prototype {prototype} cannot be clamped: it does not raise the first token of its "
            "card, so no activation gives that a positive contribution. Clamp another prototype."
        )
    return plan
