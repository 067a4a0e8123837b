"""Edits made ready for one model: which activations they change, and the state that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn

from prismlm.errors import InputError, check_choice
from prismlm.interventions.values import Ablate, Clamp, Edit, Group, Only, Scale, members_of
from prismlm.layers import PrototypeHead
from prismlm.lens.opened_model import OpenedModel
from prismlm.lens.signatures import signature_ids, tokens_of_group
from prismlm.models.seam import LogitMap, output_embedding
from prismlm.ops.prototype_head import Routing, reconstruct

# Of W, where the energy of a direction is measured.
ROWS = 16_384


class Step(NamedTuple):
    """What one edit, or all that only scale, change in N states.

    Attributes:
        change: α′ − α of the edited prototypes, [N, E].
        rows: what one unit of it adds to a state, [E, d].
        raising: the edit that raises; None for those that scale what is there.
    """

    change: Tensor
    rows: Tensor
    raising: Clamp | Group | None


class Changes(NamedTuple):
    """What edits do to N states: activations of the E edited prototypes before and after, [N, E].

    ``routing`` is of the unedited states; the first of ``steps`` is of all edits that scale.
    """

    routing: Routing
    before: Tensor
    after: Tensor
    steps: tuple[Step, ...]

    @property
    def touched(self) -> Tensor:
        """States in which an activation changes, bool [N]."""
        return torch.stack([(step.change != 0).any(1) for step in self.steps]).any(0)


@dataclass(frozen=True)
class Plan:
    """Edits of one model, checked, in the order in which they act.

    Attributes:
        embedding: the model's output embedding; nothing else of the model is needed.
        head: the prototype head.
        logit_map: what the model does after its output embedding.
        listed: the tokens that a prototype's card lists, the first ones first.
        telling: the tokens that tell a group from other prototypes.
        edits: each with the prototypes it acts on.
        only: ``"prototypes"`` drops the residual, ``"residual"`` drops the prototypes.
    """

    embedding: nn.Module
    head: PrototypeHead
    logit_map: LogitMap
    listed: Callable[[int], list[int]]
    telling: Callable[[tuple[int, ...]], list[int]]
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
        """Return the plan that does this one's edits first and those of ``inner`` after them."""
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
    def rows(self) -> dict[Clamp | Group, Tensor]:
        """What one unit of activation adds to a state under each edit that raises, [E, d]."""
        found: dict[Clamp | Group, Tensor] = {}
        for edit, members in self.edits:
            if isinstance(edit, Clamp):
                part = self.shown(members)
            elif isinstance(edit, Group) and raises(edit):
                own = self.head.prototypes[list(members)].detach().float()
                part = part_for(self._weight, own, self.telling(members))
            else:
                continue
            found[edit] = torch.zeros_like(self.head.prototypes[self.prototypes])
            found[edit][self._columns(members)] = part.to(found[edit].dtype)
        return found

    @property
    def _weight(self) -> Tensor:
        return cast("Tensor", self.embedding.weight)

    def _columns(self, members: Sequence[int]) -> Tensor:
        chosen = self.prototypes
        return torch.searchsorted(chosen, torch.tensor(members, device=chosen.device))

    def shown(self, prototypes: Iterable[int]) -> Tensor:
        """Return :func:`shown_part` of prototypes, [n, d]."""
        bank = self.head.prototypes.detach()
        rows = [shown_part(self._weight, bank[i].float(), self.listed(i)) for i in prototypes]
        return torch.stack(rows) if rows else bank[:0]

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
        if self.only is None:
            return self._moved(z, changes) if bool(changes.touched.any()) else z
        mixture = reconstruct(changes.routing, self.head.prototypes)
        if self.only == "residual":
            return (z.to(mixture.dtype) - mixture).to(z.dtype)
        return self._moved(mixture, changes).to(z.dtype)

    @staticmethod
    def _moved(z: Tensor, changes: Changes) -> Tensor:
        rows = torch.cat([step.rows for step in changes.steps])
        change = torch.cat([step.change for step in changes.steps], 1)
        rows = rows.to(torch.promote_types(z.dtype, rows.dtype))
        moved = (z.to(rows.dtype) + change @ rows).to(z.dtype)
        # A state in which nothing changes keeps every bit.
        return torch.where((change != 0).any(1, keepdim=True), moved, z)

    def changes(self, z: Tensor) -> Changes:
        """Return what the edits change in states [N, d]."""
        routing = self.head(z).routing
        before = self._activations_of(routing)
        now, scaled, raised = before, torch.zeros_like(before), []
        for edit, members in self.edits:
            columns, after = self._columns(members), now.clone()
            if raises(edit):
                after[:, columns] = self._held(edit, members, z, now)[:, columns]
                raised.append(Step(after - now, self.rows[edit], edit))
            else:
                after[:, columns] *= _factor(edit)
                scaled += after - now
            now = after
        own = self.head.prototypes[self.prototypes].detach()
        return Changes(routing, before, now, (Step(scaled, own, None), *raised))

    def _activations_of(self, routing: Routing) -> Tensor:
        """Return the activation of each edited prototype, [N, E]; 0 where it is not routed."""
        count = len(self.prototypes)
        column = torch.full((self.head.num_prototypes,), count, device=self.prototypes.device)
        column[self.prototypes] = torch.arange(count, device=column.device)
        # All other prototypes share the last column, which is dropped.
        spread = routing.activations.new_zeros(len(routing.indices), count + 1)
        return spread.scatter(1, column[routing.indices], routing.activations)[:, :count]

    def _held(
        self, edit: Clamp | Group, members: tuple[int, ...], z: Tensor, now: Tensor
    ) -> Tensor:
        """Return the activations that a clamp or a group holds in each state, [N, E]."""
        # forward itself, not the module: its hooks would edit the logits that are to be unedited.
        logits = self.logit_map.before_softcap(self.embedding.forward(z).float())
        evidence = logits.max(-1).values - logits.mean(-1)
        if isinstance(edit, Clamp):
            target = self._weight[self.listed(edit.prototype)[0]].float()
            # The part that the card shows gives it what the prototype does.
            given = self.logit_map.scale * (target @ self.head.prototypes[edit.prototype].float())
            return (edit.fraction * evidence / given)[:, None].expand_as(now)
        told = self._weight[self.telling(members)].float()
        given = self.logit_map.scale * (now @ self.rows[edit] @ told.T).max(1).values
        more = torch.where(given > 0, edit.strength * evidence / given, 0)
        return now * (1 + more[:, None])


