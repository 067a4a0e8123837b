"""One text written under edits: each token's probability before, after, and under a control.

An edit acts after the last layer, so the same tokens have the same states with and without it: the
text written under the edit is read once, and all three probabilities come from that pass.

The control makes the same change of activation on random prototypes instead: a change α′ − α goes
to one of the four unedited active prototypes of that position that are nearest in activation, a
different one for each edited prototype while enough are left. A clamp's change goes to an inactive
prototype, by the part that its own card shows; so does a change where no other is active, or of
what only a clamp has made active. A seeded random order decides among the allowed prototypes, so a
draw prefers the same ones all along a text.

Strengths are compared by how repetitive the text becomes:

    R(s) = r(text under strength s) − r(text without the edit)
    r    = share of a text's 3-grams of tokens that occurred earlier in it
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prismlm.corpus.chat import Messages
from prismlm.corpus.pieces import pieces_of, token_alone
from prismlm.errors import InputError
from prismlm.interventions.plan import Changes, Plan, Step, applied, plan_for
from prismlm.interventions.values import Clamp, Controller, Edit, Group, Only
from prismlm.lens.opened_model import OpenedModel
from prismlm.models.seam import capture, output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.models.uncertainty_feedback import recording_codes, replay
from prismlm.models.watch import evaluating
from prismlm.ops.prototype_head import Routing
from prismlm.ops.prototype_head.fast import gather_sum

NEAREST = 4
MIN_PROBABILITY = 1e-38
# Below this share of the evidence, removing a set changes hardly any top token.
HARDLY_ACTIVE = 0.02
NGRAM, CONTEXTS = 3, 3
MAX_REPETITION = 0.1
STRENGTH_STEPS = 8
# Evidence lies some 15 nats below the top: at 0.8 of that hardly any text is left.
MAX_STRENGTH = 0.8


def plan_with_controls(
    lm: OpenedModel, edits: Sequence[Edit], only: Only | None, draws: int, seed: int
) -> tuple[Plan, list[Tensor]]:
    """Return the plan and a random order of all prototypes [K] for each draw; none for ``only``."""
    plan = plan_for(lm, edits, only)
    if not (plan.edits or plan.only):
        raise InputError("there is no edit: give at least one, such as prismlm.Ablate(412).")
    generator, count = torch.Generator().manual_seed(seed), lm.head.num_prototypes
    return plan, [torch.randperm(count, generator=generator) for _ in range(0 if only else draws)]


def control_state(plan: Plan, z: Tensor, changes: Changes, order: Tensor) -> Tensor:
    """Return z [N, d] with every change moved to another prototype; untouched states stay equal.

    The plan is without ``only``; ``order`` has all prototypes in random order, int64 [K].
    """
    order, routing = order.to(z.device), changes.routing
    edited = torch.zeros(len(order), dtype=torch.bool, device=z.device)
    edited[plan.prototypes] = True
    free = (routing.activations > 0) & ~edited[routing.indices]
    moved, used = torch.zeros_like(z, dtype=plan.bank.dtype), 0
    for step in changes.steps:
        if not bool(step.change.any()):
            continue
        clamps, received = isinstance(step.edit, Clamp), list[tuple[Tensor, Tensor]]()
        before = changes.before[:, torch.searchsorted(plan.prototypes, step.members)]
        near = step.change * (free.any(1, keepdim=True) & (before > 0) & (not clamps))
        if not clamps:
            received.append(_to_active(step, near, routing, order, free))
        left = step.change - near
        received.append(_to_inactive(left, routing, order[~edited[order]], used))
        used += received[-1][0].shape[1]
        for prototypes, amounts in received:
            unique, columns = prototypes.unique(return_inverse=True)
            if len(unique):
                rows = plan.card_directions(unique.tolist()) if step.edit else plan.bank[unique]
                moved = moved + gather_sum(columns, amounts, rows.to(amounts.dtype))
    return torch.where(changes.touched[:, None], (z.to(moved.dtype) + moved).to(z.dtype), z)


def _to_active(
    step: Step, change: Tensor, routing: Routing, order: Tensor, free: Tensor
) -> tuple[Tensor, Tensor]:
    """Move changes to ``free`` active prototypes; return prototypes and amounts, [N, k] both."""
    indices, activations = routing.indices, routing.activations
    rank, column = order.argsort(), torch.searchsorted(step.members, indices)
    column = column.clamp_max(len(step.members) - 1)
    moving = change.gather(1, column) * (step.members[column] == indices)
    used, received = torch.zeros_like(free), torch.zeros_like(moving)
    nearest = min(NEAREST, indices.shape[1])
    for slot in range(indices.shape[1]):
        allowed = free & ~used
        allowed = torch.where(allowed.any(1, keepdim=True), allowed, free)
        distance = (activations - activations[:, slot, None]).abs()
        near = distance.masked_fill(~allowed, torch.inf).topk(nearest, largest=False)
        ranks = rank[indices.gather(1, near.indices)]
        ranks = ranks.masked_fill(near.values.isinf(), len(order))
        receiver = near.indices.gather(1, ranks.argmin(1, keepdim=True))
        amount = moving[:, slot, None]
        received.scatter_add_(1, receiver, amount)
        used.scatter_(1, receiver, used.gather(1, receiver) | (amount != 0))
    return torch.where(received != 0, indices, 0), received


def _to_inactive(
    change: Tensor, routing: Routing, order: Tensor, used: int
) -> tuple[Tensor, Tensor]:
    """Move each change to an inactive prototype of ``order`` after the first ``used`` ones."""
    indices, columns = routing.indices, change.any(0).nonzero()[:, 0]
    candidates = order[: indices.shape[1] + used + len(columns)]
    if not len(candidates) or not len(columns):
        return indices[:, :0], change[:, :0]
    active = (routing.activations > 0)[:, :, None]
    # The n-th column gets the n-th candidate that is inactive at the position.
    ordinal = (~((indices[:, :, None] == candidates) & active).any(1)).cumsum(1)
    numbers = range(used + 1, used + 1 + len(columns))
    chosen = [candidates[(ordinal >= number).int().argmax(1)] for number in numbers]
    return torch.stack(chosen, 1), change[:, columns]


@dataclass(frozen=True)
class Leading:
    """The category and the prototype with the most evidence for a token, if known."""

    category: str | None
    prototype: int
    name: str | None


@dataclass(frozen=True)
class SteeredToken:
    """One token and its probability before, after, and on average under the control."""

    position: int
    token: str
    token_id: int
    before: float
    after: float
    control: float | None
    leading_before: Leading | None  # None where no prototype is active
    leading_after: Leading | None
    changed: float  # Σ |α′ − α| over the edited prototypes


@dataclass(frozen=True)
class Steering:
    """A text written under edits, and the text without them.

    ``active`` is the share of the edited prototypes in the positive evidence of all prototypes for
    the unedited top tokens; None for a clamp, which acts anywhere.
    """

    prompt: str
    text: str  # prompt and continuation
    unedited: str  # the same without the edits
    tokens: tuple[SteeredToken, ...]  # generated, or of the prompt if none were requested
    draws: int  # of the control
    repeated: float  # R of the continuation
    active: float | None

    @property
    def repeats(self) -> bool:
        """Whether the edit makes the text repetitive."""
        return self.repeated > MAX_REPETITION

    @property
    def change(self) -> float | None:
        """Mean over tokens of ln(after / before), in nats; None without tokens."""
        return _mean_change([(token.before, token.after) for token in self.tokens])

    @property
    def control_change(self) -> float | None:
        """The same for the control; None without one."""
        return _mean_change([(t.before, t.control) for t in self.tokens if t.control is not None])


def cautions(steering: Steering) -> list[str]:
    """Return the warnings to show before a steered text, one sentence each."""
    sentences: list[str] = []
    if steering.repeats:
        sentences.append(
            "The text begins to repeat itself at this strength: "
            f"{steering.repeated:.0%} more of its three-token sequences occurred before than "
            "without the edit."
        )
    if steering.active is not None and steering.active < HARDLY_ACTIVE:
        sentences.append(
            "What is edited is hardly active here: it carries "
            f"{steering.active:.1%} of the evidence for the model's top tokens."
        )
    return sentences


def _mean_change(probabilities: Sequence[tuple[float, float]]) -> float | None:
    if not probabilities:
        return None
    # Probabilities that underflow in float32 have no logarithm.
    logs = np.log(np.maximum(probabilities, MIN_PROBABILITY))
    return float((logs[:, 1] - logs[:, 0]).mean())


class SteeredPredictions(NamedTuple):
    """Log-probabilities [T, V] of one sequence before, after, and for each control draw."""

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
    """Write a continuation under edits and measure what they do to each of its tokens.

    Args:
        lm, prompt, edits: the prompt has at least two tokens with ``generate=0``.
        only: as for :meth:`PrismLM.edit`; there is no control for it.
        generate: tokens to write; 0 reads the prompt's own tokens.
        temperature, seed: as for :meth:`PrismLM.explain`; the seed is also the control's.
        draws: random controls.
        enough: called with all tokens so far after each new one, first of the unedited text, then
            of the edited one; True stops that text.
    """
    plan, orders = plan_with_controls(lm, edits, only, draws, seed)
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
    predictions = steered_predictions(plan, ids, orders, first, codes)
    edited_r, plain_r = (repetition(text[0, length:].tolist()) for text in (ids, unedited))
    anywhere = plan.only or any(isinstance(one.edit, Clamp) for one in plan.edits)
    return Steering(
        prompt=start,
        text=start + lm.words(ids[0, length:]),
        unedited=start + lm.words(unedited[0, length:]),
        tokens=tuple(_tokens(plan, predictions, ids[0].tolist(), first + 1)),
        draws=len(orders),
        repeated=edited_r - plain_r,
        active=None if anywhere else evidence_share(lm, predictions, plan.prototypes.tolist()),
    )


@torch.no_grad()
def compare_answers(
    lm: OpenedModel,
    text: str | Messages,
    controller: Controller,
    generate: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare ``generate`` tokens after a text, or with 0 the top token, with and without.

    Where two answers part, after the same tokens, the one without the controller has the token x
    and the one with it y. What y gains on x is, exactly, the sum over the turned prototypes that
    are active in the state between them of

        Δ_i = (s_i − 1) · scale · α_i (W_y − W_x)·p_i

    Returns the part ``controller`` of ``prismlm explain --json``: both texts; the ``position`` of
    the last token that they share, None if they are the same; the two tokens after it; ``gap``, the
    logit of x less that of y without the controller; Σ Δ_i, ``gained``; and ``moves`` of the turned
    prototypes by |Δ_i|, with ``contexts`` of the lens, nearest first.
    """
    prompt, plan = lm.encode(text, generate), plan_for(lm, [controller])
    how = max(1, generate), temperature if generate else 0.0, seed
    with recording_codes(lm.model) as codes:
        before = lm.write(prompt, *how)[0]
    with applied(lm.model, plan):
        after = lm.write(prompt, *how)[0]
    without, with_it = (lm.words(ids[prompt.shape[1] :]) for ids in (before, after))
    report: dict[str, Any] = {"without": without, "with_it": with_it, "position": None}
    report |= {"token_without": "", "token_with": "", "gap": 0.0, "gained": 0.0, "moves": []}
    pairs = enumerate(zip(before.tolist(), after.tolist(), strict=False))
    parted, x, y = next(((n, x, y) for n, (x, y) in pairs if x != y), (None, 0, 0))
    if parted is None:
        return report
    with evaluating(lm.model), capture(lm.model, logits=False) as captured:
        lm.model(**replay(after[None, :parted], codes), use_cache=False)
    z, weight = captured.z[0, -1:], weight_of(lm.model)
    logits = lm.logit_map.before_softcap(output_embedding(lm.model)(z).float())
    changes, lens = plan.changes(z.float()), lm.lens
    along = lm.head.prototypes[plan.prototypes].float() @ (weight[y] - weight[x]).float()
    gained = lm.logit_map.scale * (changes.after - changes.before)[0] * along
    for n in gained.abs().argsort(descending=True, stable=True).tolist():
        i, s = controller.scales[n]
        if changes.after[0, n] != (alpha := float(changes.before[0, n])):
            move = {"prototype": i, "name": lens and lens.names[i], "scale": s, "activation": alpha}
            contexts = lens.index[lens.rows_of(i)][:CONTEXTS].to_pylist() if lens else []
            report["moves"].append(move | {"gained": float(gained[n]), "contexts": contexts})
    old, new = (token_alone(lm.tokenizer, token) for token in (x, y))
    report |= {"position": parted - 1, "token_without": old, "token_with": new}
    total = sum(move["gained"] for move in report["moves"])
    return report | {"gap": float(logits[0, x] - logits[0, y]), "gained": total}


