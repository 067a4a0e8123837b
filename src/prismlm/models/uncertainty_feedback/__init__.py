"""Uncertainty feedback beside any Hugging Face decoder (PRISMA)."""

from prismlm.models.uncertainty_feedback.call import CODES
from prismlm.models.uncertainty_feedback.feedback import UncertaintyFeedback, uncertainty_of
from prismlm.models.uncertainty_feedback.files import (
    attach_uncertainty,
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
