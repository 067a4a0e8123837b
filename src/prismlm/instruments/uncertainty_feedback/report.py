"""All checks of a model's uncertainty signal: which can be done, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from prismlm.errors import InputError, check_choice
from prismlm.instruments.results import Report, Table
from prismlm.instruments.uncertainty_feedback.attention import LEAST_LATER, attention_probe
from prismlm.instruments.uncertainty_feedback.hedging import PROMPT, hedging
from prismlm.instruments.uncertainty_feedback.losses import ablation, mistakes, prefill_gap
from prismlm.instruments.uncertainty_feedback.probe import code_probe
from prismlm.instruments.uncertainty_feedback.signal import (
    DEFAULTS,
    InspectOptions,
    Reading,
    Sample,
    cache_of,
    check_sample,
    evaluating_feedback,
    feedback_of,
    longer_than,
    own_codes,
)
from prismlm.models.attention import attention_layers
from prismlm.models.positions import learned_positions
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Check(NamedTuple):
    """One check.

    Attributes:
        do: what it does.
        texts: the fewest that it needs.
        tokens: the fewest of each; of mistakes by the steps after one.
    """

    do: Callable[[Reading], Table]
    texts: int
    tokens: int


CHECKS = {
    "ablation": Check(ablation, 4, 2),
    "prefill": Check(prefill_gap, 4, 2),
    "attention": Check(attention_probe, 8, LEAST_LATER + 2),
    "hedging": Check(hedging, 4, 2),
    "mistakes": Check(mistakes, 4, DEFAULTS.steps + 2),
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

    Intervals and p of the report are over these texts, of one model.

    Args:
        model: a decoder with uncertainty feedback; it is left as it was.
        tokenizer: its tokenizer.
        sample: the texts.
        checks: which; none for all that model and texts allow, the others with a reason.
        name: of the model, for the report.
        options: how.
        progress: shows the reading.

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
    found = {check: CHECKS[check].do(reading) for check in planned}
    return Report(name, facts, found, left_out)


def checks_for(
    model: PreTrainedModel,
    sample: Sample,
    checks: Sequence[str] = (),
    options: InspectOptions = DEFAULTS,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the checks that can be done, and why others cannot.

    Raises:
        InputError: as :func:`inspect_uncertainty_feedback`.
    """
    for check in checks:
        check_choice("a check", check, tuple(CHECKS))
    feedback_of(model)
    check_sample(model, sample)
    asked = tuple(dict.fromkeys(checks or CHECKS))
    if "hedging" in asked and options.window >= options.tokens:
        raise InputError(
            f"{options.window} tokens after a step, of {options.tokens} that are written: expected "
            f"1 to {options.tokens - 1}."
        )
    missing = _missing(model)
    left_out: dict[str, str] = {}
    for check in asked:
        reason = _too_few(check, sample, options) or _too_long(model, check, options)
        if reason is not None and checks:
            raise InputError(reason)
        # What a family has not is no fault of who asks.
        reason = reason or missing.get(check)
        if reason is not None:
            left_out[check] = reason
    planned = tuple(check for check in asked if check not in left_out)
    if not planned and not all(missing.get(check) for check in left_out):
        raise InputError(f"no check can be done: {next(iter(left_out.values()))}")
    return planned, left_out


def _too_few(check: str, sample: Sample, options: InspectOptions) -> str | None:
    texts = CHECKS[check].texts
    tokens = options.steps + 2 if check == "mistakes" else CHECKS[check].tokens
    found = len(longer_than(sample.texts, tokens))
    if found >= texts:
        return None
    return (
        f"{check} needs at least {texts} texts of at least {tokens} tokens, and {sample.name} has "
        f"{found}: give more or longer texts."
    )


def _too_long(model: PreTrainedModel, check: str, options: InspectOptions) -> str | None:
    bound = learned_positions(model)
    if check != "hedging" or bound is None or PROMPT + options.tokens <= bound:
        return None
    return (
        f"hedging writes {options.tokens} tokens after {PROMPT}, and the model has learned "
        f"{bound} positions: write fewer."
    )


def _missing(model: PreTrainedModel) -> dict[str, str]:
    """Return why a family has no attention, or no cache to write on from, by check."""

    def cached() -> None:
        with evaluating_feedback(model):
            cache_of(model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device)))

    found: dict[str, str] = {}
    for checks, read in (
        (("attention",), lambda: attention_layers(model)),
        (("prefill", "hedging"), cached),
    ):
        try:
            read()
        except InputError as error:
            found |= dict.fromkeys(checks, str(error))
    return found
