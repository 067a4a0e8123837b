"""The effect of an edit over many prompts, and its cost on held-out text, each with a control."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prismlm.corpus.chat import Messages
from prismlm.corpus.layout import NONE_HELD_OUT
from prismlm.corpus.pieces import token_alone
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.interventions.plan import Changes, Plan
from prismlm.interventions.steering import control_state, plan_with_controls, steered_predictions
from prismlm.interventions.values import Edit, Only
from prismlm.lens.opened_model import OpenedModel
from prismlm.lens.signatures import LISTED, signature_ids
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.models.watch import evaluating
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap

MEASURES = ("signature", "text", "divergence")
MAX_WINDOW = 512


@torch.no_grad()
def measure_effects(
    lm: OpenedModel,
    prompts: Sequence[str | Messages],
    edits: Sequence[Edit],
    *,
    only: Only | None = None,
    seed: int = 0,
    draws: int = 8,
    progress: Reporter = SILENT,
) -> dict[str, Any]:
    """Measure what edits and their control do to the predictions along each prompt.

    Returns the figures of ``prismlm steer --file --json``. Its ``measures``, as :func:`summarise`,
    are of means over the predictions of a prompt: ``signature``, change of the log-probability that
    the next token is one of the ``signature_tokens`` on the edited prototypes' cards; ``text``,
    change of the log-probability of the prompt's own next token; ``divergence``, KL(before ‖
    after). ``changed`` is the share of predictions that the edit changes.
    """
    plan, orders = plan_with_controls(lm, edits, only, draws, seed)
    ids = [lm.encode(prompt) for prompt in prompts]
    tokens, values = signature_tokens(plan) if plan.edits else [], defaultdict(list)
    count = changed = 0
    with progress.task("Reading prompts", len(ids), "prompts") as task:
        for sequence in ids:
            predictions = steered_predictions(plan, sequence, orders)
            before, effects = predictions.before, (predictions.after, *predictions.control)
            count += len(before)
            changed += _count_changed(plan, predictions.changes)
            rows = [_measured(before, after, sequence[0], tokens) for after in effects]
            for name in rows[0]:
                values[name].append([row[name] for row in rows])
            task.advance()
    return {
        "measures": {name: summarise(values[name]) for name in MEASURES if name in values},
        "signature_tokens": [token_alone(lm.tokenizer, token) for token in tokens],
        "predictions": count,
        "changed": changed / count,
        "draws": len(orders),
    }


def _measured(before: Tensor, after: Tensor, ids: Tensor, tokens: list[int]) -> dict[str, float]:
    """Return the measures of a prompt ``ids`` [T], means over its predictions."""
    changes = {"divergence": F.kl_div(after, before, reduction="none", log_target=True).sum(1)}
    if tokens:
        changes["signature"] = after[:, tokens].logsumexp(1) - before[:, tokens].logsumexp(1)
    if len(ids) > 1:
        changes["text"] = (after - before)[:-1].gather(1, ids[1:, None])[:, 0]
    return {name: float(change.double().mean()) for name, change in changes.items()}


def signature_tokens(plan: Plan) -> list[int]:
    """Return the tokens on the cards of the edited prototypes; of many, the ten raised most."""
    cards = signature_ids(plan.lm, plan.prototypes.tolist())
    tokens = list(dict.fromkeys(token for ids in cards for token in ids))
    raised = weight_of(plan.lm.model)[tokens].float() @ plan.bank[plan.prototypes].sum(0)
    most = raised.argsort(descending=True)[:LISTED].tolist()
    return tokens if len(tokens) <= LISTED else [tokens[i] for i in most]


def summarise(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the mean effect over prompts, in nats, by the edit, the control, and their difference.

    Each prompt has the effect of the edit and of each draw of the control. The interval is a 95 %
    bootstrap over prompts, of two or more; what there is no control for is None.
    """
    table = np.array(values)
    edit, draws = table[:, 0], table[:, 1:]
    row: dict[str, Any] = {"prompts": len(edit), "edit": float(edit.mean()), "control": None}
    row |= {"difference": None, "difference_interval": None}
    if draws.size:
        control = draws.mean(1)
        difference = edit - control
        row |= {"control": float(control.mean()), "difference": float(difference.mean())}
        if len(edit) > 1:
            interval = bootstrap(difference, seed=0)
            row["difference_interval"] = interval.low, interval.high
    return row


def _count_changed(plan: Plan, changes: Changes) -> int:
    # With ``only``, every state differs.
    return len(changes.before) if plan.only else int(changes.touched.sum())


@dataclass(frozen=True)
class Cost:
    """Perplexity on held-out text: without an edit, with it, and under its control."""

    corpus: str
    tokens: int  # predictions measured
    perplexity: float
    edited: float
    control: float | None  # from the mean cross-entropy over draws
    changed: float  # share of predictions that the edit changes


@torch.no_grad()
def perplexity_cost(
    lm: OpenedModel,
    corpus: Corpus,
    edits: Sequence[Edit],
    *,
    only: Only | None = None,
    tokens: int = 10_000,
    seed: int = 0,
    draws: int = 2,
    progress: Reporter = SILENT,
) -> Cost:
    """Measure perplexity on some held-out tokens with and without edits, and under the control."""
    plan, orders = plan_with_controls(lm, edits, only, draws, seed)
    losses, count, changed = np.zeros(2 + len(orders)), 0, 0
    text = held_out_text(lm, corpus, tokens)
    with progress.task("Reading held-out text", text.tokens) as task:
        for batch in text.batches():
            ids, attended, scored = batch.scored_on(lm.model.device)
            with evaluating(lm.model), capture(lm.model, logits=False) as captured:
                lm.model(input_ids=ids, attention_mask=attended, use_cache=False)
            z, targets = captured.z[:, :-1][scored], ids[:, 1:][scored]
            changes = plan.changes(z)
            states = [z, plan.edited(z, changes)]
            states += [control_state(plan, z, changes, order) for order in orders]
            losses += [
                float(F.nll_loss(plan.log_probabilities(state), targets, reduction="sum"))
                for state in states
            ]
            count += len(z)
            changed += _count_changed(plan, changes)
            task.advance(len(z))
    before, after, *controls = (losses / count).tolist()
    return Cost(
        corpus=corpus.name,
        tokens=count,
        perplexity=float(np.exp(before)),
        edited=float(np.exp(after)),
        control=float(np.exp(np.mean(controls))) if controls else None,
        changed=changed / count,
    )


def held_out_text(lm: OpenedModel, corpus: Corpus, tokens: int) -> Sequences:
    """Return held-out text of some ``tokens``, spread over the corpus."""
    check_tokenizer_of(corpus, lm.tokenizer, lm.path.name)
    window = min(lm.context_length or MAX_WINDOW, MAX_WINDOW)
    text = Sequences(corpus, "heldout", window, tokens)
    if not text.tokens:
        raise InputError(f"the corpus {corpus.name!r} {NONE_HELD_OUT}")
    return text


def corpus_of(lm: OpenedModel, corpus: Path | None) -> tuple[Corpus | None, str]:
    """Return the corpus to measure the cost on, or None and the reason."""
    if corpus is not None:
        return Corpus.open(corpus), ""
    if lm.lens is not None and lm.lens.corpus_path.is_dir():
        return Corpus.open(lm.lens.corpus_path), ""
    why = "there is no lens that names a corpus that is still where it was"
    return None, f"{why}: give one with --corpus DIR."
