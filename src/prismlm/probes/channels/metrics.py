"""How evenly gates spread over channels, what they say of tokens, and how read follows write.

a_n is a gate at token n in one group of P channels; means are over N tokens. Each group is measured
by itself, and a figure is the mean over groups. Figures of one position take absolute values
(ProtoT, A.8, Eq. 3 to 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int64
from scipy import stats
from torch import Tensor, nn

from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError, check_finite, check_whole
from prismlm.models.decoders.mixers import mixers_of
from prismlm.probes.channels.activations import Activations, Kind, read_activations
from prismlm.probes.results import Row
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

BINS = 8
STILL = 1e-28
"""The variance below which a gate counts as constant."""


def sparsity_ratio(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return max_p |a_p| / mean_p |a_p|, float64: 1 if all are equal, P if one is alone."""
    a = _magnitudes(activations)
    return a.amax(-1) / a.mean(-1)


def gini(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return the Gini coefficient, float64: 0 if all are equal, 1 − 1/P if one is alone.

    G = (P + 1 − 2 Σ_p (P + 1 − p) a↑_p / Σ_p a_p) / P,   a↑ ascending, p from 1
    """
    a = _magnitudes(activations).sort(-1).values
    count = a.shape[-1]
    weights = torch.arange(count, 0, -1, dtype=a.dtype, device=a.device)
    return (count + 1 - 2 * (a * weights).sum(-1) / a.sum(-1)) / count


def entropy(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return −Σ_p q_p ln q_p with q = |a| / Σ |a|, in nats, float64: ln P if all are equal."""
    a = _magnitudes(activations)
    return torch.special.entr(a / a.sum(-1, keepdim=True)).sum(-1)


def _magnitudes(activations: Tensor) -> Tensor:
    magnitudes = activations.detach().double().abs()
    check_finite("activations", magnitudes)
    if not bool((magnitudes.sum(-1) > 0).all()):
        raise InputError(
            "a position has no activation at all, so it has no distribution over channels: leave "
            "padding out, and do not mask every channel."
        )
    return magnitudes


def gate_uses(model: nn.Module, batches: Iterable[WindowBatch]) -> list[Row]:
    """Return how evenly each layer's ``write`` and ``read`` gates spread over a text's ``tokens``.

    Each gate has the figures of :func:`gate_use`; with shared gates they are the same.
    """
    read = read_activations(model, batches, ("write", "read"))  # pyright: ignore[reportArgumentType]
    return [
        {"tokens": len(read.tokens)}
        | {kind: gate_use(read.values[kind, layer], mixer.groups) for kind in ("write", "read")}
        for layer, mixer in enumerate(mixers_of(model))
    ]


def gate_use(gate: Float[Tensor, "N R"], groups: int = 1) -> dict[str, float]:
    """Return how evenly a gate spreads over P channels of a group (ProtoT, A.7.1 and Table 15).

    ``gini``: mean_n G(a_n), of single tokens, and ``use_gini``: G(mean_n a_n), of all together, 0
    to 1 − 1/P. ``top_share``: mean_n max_k a_nk, what a token gives its first channel, and
    ``top_channel_share``: max_k mean_n a_nk, what the most used channel gets, 1/P to 1.
    """
    parts = gate.double().unflatten(-1, (groups, -1))
    use = parts.mean(0)
    figures = {"gini": gini(parts), "use_gini": gini(use)}
    figures |= {"top_share": parts.amax(-1), "top_channel_share": use.amax(-1)}
    return {name: figure.mean().item() for name, figure in figures.items()}


def measure_layers(
    model: PreTrainedModel,
    sequences: Sequences,
    kind: Kind = "write",
    *,
    progress: Reporter = SILENT,
) -> tuple[Row, ...]:
    """Return the :func:`metrics` of every layer: of gates, or the norms of value heads."""
    read = read_activations(
        model, sequences.batches(), (kind,), total=sequences.tokens, progress=progress
    )
    return tuple(metrics(model, read, kind, layer) for _, layer in read.values)


def metrics(model: nn.Module, read: Activations, kind: Kind, layer: int) -> Row:
    """Return sparsity, Gini, entropy and mutual information of a ``layer`` (ProtoT, A.8).

    Its ``width`` P; ``positions`` read; ``sparsity_ratio``, max over mean; ``gini``; ``entropy`` in
    nats and ``entropy_share`` of ln P, NaN for P = 1; ``mutual_information`` with the token read,
    nats, biased upwards by few positions, and ``mutual_information_corrected`` after Miller and
    Madow, the means over channels.
    """
    # The heads of attention are one group.
    groups = mixers_of(model)[layer].groups if kind in ("write", "read") else 1
    activations = read.values[kind, layer]
    parts = activations.unflatten(-1, (groups, -1))
    width, spread = parts.shape[-1], entropy(parts).mean().item()
    plain, corrected = information(read.tokens, activations)
    return {
        "layer": layer,
        "width": width,
        "positions": len(activations),
        "sparsity_ratio": sparsity_ratio(parts).mean().item(),
        "gini": gini(parts).mean().item(),
        "entropy": spread,
        "entropy_share": spread / math.log(width) if width > 1 else math.nan,
        "mutual_information": float(plain.mean()),
        "mutual_information_corrected": float(corrected.mean()),
    }


def information(
    tokens: Int64[Tensor, " N"], activations: Float[Tensor, "N P"], bins: int = BINS
) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    """Return I(T; ã_p) = H(T) + H(ã_p) − H(T, ã_p) of each channel, nats, and corrected.

    ã_p is the bin of channel p's activation, of ``bins`` that hold equally many (ProtoT, A.8,
    Eq. 6, which leaves the bins open). From few positions this is too high, which the Miller–Madow
    correction takes off; it can fall below zero:

        corrected:  I + (K_T + K_B − K_TB − 1) / 2n,   K: how many values or pairs were seen
    """
    ids = tokens.unique(return_inverse=True)[1].numpy()
    rows: list[tuple[float, float]] = []
    for column in activations.abs().T.numpy():
        pairs = ids * bins + equal_bins(column, bins)
        counts = np.bincount(pairs, minlength=bins * (int(ids.max()) + 1)).reshape(-1, bins)
        margins = (counts.sum(1), counts.sum(0), counts.ravel())
        found = float(np.dot((1, 1, -1), [stats.entropy(each) for each in margins]))
        seen = np.dot((1, 1, -1), [np.count_nonzero(each) for each in margins]) - 1
        rows.append((found, found + seen / (2 * len(ids))))
    plain, corrected = np.array(rows).T
    return plain, corrected


def equal_bins(values: Float[np.ndarray, " N"], bins: int) -> Int64[np.ndarray, " N"]:
    """Return the bin of each value, of bins that hold equally many."""
    # An edge is the last value of the bin below it, and belongs to that bin.
    last = np.ceil(np.arange(1, bins) * len(values) / bins).astype(np.int64) - 1
    return np.searchsorted(np.sort(values)[last], values)


def repetition(tokens: Sequence[int]) -> float:
    """Return 1 − distinct / all over a channel's kept tokens: 0 if no token comes twice.

    The source takes how often the most written tokens repeat as a proxy for locality, without
    saying how it counts (ProtoT, A.8, Table 21).
    """
    return 1 - len(set(tokens)) / len(tokens)


def quartiles(lives: Float[np.ndarray, " n"], scores: Float[np.ndarray, " n"]) -> Row:
    """Compare repetition over quartiles of half-life, the shortest first.

    Returns:
        ``bounds`` between the groups, a channel at a bound in the shorter one; ``counts`` of
        channels; ``means`` of repetition, NaN of an empty group; and ``cohens_d``,
        (mean of the first − mean of the last) / pooled standard deviation.
    """
    bounds = np.quantile(lives, [0.25, 0.5, 0.75])
    group = np.searchsorted(bounds, lives)
    parts = [scores[group == i] for i in range(4)]
    first, last = parts[0], parts[3]
    if min(len(first), len(last)) < 2:
        raise InputError(
            f"{len(first)} channels in the first quartile of half-lives and {len(last)} in the "
            "last: expected two or more of each. Channels that all decay alike have no quartiles."
        )
    # Exact, where the sum of squares about a rounded mean is not.
    if np.ptp(first) == 0 and np.ptp(last) == 0:
        raise InputError("repetition is one figure in each outer quartile, so d has no unit.")
    squares = sum(part.var() * len(part) for part in (first, last))
    pooled = math.sqrt(squares / (len(first) + len(last) - 2))
    return {
        "bounds": bounds.tolist(),
        "counts": [len(part) for part in parts],
        "means": [float(part.mean()) if len(part) else math.nan for part in parts],
        "cohens_d": float(first.mean() - last.mean()) / pooled,
    }


@dataclass(frozen=True, eq=False)
class LagCorrelation:
    """Cross-correlation of read and write of R channels; NaN where a gate is constant.

        c(ℓ) = Σ_i r_i w_{i+ℓ} / √(Σ_i r_i² · Σ_i w_i²),   gates minus their mean over the sequence

    A peak at ℓ = 1 means that the channel is read one position before it is written. The null
    shuffles the read gate's positions within each sequence, which also destroys the similarity of
    neighbouring gates: a small p says that read and write correlate at some lag, the peak which.
    Source: ProtoT, §5.1, which shows the pattern by example and has no figure for it.

    Attributes:
        lags: −L to L.
        correlation: c(ℓ), float64, summed over all sequences.
        null_mean, null_deviation: of the shuffles, float64.
        peak: the lag of the largest c(ℓ).
        p: share of the shuffles and the original whose largest c(ℓ) is at least that large.
    """

    lags: Int64[Tensor, " lags"]
    correlation: Float[Tensor, "R lags"]
    null_mean: Float[Tensor, "R lags"]
    null_deviation: Float[Tensor, "R lags"]
    peak: Int64[Tensor, " R"]
    p: Float[Tensor, " R"]


def lag_correlation(
    writes: Float[Tensor, "N R"],
    reads: Float[Tensor, "N R"],
    lengths: Sequence[int],
    *,
    max_lag: int = 4,
    shuffles: int = 99,
    seed: int = 0,
) -> LagCorrelation:
    """Return the cross-correlation of gates along sequences of these lengths."""
    check_whole("the largest lag", max_lag, 1)
    generator = torch.Generator().manual_seed(seed)
    channels = writes.shape[1]
    # The first is the original order.
    products = torch.zeros(shuffles + 1, channels, 2 * max_lag + 1, dtype=torch.float64)
    energy = torch.zeros(2, channels, dtype=torch.float64)
    for pair in zip(writes.split(lengths), reads.split(lengths), strict=True):
        write, read = (gate.double() - gate.double().mean(0) for gate in pair)
        energy += torch.stack([write.square().sum(0), read.square().sum(0)])
        orders = torch.rand(shuffles, len(write), generator=generator).argsort(1)
        orders = torch.cat([torch.arange(len(write))[None], orders])
        # windows[r, i] holds w_{i−L} to w_{i+L}, with zeros beyond the ends.
        padded = torch.nn.functional.pad(write.T, (max_lag, max_lag))
        windows = padded.unfold(1, 2 * max_lag + 1, 1)
        products += torch.bmm(read.T[:, orders], windows).transpose(0, 1)
    scale = energy.prod(0).sqrt()
    # Anything below that is rounding of the means.
    varies = scale > STILL * len(writes)
    found = products / torch.where(varies, scale, torch.nan)[None, :, None]
    observed, null = found[0], found[1:]
    at_least = (null.amax(2) >= observed.amax(1)).sum(0)
    lags = torch.arange(-max_lag, max_lag + 1)
    p = torch.where(varies, (at_least.double() + 1) / len(found), torch.nan)
    peak = lags[observed.argmax(1)]
    return LagCorrelation(lags, observed, null.mean(0), null.std(0), peak, p)
