"""A left-padded batch of texts that are generated together, with a cache; texts join and leave."""

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

# Tokens by which a full cache grows.
SPARE_TOKENS = 64


class PreallocatedLayer(DynamicLayer):
    """Keys and values [B, H, T, d] with spare room: ``DynamicLayer`` copies them at every step."""

    keys: Tensor
    values: Tensor

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Replace the cached keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._buffers = [F.pad(states, (0, 0, 0, SPARE_TOKENS)) for states in (keys, values)]
        self._resize(keys.shape[2])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens; return all."""
        length = self._length + key_states.shape[2]
        if length > self._buffers[0].shape[2]:
            self.fill(*self._resize(self._length))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : length] = states
        return self._resize(length)

    def _resize(self, length: int) -> tuple[Tensor, Tensor]:
        self._length = length
        self.keys, self.values = keys, values = [buffer[:, :, :length] for buffer in self._buffers]
        return keys, values


class Batch:
    """The cache of several texts, left-padded to the longest; ``lengths`` are their token counts.

    ``model`` is a decoder for which :func:`supports_batching` is true.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache: Cache | None = None
        self._layers: list[PreallocatedLayer] = []
        self.lengths: list[int] = []

    def join(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append a text [1, T]; return its states [T, d], and W z + b and the logits after it."""
        cache = DynamicCache(config=self._model.config)
        positions = torch.arange(ids.shape[1])[None]
        z, embedded, logits = self._forward(ids, torch.ones_like(ids), positions, cache)
        new: list[Any] = cache.layers
        if any(type(layer) is not DynamicLayer for layer in new):
            raise TypeError("the model caches something other than keys and values of all tokens")
        self.lengths.append(ids.shape[1])
        size = max(self.lengths)
        if self._cache is None:
            self._layers = [PreallocatedLayer() for _ in new]
            self._cache = Cache(layers=[*self._layers])
        for batched, single in zip(self._layers, new, strict=True):
            rows = [batched, single] if batched.is_initialized else [single]
            batched.fill(
                torch.cat([_padded(layer.keys, size) for layer in rows]),
                torch.cat([_padded(layer.values, size) for layer in rows]),
            )
        return z[0], embedded[0], logits[0]

    def step(self, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Read the next token of every text; return states [B, d], W z + b and logits [B, V]."""
        assert self._cache is not None
        size, lengths = max(self.lengths), torch.tensor(self.lengths)
        mask = torch.arange(size + 1) >= (size - lengths)[:, None]
        ids = torch.tensor(tokens)[:, None]
        z, embedded, logits = self._forward(ids, mask.long(), lengths[:, None], self._cache)
        self.lengths = [length + 1 for length in self.lengths]
        return z[:, 0], embedded, logits

    def keep(self, rows: list[int]) -> None:
        """Remove all other rows, and padding that is no longer needed."""
        if len(rows) == len(self.lengths):
            return
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self._cache, self._layers = None, []
            return
        last = slice(-max(self.lengths), None)
        for layer in self._layers:
            layer.fill(layer.keys[rows, :, last], layer.values[rows, :, last])

    @torch.no_grad()
    def _forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return all states, and W z + b and the logits of the last position in float32."""
        states: list[Tensor] = []
        embedded: list[Tensor] = []

        def last_only(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            states.append(args[0])
            return (args[0][:, -1:], *args[1:]), kwargs

        def store(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            embedded.append(output)

        # By default some models pass only the last position to their output embedding.
        parameters = signature(self._model.forward).parameters
        options = {"logits_to_keep": 0} if "logits_to_keep" in parameters else {}
        device = self._model.device
        with watch([Hook(output_embedding(self._model), last_only, store)]):
            output = self._model(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                position_ids=positions.to(device),
                past_key_values=cache,
                use_cache=True,
                **options,
            )
        return states[-1], embedded[-1][:, -1].float(), output.logits[:, -1].float()


def _padded(states: Tensor, size: int) -> Tensor:
    return F.pad(states, (0, 0, size - states.shape[2], 0))


def _rope_depends_on_length(module: nn.Module) -> bool:
    rope_type: Any = getattr(module, "rope_type", None)
    # Models with several kinds of layers have one for each.
    kinds: list[Any] = list(rope_type.values()) if isinstance(rope_type, dict) else [rope_type]
    return any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)


def supports_batching(model: PreTrainedModel) -> bool:
    """Return whether texts in a batch get the predictions that each gets alone.

    A model must accept position ids and cache nothing but keys and values of all positions. Sliding
    windows, recurrent states and uncertainty codes belong to one text, and so do rotary embeddings
    that depend on the longest text. Beyond that, two random texts are tried: the second joins
    the first, and stays when it leaves.
    """
    if (
        uncertainty_of(model) is not None
        or "position_ids" not in signature(model.forward).parameters
        or any(_rope_depends_on_length(module) for module in model.modules())
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
        *_, remaining = batch.step([int(second[0, -1])])
        with torch.no_grad():
            alone = [
                model(input_ids=ids.to(model.device)).logits[0].float() for ids in (first, second)
            ]
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
        return False
    actual = torch.stack([both[0], both[1], remaining[0]])
    expected = torch.stack([alone[0][-2], alone[1][-2], alone[1][-1]])
    error = (actual - expected).abs() / expected.abs().clamp_min(1)
    return bool((error <= tolerance_of(rows.dtype)).all())