def evidence_share(
    lm: OpenedModel, predictions: SteeredPredictions, members: Sequence[int]
) -> float:
    """Return the members' mean share of the unedited positive evidence for the top tokens."""
    routing, weight = predictions.changes.routing, weight_of(lm.model)
    rows = weight[predictions.before.argmax(1)].float() - weight.mean(0, dtype=torch.float32)
    gain = (lm.head.prototypes[routing.indices].float() @ rows[:, :, None])[:, :, 0]
    raised = (gain * routing.activations).clamp_min(0)
    chosen = torch.zeros(lm.head.num_prototypes, dtype=torch.bool, device=raised.device)
    chosen[list(members)] = True
    shares = (raised * chosen[routing.indices]).sum(1) / raised.sum(1).clamp_min(MIN_PROBABILITY)
    return float(shares.mean())


def steered_predictions(
    plan: Plan,
    ids: Tensor,
    orders: Sequence[Tensor],
    first: int = 0,
    codes: list[Tensor] | None = None,
) -> SteeredPredictions:
    """Run the model once over ``ids`` [1, T] and return its predictions with and without a plan.

    They start at ``first``, since each needs the complete vocabulary for each draw. ``codes`` are
    the uncertainty codes of a run under the plan, which are fed again.
    """
    with evaluating(plan.lm.model), capture(plan.lm.model, logits=False) as captured:
        plan.lm.model(**replay(ids, codes), use_cache=False)
    z = captured.z[0, first:]
    changes = plan.changes(z)
    return SteeredPredictions(
        changes,
        plan.log_probabilities(z),
        plan.log_probabilities(plan.edited(z, changes)),
        [plan.log_probabilities(control_state(plan, z, changes, order)) for order in orders],
    )


