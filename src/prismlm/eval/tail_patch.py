"""Tail-patch: does one more step on the named passages make the prediction likelier?

    gain = log p_θ′(y | context) − log p_θ(y | context),    θ′ = θ − η ∇_θ L(θ)

with L the mean next-token loss over all tokens of the named passages together, each read on its
own. The model is put back after every prediction. Passages that the model truly learned the
prediction from raise it; so do others of the same kind, which is why the figure stands beside
those of other methods and of passages at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from prismlm.errors import InputError
from prismlm.eval.passages import Prediction

IGNORED = -100


def tail_patch(
    model: nn.Module,
    predictions: Sequence[Prediction],
    passages: Sequence[Sequence[np.ndarray]],
    *,
    learning_rate: float = 0.05,
) -> np.ndarray:
    """Return the gain of each prediction, in nats, float64 [predictions].

    Args:
        model: a causal language model; its weights are as before when this returns or fails.
        predictions: whose targets' log-probabilities are compared.
        passages: for each prediction the token ids of those named for it, int64 [length] each.
        learning_rate: η of the step, plain SGD on every weight.

    Raises:
        InputError: not one list of passages for each prediction, or one without two tokens in a
            row to learn from.
    """
    if len(passages) != len(predictions):
        raise InputError(
            f"{len(passages)} lists of passages for {len(predictions)} predictions: expected one "
            "for each."
        )
    training = model.training
    model.eval()
    try:
        gains = [
            _gain(model, prediction, named, learning_rate)
            for prediction, named in zip(predictions, passages, strict=True)
        ]
    finally:
        model.train(training)
    return np.array(gains, dtype=np.float64)


def _gain(
    model: nn.Module, prediction: Prediction, passages: Sequence[np.ndarray], rate: float
) -> float:
    before = log_probability(model, prediction)
    with one_step(model, passages, rate):
        return log_probability(model, prediction) - before


@contextmanager
def one_step(model: nn.Module, passages: Sequence[np.ndarray], rate: float) -> Iterator[None]:
    """Move the weights by one step of SGD on the passages, and back when the block ends.

    Raises:
        InputError: no passage has two tokens.
    """
    weights = list(model.parameters())
    kept = [weight.detach().clone() for weight in weights]
    with torch.enable_grad():
        gradients = torch.autograd.grad(_passage_loss(model, passages), weights, allow_unused=True)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                weight.sub_(gradient, alpha=rate)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value)


@torch.no_grad()
def log_probability(model: nn.Module, prediction: Prediction) -> float:
    """Return the log-probability of the target, in nats."""
    ids = torch.from_numpy(prediction.ids)[None].to(_device(model))
    logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    return float(logits.log_softmax(-1)[prediction.target])


def _passage_loss(model: nn.Module, passages: Sequence[np.ndarray]) -> Tensor:
    """Return the mean loss over the tokens of all passages, each padded on the right."""
    read = [passage for passage in passages if len(passage) > 1]
    if not read:
        raise InputError("none of the named passages has two tokens: there is nothing to learn.")
    width = max(len(passage) for passage in read)
    ids = np.zeros((len(read), width), dtype=np.int64)
    labels = np.full((len(read), width), IGNORED, dtype=np.int64)
    for row, passage in enumerate(read):
        ids[row, : len(passage)] = passage
        labels[row, 1 : len(passage)] = passage[1:]
    device = _device(model)
    # Padding is on the right of causal models, so that no token sees it: no mask is needed.
    logits = model(input_ids=torch.from_numpy(ids).to(device), use_cache=False).logits[:, :-1]
    targets = torch.from_numpy(labels[:, 1:]).to(device)
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED
    )


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
