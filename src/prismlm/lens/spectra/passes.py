"""Forward passes over text for the instruments: in evaluation mode, within a model's positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from prismlm.errors import InputError
from prismlm.lens.corpus_reading import decoder_of
from prismlm.models.seam import capture
from prismlm.models.uncertainty import uncertainty_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch


def learned_positions(model: nn.Module) -> int | None:
    """Return how many positions a model has learned an embedding of, or None if it rotates them."""
    bounds = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and (name.endswith("wpe") or "position" in name.rpartition(".")[2])
    ]
    if not bounds:
        return None
    config: Any = getattr(model, "config", None)
    # OPT's table has two rows more than it has positions.
    stated = getattr(config, "max_position_embeddings", None)
    return min(*bounds, stated) if isinstance(stated, int) else min(bounds)


def check_window(model: nn.Module, length: int) -> None:
    """Raise InputError for a window that is longer than the positions that a model has learned."""
    bound = learned_positions(model)
    if bound is not None and length > bound:
        raise InputError(
            f"a window of {length:,} tokens, but the model has learned an embedding of {bound:,} "
            f"positions and has none for more: take windows of at most {bound:,} tokens. Only "
            "models that rotate positions, or have none, read on."
        )


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
        decoder_of(model)(**given)
        return
    with capture(model, logits=False):
        model(**given)
