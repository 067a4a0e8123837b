"""The discounted prefix mean of the prototype mixer (ProtoT)."""

from prismlm.ops.prototype_mixer.chunked import PrefixState, prefix_mean

__all__ = ["PrefixState", "prefix_mean"]
