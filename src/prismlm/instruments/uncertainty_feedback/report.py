"""All checks of a model's uncertainty signal: which can be done, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from prismlm.errors import InputError, check_choice
from prismlm.instruments.reading import Sample
from prismlm.instruments.results import Report, Table
from prismlm.instruments.uncertainty_feedback.hedging import PROMPT, hedging
from prismlm.instruments.uncertainty_feedback.losses import ablation, mistakes, prefill_gap
from prismlm.instruments.uncertainty_feedback.probes import (
    LEAST_LATER,
    attention_probe,
    code_probe,
)
from prismlm.instruments.uncertainty_feedback.signal import (
    DEFAULTS,
    InspectOptions,
    Reading,
    cache_of,
    evaluating_feedback,
    feedback_of,
    longer_than,
    own_codes,
)
from prismlm.models.attention import attention_layers
from prismlm.models.positions import check_window, learned_positions
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Check(NamedTuple):
    """A check, and the fewest texts and tokens of each that it needs; None: ``steps`` + 2."""

    do: Callable[[Reading], Table]
    texts: int
    tokens: int | None


CHECKS = {
    "ablation": Check(ablation, 4, 2),
    "prefill": Check(prefill_gap, 4, 2),
    "attention": Check(attention_probe, 8, LEAST_LATER + 2),
    "hedging": Check(hedging, 4, 2),
    "mistakes": Check(mistakes, 4, None),
    "probe": Check(code_probe, 6, 2),
}


def inspect_uncertainty_feedback(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    checks: Sequence[str] = (),
    *,
    name: str = "",
    options: InspectOptions = DEFAULTS,
    progress: Reporter = SILENT,
) -> Report:
    """Check whether a model uses the uncertainty that is fed back to it.

    Intervals and p of the report are over these texts, of one model, which is left as it was.
    Without ``checks`` it has all that model and texts allow, the others with a reason.

    Raises:
        InputError: a model without feedback, an unknown check, texts of another vocabulary or
            longer than the model reads, or texts too few or too short for a check that was asked
            for, or for all.
    """
    levels = feedback_of(model).embedding.levels
    planned, left_out = checks_for(model, sample, checks, options)
    codes = own_codes(model, sample.texts, options.signal, progress=progress)
    reading = Reading(model, tokenizer, sample.texts, codes, options, progress)
    facts = {
        "sample": sample.name,
        "texts": len(sample.texts),
        "tokens": sample.tokens,
        "too_short": sample.left_out,
        "levels": levels,
        "options": options,
    }
    return Report(name, facts, {check: CHECKS[check].do(reading) for check in planned}, left_out)


def checks_for(
    model: PreTrainedModel,
    sample: Sample,
    checks: Sequence[str] = (),
    options: InspectOptions = DEFAULTS,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the checks that can be done, and why others cannot."""
    for check in checks:
        check_choice("a check", check, tuple(CHECKS))
    feedback_of(model)
    check_window(model, max(map(len, sample.texts)))
    largest = max(int(text.max()) for text in sample.texts)
    known = model.get_input_embeddings().weight.shape[0]  # pyright: ignore
    if largest >= known:
        raise InputError(
            f"the texts hold token {largest} and the model has {known}: they were made with "
            "another tokenizer than the model's."
        )
    asked = tuple(dict.fromkeys(checks or CHECKS))
    if "hedging" in asked and options.window >= options.tokens:
        raise InputError(
            f"{options.window} tokens after a step, of {options.tokens} that are written: expected "
            f"1 to {options.tokens - 1}."
        )
    missing = _missing(model)
    left_out: dict[str, str] = {}
    for check in asked:
        reason = _unfit(model, check, sample, options)
        if reason is not None and checks:
            raise InputError(reason)
        # A check that the model's family lacks is left out even where it was asked for.
        if reason := reason or missing.get(check):
            left_out[check] = reason
    planned = tuple(check for check in asked if check not in left_out)
    if not planned and not all(missing.get(check) for check in left_out):
        raise InputError(f"no check can be done: {next(iter(left_out.values()))}")
    return planned, left_out


def _unfit(
    model: PreTrainedModel, check: str, sample: Sample, options: InspectOptions
) -> str | None:
    """Return why the texts or the options do not allow a check."""
    _, texts, tokens = CHECKS[check]
    tokens = tokens or options.steps + 2
    count, bound = len(longer_than(sample.texts, tokens)), learned_positions(model)
    if count < texts:
        return (
            f"{check} needs at least {texts} texts of at least {tokens} tokens, and {sample.name} "
            f"has {count}: give more or longer texts."
        )
    if check == "hedging" and bound is not None and PROMPT + options.tokens > bound:
        return (
            f"hedging writes {options.tokens} tokens after {PROMPT}, and the model has learned "
            f"{bound} positions: write fewer."
        )
    return None


def _missing(model: PreTrainedModel) -> dict[str, str]:
    """Return why a family has no attention, or no cache to write on from, by check."""
    reasons: dict[str, str] = {}
    try:
        attention_layers(model)
    except InputError as error:
        reasons["attention"] = str(error)
    try:
        with evaluating_feedback(model):
            cache_of(model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device)))
    except InputError as error:
        reasons |= dict.fromkeys(("prefill", "hedging"), str(error))
    return reasons
