"""Splitting every prediction along a token sequence; checked against the model's own logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.explain.split import OutputLayer, SplitPredictions, split_states
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, capture, output_embedding
from prismlm.models.uncertainty_feedback import CODES, uncertainty_of
from prismlm.models.watch import Hook, watch
from prismlm.ops.uncertainty_feedback import NO_CODE


class Recorded(NamedTuple):
    """What a generation sent through the output embedding, one entry per forward pass.

    Attributes:
        states: its inputs, each [1, positions, d].
        embedded: its outputs W z + b, each [1, positions, V].
        codes: of uncertainty that were fed back, each [1, positions]; none without feedback.
    """

    states: list[Tensor]
    embedded: list[Tensor]
    codes: list[Tensor]

    def until(self, tokens: int | None) -> Recorded:
        """Return what was recorded of the first tokens alone; of all where None."""
        if tokens is None:
            return self
        kept = ([torch.cat(of, 1)[:, : tokens - 1]] if of else [] for of in self)
        return Recorded(*kept)


@contextmanager
def record(model: PreTrainedModel) -> Iterator[Recorded]:
    """Keep every position that this thread sends through the output embedding in the block."""
    recorded = Recorded([], [], [])

    def after(_: nn.Module, args: tuple[Tensor, ...], kwargs: Any, output: Tensor) -> None:
        recorded.states.append(args[0])
        recorded.embedded.append(output)

    def called(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        recorded.codes.append(output[CODES])

    hooks = [Hook(output_embedding(model), after=after)]
    if uncertainty_of(model) is not None:
        hooks.append(Hook(model, after=called))
    with watch(hooks):
        yield recorded


def _states(
    model: PreTrainedModel, ids: Tensor, steps: int, recorded: Recorded | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return z [steps, d], W z + b [steps, V] and codes [steps], recorded or of a forward pass."""
    if recorded is not None and sum(z.shape[1] for z in recorded.states) == steps:
        codes = torch.cat(recorded.codes, 1)[0] if recorded.codes else None
        return torch.cat(recorded.states, 1)[0], torch.cat(recorded.embedded, 1)[0], codes
    with capture(model) as seen:
        output = model(input_ids=ids, use_cache=False)
    assert seen.embedded is not None
    codes = output[CODES][0, :steps] if uncertainty_of(model) is not None else None
    return seen.z[0, :steps], seen.embedded[0, :steps], codes


@torch.no_grad()
def split_predictions(
    model: PreTrainedModel,
    head: PrototypeHead,
    logit_map: LogitMap,
    ids: Tensor,
    steps: int,
    recorded: Recorded | None = None,
) -> SplitPredictions:
    """Split the first ``steps`` predictions along ``ids`` [1, T].

    The target of prediction t is token t + 1; the last token's target is the model's top token.
    The model runs once, or not at all where its generation of ``ids`` was recorded.

    Raises:
        DecompositionError: the parts of a logit do not sum to the model's own.
    """
    states, embedded, codes = _states(model, ids, steps, recorded)
    targets = torch.cat([ids[0, 1:], logit_map(embedded[-1:].float()).argmax(-1)])[:steps]
    output = OutputLayer.of(model, logit_map)
    split = split_states(output, head, states, embedded, (ids[0, :steps], targets))
    return split._replace(uncertainty=fed_back(model, codes))


def fed_back(
    model: PreTrainedModel, codes: Tensor | None
) -> list[tuple[float | None, int | None]] | None:
    """Return codes as shares of the largest entropy, and codes; None where there is no code."""
    feedback = uncertainty_of(model)
    if feedback is None or codes is None:
        return None
    most = feedback.embedding.levels - 1
    return [(None, None) if code == NO_CODE else (code / most, code) for code in codes.tolist()]
