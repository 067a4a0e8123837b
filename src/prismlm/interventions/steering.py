"""One text written under edits: what each token's probability was, became, and would have become.

An edit acts after the last layer, so the states of the same tokens are the same with and without
it: the text written under the edit is read once, and probabilities before, after and under the
control come from that one pass.

The control makes the same change of activation on random prototypes instead: a change α′ − α goes
to one of the four active prototypes of that position that are nearest in activation, other than
those edited; several edited prototypes of a position get different ones as long as there are
enough. A clamp's change, which does not depend on whether its prototype is active, goes to one that
is not active there, of which the part is added that its own card shows. Among the prototypes that a
position allows, a seeded random order decides, so that a draw prefers the same all along a text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prismlm.corpus.chat import Messages
from prismlm.corpus.pieces import pieces_of
from prismlm.errors import InputError, check_whole
from prismlm.interventions.plan import Changes, Plan, plan_for
from prismlm.interventions.scope import applied
from prismlm.interventions.strength import REPEATED, repetition
from prismlm.interventions.values import Clamp, Edit, Only
from prismlm.lens.opened_model import OpenedModel
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.models.uncertainty_feedback import recording_codes, replay
from prismlm.ops.prototype_head import Routing
from prismlm.ops.prototype_head.fast import gather_sum

NEAREST = 4
LEAST_PROBABILITY = 1e-38
# Below this share of the evidence, taking a set out changes hardly any top token.
HARDLY = 0.02


def planned(
    lm: OpenedModel, edits: Sequence[Edit], only: Only | None, draws: int, seed: int
) -> tuple[Plan, list[Tensor]]:
    """Return the plan of edits, and the order of all prototypes, int64 [K], of each control.

    There is no control for ``only``.
    """
    plan = plan_for(lm, edits, only)
    if not (plan.edits or plan.only):
        raise InputError("there is no edit: give at least one, such as prismlm.Ablate(412).")
    check_whole("the number of draws of the control", draws)
    generator, count = torch.Generator().manual_seed(seed), lm.head.num_prototypes
    return plan, [torch.randperm(count, generator=generator) for _ in range(0 if only else draws)]


def control_state(plan: Plan, z: Tensor, changes: Changes, order: Tensor) -> Tensor:
    """Return z [N, d] with every change moved to another prototype; without changes, z's bits.

    Args:
        plan: of the edits, without ``only``.
        z: unedited states.
        changes: what the plan changes in them.
        order: prototypes in random order, int64 [K].
    """
    order, bank, routing = order.to(z.device), plan.head.prototypes, changes.routing
    edited = torch.zeros(len(bank), dtype=torch.bool, device=z.device)
    edited[plan.prototypes] = True
    free = (routing.activations > 0) & ~edited[routing.indices]
    moved, taken = torch.zeros_like(z, dtype=bank.dtype), 0
    for step in changes.steps:
        change, received = step.change, []
        if not bool(change.any()):
            continue
        if not isinstance(step.raising, Clamp):
            received.append(_to_active(plan, routing, change, order, free))
            # Where nothing else is active, the change goes to what is not.
            change = change * ~free.any(1, keepdim=True)
        received.append(_to_inactive(routing, change, order[~edited[order]], taken))
        taken += received[-1].change.shape[1]
        for prototypes, amounts in received:
            if not prototypes.shape[1]:
                continue
            unique, place = prototypes.unique(return_inverse=True)
            rows = bank[unique] if step.raising is None else plan.shown(unique.tolist())
            moved = moved + gather_sum(place, amounts, rows.to(amounts.dtype))
    return torch.where(changes.touched[:, None], (z.to(moved.dtype) + moved).to(z.dtype), z)


class _Received(NamedTuple):
    """Prototypes and the change that each takes over, [N, C] both."""

    prototypes: Tensor
    change: Tensor


def _to_active(
    plan: Plan, routing: Routing, change: Tensor, order: Tensor, free: Tensor
) -> _Received:
    """Give changes of active prototypes to ``free`` ones; what takes over nothing is the first."""
    indices, activations = routing.indices, routing.activations
    rank, some = order.argsort(), free.any(1, keepdim=True)
    own = plan.prototypes
    column = torch.searchsorted(own, indices).clamp_max(len(own) - 1)
    moving = change.gather(1, column) * ((own[column] == indices) & (activations > 0) & some)
    taken, received = torch.zeros_like(free), torch.zeros_like(moving)
    nearest = min(NEAREST, indices.shape[1])
    for slot in range(indices.shape[1]):
        allowed = free & ~taken
        allowed = torch.where(allowed.any(1, keepdim=True), allowed, free)
        distance = (activations - activations[:, slot, None]).abs()
        near = distance.masked_fill(~allowed, torch.inf).topk(nearest, largest=False)
        ranks = rank[indices.gather(1, near.indices)]
        ranks = ranks.masked_fill(near.values.isinf(), len(order))
        receiver = near.indices.gather(1, ranks.argmin(1, keepdim=True))
        amount = moving[:, slot, None]
        received.scatter_add_(1, receiver, amount)
        taken.scatter_(1, receiver, taken.gather(1, receiver) | (amount != 0))
    return _Received(torch.where(received != 0, indices, 0), received)


def _to_inactive(routing: Routing, change: Tensor, order: Tensor, taken: int) -> _Received:
    """Give each change to an inactive prototype of ``order``, not to the first ``taken``."""
    indices = routing.indices
    columns = change.any(0).nonzero()[:, 0]
    candidates = order[: indices.shape[1] + taken + len(columns)]
    if not len(candidates) or not len(columns):
        return _Received(indices[:, :0], change[:, :0])
    active = (routing.activations > 0)[:, :, None]
    used = ((indices[:, :, None] == candidates) & active).any(1)
    # Each column in need takes the next of the candidates that are not active at the position.
    places = (~used).cumsum(1)
    numbers = range(taken + 1, taken + 1 + len(columns))
    chosen = [candidates[(places >= number).int().argmax(1)] for number in numbers]
    return _Received(torch.stack(chosen, 1), change[:, columns])


@dataclass(frozen=True)
class Leading:
    """What carries most of a token's evidence.

    Attributes:
        category: the category whose prototypes have the most evidence together, or None where no
            prototype in use has one.
        prototype: the one with the most evidence.
        name: its name, or None without a lens.
    """

    category: str | None
    prototype: int
    name: str | None


@dataclass(frozen=True)
class SteeredToken:
    """One token of the text and what the edit does to the prediction of it.

    Attributes:
        position: of the token, from 0.
        token, token_id: the token, of a character of several as ``東 2/3``.
        before, after: its probability without and with the edit.
        control: its probability under the control, the mean over draws; None without a control.
        leading_before, leading_after: what leads it; None where no prototype is in use.
        changed: Σ |α′ − α| over the edited prototypes.
    """

    position: int
    token: str
    token_id: int
    before: float
    after: float
    control: float | None
    leading_before: Leading | None
    leading_after: Leading | None
    changed: float


@dataclass(frozen=True)
class Steering:
    """A text written under edits, beside the text without them.

    Attributes:
        prompt: what it starts with.
        text: prompt and continuation under the edits.
        unedited: prompt and continuation without them.
        tokens: those written, or those of the prompt where none were asked for.
        draws: random controls that ``control`` is the mean of; 0 without a control.
        repeated: share of the 3-grams written under the edits that occurred before in the text,
            less that of the text without them.
        active: share of the edited prototypes, as they were, in the positive evidence of all
            prototypes for the unedited top tokens; None for a clamp, which acts anywhere.
    """

    prompt: str
    text: str
    unedited: str
    tokens: tuple[SteeredToken, ...]
    draws: int
    repeated: float
    active: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of ``prismlm steer --json``."""
        return asdict(self) | {"tokens": [asdict(token) for token in self.tokens]}

    @property
    def repeats(self) -> bool:
        """Whether the text begins to repeat itself, and the one without the edit does not."""
        return self.repeated > REPEATED

    @property
    def change(self) -> float | None:
        """Mean over tokens of ln(after / before), in nats; None without tokens."""
        return _mean_change([(token.before, token.after) for token in self.tokens])

    @property
    def control_change(self) -> float | None:
        """The same for the control; None without one."""
        pairs = [(t.before, t.control) for t in self.tokens if t.control is not None]
        return _mean_change(pairs)


