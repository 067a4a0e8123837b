"""The entropy of a prediction as a code, and the code as a vector (PRISMA)."""

from prismlm.ops.uncertainty_feedback.embedding import NO_CODE, embed_codes
from prismlm.ops.uncertainty_feedback.entropy import (
    check_levels,
    entropy_codes,
    neutral_code,
    normalised_entropy,
    quantise,
)
from prismlm.ops.uncertainty_feedback.shuffle import shuffle_codes

__all__ = [
    "NO_CODE",
    "check_levels",
    "embed_codes",
    "entropy_codes",
    "neutral_code",
    "normalised_entropy",
    "quantise",
    "shuffle_codes",
]
