"""Edits prepared for one model: what they change in a state, and the block in which they apply.

A forward pre-hook on the output embedding edits z. The edits themselves are in a context variable,
so that blocks nest and each thread or task has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn

from prismlm.errors import InputError, check_choice
from prismlm.interventions.values import Clamp, Controller, Edit, Group, Only, Scale, members_of
from prismlm.layers import PrototypeHead
from prismlm.lens.layout import prototypes_fingerprint
from prismlm.lens.opened_model import OpenedModel
from prismlm.lens.signatures import signature_ids, tokens_of_group
from prismlm.models.seam import LogitMap, output_embedding
from prismlm.models.watch import Hook, watch
from prismlm.ops.prototype_head import Nearest, Routing, reconstruct

# Rows of W sampled to estimate M = WᵀW / V.
SAMPLED_ROWS = 16_384


class Step(NamedTuple):
    """Changes of activation by a raising edit, or by all scaling edits together (None)."""

    change: Tensor  # α′ − α [N, E]
    rows: Tensor  # [E, d], added to a state per unit of change
    edit: Clamp | Group | None


class Changes(NamedTuple):
    """Activations of the E edited prototypes before and after the edits, [N, E]."""

    routing: Routing  # of the unedited states
    before: Tensor
    after: Tensor
    steps: tuple[Step, ...]  # the first has all scaling edits

    @property
    def touched(self) -> Tensor:
        """States in which an activation changes, bool [N]."""
        return torch.stack([(step.change != 0).any(1) for step in self.steps]).any(0)


@dataclass(frozen=True)
class Plan:
    """Validated edits of one model, in the order in which they act."""

    embedding: nn.Module
    head: PrototypeHead
    logit_map: LogitMap
    card_tokens: Callable[[int], list[int]]  # of a prototype, in order
    distinctive_tokens: Callable[[tuple[int, ...]], list[int]]  # of a group
    edits: tuple[tuple[Edit, tuple[int, ...]], ...] = ()  # each with its prototypes
    only: Only | None = None  # "prototypes" drops the residual, "residual" the prototypes

    def __post_init__(self) -> None:
        if self.only is not None:
            check_choice("only", self.only, ("prototypes", "residual"))
        if self.only == "residual" and self.edits:
            raise InputError(
                "only='residual' leaves no prototypes, so there is nothing to edit: drop the other "
                "edits, or only='residual'."
            )

    def then(self, inner: Plan) -> Plan:
        """Return the plan that applies these edits first, then those of ``inner``."""
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
        """Direction added per unit of activation under each raising edit, [E, d]."""
        rows: dict[Clamp | Group, Tensor] = {}
        for edit, members in self.edits:
            if raises(edit):
                if isinstance(edit, Clamp):
                    directions = self.card_directions(members)
                else:
                    prototypes = self.head.prototypes[list(members)].detach().float()
                    tokens = self.distinctive_tokens(members)
                    directions = token_directions(self._weight, prototypes, tokens)
                rows[edit] = torch.zeros_like(self.head.prototypes[self.prototypes])
                rows[edit][self._columns(members)] = directions.to(rows[edit].dtype)
        return rows

    @property
    def _weight(self) -> Tensor:
        return cast("Tensor", self.embedding.weight)

    def _columns(self, members: Sequence[int]) -> Tensor:
        return torch.searchsorted(
            self.prototypes, torch.tensor(members, device=self.prototypes.device)
        )

    def card_directions(self, prototypes: Iterable[int]) -> Tensor:
        """Return :func:`card_direction` of prototypes, [n, d]."""
        bank, weight = self.head.prototypes.detach(), self._weight
        rows = [card_direction(weight, bank[i].float(), self.card_tokens(i)) for i in prototypes]
        return torch.stack(rows) if rows else bank[:0]

    def apply(self, z: Tensor) -> Tensor:
        """Return z′ for states [..., d]; z itself if no edit changes anything."""
        if z.numel() == 0 or not (self.edits or self.only):
            return z
        flat = z.flatten(0, -2)
        with torch.autocast(device_type=z.device.type, enabled=False):
            edited = self.edited(flat, self.changes(flat))
        return z if edited is flat else edited.view_as(z)

    def log_probabilities(self, z: Tensor) -> Tensor:
        """Return the model's own float32 log-probabilities [N, V] from states [N, d]."""
        # forward, not the module: its hooks would edit them.
        return self.logit_map(self.embedding.forward(z).float()).log_softmax(-1)

    def edited(self, z: Tensor, changes: Changes) -> Tensor:
        """Return z′ [N, d] from states and their changes; z itself if nothing changes."""
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
        # An untouched state stays bit-identical.
        return torch.where((change != 0).any(1, keepdim=True), moved, z)

    def changes(self, z: Tensor) -> Changes:
        """Return what the edits change in states [N, d]."""
        routing = self.head(z).routing
        before = dense_activations(routing, self.prototypes, self.head.num_prototypes)
        current, scaled, raised = before, torch.zeros_like(before), []
        for edit, members in self.edits:
            columns, after = self._columns(members), current.clone()
            if raises(edit):
                after[:, columns] = self._target(edit, members, z, current)[:, columns]
                raised.append(Step(after - current, self.rows[edit], edit))
            else:
                after[:, columns] *= after.new_tensor(_factors(edit))
                scaled += after - current
            current = after
        rows = self.head.prototypes[self.prototypes].detach()
        return Changes(routing, before, current, (Step(scaled, rows, None), *raised))

    def _target(
        self, edit: Clamp | Group, members: tuple[int, ...], z: Tensor, current: Tensor
    ) -> Tensor:
        """Return the activations that a raising edit sets in each state, [N, E]."""
        # forward, not the module: its hooks would edit the logits.
        logits = self.logit_map.before_softcap(self.embedding.forward(z).float())
        evidence = logits.max(-1).values - logits.mean(-1)
        if isinstance(edit, Clamp):
            row = self._weight[self.card_tokens(edit.prototype)[0]].float()
            # p̂ gives the first token as much as p does.
            gain = self.logit_map.scale * (row @ self.head.prototypes[edit.prototype].float())
            return (edit.fraction * evidence / gain)[:, None].expand_as(current)
        rows = self._weight[self.distinctive_tokens(members)].float()
        gain = self.logit_map.scale * (current @ self.rows[edit] @ rows.T).max(1).values
        more = torch.where(gain > 0, edit.strength * evidence / gain, 0)
        return current * (1 + more[:, None])


