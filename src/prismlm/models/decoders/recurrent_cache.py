"""A generation cache of constant size: what each layer's recurrent mixer carries on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

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
        self.state: Any = None
        self.tokens = 0

    def advance(self, state: Any, tokens: int) -> None:
        """Replace the state by the one after ``tokens`` more positions."""
        self.state = state
        self.tokens += tokens
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: there are no keys and values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refuse keys and values.

        Raises:
            InputError: always.
        """
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
        self.state = None
        self.tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take positions back, which a state cannot.

        Raises:
            InputError: something is to be taken back.
        """
        if tokens_to_remove:
            raise InputError(
                f"{tokens_to_remove} tokens cannot be taken back from a recurrent state: keep a "
                "copy of the cache from before them."
            )

    def offload(self) -> None:
        """Do nothing: the state is small and is needed at every step."""

    def prefetch(self) -> None:
        """Do nothing."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx``."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take some of the rows."""
        self.state = _map(self.state, lambda t: t.index_select(0, indices.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.state = _map(self.state, lambda t: t.repeat_interleave(repeats, dim=0))


class RecurrentCache(Cache):
    """A state for each layer of a recurrent decoder.

    Args:
        num_layers: of the decoder.
    """

    layers: list[RecurrentCacheLayer]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[RecurrentCacheLayer() for _ in range(num_layers)])
        self._layout: Mapping[str, Any] | None = None

    def claim(self, layout: Mapping[str, Any], batch: int) -> None:
        """Note which model writes this cache, or see that it may go on from it.

        Args:
            layout: what the model's states look like, by setting.
            batch: rows of the input.

        Raises:
            InputError: another number of layers, another model's states, or another batch.
        """
        if len(self.layers) != layout["num_hidden_layers"]:
            raise InputError(
                f"the cache has {len(self.layers)} layers and the model "
                f"{layout['num_hidden_layers']}: give the cache that this model returned."
            )
        if self._layout is None:
            self._layout = dict(layout)
        differing = [name for name, value in layout.items() if self._layout.get(name) != value]
        if differing:
            name = differing[0]
            raise InputError(
                f"the cache is another model's: it was made with {name} "
                f"{self._layout.get(name)!r}, and this model has {layout[name]!r}. Give the cache "
                "that this model returned."
            )
        held = next((rows for layer in self.layers if (rows := _rows(layer.state))), batch)
        if held != batch:
            raise InputError(
                f"the cache holds {held} rows and the input has {batch}: select or repeat rows "
                "with the cache's batch_select_indices or batch_repeat_interleave."
            )

    def reset(self) -> None:
        """Start anew, for any model of as many layers."""
        super().reset()
        self._layout = None


def _rows(state: Any) -> int:
    """Return the rows of a state, 0 if it is empty."""
    if isinstance(state, torch.Tensor):
        return len(state)
    if isinstance(state, tuple):
        return max((_rows(part) for part in state), default=0)
    return 0


def _map(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(state, torch.Tensor):
        return function(state)
    if isinstance(state, tuple):
        return type(state)(*(_map(part, function) for part in state))
    return state