def cautions(steering: Steering) -> list[str]:
    """Return what a reader of a steered text is told before it: one sentence each."""
    said: list[str] = []
    if steering.repeats:
        said.append(
            "The text begins to repeat itself at this strength: "
            f"{steering.repeated:.0%} more of its three-token sequences occurred before than "
            "without the edit."
        )
    if steering.active is not None and steering.active < HARDLY:
        said.append(
            "What is edited is hardly active here: it carries "
            f"{steering.active:.1%} of the evidence for the model's top tokens."
        )
    return said


def _mean_change(probabilities: Sequence[tuple[float, float]]) -> float | None:
    """Return the mean of ln(after / before)."""
    if not probabilities:
        return None
    # A probability that float32 cannot hold is none: its logarithm would be.
    logs = np.log(np.maximum(probabilities, LEAST_PROBABILITY))
    return float((logs[:, 1] - logs[:, 0]).mean())


class SteeredPredictions(NamedTuple):
    """T predictions of one sequence with and without an edit.

    Attributes:
        changes: of activations.
        before, after: log-probabilities, [T, V].
        control: log-probabilities of each draw, [T, V] each.
    """

    changes: Changes
    before: Tensor
    after: Tensor
    control: list[Tensor]


@torch.no_grad()
def steer(
    lm: OpenedModel,
    prompt: str | Messages,
    edits: Sequence[Edit],
    *,
    only: Only | None = None,
    generate: int = 20,
    temperature: float = 0.0,
    seed: int = 0,
    draws: int = 8,
    enough: Callable[[Tensor], bool] | None = None,
) -> Steering:
    """Write a continuation under edits and say what they did to every token of it.

    Args:
        lm: the model.
        prompt: a text or messages, of at least two tokens with ``generate=0``.
        edits: what to change.
        only: as for :meth:`PrismLM.edit`; there is no control for it.
        generate: tokens to write; 0 reads the prompt's own.
        temperature: 0 takes the top token; otherwise sampling from softmax(logits / T).
        seed: of the sampling and of the control.
        draws: random controls; 0 for none.
        enough: is asked after every token, first of the text without edits and then of that under
            them, with all tokens so far, whether to stop writing that text.
    """
    plan, orders = planned(lm, edits, only, draws, seed)
    ids = lm.encode(prompt, generate)
    length = ids.shape[1]
    if generate == 0 and length < 2:
        raise InputError(
            "the prompt is one token, so it holds no prediction to show: give more tokens to "
            "generate, or a longer prompt."
        )
    unedited = lm.write(ids, generate, temperature, seed, enough=enough)
    with applied(lm.model, plan), recording_codes(lm.model) as codes:
        ids = lm.write(ids, generate, temperature, seed, enough=enough)
    first, start = length - 1 if generate else 0, lm.as_text(prompt, generate)
    predictions = steered_predictions(lm, plan, ids, orders, first, codes)
    written, plain = (repetition(text[0, length:].tolist()) for text in (ids, unedited))
    return Steering(
        prompt=start,
        text=start + lm.words(ids[0, length:]),
        unedited=start + lm.words(unedited[0, length:]),
        tokens=tuple(_tokens(lm, plan, predictions, ids[0].tolist(), first + 1)),
        draws=len(orders),
        repeated=written - plain,
        active=None
        if plan.only or any(isinstance(edit, Clamp) for edit, _ in plan.edits)
        else carried(lm, predictions, plan.prototypes.tolist()),
    )


