"""Tail-patch: does one more step on the named passages make the prediction likelier?

    gain     = log p_θ′(y | context) − log p_θ(y | context),    θ′ = θ − η ∇_θ L(θ)
    specific = Δ log-odds(y | context) − mean over other contexts c of Δ log-odds(y | c)

with L the mean next-token loss over all tokens of the named passages together, each read on its
own. The model is put back after every prediction. Any passages full of y raise it, everywhere: the
gain alone is largest for whoever counts y. What they say of y *here* is in the specific gain; it is
in log-odds, log p / (1 − p), which a constant added to y's logit moves alike in every context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.attribution.judges.passages import Prediction

IGNORED = -100


class PatchGains(NamedTuple):
    """The change of each log-probability, in nats, and the specific change of log-odds (or NaN)."""

    gain: np.ndarray
    specific: np.ndarray


def tail_patch(
    model: nn.Module,
    predictions: Sequence[Prediction],
    passages: Sequence[Sequence[np.ndarray]],
    *,
    contexts: Sequence[np.ndarray] = (),
    learning_rate: float = 0.05,
) -> PatchGains:
    """Return the gains of each prediction from one step of plain SGD on its passages.

    The step moves all weights; they are as before when this returns.
    ``contexts`` are other texts that targets might follow, for the specific gain.
    """
    model.eval()
    gains = np.full((len(predictions), 2), np.nan)
    before = [_log_probabilities(model, context) for context in contexts]
    for row, (asked, named) in enumerate(zip(predictions, passages, strict=True)):
        target = asked.target
        was = _log_probabilities(model, asked.ids)[target]
        with one_step(model, named, learning_rate):
            now = _log_probabilities(model, asked.ids)[target]
            after = [_log_probabilities(model, context) for context in contexts]
        pairs = zip(after, before, strict=True)
        others = [_log_odds(a[target]) - _log_odds(b[target]) for a, b in pairs]
        general = float(torch.stack(others).mean()) if others else float("nan")
        gains[row] = float(now - was), float(_log_odds(now) - _log_odds(was)) - general
    return PatchGains(gains[:, 0], gains[:, 1])


def _log_odds(log_probability: Tensor) -> Tensor:
    return log_probability - torch.log(-torch.expm1(log_probability))


@contextmanager
def one_step(model: nn.Module, passages: Sequence[np.ndarray], rate: float) -> Iterator[None]:
    """Move the weights by one step of SGD on the passages, and back when the block ends."""
    weights = list(model.parameters())
    kept = [weight.detach().clone() for weight in weights]
    with torch.enable_grad():
        gradients = torch.autograd.grad(passage_loss(model, passages), weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(gradient, alpha=rate)
        yield
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)


def log_probability(model: nn.Module, prediction: Prediction) -> float:
    """Return the log-probability of the target, in nats."""
    return float(_log_probabilities(model, prediction.ids)[prediction.target])


@torch.no_grad()
def _log_probabilities(model: nn.Module, ids: np.ndarray) -> Tensor:
    """Return the log-probability of every token after some, float64 [V]."""
    read = torch.from_numpy(ids)[None].to(_device(model))
    return model(input_ids=read, use_cache=False).logits[0, -1].double().log_softmax(-1)


def passage_loss(model: nn.Module, passages: Sequence[np.ndarray]) -> Tensor:
    """Return the mean next-token loss over the tokens of all passages, each padded on the right."""
    ids, labels = (tensor.to(_device(model)) for tensor in padded(passages))
    # Padding is on the right of causal models, so that no token sees it: no mask is needed.
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED
    )


def padded(texts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return token ids and labels of some texts, int64 [texts, T], padded on the right."""
    width = max(len(text) for text in texts)
    ids = np.zeros((len(texts), width), dtype=np.int64)
    labels = np.full((len(texts), width), IGNORED, dtype=np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = labels[row, : len(text)] = text
    return torch.from_numpy(ids), torch.from_numpy(labels)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
