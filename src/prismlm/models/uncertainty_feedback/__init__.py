"""Uncertainty feedback beside any Hugging Face decoder (PRISMA)."""

from prismlm.models.uncertainty_feedback.feedback import (
    CODES,
    UncertaintyFeedback,
    attach_uncertainty,
    uncertainty_of,
)
from prismlm.models.uncertainty_feedback.files import (
    has_uncertainty,
    load_uncertainty,
    save_uncertainty,
)

__all__ = [
    "CODES",
    "UncertaintyFeedback",
    "attach_uncertainty",
    "has_uncertainty",
    "load_uncertainty",
    "save_uncertainty",
    "uncertainty_of",
]
