"""The codes that a model feeds back to itself, and its predictions with these or other codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.errors import InputError
from prismlm.models.uncertainty_feedback import CACHES, CODES, UncertaintyFeedback, uncertainty_of
from prismlm.models.watch import evaluating
from prismlm.ops.uncertainty_feedback import NO_CODE, neutral_code, normalised_entropy, quantise
from prismlm.probes.texts import target_losses
from prismlm.progress import SILENT, Reporter

BATCH_TOKENS, BATCH_LOGITS = 2048, 2**26
Codes = tuple[Tensor, ...]
"""Codes of each text, int64 [T], on the CPU; the first token of a text has NO_CODE."""


@dataclass(frozen=True)
class InspectOptions:
    """Settings of the checks.

    Of ``passes`` that compute the model's own codes the first reads neutral codes, and each later
    one those of the pass before; 0 is the recursion, token by token, as in decoding.
    """

    passes: int = 2
    permutations: int = 5  # of the shuffled codes in the ablation
    tokens: int = 48  # generated after each prompt, for hedging
    steps: int = 8  # tokens measured after a step or a mistake
    mistakes: int = 4  # planted in each text, one at a time
    seed: int = 0


DEFAULTS = InspectOptions()


class CheckInputs(NamedTuple):
    """The inputs of every check: a decoder with uncertainty feedback, texts, its own codes."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    texts: Sequence[Int64[Tensor, " T"]]
    codes: Codes
    options: InspectOptions = DEFAULTS
    progress: Reporter = SILENT


class Predictions(NamedTuple):
    """A model's predictions along one text; on the CPU."""

    losses: Float[Tensor, " T_less_1"]  # of each token but the first, nats; float64
    entropies: Float[Tensor, " T"]  # after each token, divided by ln V; float32


def feedback_of(model: PreTrainedModel) -> UncertaintyFeedback:
    """Return a decoder's feedback; InputError if it has none, or is an encoder-decoder."""
    feedback = uncertainty_of(model)
    if feedback is None:
        raise InputError(
            f"this {type(model).__name__} has no uncertainty feedback, so there is no signal to "
            "check. Train with `uncertainty_feedback: {enabled: true}` in a recipe, or add a table "
            "to a model with prismlm.attach_uncertainty and save_uncertainty."
        )
    if model.config.is_encoder_decoder:
        raise InputError(
            f"{type(model).__name__} is an encoder-decoder: these checks support decoders only."
        )
    return feedback


