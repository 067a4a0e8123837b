"""A generation cache with one unrotated tensor per head, which serves as key and value."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from prismlm.errors import InputError


class ProjectionCacheLayer(DynamicLayer):
    """Z U of what one layer has seen, and at which positions.

    Attributes:
        keys: the projections, [B, 2H, S, p]; half of what keys and values take.
        values: the positions, int64 [B, 1, S, 1]; keys are rotated when they are used.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start with no position."""
        super().lazy_initialization(key_states, value_states)
        self.values = torch.tensor([], dtype=value_states.dtype, device=value_states.device)


class ProjectionCache(Cache):
    """One :class:`ProjectionCacheLayer` for each layer of a signal/noise decoder.

    Args:
        num_layers: of the decoder.
    """

    layers: list[ProjectionCacheLayer]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[ProjectionCacheLayer() for _ in range(num_layers)])

    def check(self, num_layers: int, heads: tuple[int, int], batch: int) -> None:
        """See that a model can go on from this cache.

        Args:
            num_layers: of the model.
            heads: 2H and p.
            batch: rows of the input.

        Raises:
            InputError: another number of layers, other heads or another batch.
        """
        if len(self.layers) != num_layers:
            raise InputError(
                f"the cache has {len(self.layers)} layers and the model {num_layers}: give the "
                "cache that this model returned."
            )
        held = self.layers[0].keys if self.get_seq_length() else None
        if held is None:
            return
        count, size = held.shape[1], held.shape[3]
        if (count, size) != heads:
            raise InputError(
                f"the cache is another model's: it holds {count} heads of size {size}, and this "
                f"model has {heads[0]} of size {heads[1]}."
            )
        if len(held) != batch:
            raise InputError(
                f"the cache holds {len(held)} rows and the input has {batch}: select or repeat "
                "rows with the cache's batch_select_indices or batch_repeat_interleave."
            )
