"""Non-negative sparse codes by unrolled proximal gradient steps (ISTA)."""

from prismlm.ops.sparse_coding.ista import check_settings, largest_step, sparse_code

__all__ = ["check_settings", "largest_step", "sparse_code"]
