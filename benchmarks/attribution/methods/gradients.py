"""Gradients: of all weights, and influence through the output layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.methods.setting import Asked, Setting

AT_ONCE = 2048
DAMPING = 0.1


class Gradients:
    """The product of the prediction's and a passage's gradient, over all weights.

        score = g_y · D g_p / (|D^½ g_y| |D^½ g_p|),   g = ∇_θ of the loss

    The loss of a passage is the mean over its tokens; without ``cosine``, the product alone. D is
    the identity or, ``preconditioned``, the inverse of the diagonal Fisher: the mean of squared
    gradients over passages, damped by ``DAMPING`` of its mean.
    """

    def __init__(
        self,
        model: nn.Module,
        bank: PassageBank,
        *,
        cosine: bool = True,
        preconditioned: bool = False,
    ) -> None:
        self.model, self.bank, self.cosine = model.eval(), bank, cosine
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.root = torch.ones(())
        if preconditioned:
            total = torch.zeros(sum(weight.numel() for weight in self.weights))
            for passage in range(len(bank)):
                total += self._of_passage(passage).square()
            fisher = total / len(bank)
            self.root = (fisher + DAMPING * fisher.mean()).rsqrt()

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


class LastLayerKFAC:
    """Influence of the output layer alone, with its curvature as a Kronecker product (K-FAC).

    The gradient of a position's loss with respect to W is δ_n z_nᵀ, δ_n = p_n − e_{y_n}. With the
    curvature G ⊗ A, A = mean z zᵀ and G = mean (diag p − p pᵀ), estimated on ``sampled`` positions,
    the influence of a position on the loss of a prediction is

        score_n = (δ_n · (G + g I)⁻¹ δ) (z_n · (A + a I)⁻¹ z)

    with a and g ``damping`` times the mean of the diagonal, summed over a passage's positions:
    positive where its step would make the prediction likelier.
    """

    def __init__(
        self, setting: Setting, *, damping: float = DAMPING, sampled: int = 20_000, seed: int = 0
    ) -> None:
        self.setting, self.damping = setting, damping
        positions = setting.positions
        self.weight = setting.weight()
        length = torch.from_numpy(positions.size.astype(np.float64))
        moment = torch.from_numpy(positions.second_moment) * length.square().mean()
        self.inner = self._inverse(moment)
        self.outer = self._inverse(self._output_moment(sampled, seed))

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        asked = self.setting.ask(predictions)
        z, delta = self._asked(asked)
        positions = self.setting.positions
        scores = torch.zeros(len(self.setting.bank), len(predictions))
        for first in range(0, len(positions), AT_ONCE):
            states, probabilities = self._read(
                np.arange(first, min(first + AT_ONCE, len(positions)))
            )
            tokens = torch.from_numpy(positions.token[first : first + AT_ONCE].astype(np.int64))
            near = states @ z.T
            alike = probabilities @ delta.T - delta.T[tokens]
            passage = torch.from_numpy(positions.passage[first : first + AT_ONCE].astype(np.int64))
            scores.index_add_(0, passage, near * alike)
        return scores.T.numpy()

    def _asked(self, asked: Asked) -> tuple[Tensor, Tensor]:
        """Return A⁻¹ z [Q, d] and G⁻¹ δ [Q, V]."""
        z = torch.from_numpy(asked.states * asked.size[:, None])
        delta = (z @ self.weight.T).softmax(-1)
        delta[torch.arange(len(delta)), torch.from_numpy(asked.targets)] -= 1
        return z @ self.inner, delta @ self.outer

    def _read(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        positions = self.setting.positions
        states = positions.state[rows].astype(np.float32) * positions.size[rows, None]
        logits = torch.from_numpy(states) @ self.weight.T
        total = torch.from_numpy(positions.log_total[rows])
        return torch.from_numpy(states), (logits - total[:, None]).exp()

    def _output_moment(self, sampled: int, seed: int) -> Tensor:
        count = len(self.setting.positions)
        rows = np.random.default_rng(seed).permutation(count)[:sampled]
        vocabulary = len(self.weight)
        diagonal, product = torch.zeros(vocabulary), torch.zeros(vocabulary, vocabulary)
        for first in range(0, len(rows), AT_ONCE):
            _, probabilities = self._read(rows[first : first + AT_ONCE])
            diagonal += probabilities.sum(0)
            product += probabilities.T @ probabilities
        return (torch.diag(diagonal) - product) / len(rows)

    def _inverse(self, moment: Tensor) -> Tensor:
        damped = moment + self.damping * moment.diagonal().mean() * torch.eye(len(moment))
        return torch.linalg.inv(damped).float()
