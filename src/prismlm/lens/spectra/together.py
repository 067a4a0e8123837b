"""States and heads of a model from the same forward passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prismlm.lens.spectra.head_use import HeadReading, HeadUses
from prismlm.lens.spectra.passes import forward
from prismlm.lens.spectra.states import POSITIONS, AttentionStates, StateReading
from prismlm.models.evaluating import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch


def read_states_and_heads(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *,
    positions: int = POSITIONS,
    seed: int = 0,
) -> tuple[tuple[AttentionStates, ...], HeadUses]:
    """Return what :func:`read_states` and :func:`head_uses` do, in one forward pass a batch.

    Args:
        model: a decoder of signal/noise attention.
        batches: text; tokens count that their window owns.
        positions: N of the states, or all there are if that is fewer.
        seed: of the draw of positions.

    Raises:
        InputError: as both.
    """
    states = StateReading(model, positions=positions, seed=seed)
    heads = HeadReading(model)
    with evaluating(model), states.listening(), heads.listening():
        for batch in batches:
            states.begin(batch)
            heads.begin(batch)
            forward(model, batch)
    return states.result(), heads.result()
