"""A model's own codes along texts, and what it predicts when other codes are fed to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import InputError, check_choice, check_number, check_whole
from prismlm.instruments.forward import documents_of, target_losses
from prismlm.models.evaluating import evaluating
from prismlm.models.positions import check_window
from prismlm.models.uncertainty_feedback import CODES, UncertaintyFeedback, uncertainty_of
from prismlm.models.uncertainty_feedback.call import CACHES
from prismlm.ops.uncertainty_feedback import NO_CODE, neutral_code, normalised_entropy, quantise
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.documents import Document
    from prismlm.corpus.store import Corpus, Split

# Tokens of a forward pass, and logits that are held at once.
PASS_TOKENS = 2048
LOGITS = 2**26

Codes = tuple[Tensor, ...]
"""Codes of each text, int64 [T], on the CPU."""


@dataclass(frozen=True)
class Signal:
    """How a model's own codes along a text are obtained.

    Attributes:
        kind: "recursion", token by token, what decoding does; or "passes".
        passes: n: neutral codes, then n − 1 times those of the predictions so far.
    """

    kind: Literal["passes", "recursion"] = "passes"
    passes: int = 2

    def __post_init__(self) -> None:
        check_choice("the signal", self.kind, ("passes", "recursion"))
        check_whole("the number of passes", self.passes, 1)

    @property
    def words(self) -> str:
        """In words."""
        if self.kind == "recursion":
            return "token by token"
        return f"{self.passes} passes" if self.passes > 1 else "1 pass"


OWN = Signal()


@dataclass(frozen=True)
class InspectOptions:
    """How the checks are done.

    Attributes:
        signal: how the own codes are obtained.
        permutations: of the shuffled signal of the ablation.
        passes: the most, of the gap between prefill and recursion.
        tokens: that are written on, for hedging.
        window: tokens after a step, for hedging.
        steps: predictions after a mistake.
        mistakes: planted in each text, one at a time; a text counts once in the intervals.
        temperature: of what is written.
        seed: of all that is drawn.
    """

    signal: Signal = OWN
    permutations: int = 5
    passes: int = 3
    tokens: int = 48
    window: int = 8
    steps: int = 8
    mistakes: int = 4
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        # Said before the first check, not in the middle of the last.
        check_whole("the number of permutations", self.permutations, 1)
        check_whole("the number of passes", self.passes, 1)
        check_whole("the number of tokens after a step", self.window, 1)
        check_whole("the number of tokens after a mistake", self.steps, 1)
        check_whole("the number of mistakes of a text", self.mistakes, 1)
        check_number("the temperature", self.temperature, "0 or more", lambda t: t >= 0)
        check_whole("the seed", self.seed)


DEFAULTS = InspectOptions()


class Reading(NamedTuple):
    """What every check takes.

    Attributes:
        model: a decoder with uncertainty feedback.
        tokenizer: its tokenizer.
        texts: tokens of each.
        codes: the own, as :func:`own_codes`.
        options: how checks are done.
        progress: shows the reading.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    texts: Sequence[Int64[Tensor, " T"]]
    codes: Codes
    options: InspectOptions = DEFAULTS
    progress: Reporter = SILENT


@dataclass(frozen=True)
class Replay:
    """What a model predicts along one text.

    Attributes:
        losses: cross-entropy of each token but the first, nats; float64, on the CPU.
        shares: entropy of the prediction after each token, over ln V; float32, on the CPU.
    """

    losses: Float[Tensor, " T_less_1"]
    shares: Float[Tensor, " T"]


def feedback_of(model: PreTrainedModel) -> UncertaintyFeedback:
    """Return the feedback that stands in a decoder.

    Raises:
        InputError: it has none, or is an encoder-decoder.
    """
    feedback = uncertainty_of(model)
    if feedback is None:
        raise InputError(
            f"this {type(model).__name__} has no uncertainty feedback, so there is no signal to "
            "look for. Train one with `uncertainty: {enabled: true, passes: 2}` in a recipe, or "
            "put a table beside it with prismlm.attach_uncertainty and save_uncertainty."
        )
    if model.config.is_encoder_decoder:
        raise InputError(
            f"{type(model).__name__} is an encoder-decoder: the checks read decoders alone."
        )
    return feedback


