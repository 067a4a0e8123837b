"""Texts that a model goes on to write, with the entropy of every prediction on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import check_number, check_whole
from prismlm.instruments.uncertainty_feedback.signal import (
    Codes,
    cache_of,
    evaluating_feedback,
    stacked,
    text_batches,
)
from prismlm.models.positions import check_window
from prismlm.models.uncertainty_feedback import CODES
from prismlm.ops.uncertainty_feedback import normalised_entropy
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Continuation:
    """What a model wrote after one prompt.

    Attributes:
        ids: the tokens, S.
        shares: entropy of the prediction that each was drawn from, over ln V.
    """

    ids: Int64[Tensor, " S"]
    shares: Float[Tensor, " S"]


def continuations(
    model: PreTrainedModel,
    prompts: Sequence[Int64[Tensor, " P"]],
    codes: Codes,
    tokens: int,
    *,
    written_codes: Codes | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Reporter = SILENT,
    title: str = "Writing on",
) -> tuple[Continuation, ...]:
    """Let a model go on from prompts.

    Every text and step has its own random number, the same whatever codes are fed, so that all
    write the same for as long as they predict the same.

    Args:
        model: a decoder with uncertainty feedback.
        prompts: tokens of each.
        codes: of the prompts.
        tokens: S, how many to write.
        written_codes: codes [S − 1] to feed with the tokens that are written; None for the own.
        temperature: of sampling; 0 takes the likeliest token.
        seed: of the random numbers.
        progress, title: show the writing.

    Raises:
        InputError: a model without feedback, a temperature that is no number from 0 on, no token
            to write, or more than the model has positions for.
    """
    check_number("the temperature", temperature, "0 or more", lambda t: t >= 0)
    check_whole("the number of tokens to write", tokens, 1)
    check_window(model, max(map(len, prompts)) + tokens)
    draws = np.random.default_rng(seed).random((len(prompts), tokens))
    found: dict[int, Continuation] = {}
    with evaluating_feedback(model), progress.task(title, len(prompts) * tokens) as task:
        for numbers in text_batches(model, prompts):
            ids, fed = stacked(prompts, numbers), {CODES: stacked(codes, numbers)}
            given = None if written_codes is None else stacked(written_codes, numbers)
            cached: dict[str, Any] = {}
            written: list[Tensor] = []
            shares: list[Tensor] = []
            for step in range(tokens):
                asked = {name: x.to(model.device) for name, x in ({"input_ids": ids} | fed).items()}
                output: Any = model(**asked, use_cache=True, **cached)
                cached, logits = cache_of(output), output.logits[:, -1]
                shares.append(normalised_entropy(logits).float().cpu())
                drawn = torch.from_numpy(draws[numbers, step])
                written.append(draw_tokens(logits, drawn, temperature))
                # The cache has the own.
                fed = {} if given is None else {CODES: given[:, step : step + 1]}
                ids = written[-1][:, None]
                task.advance(len(numbers))
            rows = zip(torch.stack(written, 1), torch.stack(shares, 1), strict=True)
            found |= dict(zip(numbers, (Continuation(*row) for row in rows), strict=True))
    return tuple(found[number] for number in range(len(prompts)))


def draw_tokens(
    logits: Float[Tensor, "B V"], draws: Float[Tensor, " B"], temperature: float
) -> Int64[Tensor, " B"]:
    """Return the tokens at quantiles ``draws`` (0 to 1) of softmax(logits / temperature)."""
    if not temperature:
        return logits.argmax(-1).cpu()
    shares = (logits.double() / temperature).softmax(-1).cumsum(-1).cpu()
    wanted = draws[:, None].double() * shares[:, -1:]
    return (shares <= wanted).sum(-1).clamp_max(shares.shape[-1] - 1)
