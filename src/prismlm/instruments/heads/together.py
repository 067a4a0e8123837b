"""States and heads of a model from the same forward passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prismlm.instruments.forward import forward
from prismlm.instruments.heads.head_use import LEAST_VISIBLE, HeadReading, HeadUses
from prismlm.instruments.heads.states import POSITIONS, AttentionStates, StateReading
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
    least_visible: int = LEAST_VISIBLE,
) -> tuple[tuple[AttentionStates, ...], HeadUses | None]:
    """Return what :func:`read_states` and :func:`head_uses` do, in one forward pass a batch.

    There is None in the place of the heads where no query sees enough: the states are there all
    the same.

    Args:
        model: a decoder of signal/noise attention.
        batches: text; tokens count that their window owns.
        positions: N of the states, or all there are if that is fewer.
        seed: of the draw of positions.
        least_visible: a query of a head counts from so many visible positions on.

    Raises:
        InputError: as both, but for queries.
    """
    states = StateReading(model, positions=positions, seed=seed)
    heads = HeadReading(model, least_visible=least_visible)
    with evaluating(model), states.listening(), heads.listening():
        for batch in batches:
            states.begin(batch)
            heads.begin(batch)
            forward(model, batch)
    return states.result(), heads.result() if heads.queries else None
