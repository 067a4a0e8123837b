"""Generation caches: a state of constant size for each layer, or one unrotated tensor per head."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from prismlm.errors import InputError


class RecurrentCacheLayer(CacheLayerMixin):
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
        """How many rows it holds; None for nothing."""
        return next((len(held) for held in tree_leaves(self.state) if held is not None), None)

    def advance(self, state: Any, tokens: int) -> None:
        """Replace the state by the one after ``tokens`` more positions."""
        self.state = state
        self.tokens += tokens
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: there are no keys and values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refuse keys and values."""
        raise InputError("a recurrent layer's cache holds a state, no keys and values.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of a mask over everything seen."""
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many positions were seen."""
        return self.tokens

    def get_max_length(self) -> int:
        """Return −1: there is no longest sequence."""
        return -1

    def reset(self) -> None:
        """Start anew."""
        self.state: Any = None
        self.tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take positions back, which a state cannot."""
        if tokens_to_remove:
            raise InputError(
                f"{tokens_to_remove} tokens cannot be taken back from a recurrent state: keep a "
                "copy of the cache from before them."
            )

    def offload(self) -> None:
        """Do nothing: the state is small and is needed at every step."""

    prefetch = offload

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take some of the rows."""
        self.state = tree_map_only(
            Tensor, lambda t: t.index_select(0, indices.to(t.device)), self.state
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the beams that go on."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.state = tree_map_only(Tensor, lambda t: t.repeat_interleave(repeats, 0), self.state)


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

    @property
    def rows(self) -> int | None:
        """How many rows it holds; None for nothing."""
        return len(cast(Tensor, self.keys)) if self.get_seq_length() else None


class OwnCache(Cache):
    """What each of the ``num_layers`` layers of a decoder of this package holds."""

    layer_class: type[RecurrentCacheLayer | ProjectionCacheLayer]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[self.layer_class() for _ in range(num_layers)])

    def check(self, layers: int, batch: int) -> None:
        """Raise InputError for a model of another depth, or an input of another batch."""
        held = cast(Any, self.layers[0]).rows
        if len(self.layers) != layers or held not in (None, batch):
            raise InputError(
                f"the cache has {len(self.layers)} layers and {held or 'no'} rows, and the model "
                f"{layers} layers and its input {batch} rows: give the cache that this model "
                "returned, and select or repeat its rows with batch_select_indices or "
                "batch_repeat_interleave."
            )


class RecurrentCache(OwnCache):
    """A state for each layer of a recurrent decoder."""

    layers: list[RecurrentCacheLayer]
    layer_class = RecurrentCacheLayer


class ProjectionCache(OwnCache):
    """One unrotated tensor per head for each layer of a signal/noise decoder."""

    layers: list[ProjectionCacheLayer]
    layer_class = ProjectionCacheLayer
