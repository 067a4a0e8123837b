"""Predictions made by hand, as a model's split gives them."""

import torch

from prismlm.explain.attribution import attribute, carriers_of
from prismlm.explain.prediction import Parts, Predictions, Scores
from prismlm.ops.prototype_head import Nearest


def predictions(indices, evidence, residual, bias, states, read, targets, activations=None):
    """Return predictions with these parts; prototypes are active where they have evidence."""
    activations = (evidence != 0).float() if activations is None else activations
    none = torch.zeros(len(states))
    return Predictions(
        Nearest(indices, activations, activations),
        Parts(evidence, evidence, residual, residual, bias, bias),
        lambda: Scores(none, none, targets),
        *(read, targets, states),
    )


def attributed(given, lens, method="evidence"):
    """Return the attribution of predictions of one text."""
    return attribute(carriers_of(given, lens, method), lens, method)
