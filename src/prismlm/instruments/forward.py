"""Forward passes over text for the instruments: in evaluation mode, within a model's positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prismlm.models.positions import check_window
from prismlm.models.seam import base_model_of, capture
from prismlm.models.uncertainty_feedback import uncertainty_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch


def forward(model: PreTrainedModel, batch: WindowBatch) -> None:
    """Run a batch through the decoder, without logits, for what hooks see of it.

    With uncertainty feedback the whole model runs, which adds its codes; its passes that only take
    codes are unwatched, and form logits.

    Raises:
        InputError: the windows are longer than the model's positions.
    """
    check_window(model, batch.input_ids.shape[1])
    given: dict[str, Any] = {
        "input_ids": batch.input_ids.to(model.device),
        "attention_mask": batch.attention_mask.to(model.device).long(),
        "use_cache": False,
    }
    if uncertainty_of(model) is None:
        base_model_of(model)(**given)
        return
    with capture(model, logits=False):
        model(**given)
