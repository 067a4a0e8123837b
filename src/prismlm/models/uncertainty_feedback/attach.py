"""Feedback whose table is drawn anew, put beside a model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from prismlm.layers.uncertainty_feedback import UncertaintyEmbedding
from prismlm.models.uncertainty_feedback.feedback import UncertaintyFeedback
from prismlm.models.uncertainty_feedback.place import check_model, decoder_and_embeddings, width_of
from prismlm.ops.uncertainty_feedback import check_levels


def attach_uncertainty(
    model: PreTrainedModel,
    levels: int = 65536,
    *,
    rows: int | None = None,
    deviation: float | None = None,
    passes: int = 1,
    decoder: str | None = None,
    embeddings: str | None = None,
) -> UncertaintyFeedback:
    """Put uncertainty feedback beside a model, its table freshly drawn.

    The table has the dtype and device that the input embeddings have now, and N(0,
    initializer_range²), as in the source: move it with ``feedback.to(…)`` where the model is moved
    later.

    Args:
        model: a Hugging Face decoder, or encoder-decoder.
        levels: how many codes there are.
        rows: of the table; None for one a code, fewer to interpolate between them.
        deviation: of the table at the start in place of initializer_range; with 0 the model
            begins as it was without feedback.
        passes: see :class:`UncertaintyFeedback`.
        decoder: dotted name of the decoder, as in ``model.named_modules()``, for a model that does
            not say which of its modules that is. Saved and loaded with the table.
        embeddings: dotted name of its input embeddings, likewise.

    Raises:
        InputError: as :class:`UncertaintyFeedback`, levels that are no whole number from 2 on, or
            a deviation below 0.
    """
    check_levels(levels)
    check_model(model)
    _, inputs = decoder_and_embeddings(model, decoder=decoder, embeddings=embeddings)
    text: Any = model.config.get_text_config(decoder=True)
    spread = getattr(text, "initializer_range", 0.02) if deviation is None else deviation
    embedding = UncertaintyEmbedding(width_of(inputs), levels, rows=rows, deviation=spread)
    weight = next(inputs.parameters())
    return UncertaintyFeedback(
        model, embedding.to(weight), passes=passes, decoder=decoder, embeddings=embeddings
    )