@contextmanager
def evaluating_feedback(model: PreTrainedModel) -> Iterator[None]:
    """Run the block in evaluation mode without gradients; the model is as it was afterwards."""
    feedback_of(model)
    with evaluating(model):
        yield


def text_batches(model: PreTrainedModel, texts: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield numbers of equally long texts that one forward pass reads together."""
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
    """Return what a model predicts along texts with these codes fed to it.

    Raises:
        InputError: a model without feedback, or codes that do not go with it.
    """
    found: dict[int, Replay] = {}
    with evaluating_feedback(model), progress.task(title, sum(map(len, texts))) as task:
        for numbers in text_batches(model, texts):
            ids = stacked(texts, numbers)
            output = run(model, ids, stacked(codes, numbers))
            losses, shares = read_logits(output.logits, ids)
            for row, number in enumerate(numbers):
                found[number] = Replay(losses[row], shares[row])
            task.advance(ids.numel())
    return tuple(found[number] for number in range(len(texts)))


def summed(found: Sequence[Replay]) -> Float[np.ndarray, " texts"]:
    """Return the loss of each text, nats."""
    return np.array([float(one.losses.sum()) for one in found])


def predictions_of(texts: Sequence[Tensor]) -> Float[np.ndarray, " texts"]:
    """Return how many tokens of each text are predicted: all but its first."""
    return np.array([len(text) - 1 for text in texts], dtype=np.float64)


def run(model: PreTrainedModel, ids: Tensor, codes: Tensor, **more: Any) -> Any:
    """Return what a model gives for rows of tokens with these codes."""
    fed = {CODES: codes.to(model.device)}
    return model(input_ids=ids.to(model.device), use_cache=False, **fed, **more)


def read_logits(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses [B, T − 1] and the entropies [B, T] of predictions, on the CPU."""
    shares = normalised_entropy(logits).float().cpu()
    losses = [target_losses(row[:-1], own[1:]) for row, own in zip(logits, ids, strict=True)]
    return torch.stack(losses), shares


def no_codes(texts: Sequence[Tensor]) -> Codes:
    """Return codes with which nothing is added."""
    return tuple(torch.full((len(text),), NO_CODE) for text in texts)


def neutral_codes(texts: Sequence[Tensor], levels: int) -> Codes:
    """Return the neutral code for every token but the first, which has none."""
    found = tuple(torch.full((len(text),), neutral_code(levels)) for text in texts)
    for codes in found:
        codes[0] = NO_CODE
    return found


def codes_after(found: Sequence[Replay], levels: int) -> Codes:
    """Return the codes of each text's tokens, each of the prediction before it."""
    codes = no_codes([one.shares for one in found])
    for own, one in zip(codes, found, strict=True):
        own[1:] = quantise(one.shares[:-1], levels)
    return codes


def different(codes: Codes) -> int:
    """Return how many different codes there are, first tokens apart, which have none."""
    return len({int(code) for row in codes for code in row[1:]})


def permuted(codes: Codes, seed: int) -> Codes:
    """Return the codes permuted among all positions of all texts that have one.

    Two calls with texts of the same lengths and one seed permute alike.
    """
    pool = torch.cat(codes)
    known = pool != NO_CODE
    order = torch.from_numpy(np.random.default_rng(seed).permutation(int(known.sum())))
    pool = pool.clone()
    pool[known] = pool[known][order]
    return pool.split([len(own) for own in codes])


def pass_codes(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    passes: int,
    *,
    progress: Reporter = SILENT,
) -> Iterator[tuple[Codes, tuple[Replay, ...]]]:
    """Yield the codes of 1, 2, … ``passes`` passes, each with what the model predicts with them."""
    levels = feedback_of(model).embedding.levels
    codes = neutral_codes(texts, levels)
    for number in range(passes):
        title = f"Pass {number + 1} of {passes}"
        found = replay(model, texts, codes, progress=progress, title=title)
        yield codes, found
        codes = codes_after(found, levels)


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
        codes = codes_after(found, levels)
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
            columns = (torch.stack(one, 1) for one in (used, losses, shares))
            for number, own, lost, spread in zip(numbers, *columns, strict=True):
                codes[number], found[number] = own, Replay(lost, spread)
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


LEAST_TOKENS = 2
TOKENS = "the number of tokens of a text, of which the first is not predicted,"


@dataclass(frozen=True)
class Sample:
    """Texts as tokens, each from its start.

    Attributes:
        name: where they are from.
        texts: tokens of each, int64 [T] of at least 2.
        left_out: texts that were drawn and are shorter.
    """

    name: str
    texts: tuple[Int64[Tensor, " T"], ...]
    left_out: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.texts))


