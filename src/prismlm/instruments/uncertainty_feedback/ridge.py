"""Ridge regression from moments, so that no hidden state has to be kept."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError

PENALTIES = tuple(10.0**power for power in range(-6, 3))
LEAST_FREEDOM = 0.1
"""Nearer to a fit that goes through every row, the validation error is rounding over rounding."""


class Moments:
    """Count, sums and second moments of rows [x, y]; float64.

    Args:
        inputs: width of x.
        targets: width of y.
    """

    def __init__(self, inputs: int, targets: int) -> None:
        self.inputs, width = inputs, inputs + targets
        self.count = 0
        self.total = torch.zeros(width, dtype=torch.float64)
        self.second = torch.zeros(width, width, dtype=torch.float64)

    def add(self, x: Float[Tensor, "N d"], y: Float[Tensor, "N C"]) -> None:
        """Take N rows."""
        rows = torch.cat([x.double(), y.double()], 1)
        self.count += len(rows)
        self.total += rows.sum(0)
        self.second += rows.T @ rows

    def fit(self) -> Readout:
        """Return the ridge regression of each target, its penalty by cross-validation.

            w = argmin mean (y − w·x̃)² + λ ‖w‖²,   x̃ = (x − mean) / deviation

        λ of each target is the one of ten-fold steps from 1e-6 to 100 with the least generalised
        cross-validation error, mse / (1 − degrees of freedom / N)². A λ that leaves less than a
        tenth of the N rows free is no choice; without any, w is 0.

        Source: Golub, Heath and Wahba (1979).

        Raises:
            InputError: fewer than two rows, or rows that are not finite.
        """
        if self.count < 2:
            raise InputError(f"{self.count} positions to fit a probe on: expected at least 2.")
        if not bool(torch.isfinite(self.second).all()):
            raise InputError("hidden states are not finite: the model holds NaN or infinity.")
        mean = self.total / self.count
        covariance = self.second / self.count - mean[:, None] * mean
        d = self.inputs
        variance = covariance.diagonal()[:d]
        # What never changes has rounding for its variance.
        varies = variance > 1e-12 * (1 + mean[:d] ** 2)
        scale = torch.where(varies, variance.clamp_min(0).rsqrt(), torch.zeros(()).double())
        inner = covariance[:d, :d] * scale[:, None] * scale
        cross = covariance[:d, d:] * scale[:, None]
        values, vectors = torch.linalg.eigh(inner)
        values = values.clamp_min(0)
        turned = vectors.T @ cross
        best = torch.full((cross.shape[1],), torch.inf, dtype=torch.float64)
        weight = torch.zeros_like(cross)
        for penalty in PENALTIES:
            shrunk = values / (values + penalty)
            fitted = turned / (values + penalty)[:, None]
            error = covariance.diagonal()[d:] - (fitted * turned * (2 - shrunk[:, None])).sum(0)
            freedom = 1 - (float(shrunk.sum()) + 1) / self.count
            if freedom < LEAST_FREEDOM:
                continue
            score = error / freedom**2
            better = score < best
            best = torch.where(better, score, best)
            weight[:, better] = (vectors @ fitted * scale[:, None])[:, better]
        return Readout(weight, mean[d:] - mean[:d] @ weight)


class Readout:
    """A linear map from states to targets: y ≈ w·x + b.

    Args:
        weight: w [d, C].
        bias: b [C].
    """

    def __init__(self, weight: Float[Tensor, "d C"], bias: Float[Tensor, " C"]) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "N C"]:
        """Return what is read from states."""
        return x.double() @ self.weight + self.bias
