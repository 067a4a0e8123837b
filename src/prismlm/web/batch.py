"""Several texts written together: a left-padded batch with a cache, which texts join and leave."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from prismlm.explain.prediction import tolerance_of
from prismlm.models.seam import output_embedding
from prismlm.models.uncertainty_feedback import uncertainty_of
from prismlm.models.watch import Hook, watch

# Tokens that a batch's cache has room for before it is copied to a larger one.
ROOM = 64


class RoomyLayer(DynamicLayer):
    """Keys and values [B, H, T, d] with room after them.

    To join each new token to all those before, as ``DynamicLayer`` does, slows every step.
    """

    keys: Tensor
    values: Tensor

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Hold these from now on."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._buffers = [F.pad(states, (0, 0, 0, ROOM)) for states in (keys, values)]
        self._show(keys.shape[2])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in new tokens; return all."""
        new = self._length + key_states.shape[2]
        if new > self._buffers[0].shape[2]:
            self.hold(*self._show(self._length))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : new] = states
        return self._show(new)

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self._length = length
        self.keys, self.values = keys, values = [buffer[:, :, :length] for buffer in self._buffers]
        return keys, values


class Batch:
    """The cache of several texts, each padded on its left to the longest.

    Args:
        model: a decoder for which :func:`writes_together` holds.

    Attributes:
        lengths: how many tokens of each text are in the cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache: Cache | None = None
        self._layers: list[RoomyLayer] = []
        self.lengths: list[int] = []

    def join(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read a text [1, T], the last of the batch from now on.

        Returns:
            its states [T, d], and what follows it: W z + b and the logits, float32, [V] each.
        """
        cache = DynamicCache(config=self._model.config)
        positions = torch.arange(ids.shape[1])[None]
        z, embedded, logits = self._read(ids, torch.ones_like(ids), positions, cache)
        new: list[Any] = cache.layers
        if any(type(layer) is not DynamicLayer for layer in new):
            raise TypeError("the model keeps something else than keys and values of all tokens")
        self.lengths.append(ids.shape[1])
        size = max(self.lengths)
        if self._cache is None:
            self._layers = [RoomyLayer() for _ in new]
            self._cache = Cache(layers=[*self._layers])
        for mine, theirs in zip(self._layers, new, strict=True):
            rows = [mine, theirs] if mine.is_initialized else [theirs]
            mine.hold(
                torch.cat([_padded(layer.keys, size) for layer in rows]),
                torch.cat([_padded(layer.values, size) for layer in rows]),
            )
        return z[0], embedded[0], logits[0]

    def step(self, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Read the next token of every text.

        Returns:
            states [B, d], W z + b and logits, float32, [B, V] each.
        """
        assert self._cache is not None
        size, lengths = max(self.lengths), torch.tensor(self.lengths)
        mask = torch.arange(size + 1) >= (size - lengths)[:, None]
        ids = torch.tensor(tokens)[:, None]
        z, embedded, logits = self._read(ids, mask.long(), lengths[:, None], self._cache)
        self.lengths = [length + 1 for length in self.lengths]
        return z[:, 0], embedded, logits

    def keep(self, rows: list[int]) -> None:
        """Leave out all texts but some, by their numbers, and the padding that nobody needs now."""
        if len(rows) == len(self.lengths):
            return
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self._cache, self._layers = None, []
            return
        last = slice(-max(self.lengths), None)
        for layer in self._layers:
            layer.hold(layer.keys[rows, :, last], layer.values[rows, :, last])

    @torch.no_grad()
    def _read(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states of all positions, and W z + b and the logits of the last."""
        seen: list[Tensor] = []
        embedded: list[Tensor] = []

        def last(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen.append(args[0])
            return (args[0][:, -1:], *args[1:]), kwargs

        def after(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            embedded.append(output)

        device = self._model.device
        with watch([Hook(output_embedding(self._model), last, after)]):
            output = self._model(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                position_ids=positions.to(device),
                past_key_values=cache,
                use_cache=True,
                **_all_positions(self._model),
            )
        return seen[-1], embedded[-1][:, -1].float(), output.logits[:, -1].float()


def _all_positions(model: PreTrainedModel) -> dict[str, int]:
    # Where a model hands on the last position alone, its output embedding would see no other.
    return {"logits_to_keep": 0} if "logits_to_keep" in signature(model.forward).parameters else {}


def _padded(states: Tensor, size: int) -> Tensor:
    return F.pad(states, (0, 0, size - states.shape[2], 0))


def _turns_by_length(module: nn.Module) -> bool:
    """Say whether rotary embeddings are others for all of a batch once one text of it is long."""
    kind: Any = getattr(module, "rope_type", None)
    # A model with several kinds of layers has one for each.
    kinds: list[Any] = list(kind.values()) if isinstance(kind, dict) else [kind]
    return any("dynamic" in str(one) or one == "longrope" for one in kinds)


def writes_together(model: PreTrainedModel) -> bool:
    """Say whether texts in a batch get the predictions that each gets alone.

    A model must take positions, and keep keys and values of all of them and nothing else: caches of
    sliding windows, of recurrent states and of codes of uncertainty are of one text each, and so
    are rotations that change with the longest text. Beyond that it is tried: two texts of random
    tokens, the second of which joins the first, and stays.
    """
    if (
        uncertainty_of(model) is not None
        or "position_ids" not in signature(model.forward).parameters
        or any(_turns_by_length(module) for module in model.modules())
    ):
        return False
    generator = torch.Generator().manual_seed(0)
    rows = output_embedding(model).weight
    assert isinstance(rows, Tensor)
    first, second = (torch.randint(len(rows), (1, n), generator=generator) for n in (9, 6))
    batch = Batch(model)
    try:
        batch.join(first[:, :-3])
        batch.step([int(first[0, -3])])
        batch.join(second[:, :-2])
        *_, both = batch.step([int(first[0, -2]), int(second[0, -2])])
        batch.keep([1])
        *_, left = batch.step([int(second[0, -1])])
        with torch.no_grad():
            alone = [
                model(input_ids=ids.to(model.device)).logits[0].float() for ids in (first, second)
            ]
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
        return False
    found = torch.stack([both[0], both[1], left[0]])
    expected = torch.stack([alone[0][-2], alone[1][-2], alone[1][-1]])
    error = (found - expected).abs() / expected.abs().clamp_min(1)
    return bool((error <= tolerance_of(rows.dtype)).all())