def _tokens(
    plan: Plan, predictions: SteeredPredictions, ids: list[int], first: int
) -> Iterator[SteeredToken]:
    """Yield the tokens from ``first`` on, which the predictions are of."""
    lm, changes = plan.lm, predictions.changes
    weight, pieces = weight_of(lm.model), pieces_of(lm.tokenizer, ids)
    mean, prototypes = weight.mean(0, dtype=torch.float32), plan.prototypes.tolist()
    changed = (changes.after - changes.before).abs().sum(1).tolist()
    columns = changes.routing.indices, changes.routing.activations, changes.after
    states = zip(*(column.tolist() for column in columns), strict=True)
    # The last state predicts what comes after the text.
    for t, (position, (indices, activations, edited)) in enumerate(
        zip(range(first, len(ids)), states, strict=False)
    ):
        token = ids[position]
        row = weight[token].float() - mean
        before = dict(zip(indices, activations, strict=True))
        after = before | dict(zip(prototypes, edited, strict=True))
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
    """Return what leads a token v by evidence α (W_v − W̄)·p; ``row`` is W_v − W̄."""
    active = {i: a for i, a in activations.items() if a > 0}
    if not active:
        return None
    alpha = torch.tensor(list(active.values()), device=row.device)
    parts = (alpha * (lm.head.prototypes[list(active)].float() @ row)).tolist()
    evidence = dict(zip(active, parts, strict=True))
    best, lens = max(evidence, key=lambda i: (evidence[i], i)), lm.lens
    if lens is None:
        return Leading(None, best, None)
    sums = Counter[str]()
    for prototype, e in evidence.items():
        if (category := lens.categories[prototype]) is not None:
            sums[category] += e
    return Leading(max(sums, key=sums.__getitem__, default=None), best, lens.names[best])


