"""Uncertainty feedback beside any Hugging Face decoder (PRISMA)."""

from prismlm.models.uncertainty_feedback.call import CODES
from prismlm.models.uncertainty_feedback.feedback import (
    UncertaintyFeedback,
    attach_uncertainty,
    load_uncertainty,
    recording_codes,
    replay,
    save_uncertainty,
    uncertainty_of,
)
from prismlm.models.uncertainty_feedback.table_file import has_uncertainty

__all__ = [
    "CODES",
    "UncertaintyFeedback",
    "attach_uncertainty",
    "has_uncertainty",
    "load_uncertainty",
    "recording_codes",
    "replay",
    "save_uncertainty",
    "uncertainty_of",
]
