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
from prismlm.ops.uncertainty_feedback import NO_CODE, normalised_entropy
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
    feedback: bool = True,
    written_codes: Codes | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> tuple[Continuation, ...]:
    """Let a model go on from prompts.

    Every text and step has its own random number, the same with feedback as without, so that
    both write the same for as long as they predict the same.

    Args:
        model: a decoder with uncertainty feedback.
        prompts: tokens of each.
        codes: of the prompts, for ``feedback``.
        tokens: S, how many to write.
        feedback: whether codes are fed to it; otherwise none is, to the prompt neither.
        written_codes: codes [S − 1] to feed with the tokens that are written; None for the own.
        temperature: of sampling; 0 takes the likeliest token.
        seed: of the random numbers.
        progress: shows the writing.

    Raises:
        InputError: a model without feedback, a temperature that is no number from 0 on, no token
            to write, or more than the model has positions for.
    """
    check_number("the temperature", temperature, "0 or more", lambda t: t >= 0)
    check_whole("the number of tokens to write", tokens, 1)
    check_window(model, max(map(len, prompts)) + tokens)
    draws = np.random.default_rng(seed).random((len(prompts), tokens))
    found: dict[int, Continuation] = {}
    own = feedback and written_codes is None
    title = "Writing on" if own else "Writing with other codes" if feedback else "Writing without"
    if not feedback:
        written_codes = tuple(torch.full((tokens - 1,), NO_CODE) for _ in prompts)
    with evaluating_feedback(model), progress.task(title, len(prompts) * tokens) as task:
        for numbers in text_batches(model, prompts):
            ids, fed = stacked(prompts, numbers), stacked(codes, numbers)
            if not feedback:
                fed = torch.full_like(fed, NO_CODE)
            given = None if written_codes is None else stacked(written_codes, numbers)
            written = _Writing(model, given, temperature)
            written.read(ids, fed)
            for step in range(tokens):
                written.add(torch.from_numpy(draws[numbers, step]), last=step + 1 == tokens)
                task.advance(len(numbers))
            found |= {number: written.row(row) for row, number in enumerate(numbers)}
    return tuple(found[number] for number in range(len(prompts)))


class _Writing:
    """Rows that are being written."""

    def __init__(self, model: PreTrainedModel, codes: Tensor | None, temperature: float) -> None:
        self.ids: list[Tensor] = []
        self.shares: list[Tensor] = []
        self._model, self._codes, self._temperature = model, codes, temperature
        self._cached: dict[str, Any] = {}
        self._logits = torch.empty(0)

    def read(self, ids: Tensor, codes: Tensor | None) -> None:
        device = self._model.device
        fed = {} if codes is None else {CODES: codes.to(device)}
        output: Any = self._model(input_ids=ids.to(device), use_cache=True, **self._cached, **fed)
        self._cached, self._logits = cache_of(output), output.logits[:, -1]

    def add(self, draws: Tensor, *, last: bool) -> None:
        self.shares.append(normalised_entropy(self._logits).float().cpu())
        chosen = draw_tokens(self._logits, draws, self._temperature)
        self.ids.append(chosen)
        if not last:
            at = len(self.ids) - 1
            # The cache has the own.
            codes = None if self._codes is None else self._codes[:, at : at + 1]
            self.read(chosen[:, None], codes)

    def row(self, number: int) -> Continuation:
        return Continuation(
            torch.stack([one[number] for one in self.ids]),
            torch.stack([one[number] for one in self.shares]),
        )


def draw_tokens(
    logits: Float[Tensor, "B V"], draws: Float[Tensor, " B"], temperature: float
) -> Int64[Tensor, " B"]:
    """Return the tokens at quantiles ``draws`` (0 to 1) of softmax(logits / temperature)."""
    if not temperature:
        return logits.argmax(-1).cpu()
    shares = (logits.double() / temperature).softmax(-1).cumsum(-1).cpu()
    wanted = draws[:, None].double() * shares[:, -1:]
    return (shares <= wanted).sum(-1).clamp_max(shares.shape[-1] - 1)