def dense_activations(routing: Routing | Nearest, chosen: Tensor, prototypes: int) -> Tensor:
    """Return the activations of E chosen prototypes, of all, [N, E]; 0 where one is not routed."""
    column = torch.full((prototypes,), len(chosen), device=chosen.device)
    column[chosen] = torch.arange(len(chosen), device=chosen.device)
    # All other prototypes share a last column, which is dropped.
    spread = routing.activations.new_zeros(len(routing.indices), len(chosen) + 1)
    return spread.scatter(1, column[routing.indices], routing.activations)[:, : len(chosen)]


def raises(edit: Edit) -> TypeGuard[Clamp | Group]:
    """Return whether an edit raises tokens rather than scaling contributions."""
    return isinstance(edit, Clamp) or (isinstance(edit, Group) and edit.strength > 0)


def _factors(edit: Edit) -> list[float]:
    """Return the factor of each member, or of all."""
    if isinstance(edit, Controller):
        return edit.factors
    if isinstance(edit, Group):
        return [1 + edit.strength]
    return [edit.factor if isinstance(edit, Scale) else 0.0]


def card_direction(weight: Tensor, prototype: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return p̂ [d], the part of a prototype that its card shows.

        p̂ = argmin_x xᵀ (M + λI) x   with (W x)[u] = min((W p)[u], (W p)[v]) for card tokens u

    Of all directions that give each card token u what the prototype gives it, but none more than
    the first, v, this one moves the other logits least: M = WᵀW / V, and λ is a thousandth of its
    mean eigenvalue. p itself moves many others as much, most of all rows of W that were hardly
    ever trained. Contradictory conditions are met by least squares, the first one exactly. Tokens
    that p does not raise are ignored; p̂ is zero if the first is among them.
    """
    rows = weight.detach()[list(tokens)].float()
    gain = rows @ prototype
    if float(gain[0]) <= 0:
        return torch.zeros_like(prototype)
    raised = gain > 0
    direction = _smallest(weight, rows[raised], gain[None, raised].clamp_max(gain[0]))[0]
    return direction * (gain[0] / (rows[0] @ direction))


def token_directions(weight: Tensor, prototypes: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the parts of prototypes [n, d] that keep these tokens' logits and move others least.

    As :func:`card_direction`; by least squares if there are more tokens than dimensions.
    """
    rows = weight.detach()[list(tokens)].float()
    return _smallest(weight, rows, prototypes @ rows.T)


def _smallest(weight: Tensor, rows: Tensor, logits: Tensor) -> Tensor:
    """Return the x [n, d] with rows · x = logits [n, u] that minimises xᵀ (M + λI) x."""
    solved = torch.cholesky_solve(rows.T, _metric(weight))
    return logits @ torch.linalg.pinv(rows @ solved, rtol=1e-5).T @ solved.T


@lru_cache(maxsize=2)
def _metric(weight: Tensor) -> Tensor:
    """Return the Cholesky factor of M + λI [d, d], M from evenly spaced rows."""
    sampled = weight.detach()[:: -(-len(weight) // SAMPLED_ROWS)].float()
    metric = sampled.T @ sampled / len(sampled)
    metric.diagonal().add_(1e-3 * metric.diagonal().mean())
    return torch.linalg.cholesky(metric)


def plan_for(lm: OpenedModel, edits: Iterable[Edit], only: Only | None = None) -> Plan:
    """Check edits against an opened model, its head and its lens."""
    members: list[tuple[Edit, tuple[int, ...]]] = []
    for edit in edits:
        if not isinstance(edit, Edit):
            raise InputError(
                f"{edit!r} is not an edit: expected prismlm.Scale, Ablate, Clamp, Group or "
                "Controller."
            )
        head = prototypes_fingerprint(lm.head) if isinstance(edit, Controller) else ""
        if isinstance(edit, Controller) and edit.head not in ("", head):
            name = f" {edit.description!r}" if edit.description else ""
            raise InputError(
                f"the controller{name} was made for the prototype head {edit.head[:8]}, and this "
                f"model has {head[:8]}, whose prototypes mean other things: open the model it was "
                "made for, or calibrate one for this model."
            )
        members.append((edit, tuple(members_of(edit, lm.head.num_prototypes, lm.lens))))
    plan = Plan(
        output_embedding(lm.model),
        lm.head,
        lm.logit_map,
        lru_cache(maxsize=None)(lambda prototype: signature_ids(lm, [prototype])[0]),
        lru_cache(maxsize=None)(lambda members: tokens_of_group(lm, members)),
        tuple(members),
        only,
    )
    for edit, _ in members:
        if isinstance(edit, Clamp) and not bool(plan.rows[edit].any()):
            raise InputError(
                f"prototype {edit.prototype} cannot be clamped: it does not raise the first token "
                "of its card, so no activation gives that a positive contribution. Clamp another "
                "prototype."
            )
    return plan


_plans: ContextVar[tuple[Plan, ...]] = ContextVar("prismlm_edits", default=())


@contextmanager
def applied(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Apply a plan to every forward pass of ``model`` in this block and context.

    Blocks nest: edits of the outer act first. A thread started inside the block has its own
    context and is not edited, unless it gets a copy of this one.
    """
    outer = _plans.get()
    same = [p for p in outer if p.embedding is plan.embedding]
    combined = same[0].then(plan) if same else plan
    token = _plans.set((*(p for p in outer if p not in same), combined))
    try:
        with watch([Hook(plan.embedding, _edit)], unwatched_too=True):
            yield
    finally:
        _plans.reset(token)


def install(lm: OpenedModel, edits: Iterable[Edit]) -> None:
    """Apply edits to every later pass, in all threads, before edits of blocks: for a server."""
    plan = plan_for(lm, edits)

    def always(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (plan.apply(args[0]), *args[1:])

    plan.embedding.register_forward_pre_hook(always)


def _edit(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plan = next((p for p in _plans.get() if p.embedding is module), None)
    if plan is None:
        return None
    edited = plan.apply(args[0])
    return None if edited is args[0] else ((edited, *args[1:]), kwargs)
