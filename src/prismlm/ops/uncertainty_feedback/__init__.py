"""Codes of the entropy of predictions, and their vectors (PRISMA)."""

from prismlm.ops.uncertainty_feedback.codes import (
    NO_CODE,
    embed_codes,
    entropy_codes,
    neutral_code,
    normalised_entropy,
    quantise,
    shuffle_codes,
)

__all__ = [
    "NO_CODE",
    "embed_codes",
    "entropy_codes",
    "neutral_code",
    "normalised_entropy",
    "quantise",
    "shuffle_codes",
]
