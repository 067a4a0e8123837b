"""The entropy of a prediction as a code, and the code as a vector (PRISMA)."""

from prismlm.ops.uncertainty_feedback.codes import (
    NO_CODE,
    check_levels,
    embed_codes,
    entropy_codes,
    neutral_code,
    normalised_entropy,
    quantise,
    shuffle_codes,
)

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
