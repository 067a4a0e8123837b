"""Non-negative sparse codes by unrolled proximal gradient steps (ISTA)."""

from prismlm.ops.sparse_coding.arguments import check_settings
from prismlm.ops.sparse_coding.ista import ista_step, largest_step, lasso, sparse_code

__all__ = ["check_settings", "ista_step", "largest_step", "lasso", "sparse_code"]
