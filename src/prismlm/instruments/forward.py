"""Forward passes over text for the instruments: in evaluation mode, within a model's positions."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.models.evaluating import evaluating
from prismlm.models.positions import check_window
from prismlm.models.seam import capture, run_decoder
from prismlm.models.uncertainty_feedback import uncertainty_of
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus, Split
    from prismlm.corpus.windows import WindowBatch


class Collector(Protocol):
    """Takes in what it sees of forward passes."""

    def listening(self) -> AbstractContextManager[None]:
        """Look into the model's passes during the block."""
        ...

    def begin(self, batch: WindowBatch) -> None:
        """Say which batch the next forward pass is of."""
        ...


def collect(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *collectors: Collector,
    title: str,
    progress: Reporter = SILENT,
) -> None:
    """Run batches through the decoder, in evaluation mode, and let collectors see each pass.

    Raises:
        InputError: as :func:`forward`.
    """
    with evaluating(model), ExitStack() as stack, progress.task(title) as task:
        for collector in collectors:
            stack.enter_context(collector.listening())
        for batch in batches:
            for collector in collectors:
                collector.begin(batch)
            forward(model, batch)
            task.advance(int(batch.owned.sum()))


def forward(model: PreTrainedModel, batch: WindowBatch) -> None:
    """Run a batch through the decoder, without logits, for what hooks see of it.

    With uncertainty feedback the whole model runs, which adds its codes; its passes that only take
    codes are unwatched, and form logits.

    Raises:
        InputError: the windows are longer than the model's positions.
    """
    check_window(model, batch.input_ids.shape[1])
    if uncertainty_of(model) is None:
        run_decoder(model, batch.input_ids, batch.attention_mask)
        return
    ids, mask = batch.input_ids.to(model.device), batch.attention_mask.to(model.device).long()
    with capture(model, logits=False):
        model(input_ids=ids, attention_mask=mask, use_cache=False)


def documents_of(corpus: Corpus, split: Split) -> np.ndarray:
    """Return the numbers of a split's documents.

    Raises:
        InputError: it has none.
    """
    numbers = corpus.split(split)
    if not len(numbers):
        raise InputError(
            f"the corpus {corpus.name!r} has no documents in {split!r}: take another split, or "
            "build it with `prismlm corpus build` and another --heldout share."
        )
    return numbers


def target_losses(
    logits: Float[Tensor, "*batch V"], targets: Int64[Tensor, "*batch"]
) -> Float64[Tensor, "*batch"]:
    """Return the cross-entropy of each target, nats; float64, on the CPU."""
    rows = logits.float()
    chosen = rows.gather(-1, targets.to(rows.device)[..., None])[..., 0]
    return (rows.logsumexp(-1) - chosen).double().cpu()
