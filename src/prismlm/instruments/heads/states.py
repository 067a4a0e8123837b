"""What signal/noise attention reads and adds, at positions drawn from a text."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import InputError, check_whole
from prismlm.index.positions import hashed
from prismlm.instruments.forward import collect
from prismlm.instruments.heads.head_use import LEAST_VISIBLE, HeadUseCollector, HeadUses
from prismlm.layers.signal_noise_attention import SignalNoiseAttention, SignalNoiseOutput
from prismlm.models.watch import Hook, watch
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

POSITIONS = 2048


@dataclass(frozen=True)
class AttentionStates:
    """One layer's attention at N positions, on the CPU.

    Attributes:
        layer: from 0.
        attention: the layer itself.
        noise_weight: λ.
        dictionary: U of each head, signal heads first.
        positions: where in the corpus, ascending.
        inputs: Z, the normalised stream that the attention reads.
        steps: η (S − λN), what it adds.
    """

    layer: int
    attention: SignalNoiseAttention
    noise_weight: float
    dictionary: Float[Tensor, "G d p"]
    positions: Int64[Tensor, " N"]
    inputs: Float[Tensor, "N d"]
    steps: Float[Tensor, "N d"]

    def projections(self) -> Float[Tensor, "G N p"]:
        """Return Z U of each head; float64."""
        return self.inputs.double() @ self.dictionary.double()


def signal_noise_layers(model: nn.Module) -> tuple[SignalNoiseAttention, ...]:
    """Return the signal/noise attention of each layer.

    Raises:
        InputError: the model has none.
    """
    found = [module for module in model.modules() if isinstance(module, SignalNoiseAttention)]
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
        raise InputError(
            f"a model of type {kind!r} has no signal and noise dictionaries: coding rates, "
            "incoherence and cross terms need signal/noise attention, as models of type "
            "'prismlm_signal_noise' have. Heads and the loss against length can be read of any "
            "decoder."
        )
    return tuple(found)


def read_states(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *,
    positions: int = POSITIONS,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> tuple[AttentionStates, ...]:
    """Return what each layer's attention reads and adds at positions drawn from the text.

    Which positions is a matter of the seed and of where in the corpus they are, not of batches:
    each gets a hash, and the lowest are kept.

    Args:
        model: a decoder of signal/noise attention.
        batches: text; tokens count that their window owns.
        positions: N, or all there are if that is fewer.
        seed: of the draw.
        progress: shows the reading.

    Raises:
        InputError: a model without signal/noise heads, fewer than two tokens, or N below 2.
    """
    collector = StateCollector(model, positions=positions, seed=seed)
    collect(model, batches, collector, title="Reading states", progress=progress)
    return collector.result()


class StateCollector:
    """Collects the states of :func:`read_states` while the caller runs the forward passes.

    Args:
        model, positions, seed: as of :func:`read_states`.

    Raises:
        InputError: a model without signal/noise heads, or N below 2.
    """

    def __init__(self, model: PreTrainedModel, *, positions: int, seed: int) -> None:
        self._layers = signal_noise_layers(model)
        check_whole("the number of positions", positions, 2)
        self._device, self._size, self._seed = model.device, positions, seed
        # λ and U of each layer; and of the lowest keys so far key, position, input and step.
        self._fixed: dict[nn.Module, tuple[float, Tensor]] = {}
        self._kept: dict[nn.Module, tuple[Tensor, ...]] = {}
        self._places = self._keys = self._owned = torch.empty(0)

    def listening(self) -> AbstractContextManager[None]:
        """Take in what the layers read and add during the block."""
        return watch(Hook(layer, after=self._take) for layer in self._layers)

    def begin(self, batch: WindowBatch) -> None:
        """Say which batch the next forward pass is of."""
        self._places = batch.positions[batch.owned]
        self._keys = _hashed(self._places, self._seed)
        self._owned = batch.owned.to(self._device)

    def _take(self, layer: nn.Module, args: Any, kwargs: Any, output: SignalNoiseOutput) -> None:
        assert isinstance(layer, SignalNoiseAttention)
        if layer not in self._fixed:
            # While the layer runs: a sharded model holds U whole only then.
            dictionary = layer.dictionary(args[0]).detach().cpu().clone()
            self._fixed[layer] = float(args[1]), dictionary
        states = (column[self._owned].detach().cpu() for column in (args[0], output.output))
        columns = (self._keys, self._places, *states)
        if layer in self._kept:
            columns = tuple(map(torch.cat, zip(self._kept[layer], columns, strict=True)))
        lowest = columns[0].argsort()[: self._size]
        self._kept[layer] = tuple(column[lowest] for column in columns)

    def result(self) -> tuple[AttentionStates, ...]:
        """Return the states of each layer.

        Raises:
            InputError: fewer than two tokens were read.
        """
        found: list[AttentionStates] = []
        for number, layer in enumerate(self._layers):
            _, places, inputs, steps = self._kept.get(layer, (torch.empty(0),) * 4)
            if len(places) < 2:
                raise InputError(
                    "the text has fewer than two tokens, of which no coding rate can be told: read "
                    "a longer one."
                )
            # In the corpus' order, sums are the same whatever batches they came in.
            order = places.argsort()
            columns = (places[order], inputs[order], steps[order])
            found.append(AttentionStates(number, layer, *self._fixed[layer], *columns))
        return tuple(found)


def read_states_and_heads(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *,
    least_visible: int = LEAST_VISIBLE,
) -> tuple[tuple[AttentionStates, ...], HeadUses | None]:
    """Return what :func:`read_states` and :func:`head_uses` do, in one forward pass a batch.

    The heads are None where no query sees enough tokens: the states are there all
    the same.

    Args:
        model: a decoder of signal/noise attention.
        batches: text; tokens count that their window owns.
        least_visible: a query of a head counts from so many visible positions on.

    Raises:
        InputError: as both, but for queries.
    """
    states = StateCollector(model, positions=POSITIONS, seed=0)
    heads = HeadUseCollector(model, least_visible=least_visible)
    collect(model, batches, states, heads, title="Reading states and heads")
    return states.result(), heads.result() if heads.queries else None


def _hashed(positions: Tensor, seed: int) -> Tensor:
    """Return a hash of each position and the seed, as int64 that are not negative."""
    apart = positions.numpy().astype(np.uint64) + np.uint64(seed % 2**32) * np.uint64(2**32)
    keys = hashed(apart * np.uint64(0x9E3779B97F4A7C15))
    return torch.from_numpy((keys >> np.uint64(1)).astype(np.int64))