def carried(lm: OpenedModel, predictions: SteeredPredictions, members: Sequence[int]) -> float:
    """Return what prototypes carry, unedited, of the positive evidence for the top tokens.

    Their share in that of all prototypes, of each prediction, and then the mean.
    """
    routing, weight = predictions.changes.routing, weight_of(lm.model)
    rows = weight[predictions.before.argmax(1)].float() - weight.mean(0, dtype=torch.float32)
    given = (lm.head.prototypes[routing.indices].float() @ rows[:, :, None])[:, :, 0]
    raised = (given * routing.activations).clamp_min(0)
    chosen = torch.zeros(lm.head.num_prototypes, dtype=torch.bool, device=raised.device)
    chosen[list(members)] = True
    shares = (raised * chosen[routing.indices]).sum(1) / raised.sum(1).clamp_min(LEAST_PROBABILITY)
    return float(shares.mean()) if len(shares) else 0.0


def steered_predictions(
    lm: OpenedModel,
    plan: Plan,
    ids: Tensor,
    orders: Sequence[Tensor],
    first: int = 0,
    codes: list[Tensor] | None = None,
) -> SteeredPredictions:
    """Run the model once over ``ids`` [1, T] and return its predictions with and without a plan.

    Those of position ``first`` and later: of each, the whole vocabulary is held for each draw.
    With ``codes`` of uncertainty, those that a run under the plan was fed are fed again.
    """
    with capture(lm.model, logits=False) as seen:
        lm.model(**replay(ids, codes), use_cache=False)
    z = seen.z[0, first:]
    changes = plan.changes(z)
    return SteeredPredictions(
        changes,
        plan.log_probabilities(z),
        plan.log_probabilities(plan.edited(z, changes)),
        [plan.log_probabilities(control_state(plan, z, changes, order)) for order in orders],
    )


