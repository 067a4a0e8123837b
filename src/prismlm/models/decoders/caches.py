"""Generation caches: a state of constant size for each layer, or one unrotated tensor per head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from prismlm.errors import InputError


class _RecurrentLayer(CacheLayerMixin):
    """The state of one layer, and how many positions went into it, padding included.

    Attributes:
        state: tensors with the batch first, in tuples as the mixer made them; None at the start.
        tokens: positions seen.
    """

    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    @property
    def rows(self) -> int | None:
        return next((len(held) for held in tree_leaves(self.state) if held is not None), None)

    def advance(self, state: Any, tokens: int) -> None:
        """Replace the state by the one after ``tokens`` more positions."""
        self.state = state
        self.tokens += tokens
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # there are no keys and values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise InputError("a recurrent layer's cache holds a state, no keys and values.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1  # there is none

    def reset(self) -> None:
        self.state: Any = None
        self.tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise InputError(
                f"{tokens_to_remove} tokens cannot be taken back from a recurrent state: keep a "
                "copy of the cache from before them."
            )

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda held: held.index_select(0, indices.to(held.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda held: held.repeat_interleave(repeats, 0))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = tree_map_only(Tensor, change, self.state)


class _ProjectionLayer(DynamicLayer):
    """Z U of what one layer has seen, and at which positions.

    Attributes:
        keys: the projections, [B, 2H, S, p]; half of what keys and values take.
        values: the positions, int64 [B, 1, S, 1]; keys are rotated when they are used.
    """

    keys: Any
    values: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.values = torch.tensor([], dtype=value_states.dtype, device=value_states.device)

    @property
    def rows(self) -> int | None:
        return len(self.keys) if self.get_seq_length() else None


class OwnCache(Cache):
    """What each of the ``num_layers`` layers of a decoder of this package holds.

    A layer has ``rows``: how many it holds, None for nothing.
    """

    layer_class: type[_RecurrentLayer | _ProjectionLayer]
    layers: list[Any]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[self.layer_class() for _ in range(num_layers)])

    def check(self, layers: int, batch: int) -> None:
        """Raise InputError for a model of another depth, or an input of another batch."""
        held = self.layers[0].rows
        if len(self.layers) != layers or held not in (None, batch):
            raise InputError(
                f"the cache has {len(self.layers)} layers and {held or 'no'} rows, and the model "
                f"{layers} layers and its input {batch} rows: give the cache that this model "
                "returned, and select or repeat its rows with batch_select_indices or "
                "batch_repeat_interleave."
            )


class RecurrentCache(OwnCache):
    """A state for each layer of a recurrent decoder."""

    layer_class = _RecurrentLayer


class ProjectionCache(OwnCache):
    """One unrotated tensor per head for each layer of a signal/noise decoder."""

    layer_class = _ProjectionLayer
