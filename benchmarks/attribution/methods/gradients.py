"""Gradients: how alike a passage's pull on all weights is to the prediction's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.attribution.judges.passages import PassageBank, Prediction


class Gradients:
    """The product of the prediction's and a passage's gradient, over all weights.

        score = g_y · D g_p / (|D^½ g_y| |D^½ g_p|),   g = ∇_θ of the loss

    The loss of a passage is the mean over its tokens; without ``cosine``, the product alone. D is
    the identity or, ``preconditioned``, the inverse of the diagonal Fisher: the mean of squared
    gradients over passages, damped by ``damping`` of its mean.
    """

    def __init__(
        self,
        model: nn.Module,
        bank: PassageBank,
        *,
        cosine: bool = True,
        preconditioned: bool = False,
        damping: float = 0.1,
    ) -> None:
        self.model, self.bank, self.cosine = model.eval(), bank, cosine
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.root = torch.ones(())
        if preconditioned:
            total = torch.zeros(sum(weight.numel() for weight in self.weights))
            for passage in range(len(bank)):
                total += self._of_passage(passage).square()
            fisher = total / len(bank)
            self.root = (fisher + damping * fisher.mean()).rsqrt()

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        asked = torch.stack([self._length(self._of_prediction(p)) for p in predictions])
        columns = [
            asked @ self._length(self._of_passage(passage)) for passage in range(len(self.bank))
        ]
        return torch.stack(columns, 1).numpy()

    def _length(self, gradient: Tensor) -> Tensor:
        scaled = gradient * self.root
        return scaled / scaled.norm().clamp_min(1e-30) if self.cosine else scaled

    def _of_prediction(self, prediction: Prediction) -> Tensor:
        ids = [*prediction.ids.tolist(), prediction.target]
        return self._gradient(ids, last=1)

    def _of_passage(self, passage: int) -> Tensor:
        ids = self.bank.tokens(passage).tolist()
        return self._gradient(ids, last=len(ids) - 1)

    def _gradient(self, ids: list[int], last: int) -> Tensor:
        """Return the gradient of the mean loss of the last tokens, one vector."""
        read = torch.tensor([ids])
        with torch.enable_grad():
            logits = self.model(input_ids=read[:, :-1], use_cache=False).logits[0, -last:]
            loss = functional.cross_entropy(logits, read[0, -last:])
            parts = torch.autograd.grad(loss, self.weights)
        return torch.cat([part.flatten() for part in parts])
