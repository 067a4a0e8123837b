"""What an edit costs: perplexity on held-out text, with and without it and under its control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prismlm.edits.plan import Plan, plan_for
from prismlm.edits.steering import check_something, log_probabilities
from prismlm.edits.steering_control import control_orders, control_state
from prismlm.edits.values import Edit, Only
from prismlm.errors import InputError
from prismlm.index.opened_model import OpenedModel
from prismlm.models.seam import capture
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.corpus.windows import WindowBatch

LONGEST_WINDOW = 512
TOKENS_PER_BATCH = 2048


@dataclass(frozen=True)
class Cost:
    """What an edit costs on text that the model was not trained on.

    Attributes:
        corpus: its name.
        tokens: predictions measured.
        perplexity: exp of the cross-entropy without the edit.
        edited: with it.
        control: under the control, from the mean cross-entropy over draws; None without one.
        changed, left: share of predictions that the edit changes, and where a clamp is undefined.
    """

    corpus: str
    tokens: int
    perplexity: float
    edited: float
    control: float | None
    changed: float
    left: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of ``cost`` in ``prismlm steer --json``."""
        return asdict(self)


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
    """Measure perplexity on held-out documents with and without edits, and under the control.

    Whole documents in a seeded order, until ``tokens`` are read. Clamps leave positions where they
    are undefined.

    Raises:
        InputError: no held-out documents, or another tokenizer.
    """
    plan = check_something(plan_for(lm, edits, only), draws).leaving_undefined()
    orders = control_orders(lm.head.num_prototypes, 0 if only else draws, seed)
    sums = np.zeros(3 + len(orders) + 2)
    with progress.task("Reading held-out text", tokens) as task:
        for batch in held_out_batches(lm, corpus, tokens, seed):
            added = _batch_sums(lm, plan, batch, orders, only is not None)
            sums += added
            task.advance(int(added[0]))
    count, before, after, *controls = (sums[: 3 + len(orders)]).tolist()
    return Cost(
        corpus=corpus.name,
        tokens=int(count),
        perplexity=float(np.exp(before / count)),
        edited=float(np.exp(after / count)),
        control=float(np.exp(np.mean(controls) / count)) if controls else None,
        changed=float(sums[-2] / count),
        left=float(sums[-1] / count),
    )


def held_out_batches(lm: OpenedModel, corpus: Corpus, tokens: int, seed: int) -> list[WindowBatch]:
    """Return windows over held-out documents in a seeded order, of about ``tokens`` in all.

    Raises:
        InputError: no held-out documents, or another tokenizer.
    """
    from prismlm.corpus import document_windows, fingerprint, window_batches

    if fingerprint(lm.tokenizer) != corpus.meta["tokenizer"]["fingerprint"]:  # pyright: ignore[reportArgumentType]
        raise InputError(
            f"the corpus {corpus.name} was tokenised with another tokenizer than the model's: "
            "build it with --tokenizer MODEL."
        )
    documents = np.random.default_rng(seed).permutation(corpus.split("heldout"))
    if not len(documents):
        raise InputError(
            f"the corpus {corpus.name} has no held-out documents: build it with --heldout."
        )
    enough = int(np.searchsorted(np.cumsum(corpus.lengths[documents]), tokens)) + 1
    window = min(lm.context_length or LONGEST_WINDOW, LONGEST_WINDOW)
    stride = max(1, window * 3 // 4)
    grid = document_windows(documents[:enough], corpus.starts, corpus.lengths, window, stride)
    return list(window_batches(grid, corpus, TOKENS_PER_BATCH, corpus.eos_token_id))


def _batch_sums(
    lm: OpenedModel, plan: Plan, batch: WindowBatch, orders: list[Tensor], everywhere: bool
) -> np.ndarray:
    """Return count, summed CE (plain, edited, each control), and positions changed and left."""
    device = lm.model.device
    ids, attended = batch.input_ids.to(device), batch.attention_mask.to(device)
    scored = batch.owned.to(device)[:, :-1] & attended[:, 1:]
    with capture(lm.model, logits=False) as seen:
        lm.model(input_ids=ids, attention_mask=attended.long(), use_cache=False)
    z, targets = seen.z[:, :-1][scored], ids[:, 1:][scored]
    changes = plan.changes(z)
    states = [z, plan.edited(z, changes)]
    states += [control_state(plan, z, changes, order) for order in orders]
    losses = [
        float(F.nll_loss(log_probabilities(lm, plan, s), targets, reduction="sum")) for s in states
    ]
    changed = len(z) if everywhere else int(changes.touched.sum())
    return np.array([len(z), *losses, changed, int(changes.left.sum())])


def corpus_of(lm: OpenedModel, corpus: Path | None) -> tuple[Corpus | None, str]:
    """Return the corpus to measure cost on, or None and why there is none.

    Raises:
        InputError, FormatError: the corpus that was asked for cannot be opened.
    """
    from prismlm.corpus import Corpus

    if corpus is not None:
        return Corpus.open(corpus), ""
    if lm.lens is None:
        return None, "there is no lens that names a corpus: give one with --corpus DIR."
    path = Path(lm.lens.meta.corpus_path)
    if not path.is_dir():
        return None, (
            f"the lens {lm.lens.name} was built from {lm.lens.meta.corpus_name}, which is no "
            "longer where it was: give it with --corpus DIR."
        )
    return Corpus.open(path), ""
