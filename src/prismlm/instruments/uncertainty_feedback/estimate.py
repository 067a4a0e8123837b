"""What the checks would take, from one forward pass and a few single tokens."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prismlm.instruments.uncertainty_feedback.checks import DEFAULTS, InspectOptions, checks_for
from prismlm.instruments.uncertainty_feedback.hedging import SIGNALS, prompts_of
from prismlm.instruments.uncertainty_feedback.recursion import recursion
from prismlm.instruments.uncertainty_feedback.sample import Sample
from prismlm.instruments.uncertainty_feedback.signal import (
    feedback_of,
    neutral_codes,
    replay,
    text_batches,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEPS_MEASURED = 4
# Of a pass that holds attention weights or hidden states, against one that does not.
HELD = 2
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class InspectEstimate:
    """Measured on the first texts and scaled; nothing is written, so no disk is needed.

    Attributes:
        checks: that would be done.
        texts: how many.
        tokens: of all of them.
        passes: forward passes over all of them.
        steps: single tokens from a cache, of all batches one after the other.
        seconds: about how long it takes.
        memory_bytes: the most that this process held while it measured.
    """

    checks: tuple[str, ...]
    texts: int
    tokens: int
    passes: int
    steps: int
    seconds: float
    memory_bytes: int


def estimate_inspection(
    model: PreTrainedModel,
    sample: Sample,
    checks: Sequence[str] = (),
    options: InspectOptions = DEFAULTS,
) -> InspectEstimate:
    """Return what :func:`inspect_uncertainty_feedback` would take.

    Raises:
        InputError: likewise.
    """
    planned, _ = checks_for(model, sample, checks, options)
    texts = sample.texts
    grouped = list(text_batches(model, texts))
    first = [texts[number] for number in grouped[0]]
    starts = [text[:STEPS_MEASURED] for text in first]
    codes = neutral_codes(first, feedback_of(model).embedding.levels)
    scale = sample.tokens / sum(map(len, first))
    pass_seconds = _timed(lambda: replay(model, first, codes)) * scale
    passes = sum(forward_passes(check, options) for check in planned)
    steps = 0
    along = sum(len(texts[numbers[0]]) for numbers in grouped)
    if options.signal.kind == "recursion":
        steps += along * (1 + options.mistakes * ("mistakes" in planned))
    else:
        passes += options.signal.passes - 1
    steps += along * ("prefill" in planned)
    if "hedging" in planned:
        steps += len(SIGNALS) * options.tokens * len(list(text_batches(model, prompts_of(texts))))
    # A model without a cache has no such step.
    step_seconds = _timed(lambda: recursion(model, starts)) / len(starts[0]) if steps else 0.0
    return InspectEstimate(
        planned,
        len(texts),
        sample.tokens,
        passes,
        steps,
        passes * pass_seconds + steps * step_seconds,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT,
    )


def forward_passes(check: str, options: InspectOptions) -> int:
    """Return over how often a check reads all texts at once, own codes apart."""
    own = options.signal.passes - 1 if options.signal.kind == "passes" else 0
    return {
        "ablation": 3 + options.permutations,
        "prefill": 1 + options.passes,
        "attention": 2 * HELD,
        "hedging": 0,
        "mistakes": 2 + options.mistakes * (4 + own),
        "probe": 2 * HELD,
    }[check]


def _timed(run: Callable[[], object]) -> float:
    began = time.monotonic()
    run()
    return time.monotonic() - began
