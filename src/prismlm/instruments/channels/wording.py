"""Findings of a channel report as sentences, the same on the terminal, the page and the plots."""

from __future__ import annotations

import math

import torch

from prismlm.instruments.channels.report import LayerReport, Locality

SIGNIFICANT = 0.05


def locality_words(found: Locality) -> tuple[str, ...]:
    """Return Spearman's ρ over channels, and Cohen's d, or why there is none."""
    first, second = f"No ρ: {found.no_correlation}", f"No quartiles: {found.no_quartiles}"
    if found.correlation is not None:
        rho, one = signed(found.correlation.rho, 3), found.correlation
        first = f"Spearman ρ = {rho}, p = {one.p:.2g} (from Student's t), {one.count} channels"
    if found.quartiles is not None:
        d = signed(found.quartiles.cohens_d, 2)
        second = f"Cohen's d of the first quartile against the last: {d}"
    return first, second


def lag_words(layer: LayerReport) -> str:
    """Return at which lags the channels of a layer peak, and how many stand out from chance."""
    if layer.lags is None:
        return ""
    if layer.shared_gates:
        return "reads by its write gate, so that both go together at lag 0"
    lags = layer.lags
    clear = lags.p < SIGNIFICANT
    peaks = lags.peak[clear]
    before, same, after = (int(x.sum()) for x in (peaks > 0, peaks == 0, peaks < 0))
    one = int((peaks == 1).sum())
    return (
        f"{int(clear.sum())} of {len(lags.p)} channels correlate with p < {SIGNIFICANT:g}; of "
        f"these {before} are read first ({one} by one position), {same} at once, {after} "
        "are written first"
    )


def median_correlation(layer: LayerReport, lag: int) -> tuple[float, float, float]:
    """Return medians over channels at a lag: the correlation, the null's mean and deviation.

    NaN where no gate of the layer varies, or the report has no lags.
    """
    lags = layer.lags
    if lags is None or bool(lags.p.isnan().all()):
        return math.nan, math.nan, math.nan
    place = int((lags.lags == lag).nonzero()[0])
    columns = (lags.correlation, lags.null_mean, lags.null_deviation)
    kept = ~lags.p.isnan()
    found = [torch.median(column[kept, place]).item() for column in columns]
    return found[0], found[1], found[2]


def signed(value: float, digits: int) -> str:
    """Return a number with its sign."""
    return f"{value:+.{digits}f}".replace("-", "−")
