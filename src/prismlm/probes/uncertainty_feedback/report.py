"""All checks of a model's uncertainty signal, as one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from prismlm.errors import InputError, NotFiniteError, check_choice
from prismlm.models.device import check_window
from prismlm.probes.results import Report, Table
from prismlm.probes.texts import Sample
from prismlm.probes.uncertainty_feedback import behaviour, internals
from prismlm.probes.uncertainty_feedback.signal import (
    DEFAULTS,
    CheckInputs,
    InspectOptions,
    levels_of,
    long_texts,
    own_codes,
)
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


CHECKS: dict[str, tuple[Callable[[CheckInputs], Table], int, int | None]] = {
    "ablation": (behaviour.ablation, 4, 2),
    "prefill": (behaviour.prefill_gap, 4, 2),
    "attention": (internals.attention_probe, 8, internals.MIN_LATER + 2),
    "hedging": (behaviour.hedging, 4, 2),
    "mistakes": (behaviour.mistakes, 4, None),
    "probe": (internals.code_probe, 6, 2),
}
"""Each check with its minimum number of texts and of tokens per text; None: ``steps`` + 2."""


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

    Intervals and p are over these texts, of one model. A check that this kind of model does not
    support is left out with the reason; so is one that the texts are too few or too short for,
    unless ``checks`` names it, which is an InputError.
    """
    for check in checks:
        check_choice("a check", check, tuple(CHECKS))
    levels = levels_of(model)
    check_window(model, max(map(len, sample.texts)))
    embeddings: Any = model.get_input_embeddings()
    largest, vocabulary = max(int(text.max()) for text in sample.texts), len(embeddings.weight)
    if largest >= vocabulary:
        raise InputError(
            f"the texts hold token {largest} and the model has {vocabulary} tokens: they were "
            "encoded with another tokenizer than the model's."
        )
    names = dict.fromkeys(checks or CHECKS)
    left_out = {check: reason for check in names if (reason := _too_few(check, sample, options))}
    if left_out and (checks or len(left_out) == len(names)):
        raise InputError(next(iter(left_out.values())))
    codes = own_codes(model, sample.texts, options.signal, progress=progress)
    inputs = CheckInputs(model, tokenizer, sample.texts, codes, options, progress)
    tables: dict[str, Table] = {}
    for check in names:
        if check not in left_out:
            try:
                tables[check] = CHECKS[check][0](inputs)
            except NotFiniteError:
                raise
            except InputError as error:
                # The model has no attention, or no cache to generate with.
                left_out[check] = str(error)
    facts = {"sample": sample.name, "texts": len(sample.texts), "tokens": sample.tokens}
    facts |= {"too_short": sample.left_out, "levels": levels, "options": options}
    return Report(name, facts, tables, left_out)


def _too_few(check: str, sample: Sample, options: InspectOptions) -> str | None:
    """Return why the texts or the options do not allow a check."""
    if check == "hedging" and options.window >= options.tokens:
        return (
            f"a window of {options.window} tokens after a step, of {options.tokens} generated "
            f"tokens: expected 1 to {options.tokens - 1}. Generate more, or shorten the window."
        )
    _, texts, tokens = CHECKS[check]
    tokens = tokens or options.steps + 2
    if (count := len(long_texts(sample.texts, tokens))) >= texts:
        return None
    return (
        f"{check} needs at least {texts} texts of at least {tokens} tokens, and {sample.name} "
        f"has {count}: provide more or longer texts."
    )
