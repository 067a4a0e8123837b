"""Whether a model uses the uncertainty that is fed back to it: the checks of PRISMA."""

from prismlm.probes.texts import Sample, corpus_sample, document_sample
from prismlm.probes.uncertainty_feedback.checks import inspect_uncertainty_feedback
from prismlm.probes.uncertainty_feedback.signal import InspectOptions, feedback_of

__all__ = [
    "InspectOptions",
    "Sample",
    "corpus_sample",
    "document_sample",
    "feedback_of",
    "inspect_uncertainty_feedback",
]
