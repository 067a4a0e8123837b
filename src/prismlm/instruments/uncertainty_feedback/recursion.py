"""The codes that a model feeds to itself along texts: token by token, or by passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prismlm.errors import InputError
from prismlm.instruments.losses import target_losses
from prismlm.instruments.uncertainty_feedback.signal import (
    Codes,
    Replay,
    Signal,
    codes_after,
    evaluating_feedback,
    feedback_of,
    neutral_codes,
    pass_codes,
    stacked,
    text_batches,
)
from prismlm.models.uncertainty_feedback import CODES
from prismlm.models.uncertainty_feedback.call import CACHES
from prismlm.ops.uncertainty_feedback import normalised_entropy
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def own_codes(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    signal: Signal,
    *,
    progress: Reporter = SILENT,
) -> Codes:
    """Return the codes that a model feeds to itself along texts.

    Raises:
        InputError: a model without feedback.
    """
    levels = feedback_of(model).embedding.levels
    if signal.kind == "recursion":
        return recursion(model, texts, progress=progress)[0]
    codes = neutral_codes(texts, levels)
    for _, found in pass_codes(model, texts, signal.passes - 1, progress=progress):
        codes = tuple(codes_after(one.shares, levels) for one in found)
    return codes


def recursion(
    model: PreTrainedModel, texts: Sequence[Tensor], *, progress: Reporter = SILENT
) -> tuple[Codes, tuple[Replay, ...]]:
    """Return codes and predictions token by token, from a cache, as decoding has them.

    The tokens are the text's own. This is what the signal means.

    Raises:
        InputError: a model without feedback.
    """
    codes: dict[int, Tensor] = {}
    found: dict[int, Replay] = {}
    with evaluating_feedback(model), progress.task("Token by token", sum(map(len, texts))) as task:
        for numbers in text_batches(model, texts):
            ids = stacked(texts, numbers)
            used: list[Tensor] = []
            losses: list[Tensor] = []
            shares: list[Tensor] = []
            cached: dict[str, Any] = {}
            for at in range(ids.shape[1]):
                column = ids[:, at : at + 1].to(model.device)
                output = model(input_ids=column, use_cache=True, **cached)
                cached = cache_of(output)
                used.append(output[CODES][:, 0].cpu())
                shares.append(normalised_entropy(output.logits[:, -1]).float().cpu())
                if at + 1 < ids.shape[1]:
                    losses.append(target_losses(output.logits[:, -1], ids[:, at + 1]))
                task.advance(len(ids))
            for row, number in enumerate(numbers):
                codes[number] = torch.stack([one[row] for one in used])
                found[number] = Replay(
                    torch.stack([one[row] for one in losses]),
                    torch.stack([one[row] for one in shares]),
                )
    order = range(len(texts))
    return tuple(codes[n] for n in order), tuple(found[n] for n in order)


def cache_of(output: Any) -> dict[str, Any]:
    """Return a model's cache as the argument of its next call.

    Raises:
        InputError: it has none.
    """
    for name in CACHES:
        if output.get(name) is not None:
            return {name: output[name]}
    raise InputError(
        "the model returns no cache, so it cannot go on token by token: read with passes."
    )