def _tokens(
    lm: OpenedModel, plan: Plan, predictions: SteeredPredictions, written: list[int], first: int
) -> Iterator[SteeredToken]:
    """Yield the tokens from ``first`` on, of which the predictions are."""
    weight, changes = weight_of(lm.model), predictions.changes
    mean = weight.mean(0, dtype=torch.float32)
    pieces = pieces_of(lm.tokenizer, written)
    indices, activations = changes.routing.indices.tolist(), changes.routing.activations.tolist()
    own, edited = plan.prototypes.tolist(), changes.after.tolist()
    changed = (changes.after - changes.before).abs().sum(1).tolist()
    for t, position in enumerate(range(first, len(written))):
        token = written[position]
        row = weight[token].float() - mean
        before = dict(zip(indices[t], activations[t], strict=True))
        after = before | dict(zip(own, edited[t], strict=True))
        controls = [float(draw[t, token].exp()) for draw in predictions.control]
        yield SteeredToken(
            position=position,
            token=pieces[position].label,
            token_id=token,
            before=float(predictions.before[t, token].exp()),
            after=float(predictions.after[t, token].exp()),
            control=sum(controls) / len(controls) if controls else None,
            leading_before=_leading(lm, before, row),
            leading_after=None if plan.only == "residual" else _leading(lm, after, row),
            changed=changed[t],
        )


def _leading(lm: OpenedModel, activations: dict[int, float], row: Tensor) -> Leading | None:
    """Return what leads a token v, by evidence: α (W_v − W̄)·p; ``row`` is W_v − W̄."""
    used = {i: a for i, a in activations.items() if a > 0}
    if not used:
        return None
    strength = torch.tensor(list(used.values()), device=row.device)
    given = (strength * (lm.head.prototypes[list(used)].float() @ row)).tolist()
    evidence = dict(zip(used, given, strict=True))
    best, lens = max(evidence, key=lambda i: (evidence[i], i)), lm.lens
    if lens is None:
        return Leading(None, best, None)
    sums = Counter[str]()
    for prototype, e in evidence.items():
        if (category := lens.categories[prototype]) is not None:
            sums[category] += e
    leading = max(sums, key=lambda category: sums[category], default=None)
    return Leading(leading, best, lens.names[best])
