"""The control of an edit: the same change of activation, on random prototypes instead.

Every change α′ − α of an edited prototype is given to another one *of equal activation* there:

- where the edited prototype is active, to one of the four active prototypes of that position that
  are nearest to it in activation, other than those edited. Several edited prototypes of a position
  get different ones as long as there are enough;
- where it is not (a clamp alone changes those), to one that is not active there either.

Among the prototypes that a position allows, a seeded random order of all prototypes decides, so
that one draw prefers the same prototypes all along a text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prismlm.edits.plan import Changes, Plan
from prismlm.ops.prototype_head.sparse import gather_sum

NEAREST = 4


def control_orders(num_prototypes: int, draws: int, seed: int) -> list[Tensor]:
    """Return ``draws`` random orders of all prototypes, int64 [K] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(num_prototypes, generator=generator) for _ in range(draws)]


def control_state(plan: Plan, z: Tensor, changes: Changes, order: Tensor) -> Tensor:
    """Return z [N, d] with every change moved to another prototype; without changes, z's bits.

    Args:
        plan: of the edits, without ``only``.
        z: unedited states.
        changes: what the plan changes in them.
        order: prototypes in random order, int64 [K].
    """
    order = order.to(z.device)
    moved = gather_sum(*_to_active(plan, changes, order), plan.head.prototypes)
    for chosen, change in _to_inactive(plan, changes, order):
        moved = moved + change[:, None] * plan.head.prototypes[chosen]
    return torch.where(changes.touched[:, None], (z.to(moved.dtype) + moved).to(z.dtype), z)


def _edited(plan: Plan, like: Tensor) -> Tensor:
    edited = torch.zeros(plan.head.num_prototypes, dtype=torch.bool, device=like.device)
    edited[plan.prototypes] = True
    return edited


def _to_active(plan: Plan, changes: Changes, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the routed prototypes and the change that each takes over, [N, k] both."""
    indices, activations = changes.routing.indices, changes.routing.activations
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    is_edited = _edited(plan, order)[indices]
    column = torch.searchsorted(plan.prototypes, indices).clamp_max(len(plan.prototypes) - 1)
    change = changes.difference.gather(1, column) * (is_edited & (activations > 0))
    free = ~is_edited & (activations > 0)
    taken = torch.zeros_like(free)
    received = torch.zeros_like(change)
    nearest = min(NEAREST, indices.shape[1])
    for slot in range(indices.shape[1]):
        allowed = free & ~taken
        allowed = torch.where(allowed.any(1, keepdim=True), allowed, free)
        distance = (activations - activations[:, slot, None]).abs()
        near = distance.masked_fill(~allowed, torch.inf).topk(nearest, largest=False)
        ranks = rank[indices.gather(1, near.indices)]
        ranks = ranks.masked_fill(near.values.isinf(), len(order))
        receiver = near.indices.gather(1, ranks.argmin(1, keepdim=True))
        moving = change[:, slot, None] * free.any(1, keepdim=True)
        received.scatter_add_(1, receiver, moving)
        taken.scatter_(1, receiver, taken.gather(1, receiver) | (moving != 0))
    return indices, received


def _to_inactive(plan: Plan, changes: Changes, order: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return, per edited prototype that needs one, an inactive prototype and its change, [N]."""
    indices, activations = changes.routing.indices, changes.routing.activations
    edited = _edited(plan, order)
    nobody = ~((activations > 0) & ~edited[indices]).any(1)
    change = changes.difference * ((changes.before == 0) | nobody[:, None])
    columns = change.any(0).nonzero()[:, 0].tolist()
    if not columns:
        return []
    candidates = order[~edited[order]][: indices.shape[1] + len(columns)]
    if not len(candidates):
        return []
    used = (indices[:, :, None] == candidates) & (activations > 0)[:, :, None]
    # Each column in need takes the next of the candidates that are not active at the position.
    places = (~used.any(1)).cumsum(1)
    found: list[tuple[Tensor, Tensor]] = []
    for number, column in enumerate(columns, start=1):
        first = (places >= number).int().argmax(1)
        found.append((candidates[first], change[:, column]))
    return found
