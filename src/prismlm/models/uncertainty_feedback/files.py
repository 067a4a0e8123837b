"""Feedback put into a model: with a new table, or with a saved one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from prismlm.errors import check_whole
from prismlm.layers.uncertainty_feedback import ROWS, UncertaintyEmbedding
from prismlm.models.uncertainty_feedback.feedback import UncertaintyFeedback
from prismlm.models.uncertainty_feedback.place import check_model, decoder_and_embeddings, width_of


def attach_uncertainty(
    model: PreTrainedModel,
    levels: int = 65536,
    *,
    rows: int | None = ROWS,
    deviation: float | None = 0.0,
    passes: int = 2,
    decoder: str | None = None,
    embeddings: str | None = None,
) -> UncertaintyFeedback:
    """Put uncertainty feedback into a model, its new table in dtype and device of its embeddings.

    The table is the model's submodule ``prismlm_uncertainty``: it is trained, moved, wrapped and
    saved with it. By default it starts at zero, so that the model begins as it was.

    The source's own form is ``rows=None, deviation=None, passes=1``, and two traps with it. With an
    independent row for each of 65,536 codes, rounding alone changes the injected vector by 130 %.
    With one pass a text that is read at once has the neutral code everywhere, so that training
    moves row 32,768 alone.

    Args:
        model: a Hugging Face decoder, or encoder-decoder.
        levels: how many codes there are.
        rows: of the table, interpolated between, at most one a code; None for one a code.
        deviation: of the table at the start; None for the model's initializer_range.
        passes: see :class:`UncertaintyFeedback`.
        decoder: dotted name of the decoder, as in ``model.named_modules()``, for a model that does
            not say which of its modules that is. Saved and loaded with the table.
        embeddings: dotted name of its input embeddings, likewise.

    Raises:
        InputError: as :class:`UncertaintyFeedback`, levels that are no whole number from 2 on, or
            a deviation below 0.
    """
    check_model(model)
    _, inputs = decoder_and_embeddings(model, decoder=decoder, embeddings=embeddings)
    text: Any = model.config.get_text_config(decoder=True)
    spread = getattr(text, "initializer_range", 0.02) if deviation is None else deviation
    embedding = UncertaintyEmbedding(width_of(inputs), levels, rows=rows, deviation=spread)
    weight = next(inputs.parameters())
    return UncertaintyFeedback(
        model, embedding.to(weight), passes=passes, decoder=decoder, embeddings=embeddings
    )


def save_uncertainty(directory: Path | str, feedback: UncertaintyFeedback) -> None:
    """Write the table beside the checkpoint of its model, as ``save_pretrained`` does."""
    feedback.save(directory)


def load_uncertainty(
    directory: Path | str, model: PreTrainedModel, *, levels: int | None = None
) -> UncertaintyFeedback:
    """Put a saved table beside the model that it was trained with.

    Args:
        directory: of the checkpoint.
        model: what was loaded from it, in the dtype that it was saved in.
        levels: how many codes are expected; None for as many as there are.

    Raises:
        FormatError: the file is missing, damaged, of another version, of another number of levels,
            or of another model.
        InputError: the model has no decoder to put it beside, or feedback already.
    """
    if levels is not None:
        levels = check_whole("the number of levels", levels, 2)
    return UncertaintyFeedback.load(directory, model, levels=levels)
