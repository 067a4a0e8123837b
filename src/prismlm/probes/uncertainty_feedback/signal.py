"""A model's own codes along texts, and what it predicts when other codes are fed to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import InputError, check_choice, check_number, check_whole
from prismlm.models.evaluating import evaluating
from prismlm.models.uncertainty_feedback import (
    CACHES,
    CODES,
    UncertaintyFeedback,
    uncertainty_of,
)
from prismlm.ops.uncertainty_feedback import NO_CODE, neutral_code, normalised_entropy, quantise
from prismlm.probes.reading import of_one_length, target_losses
from prismlm.progress import SILENT, Reporter, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Tokens of a forward pass, and logits that are held at once.
PASS_TOKENS = 2048
LOGITS = 2**26

Codes = tuple[Tensor, ...]
"""Codes of each text, int64 [T], on the CPU."""


@dataclass(frozen=True)
class Signal:
    """How a model's own codes along a text are obtained.

    Attributes:
        kind: "recursion", token by token, as in decoding; or "passes".
        passes: n: neutral codes, then n − 1 times those of the predictions so far.
    """

    kind: Literal["passes", "recursion"] = "passes"
    passes: int = 2

    def __post_init__(self) -> None:
        check_choice("the signal", self.kind, ("passes", "recursion"))
        check_whole("the number of passes", self.passes, 1)


@dataclass(frozen=True)
class InspectOptions:
    """How the checks are done.

    Attributes:
        signal: how the own codes are obtained.
        permutations: of the shuffled signal of the ablation.
        passes: the most, of the gap between prefill and recursion.
        tokens: written after each prompt, for hedging.
        window: tokens after a step, for hedging.
        steps: predictions after a mistake.
        mistakes: planted in each text, one at a time; a text counts once in the intervals.
        temperature: of what is written.
        seed: of all that is drawn.
    """

    signal: Signal = Signal()
    permutations: int = 5
    passes: int = 3
    tokens: int = 48
    window: int = 8
    steps: int = 8
    mistakes: int = 4
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("permutations", "passes", "window", "steps", "mistakes"):
            check_whole(name, getattr(self, name), 1)
        check_number("the temperature", self.temperature, "0 or more", lambda t: t >= 0)
        check_whole("the seed", self.seed)


DEFAULTS = InspectOptions()


class Reading(NamedTuple):
    """What every check takes: a decoder with uncertainty feedback, texts, and its own codes."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    texts: Sequence[Int64[Tensor, " T"]]
    codes: Codes
    options: InspectOptions = DEFAULTS
    progress: Reporter = SILENT


class Replay(NamedTuple):
    """What a model predicts along one text; on the CPU.

    Attributes:
        losses: cross-entropy of each token but the first, nats; float64.
        shares: entropy of the prediction after each token, over ln V; float32.
    """

    losses: Float[Tensor, " T_less_1"]
    shares: Float[Tensor, " T"]


def feedback_of(model: PreTrainedModel) -> UncertaintyFeedback:
    """Return a decoder's feedback; InputError if it has none, or is an encoder-decoder."""
    feedback = uncertainty_of(model)
    if feedback is None:
        raise InputError(
            f"this {type(model).__name__} has no uncertainty feedback, so there is no signal to "
            "look for. Train one with `uncertainty_feedback: {enabled: true}` in a recipe, or "
            "put a table beside it with prismlm.attach_uncertainty and save_uncertainty."
        )
    if model.config.is_encoder_decoder:
        raise InputError(
            f"{type(model).__name__} is an encoder-decoder: the checks read decoders alone."
        )
    return feedback


@contextmanager
def batches_of(
    model: PreTrainedModel, texts: Sequence[Tensor], title: str, progress: Reporter = SILENT
) -> Iterator[Iterator[list[int]]]:
    """Yield :func:`text_batches`, each read in one pass, while the model is evaluated."""
    feedback_of(model)

    def batches(task: Task) -> Iterator[list[int]]:
        for numbers in text_batches(model, texts):
            yield numbers
            task.advance(sum(len(texts[number]) for number in numbers))

    with evaluating(model), progress.task(title, sum(map(len, texts))) as task:
        yield batches(task)