def corpus_sample(
    corpus: Corpus, split: Split, *, texts: int, tokens: int, seed: int = 0
) -> Sample:
    """Return the first ``tokens`` tokens of documents drawn from a split.

    Raises:
        InputError: a split without documents, or none of two tokens.
    """
    check_whole("the number of texts", texts, 1)
    check_whole(TOKENS, tokens, LEAST_TOKENS)
    numbers = documents_of(corpus, split)
    drawn = np.random.default_rng(seed).permutation(numbers)[:texts]
    lengths = np.minimum(corpus.lengths[drawn], tokens).tolist()
    rows = [
        corpus.read_tokens(start, length).astype(np.int64)
        for start, length in zip(corpus.starts[drawn].tolist(), lengths, strict=True)
    ]
    return _sample(f"{corpus.name}, {split}", [torch.from_numpy(row) for row in rows])


def document_sample(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    texts: int,
    tokens: int,
    seed: int = 0,
    name: str = "texts",
) -> Sample:
    """Return the first ``tokens`` tokens of texts drawn from all of ``documents``.

    They are those of :func:`prismlm.corpus.encode.encode_text`.

    Raises:
        InputError: no text, none of two tokens, or a tokenizer that is not a fast one.
    """
    from prismlm.corpus.words import encode

    check_whole("the number of texts", texts, 1)
    check_whole(TOKENS, tokens, LEAST_TOKENS)
    rng = np.random.default_rng(seed)
    kept: list[str] = []
    for number, document in enumerate(documents):
        if number < texts:
            kept.append(document.text)
        elif (place := int(rng.integers(number + 1))) < texts:
            kept[place] = document.text
    rows = [torch.tensor(encode(tokenizer, text)[0][:tokens]) for text in kept]
    return _sample(name, rows)


def check_sample(model: PreTrainedModel, sample: Sample) -> None:
    """Raise InputError for texts that a model cannot read: too long, or of another vocabulary."""
    check_window(model, max(map(len, sample.texts)))
    inputs = model.get_input_embeddings()
    assert inputs is not None
    weight = inputs.weight
    assert isinstance(weight, Tensor)
    largest = max(int(text.max()) for text in sample.texts)
    if largest >= len(weight):
        raise InputError(
            f"the texts hold token {largest} and the model has {len(weight)}: they were made with "
            "another tokenizer than the model's."
        )


def longer_than(sample: Sequence[Tensor], tokens: int) -> list[int]:
    """Return the numbers of the texts of at least so many tokens."""
    return [number for number, text in enumerate(sample) if len(text) >= tokens]


def of_one_length(texts: Sequence[Sized], at_once: int) -> Iterator[list[int]]:
    """Yield numbers of texts that are equally long, at most ``at_once`` tokens together.

    So nothing is padded: what a text gives does not depend on the others.
    """
    lengths = sorted({len(text) for text in texts}, reverse=True)
    for length in lengths:
        members = [number for number, text in enumerate(texts) if len(text) == length]
        rows = max(1, at_once // length)
        for first in range(0, len(members), rows):
            yield members[first : first + rows]


def _sample(name: str, rows: list[Tensor]) -> Sample:
    kept = tuple(row for row in rows if len(row) >= LEAST_TOKENS)
    if not kept:
        raise InputError(
            f"none of {len(rows)} texts of {name} has {LEAST_TOKENS} tokens: nothing is predicted "
            "in a text of one token. Give longer ones."
        )
    return Sample(name, kept, len(rows) - len(kept))