def repetition(tokens: Sequence[int]) -> float:
    """Return the share of the 3-grams of a text that occurred earlier in it; 0 without any."""
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def strongest(
    lm: OpenedModel,
    prompt: str | Messages,
    edit: Clamp | Group,
    *,
    generate: int = 20,
    temperature: float = 0.0,
    seed: int = 0,
    enough: Callable[[Tensor], bool] | None = None,
) -> Clamp | Group:
    """Return the edit with the largest of eight strengths for which R(s) ≤ 0.1.

    The steps go up to 0.8, or to −1 for a negative group. Repetition grows with the strength, so
    a binary search writes three texts. If every step repeats, the lowest is returned.
    """
    if generate == 0:
        raise InputError(
            "finding a strength takes generated text, and no tokens are requested: give a strength."
        )
    plan_for(lm, [edit])
    ids = lm.encode(prompt, generate)

    def at(step: int) -> Clamp | Group:
        share = step / STRENGTH_STEPS
        if isinstance(edit, Clamp):
            return replace(edit, fraction=MAX_STRENGTH * share)
        return replace(edit, strength=-share if edit.strength < 0 else MAX_STRENGTH * share)

    def repeated(*edits: Edit) -> float:
        with applied(lm.model, plan_for(lm, edits)):
            text = lm.write(ids, generate, temperature, seed, enough=enough)
        return repetition(text[0, ids.shape[1] :].tolist())

    plain, steps = repeated(), range(2, STRENGTH_STEPS + 1)
    too_much = bisect_left(steps, True, key=lambda n: repeated(at(n)) - plain > MAX_REPETITION)
    return at(1 + too_much)
