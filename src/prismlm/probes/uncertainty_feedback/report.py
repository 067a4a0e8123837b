"""All checks of a model's uncertainty signal: which can be done, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from prismlm.errors import InputError, NotFiniteError, check_choice
from prismlm.models.positions import check_window
from prismlm.probes.reading import Sample
from prismlm.probes.results import Report, Table
from prismlm.probes.uncertainty_feedback.hedging import hedging
from prismlm.probes.uncertainty_feedback.losses import ablation, mistakes, prefill_gap
from prismlm.probes.uncertainty_feedback.probes import (
    LEAST_LATER,
    attention_probe,
    code_probe,
)
from prismlm.probes.uncertainty_feedback.signal import (
    DEFAULTS,
    InspectOptions,
    Reading,
    feedback_of,
    longer_than,
    own_codes,
)
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
    A check that the model does not allow is left out with the reason, and without ``checks`` one
    that the texts do not allow.

    Raises:
        InputError: a model without feedback, an unknown check, texts of another vocabulary or
            longer than the model reads, or texts too few or too short for a check that was asked
            for, or for all.
    """
    for check in checks:
        check_choice("a check", check, tuple(CHECKS))
    levels = feedback_of(model).embedding.levels
    check_window(model, max(map(len, sample.texts)))
    embeddings: Any = model.get_input_embeddings()
    largest, known = max(int(text.max()) for text in sample.texts), len(embeddings.weight)
    if largest >= known:
        raise InputError(
            f"the texts hold token {largest} and the model has {known}: they were made with "
            "another tokenizer than the model's."
        )
    asked = dict.fromkeys(checks or CHECKS)
    left_out = {check: reason for check in asked if (reason := _too_few(check, sample, options))}
    if left_out and (checks or len(left_out) == len(asked)):
        raise InputError(next(iter(left_out.values())))
    codes = own_codes(model, sample.texts, options.signal, progress=progress)
    reading = Reading(model, tokenizer, sample.texts, codes, options, progress)
    tables: dict[str, Table] = {}
    for check in asked:
        if check not in left_out:
            try:
                tables[check] = CHECKS[check].do(reading)
            except NotFiniteError:
                raise
            except InputError as error:
                # Of a family without attention, or without a cache to write on from.
                left_out[check] = str(error)
    facts = {
        "sample": sample.name,
        "texts": len(sample.texts),
        "tokens": sample.tokens,
        "too_short": sample.left_out,
        "levels": levels,
        "options": options,
    }
    return Report(name, facts, tables, left_out)


def _too_few(check: str, sample: Sample, options: InspectOptions) -> str | None:
    """Return why texts or options do not allow a check."""
    if check == "hedging" and options.window >= options.tokens:
        return (
            f"{options.window} tokens after a step, of {options.tokens} that are written: expected "
            f"1 to {options.tokens - 1}."
        )
    _, texts, tokens = CHECKS[check]
    tokens = tokens or options.steps + 2
    if (count := len(longer_than(sample.texts, tokens))) >= texts:
        return None
    return (
        f"{check} needs at least {texts} texts of at least {tokens} tokens, and {sample.name} "
        f"has {count}: give more or longer texts."
    )
