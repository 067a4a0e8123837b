"""Generation caches of this package's decoders, as subclasses of transformers' ``Cache``.

Methods without a docstring override those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from prismlm.errors import InputError


class _RecurrentLayer(CacheLayerMixin):
    """The recurrent state of a layer: nested tuples of tensors [B, …] or None; ``tokens`` seen."""

    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    @property
    def rows(self) -> int | None:
        return next((len(leaf) for leaf in tree_leaves(self.state) if leaf is not None), None)

    def advance(self, state: Any, tokens: int) -> None:
        """Set the state after ``tokens`` more positions."""
        self.state = state
        self.tokens += tokens
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # there are no keys and values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise InputError("a recurrent layer's cache has a state, not keys and values.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1  # no limit

    def reset(self) -> None:
        self.state: Any = None
        self.tokens = 0
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:  # transformers passes -n to remove n
            raise InputError(
                f"{abs(tokens_to_remove)} tokens cannot be removed from a recurrent state: copy "
                "the cache before adding them."
            )

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda leaf: leaf.index_select(0, indices.to(leaf.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda leaf: leaf.repeat_interleave(repeats, 0))

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.state = tree_map_only(Tensor, function, self.state)


class _ProjectionLayer(DynamicLayer):
    """The unrotated projections Z U of S positions, and those positions.

    They are stored as keys [B, 2H, S, p], signal heads first, and values, int64 [B, 1, S, 1], so
    that ``DynamicLayer`` grows, crops and selects both.
    """

    keys: Any
    values: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # The base class gives values the dtype of keys, which may round positions.
        self.values = torch.tensor([], dtype=value_states.dtype, device=value_states.device)

    @property
    def rows(self) -> int | None:
        return len(self.keys) if self.get_seq_length() else None


class OwnCache(Cache):
    """The cache of a decoder; ``rows`` of a layer is its batch size, or None while empty."""

    layer_class: type[_RecurrentLayer | _ProjectionLayer]
    layers: list[Any]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[self.layer_class() for _ in range(num_layers)])

    def check(self, layers: int, batch: int) -> None:
        """Raise InputError for a model with another depth, or another batch size."""
        rows = next((layer.rows for layer in self.layers), None)
        if len(self.layers) != layers or rows not in (None, batch):
            raise InputError(
                f"the cache has {len(self.layers)} layers and {rows or 'no'} rows, and the model "
                f"{layers} layers and its input {batch} rows: give the cache that this model "
                "returned, and select or repeat its rows with batch_select_indices or "
                "batch_repeat_interleave."
            )


class RecurrentCache(OwnCache):
    """The cache of a recurrent decoder: a state per layer."""

    layer_class = _RecurrentLayer


class ProjectionCache(OwnCache):
    """The cache of a signal/noise decoder: one unrotated tensor per head and layer."""

    layer_class = _ProjectionLayer
