"""Whether a model uses the uncertainty that is fed back to it: the checks of PRISMA."""

from prismlm.probes.texts import Sample, corpus_sample, document_sample
from prismlm.probes.uncertainty_feedback.report import inspect_uncertainty_feedback
from prismlm.probes.uncertainty_feedback.signal import InspectOptions, Signal, feedback_of

__all__ = [
    "InspectOptions",
    "Sample",
    "Signal",
    "corpus_sample",
    "document_sample",
    "feedback_of",
    "inspect_uncertainty_feedback",
]
