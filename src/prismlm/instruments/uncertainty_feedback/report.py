"""All checks of a model's uncertainty signal in one report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prismlm.files import finite
from prismlm.instruments.uncertainty_feedback.ablation import Ablation
from prismlm.instruments.uncertainty_feedback.attention import AttentionProbe
from prismlm.instruments.uncertainty_feedback.checks import CHECKS, checks_for
from prismlm.instruments.uncertainty_feedback.hedging import Hedging
from prismlm.instruments.uncertainty_feedback.mistakes import Mistakes
from prismlm.instruments.uncertainty_feedback.options import DEFAULTS, InspectOptions, Reading
from prismlm.instruments.uncertainty_feedback.prefill import PrefillGap
from prismlm.instruments.uncertainty_feedback.probe import CodeProbe
from prismlm.instruments.uncertainty_feedback.sample import Sample
from prismlm.instruments.uncertainty_feedback.signal import feedback_of, own_codes
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CAVEAT = (
    "Intervals and p are over these texts, of one model: another training seed may say otherwise, "
    "and what holds of the method takes several models."
)


@dataclass(frozen=True)
class UncertaintyReport:
    """What the checks found; a check that was not done is None, with its reason.

    Attributes:
        model: its name.
        sample: where the texts are from.
        texts: how many.
        tokens: of all of them.
        levels: of the codes.
        options: how the checks were done.
        ablation: the loss with other signals.
        prefill: passes against the recursion.
        attention: received, by code.
        hedging: hedging words by entropy.
        mistakes: recovery from planted ones.
        probe: the code in hidden states.
        too_short: texts that were drawn and have fewer than 2 tokens.
        left_out: the reason of each check that was asked for and not done.
    """

    model: str
    sample: str
    texts: int
    tokens: int
    levels: int
    options: InspectOptions
    ablation: Ablation | None
    prefill: PrefillGap | None
    attention: AttentionProbe | None
    hedging: Hedging | None
    mistakes: Mistakes | None
    probe: CodeProbe | None
    too_short: int
    left_out: dict[str, str]

    @property
    def verdicts(self) -> dict[str, str]:
        """What each check that was done says, in a sentence."""
        found = {name: getattr(self, name) for name in CHECKS}
        return {name: one.verdict for name, one in found.items() if one is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; what is not a number is None."""
        return finite(asdict(self) | {"verdicts": self.verdicts, "caveat": CAVEAT})


def inspect_uncertainty_feedback(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    checks: Sequence[str] = (),
    *,
    name: str = "",
    options: InspectOptions = DEFAULTS,
    progress: Reporter = SILENT,
) -> UncertaintyReport:
    """Check whether a model uses the uncertainty that is fed back to it.

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
    feedback = feedback_of(model)
    planned, left_out = checks_for(model, sample, checks, options)
    codes = own_codes(model, sample.texts, options.signal, progress=progress)
    reading = Reading(model, tokenizer, sample.texts, codes, options, progress)
    found: dict[str, Any] = dict.fromkeys(CHECKS)
    for check in planned:
        found[check] = CHECKS[check].do(reading)
    return UncertaintyReport(
        name,
        sample.name,
        len(sample.texts),
        sample.tokens,
        feedback.embedding.levels,
        options,
        **found,
        too_short=sample.left_out,
        left_out=left_out,
    )