def text_batches(model: PreTrainedModel, texts: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield batches, each of the numbers of equally long texts."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    return of_one_length(texts, min(PASS_TOKENS, max(1, LOGITS // vocabulary)))


def stacked(rows: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """Return some rows as one batch."""
    return torch.stack([rows[number] for number in numbers])


def replay(
    model: PreTrainedModel,
    texts: Sequence[Int64[Tensor, " T"]],
    codes: Codes,
    *,
    progress: Reporter = SILENT,
    title: str = "Replaying codes",
) -> tuple[Replay, ...]:
    """Return what a model predicts along texts with these codes fed to it."""
    found: dict[int, Replay] = {}
    with batches_of(model, texts, title, progress) as batches:
        for numbers in batches:
            ids = stacked(texts, numbers)
            logits = run(model, ids, stacked(codes, numbers)).logits
            rows = zip(numbers, logits, ids, entropies(logits), strict=True)
            for number, row, text, spread in rows:
                found[number] = Replay(target_losses(row[:-1], text[1:]), spread)
    return tuple(found[number] for number in range(len(texts)))


def summed(replays: Sequence[Replay]) -> Float[np.ndarray, " texts"]:
    """Return the loss of each text, nats."""
    return np.array([float(one.losses.sum()) for one in replays])


def predictions_of(texts: Sequence[Tensor]) -> Float[np.ndarray, " texts"]:
    """Return how many tokens of each text are predicted: all but its first."""
    return np.array([len(text) - 1 for text in texts], dtype=np.float64)


def run(model: PreTrainedModel, ids: Tensor, codes: Tensor, **more: Any) -> Any:
    """Return a model's output for rows of tokens with these codes."""
    fed = {CODES: codes.to(model.device)}
    return model(input_ids=ids.to(model.device), use_cache=False, **fed, **more)


def entropies(logits: Tensor) -> Tensor:
    """Return the entropy of each prediction over ln V; float32, on the CPU."""
    return normalised_entropy(logits).float().cpu()


def no_codes(texts: Sequence[Tensor]) -> Codes:
    """Return codes with which nothing is added."""
    return tuple(torch.full((len(text),), NO_CODE) for text in texts)


def neutral_codes(texts: Sequence[Tensor], levels: int) -> Codes:
    """Return the neutral code for every token but the first, which has none."""
    neutral = tuple(torch.full((len(text),), neutral_code(levels)) for text in texts)
    for codes in neutral:
        codes[0] = NO_CODE
    return neutral


def different(codes: Codes) -> int:
    """Return how many different codes there are, first tokens apart, which have none."""
    return len({int(code) for row in codes for code in row[1:]})


def permuted(codes: Codes, seed: int) -> Codes:
    """Return the codes permuted among all positions of all texts that have one.

    Two calls with texts of the same lengths and one seed permute alike.
    """
    pool = torch.cat(codes).clone()
    known = pool != NO_CODE
    order = torch.from_numpy(np.random.default_rng(seed).permutation(int(known.sum())))
    pool[known] = pool[known][order]
    return pool.split([len(own) for own in codes])


def pass_codes(
    model: PreTrainedModel, texts: Sequence[Tensor], passes: int, *, progress: Reporter = SILENT
) -> Iterator[tuple[Codes, tuple[Replay, ...]]]:
    """Yield the codes of 1, 2, … ``passes`` passes, each with what the model predicts with them."""
    levels = feedback_of(model).embedding.levels
    codes = neutral_codes(texts, levels)
    for number in range(passes):
        title = f"Pass {number + 1} of {passes}"
        replays = replay(model, texts, codes, progress=progress, title=title)
        yield codes, replays
        codes = codes_after(replays, levels)


def codes_after(replays: Sequence[Replay], levels: int) -> Codes:
    """Return the codes of each text's tokens, each of the prediction before it."""
    codes = no_codes([one.shares for one in replays])
    for own, one in zip(codes, replays, strict=True):
        own[1:] = quantise(one.shares[:-1], levels)
    return codes


def own_codes(
    model: PreTrainedModel, texts: Sequence[Tensor], signal: Signal, *, progress: Reporter = SILENT
) -> Codes:
    """Return the codes that a model feeds to itself along texts."""
    if signal.kind == "recursion":
        return recursion(model, texts, progress=progress)[0]
    levels = feedback_of(model).embedding.levels
    codes = neutral_codes(texts, levels)
    for _, replays in pass_codes(model, texts, signal.passes - 1, progress=progress):
        codes = codes_after(replays, levels)
    return codes


def recursion(
    model: PreTrainedModel, texts: Sequence[Tensor], *, progress: Reporter = SILENT
) -> tuple[Codes, tuple[Replay, ...]]:
    """Return codes and predictions along texts token by token, from a cache, as in decoding."""
    found: dict[int, tuple[Tensor, Replay]] = {}
    feedback_of(model)
    with evaluating(model), progress.task("Token by token", sum(map(len, texts))) as task:
        for numbers in text_batches(model, texts):
            ids = stacked(texts, numbers)
            steps: list[tuple[Tensor, Tensor, Tensor]] = []
            cached: dict[str, Any] = {}
            # The last prediction has no target; its loss is dropped.
            targets = torch.cat([ids[:, 1:], ids[:, :1]], 1)
            for token, target in zip(ids.T, targets.T, strict=True):
                output = model(input_ids=token[:, None].to(model.device), use_cache=True, **cached)
                cached, logits = cache_of(output), output.logits[:, -1]
                used = output[CODES][:, 0].cpu()
                steps.append((used, target_losses(logits, target), entropies(logits)))
                task.advance(len(ids))
            columns = (torch.stack(column, 1) for column in zip(*steps, strict=True))
            for number, own, losses, shares in zip(numbers, *columns, strict=True):
                found[number] = own, Replay(losses[:-1], shares)
    codes, replays = zip(*(found[n] for n in range(len(texts))), strict=True)
    return codes, replays


def cache_of(output: Any) -> dict[str, Any]:
    """Return a model's cache as the argument of its next call; InputError if it has none."""
    for name in CACHES:
        if output.get(name) is not None:
            return {name: output[name]}
    raise InputError(
        "the model returns no cache, so it cannot go on token by token: read with passes."
    )


def longer_than(texts: Sequence[Tensor], tokens: int) -> list[int]:
    """Return the numbers of the texts of at least so many tokens."""
    return [number for number, text in enumerate(texts) if len(text) >= tokens]