def raises(edit: Edit) -> TypeGuard[Clamp | Group]:
    """Return whether an edit raises tokens, and does not just scale what prototypes give."""
    return isinstance(edit, Clamp) or (isinstance(edit, Group) and edit.strength > 0)


def _factor(edit: Edit) -> float:
    if isinstance(edit, Group):
        return 1 + edit.strength
    return edit.factor if isinstance(edit, Scale) else 0.0


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
    kept = given > 0
    part = _least(weight, own[kept], given[None, kept].clamp_max(given[0]))[0]
    return part * (given[0] / (own[0] @ part))


def part_for(weight: Tensor, prototypes: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the parts of prototypes [n, d] that give tokens what they give, and others least.

    As :func:`shown_part`, by least squares where there are more tokens than dimensions.
    """
    own = weight.detach()[list(tokens)].float()
    return _least(weight, own, prototypes @ own.T)


def _least(weight: Tensor, own: Tensor, wanted: Tensor) -> Tensor:
    """Return x [n, d] with own · x = wanted [n, u] of which xᵀ (M + λI) x is the smallest."""
    moved = torch.cholesky_solve(own.T, _energy(weight))
    return wanted @ torch.linalg.pinv(own @ moved, rtol=1e-5).T @ moved.T


@lru_cache(maxsize=2)
def _energy(weight: Tensor) -> Tensor:
    """Return the Cholesky factor of M + λI [d, d], M from at most ``ROWS`` rows, evenly spaced."""
    sampled = weight.detach()[:: -(-len(weight) // ROWS)].float()
    energy = sampled.T @ sampled / len(sampled)
    energy.diagonal().add_(1e-3 * energy.diagonal().mean())
    return torch.linalg.cholesky(energy)


def plan_for(lm: OpenedModel, edits: Iterable[Edit], only: Only | None = None) -> Plan:
    """Check edits against an opened model, its head and its lens."""
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
        lru_cache(maxsize=None)(lambda members: tokens_of_group(lm, members)),
        tuple(members),
        only,
    )
    for edit in (one for one, _ in members if isinstance(one, Clamp)):
        if bool(plan.rows[edit].any()):
            continue
        raise InputError(
            f"prototype {edit.prototype} cannot be clamped: it does not raise the first token of "
            "its card, so no activation gives that a positive contribution. Clamp another "
            "prototype."
        )
    return plan
