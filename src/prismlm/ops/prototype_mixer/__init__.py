"""The discounted prefix mean of the prototype mixer (ProtoT)."""

from prismlm.ops.prototype_mixer.chunked import prefix_mean
from prismlm.ops.prototype_mixer.state import PrefixState

__all__ = ["PrefixState", "prefix_mean"]
