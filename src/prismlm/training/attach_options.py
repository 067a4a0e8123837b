"""How a head is attached, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel

from prismlm.errors import InputError
from prismlm.index.build import IndexOptions
from prismlm.index.codes import CodeName
from prismlm.models.device import device_named, uses_bf16
from prismlm.training.fit import FitOptions
from prismlm.training.lora import LoraOptions
from prismlm.training.uncertainty_table import TableOptions

LONGEST_DEFAULT_WINDOW = 512
HELDOUT_TOKENS = 20_000


@dataclass(frozen=True)
class AttachOptions:
    """How a head is attached.

    Attributes:
        fit: how it is fitted.
        window: tokens that the model reads at once; 512, or what it can read, if left out.
        states_gb: the most disk for hidden states; what fits is an even sample of the corpus.
        keep_states: leave them there, to fit another head.
        contexts: L, the places kept per prototype in the lens.
        positions: the share of positions that goes to the lens's cells.
        codes: of their states, int8 or pq.
        heldout_tokens: that the head's figures are measured on.
        device: where the model runs: auto, cpu or cuda.
        precision: of reading the corpus: auto, float32 or bf16.
        revision: of a model from the hub.
        lora: how the model is fine-tuned on the corpus first; None leaves it as it is.
        skip_bad_rows: leave out rows of text files that cannot be used, and count them.
        uncertainty: how a table of uncertainty codes is trained for it then; None for no feedback.
    """

    fit: FitOptions = field(default_factory=FitOptions)
    window: int | None = None
    states_gb: float = 4.0
    keep_states: bool = False
    contexts: int = 64
    positions: float = 1.0
    codes: CodeName = "int8"
    heldout_tokens: int = HELDOUT_TOKENS
    device: str = "auto"
    precision: str = "auto"
    revision: str | None = None
    lora: LoraOptions | None = None
    skip_bad_rows: bool = False
    uncertainty: TableOptions | None = None

    def __post_init__(self) -> None:
        if not self.states_gb > 0:
            raise InputError(f"--states-gb is {self.states_gb:g}: expected more than 0.")


def window_of(model: PreTrainedModel, options: AttachOptions) -> int:
    """Return how many tokens the model reads at once."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return options.window or min(longest or LONGEST_DEFAULT_WINDOW, LONGEST_DEFAULT_WINDOW)


def index_options(options: AttachOptions, window: int) -> IndexOptions:
    """Return how the corpus is read, for the states and for the lens alike."""
    return IndexOptions(
        contexts=options.contexts,
        window=window,
        stride=max(1, window * 3 // 4),
        positions=options.positions,
        codes=options.codes,
        bf16=uses_bf16(options.precision, device_named(options.device)),
    )
