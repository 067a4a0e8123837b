"""The delta rule: a linear memory that overwrites what a key held (DeltaNet)."""

from prismlm.ops.delta_rule.chunked import delta_rule

__all__ = ["delta_rule"]