def batches_of(model: PreTrainedModel, texts: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of equally long texts whose logits fit in memory together, longest first.

    Without padding, the result for a text does not depend on the others.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    most = min(BATCH_TOKENS, max(1, BATCH_LOGITS // vocabulary))
    for length in sorted({len(text) for text in texts}, reverse=True):
        indices = [index for index, text in enumerate(texts) if len(text) == length]
        size = max(1, most // length)
        for first in range(0, len(indices), size):
            yield indices[first : first + size]


def stack(rows: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    """Return the rows at some indices as one batch."""
    return torch.stack([rows[index] for index in indices])


def run(
    model: PreTrainedModel,
    texts: Sequence[Int64[Tensor, " T"]],
    codes: Sequence[Tensor],
    *,
    title: str = "Replaying codes",
    progress: Reporter = SILENT,
    **options: Any,
) -> Iterator[tuple[list[int], Int64[Tensor, "B T"], Any]]:
    """Yield indices, token ids and the model's output of batches of texts with these codes."""
    with evaluating(model), progress.task(title, sum(map(len, texts))) as task:
        for batch in batches_of(model, texts):
            ids, fed = stack(texts, batch), {CODES: stack(codes, batch).to(model.device)}
            yield batch, ids, model(ids.to(model.device), use_cache=False, **fed, **options)
            task.advance(ids.numel())


def relative_entropies(logits: Tensor) -> Tensor:
    """Return the entropy of each prediction divided by ln V; float32, on the CPU."""
    return normalised_entropy(logits).float().cpu()


def replay(
    model: PreTrainedModel, texts: Sequence[Tensor], codes: Codes, **how: Any
) -> tuple[Predictions, ...]:
    """Return a model's predictions along texts with these codes fed to it."""
    predictions: dict[int, Predictions] = {}
    for batch, ids, output in run(model, texts, codes, **how):
        rows = zip(batch, output.logits, ids, relative_entropies(output.logits), strict=True)
        for index, logits, text, entropies in rows:
            predictions[index] = Predictions(target_losses(logits[:-1], text[1:]), entropies)
    return tuple(predictions[index] for index in range(len(texts)))


def recursion(
    model: PreTrainedModel, texts: Sequence[Tensor], *, progress: Reporter = SILENT
) -> tuple[Codes, tuple[Predictions, ...]]:
    """Return codes and predictions along texts token by token, with a cache, as in decoding."""
    feedback_of(model)
    results: dict[int, tuple[Tensor, Predictions]] = {}
    with evaluating(model), progress.task("Token by token", sum(map(len, texts))) as task:
        for batch in batches_of(model, texts):
            ids, cache = stack(texts, batch), dict[str, Any]()
            steps: list[tuple[Tensor, Tensor, Tensor]] = []
            # The last prediction has no target, so its loss is dropped.
            for token, target in zip(ids.T, ids.roll(-1, 1).T, strict=True):
                output = model(input_ids=token[:, None].to(model.device), use_cache=True, **cache)
                cache, logits = cache_of(output), output.logits[:, -1]
                codes = output[CODES][:, 0].cpu()
                steps.append((codes, target_losses(logits, target), relative_entropies(logits)))
                task.advance(len(ids))
            columns = (torch.stack(column, 1) for column in zip(*steps, strict=True))
            for index, codes, losses, entropies in zip(batch, *columns, strict=True):
                results[index] = codes, Predictions(losses[:-1], entropies)
    codes, predictions = zip(*(results[index] for index in range(len(texts))), strict=True)
    return codes, predictions


def cache_of(output: Any) -> dict[str, Any]:
    """Return a model's cache as the argument of its next call; InputError if it has none."""
    for name in CACHES:
        if output.get(name) is not None:
            return {name: output[name]}
    raise InputError(
        "the model returns no cache, so it cannot continue token by token: use passes."
    )


def own_codes(
    model: PreTrainedModel, texts: Sequence[Tensor], passes: int, *, progress: Reporter = SILENT
) -> Codes:
    """Return the codes that a model feeds back to itself along texts; see InspectOptions."""
    levels = feedback_of(model).levels
    if not passes:
        return recursion(model, texts, progress=progress)[0]
    codes = no_codes(texts)
    for row in codes:
        row[1:] = neutral_code(levels)
    for number in range(1, passes):
        title = f"Pass {number} of {passes - 1}"
        predictions = replay(model, texts, codes, title=title, progress=progress)
        for row, prediction in zip(codes, predictions, strict=True):
            # Each token has the code of the prediction before it.
            row[1:] = quantise(prediction.entropies[:-1], levels)
    return codes


def no_codes(texts: Sequence[Tensor]) -> Codes:
    """Return codes with which nothing is fed back."""
    return tuple(torch.full((len(text),), NO_CODE) for text in texts)


def permute_codes(codes: Codes, seed: int) -> Codes:
    """Return the codes permuted among all positions of all texts that have a code.

    Two calls for texts of the same lengths with the same seed use the same permutation.
    """
    pool = torch.cat(codes).clone()
    has_code = pool != NO_CODE
    order = torch.from_numpy(np.random.default_rng(seed).permutation(int(has_code.sum())))
    pool[has_code] = pool[has_code][order]
    return pool.split([len(row) for row in codes])


def count_codes(codes: Codes) -> int:
    """Return the number of different codes, without those of first tokens."""
    return len({int(code) for row in codes for code in row[1:]})


def long_texts(texts: Sequence[Tensor], tokens: int) -> list[int]:
    """Return the indices of the texts of at least so many tokens."""
    return [index for index, text in enumerate(texts) if len(text) >= tokens]
