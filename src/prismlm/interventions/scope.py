"""Where edits hold: inside one ``with`` block, for the thread or task that entered it.

A forward pre-hook on the output embedding edits z. The edits themselves are a context variable, so
that blocks nest: the hook of the outermost carries out what holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from prismlm.interventions.plan import Plan
from prismlm.models.watch import Hook, watch

_plans: ContextVar[tuple[Plan, ...]] = ContextVar("prismlm_edits", default=())


@contextmanager
def applied(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Apply a plan to every forward pass of ``model`` in this block and context.

    Blocks nest: edits of the outer act first. A thread started inside the block has a context of
    its own and is not edited, unless it was given a copy of this one.
    """
    outer = _plans.get()
    held = [p for p in outer if p.embedding is plan.embedding]
    combined = held[0].then(plan) if held else plan
    token = _plans.set((*(p for p in outer if p not in held), combined))
    hooks = [Hook(plan.embedding, _edit)]
    try:
        with watch(hooks, unwatched_too=True):
            yield
    finally:
        _plans.reset(token)


def edits_hold() -> bool:
    """Return whether any edit holds in this thread or task."""
    return bool(_plans.get())


def _edit(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plan = next((p for p in _plans.get() if p.embedding is module), None)
    if plan is None:
        return None
    edited = plan.apply(args[0])
    return None if edited is args[0] else ((edited, *args[1:]), kwargs)
