"""Whether a channel is read before it is written: "predict and consolidate".

    c(ℓ) = Σ_i r_i w_{i+ℓ} / √(Σ_i r_i² · Σ_i w_i²),   gates minus their mean over the sequence

A peak at ℓ = 1 means that the channel is read one position before it is written. Sums run over all
sequences. Against it stands the same with the read gate's positions shuffled within each sequence,
which keeps what the sequence as a whole reads and writes. Shuffling also takes away that
neighbouring gates are alike, so a small p says that read and write hang together at some lag; which
lag is the peak's to say.
Source: ProtoT, §5.1, which shows the pattern by example and has no figure for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import check_whole

STILL = 1e-28
"""The variance below which a gate counts as one that never varies."""


@dataclass(frozen=True, eq=False)
class LagCorrelation:
    """Cross-correlation of read and write of R channels; NaN where a gate never varies.

    Attributes:
        lags: −L to L.
        correlation: c(ℓ), float64.
        null_mean: of the shuffled, float64.
        null_deviation: their standard deviation, float64.
        peak: the lag of the largest c(ℓ).
        p: the share of shuffles whose largest c(ℓ) is at least that large, the unshuffled
            counted among them.
    """

    lags: Int64[Tensor, " lags"]
    correlation: Float[Tensor, "R lags"]
    null_mean: Float[Tensor, "R lags"]
    null_deviation: Float[Tensor, "R lags"]
    peak: Int64[Tensor, " R"]
    p: Float[Tensor, " R"]


class LagTally:
    """Sums of the cross-correlation, sequence by sequence.

    With shared gates, which are read by the write gate, the correlation is 1 at lag 0.

    Args:
        channels: R.
        max_lag: L.
        shuffles: of each sequence.
        seed: of the shuffles.

    Raises:
        InputError: a lag below 1, or fewer than two shuffles.
    """

    def __init__(self, channels: int, max_lag: int = 4, shuffles: int = 99, seed: int = 0) -> None:
        check_whole("the largest lag", max_lag, 1)
        check_whole("the number of shuffles", shuffles, 2)
        self.max_lag = max_lag
        self._generator = torch.Generator().manual_seed(seed)
        # The first is the order as it is.
        self._products = torch.zeros(shuffles + 1, channels, 2 * max_lag + 1, dtype=torch.float64)
        self._energy = torch.zeros(2, channels, dtype=torch.float64)
        self._positions = 0

    def add(self, write: Float[Tensor, "T R"], read: Float[Tensor, "T R"]) -> None:
        """Take one sequence."""
        write, read = (gate.double() - gate.double().mean(0) for gate in (write, read))
        self._energy += torch.stack([write.square().sum(0), read.square().sum(0)])
        self._positions += len(write)
        length, shuffles = len(write), len(self._products) - 1
        orders = torch.rand(shuffles, length, generator=self._generator).argsort(1)
        orders = torch.cat([torch.arange(length)[None], orders])
        # windows[r, i] holds w_{i−L} to w_{i+L}, with zeros beyond the ends.
        padded = torch.nn.functional.pad(write.T, (self.max_lag, self.max_lag))
        windows = padded.unfold(1, 2 * self.max_lag + 1, 1)
        self._products += torch.bmm(read.T[:, orders], windows).transpose(0, 1)

    def result(self) -> LagCorrelation:
        """Return the correlations so far."""
        write, read = self._energy
        scale = (write * read).sqrt()
        # What is below that is the rounding of the means.
        varies = scale > STILL * self._positions
        found = self._products / torch.where(varies, scale, torch.nan)[None, :, None]
        observed, null = found[0], found[1:]
        at_least = (null.amax(2) >= observed.amax(1)).sum(0)
        lags = torch.arange(-self.max_lag, self.max_lag + 1)
        return LagCorrelation(
            lags,
            observed,
            null.mean(0),
            null.std(0),
            lags[observed.argmax(1)],
            torch.where(varies, (at_least.double() + 1) / len(found), torch.nan),
        )
