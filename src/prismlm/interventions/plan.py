"""Edits prepared for one model: what they change in a state, and the block in which they apply.

A forward pre-hook on the output embedding edits z. The edits themselves are in a context variable,
so that blocks nest and each thread or task has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from prismlm.errors import InputError, check_choice
from prismlm.interventions.values import Clamp, Controller, Edit, Group, Only, Scale, members_of
from prismlm.lens.layout import prototypes_fingerprint
from prismlm.lens.opened_model import OpenedModel
from prismlm.lens.signatures import signature_ids, tokens_of_group
from prismlm.models.seam import output_embedding
from prismlm.models.watch import Hook, watch, within
from prismlm.ops.prototype_head import Nearest, Routing, reconstruct

# Rows of W sampled to estimate M = WᵀW / V.
SAMPLED_ROWS = 16_384


class Prepared(NamedTuple):
    """An edit of n prototypes: it scales their activations, or raises ``tokens``."""

    edit: Edit
    members: Tensor  # ascending, int64 [n]
    tokens: list[int]  # the first of a clamp's card, or those that distinguish a group
    rows: Tensor  # added to a state per unit of activation, [n, d], by one that raises


class Step(NamedTuple):
    """Changes of activation by a raising edit, or by all scaling edits together (None)."""

    edit: Edit | None
    members: Tensor  # int64 [n]
    change: Tensor  # α′ − α [N, n]
    rows: Tensor  # [n, d]


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


@dataclass(frozen=True, eq=False)
class Plan:
    """Validated edits of one model, in the order in which they act."""

    lm: OpenedModel
    edits: tuple[Prepared, ...] = ()
    only: Only | None = None  # "prototypes" drops the residual, "residual" the prototypes
    _cards: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.only is not None:
            check_choice("only", self.only, ("prototypes", "residual"))
        if self.only == "residual" and self.edits:
            raise InputError("only='residual' leaves no prototypes to edit: drop one of the two.")

    def then(self, inner: Plan) -> Plan:
        """Return the plan that applies these edits first, then those of ``inner``."""
        if inner.lm.head is not self.lm.head:
            raise InputError("edits of two different heads on one model cannot be nested.")
        if None not in (self.only, inner.only) and self.only != inner.only:
            raise InputError(
                f"only={inner.only!r} inside only={self.only!r} would leave nothing of a state."
            )
        return replace(inner, edits=self.edits + inner.edits, only=self.only or inner.only)

    @cached_property
    def embedding(self) -> nn.Module:
        """The output embedding, whose input is edited."""
        return output_embedding(self.lm.model)

    @cached_property
    def bank(self) -> Tensor:
        """All prototypes [K, d]."""
        return self.lm.head.prototypes.detach()

    @cached_property
    def prototypes(self) -> Tensor:
        """The edited prototypes, ascending, int64 [E]."""
        none = torch.empty(0, dtype=torch.int64, device=self.bank.device)
        return torch.cat([none, *(edit.members for edit in self.edits)]).unique()

    def card_directions(self, prototypes: Iterable[int]) -> Tensor:
        """Return :func:`card_direction` of prototypes, [n, d]."""
        wanted, weight = list(prototypes), cast("Tensor", self.embedding.weight)
        new = [i for i in wanted if i not in self._cards]
        for i, tokens in zip(new, signature_ids(self.lm, new) if new else [], strict=True):
            self._cards[i] = card_direction(weight, self.bank[i].float(), tokens)
        return torch.stack([self._cards[i] for i in wanted]) if wanted else self.bank[:0]

    def prepared(self, edit: Edit) -> Prepared:
        """Check an edit against the model and its lens; find what it adds to a state."""
        lm, weight = self.lm, cast("Tensor", self.embedding.weight)
        members = members_of(edit, lm.head.num_prototypes, lm.lens)
        rows, tokens = self.bank[:0], list[int]()
        if isinstance(edit, Clamp):
            (card,) = signature_ids(lm, members)
            rows = card_direction(weight, self.bank[edit.prototype].float(), card)[None]
            tokens = card[:1]
            if not bool(rows.any()):
                raise InputError(
                    f"prototype {edit.prototype} cannot be clamped: it does not raise the first "
                    "token of its card, so no activation gives that a positive contribution. Clamp "
                    "another prototype."
                )
        elif isinstance(edit, Group) and edit.strength > 0:
            tokens = tokens_of_group(lm, members)
            rows = token_directions(weight, self.bank[members].float(), tokens)
        chosen = torch.tensor(members, dtype=torch.int64, device=rows.device)
        return Prepared(edit, chosen, tokens, rows.to(self.bank.dtype))

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
        return self.lm.logit_map(self.embedding.forward(z).float()).log_softmax(-1)

    def edited(self, z: Tensor, changes: Changes) -> Tensor:
        """Return z′ [N, d] from states and their changes; z itself if nothing changes."""
        if self.only is None and not bool(changes.touched.any()):
            return z
        kept = z if self.only is None else reconstruct(changes.routing, self.bank)
        if self.only == "residual":
            return (z.to(kept.dtype) - kept).to(z.dtype)
        rows = torch.cat([step.rows for step in changes.steps])
        change = torch.cat([step.change for step in changes.steps], 1)
        rows = rows.to(torch.promote_types(kept.dtype, rows.dtype))
        moved = (kept.to(rows.dtype) + change @ rows).to(kept.dtype)
        # An untouched state stays bit-identical.
        return torch.where(changes.touched[:, None], moved, kept).to(z.dtype)

    def changes(self, z: Tensor) -> Changes:
        """Return what the edits change in states [N, d]."""
        routing = self.lm.head(z).routing
        before = dense_activations(routing, self.prototypes, len(self.bank))
        current, scaled, raised = before, torch.zeros_like(before), list[Step]()
        for prepared in self.edits:
            columns = torch.searchsorted(self.prototypes, prepared.members)
            old = current[:, columns]
            if prepared.tokens:
                new = self._raised(prepared, z, old).to(old.dtype)
                raised.append(Step(prepared.edit, prepared.members, new - old, prepared.rows))
            else:
                new = old * old.new_tensor(_factors(prepared.edit))
                scaled = scaled.index_add(1, columns, new - old)
            current = current.index_copy(1, columns, new)
        steps = Step(None, self.prototypes, scaled, self.bank[self.prototypes]), *raised
        return Changes(routing, before, current, steps)

    def _raised(self, prepared: Prepared, z: Tensor, old: Tensor) -> Tensor:
        """Return the activations that a raising edit sets in each state, [N, n]."""
        # forward, not the module: its hooks would edit the logits.
        logits = self.lm.logit_map.before_softcap(self.embedding.forward(z).float())
        evidence, edit = logits.max(-1).values - logits.mean(-1), prepared.edit
        rows = cast("Tensor", self.embedding.weight)[prepared.tokens].float()
        if isinstance(edit, Clamp):
            # p̂ gives the first token as much as p does.
            gain = self.lm.logit_map.scale * (rows[0] @ self.bank[edit.prototype].float())
            return (edit.fraction * evidence / gain)[:, None]
        assert isinstance(edit, Group)
        gain = self.lm.logit_map.scale * (old @ prepared.rows @ rows.T).max(1).values
        more = torch.where(gain > 0, edit.strength * evidence / gain, 0)
        return old * (1 + more[:, None])


def dense_activations(routing: Routing | Nearest, chosen: Tensor, prototypes: int) -> Tensor:
    """Return the activations of E chosen prototypes, of all, [N, E]; 0 where one is not routed."""
    column = torch.full((prototypes,), len(chosen), device=chosen.device)
    column[chosen] = torch.arange(len(chosen), device=chosen.device)
    # All other prototypes share a last column, which is dropped.
    spread = routing.activations.new_zeros(len(routing.indices), len(chosen) + 1)
    return spread.scatter(1, column[routing.indices], routing.activations)[:, : len(chosen)]


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
    plan, prepared = Plan(lm, only=only), list[Prepared]()
    for edit in edits:
        if not isinstance(edit, Edit):
            raise InputError(f"{edit!r} is not an edit, such as prismlm.Ablate(412).")
        if isinstance(edit, Controller) and edit.head:
            head = prototypes_fingerprint(lm.head)
            if edit.head != head:
                raise InputError(
                    f"the controller {edit.description!r} was made for the prototype head "
                    f"{edit.head[:8]}, and this model has {head[:8]}, whose prototypes mean other "
                    "things: open the model it was made for, or calibrate one for this model."
                )
        prepared.append(plan.prepared(edit))
    return replace(plan, edits=tuple(prepared))


_plans: ContextVar[tuple[Plan, ...]] = ContextVar("prismlm_edits", default=())


@contextmanager
def applied(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Apply a plan to every forward pass of ``model`` in this block and context.

    Blocks nest: edits of the outer act first. A thread started inside the block has its own
    context and is not edited, unless it gets a copy of this one.
    """
    outer = _plans.get()
    same = [p for p in outer if p.embedding is plan.embedding]
    others = [p for p in outer if p.embedding is not plan.embedding]
    plans = (*others, same[0].then(plan) if same else plan)
    with within(_plans, plans), watch([Hook(plan.embedding, _edit)], unwatched_too=True):
        yield


def install(lm: OpenedModel, edits: Iterable[Edit]) -> None:
    """Apply edits to every later pass, in all threads, before edits of blocks: for a server."""
    plan = plan_for(lm, edits)
    plan.embedding.register_forward_pre_hook(lambda _, args: (plan.apply(args[0]), *args[1:]))


def _edit(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plan = next((p for p in _plans.get() if p.embedding is module), None)
    return None if plan is None else ((plan.apply(args[0]), *args[1:]), kwargs)
