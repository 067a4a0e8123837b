"""How the checks are done, and what each of them reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Int64
from torch import Tensor

from prismlm.errors import check_number, check_whole
from prismlm.instruments.uncertainty_feedback.signal import Codes, Signal
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
