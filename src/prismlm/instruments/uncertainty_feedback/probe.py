"""How well a linear map of each layer's hidden states gives the code that was fed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError, check_finite, check_whole
from prismlm.instruments.results import Row, Table, finding
from prismlm.instruments.uncertainty_feedback.signal import (
    Codes,
    Reading,
    different,
    entropies,
    evaluating_feedback,
    feedback_of,
    no_codes,
    permuted,
    run,
    stacked,
    text_batches,
)
from prismlm.statistics import Interval, bootstrap

TEST_SHARE = 1 / 3
EXPECTED_DEPTH = 2 / 3
CODE, SHUFFLED, NEXT = range(3)
PENALTIES = tuple(10.0**power for power in range(-6, 3))
LEAST_FREEDOM = 0.1
"""Closer to a fit that goes through every row, the validation error is mere rounding."""


def code_probe(reading: Reading) -> Table:
    """Fit a ridge regression from each layer's states to the code, and test it on other texts.

    A third of the texts, drawn from the seed, are tested on. States are those that the model gives
    as ``hidden_states``: in most families the last has passed the final norm. The first token of a
    text has no code and is left out.
    Source: PRISMA, which expects the signal "approximately two-thirds through the network";
    the probe and its controls are ours.

    Returns:
        Rows by ``layer``, 0 for the embeddings with what was added to them, and ``depth``, layer /
        layers. R² on texts that the probe was not fitted on: of the ``code`` fed in, over
        levels − 1; of codes ``shuffled`` among all positions; of the same codes ``without``
        anything fed, what the text says of them; what the signal ``added``, paired by text; and of
        the ``next_entropy``, that of the prediction made at the position.
    """
    texts, codes, seed = reading.texts, reading.codes, reading.options.seed
    if len(texts) < 4:
        raise InputError(
            f"{len(texts)} texts: a probe is fitted on some and tested on others, at least 4."
        )
    order = np.random.default_rng(seed).permutation(len(texts))
    tested = order[: max(2, round(TEST_SHARE * len(texts)))].tolist()
    fitted = [number for number in range(len(texts)) if number not in set(tested)]
    mixed = permuted(codes, seed + 1)
    errors, spreads = _errors(reading, codes, mixed, fitted, tested)
    bare, _ = _errors(reading, no_codes(texts), mixed, fitted, tested)

    def r2(lost: np.ndarray, target: int) -> Interval:
        share = bootstrap(lost[:, target], spreads[:, target], seed=seed)
        return Interval(1 - share.value, 1 - share.high, 1 - share.low)

    rows = tuple(
        {
            "layer": number,
            "depth": number / max(1, len(errors) - 1),
            "code": r2(own, CODE),
            "shuffled": r2(own, SHUFFLED),
            "without": r2(unfed, CODE),
            "added": bootstrap(unfed[:, CODE] - own[:, CODE], spreads[:, CODE], seed=seed),
            "next_entropy": r2(own, NEXT),
        }
        for number, (own, unfed) in enumerate(zip(errors, bare, strict=True))
    )
    codes_used = different(codes)
    best, clear = best_layer(rows)
    known = codes_used > 1 and np.isfinite([best["code"].value, best["shuffled"].value]).all()
    name = f"probe: R² of the code in layer {best['layer']}, fed − not fed"
    added = best["added"] if known else None
    said = finding(name, added, best["without"].value, clear=clear)
    columns = {"layer": "", "depth": ".2f", "code": ".3f", "shuffled.value": "+.3f",
               "without.value": "+.3f", "added": "+.3f", "next_entropy.value": "+.3f"}  # fmt: skip
    facts = {
        "fitted_on": len(fitted),
        "tested_on": len(tested),
        "positions": sum(len(texts[number]) - 1 for number in fitted),
        "expected_depth": EXPECTED_DEPTH,
        "codes": codes_used,
    }
    title = f"The code read from hidden states: R² on {len(tested)} texts"
    return Table(title, columns, rows, facts, (said,))


def best_layer(rows: Sequence[Row]) -> tuple[Row, bool]:
    """Return the layer the code is read best from, and whether it is clearly read at all."""
    above = [row for row in rows if row["code"].value > max(0.0, row["shuffled"].value)]
    clear = [row for row in above if row["code"].above_zero]
    # Nothing is larger or smaller than NaN.
    best = max(
        clear or above or rows, key=lambda row: np.nan_to_num(row["code"].value, nan=-np.inf)
    )
    return best, bool(clear)


def _errors(
    reading: Reading, fed: Codes, mixed: Codes, fitted: list[int], tested: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return squared errors [layers, texts, 3] and squares about the mean [texts, 3].

    Targets are the code, the shuffled code and the entropy of the next prediction.
    """
    moments: list[Moments] = []
    for _, states, targets in _states(reading, fed, mixed, fitted):
        moments = moments or [Moments(x.shape[-1], targets.shape[-1]) for x in states]
        for own, x in zip(moments, states, strict=True):
            own.add(x.flatten(0, 1), targets.flatten(0, 1))
    probes = [own.fit() for own in moments]
    errors = np.zeros((len(probes), len(tested), 3))
    found: dict[int, Tensor] = {}
    for numbers, states, targets in _states(reading, fed, mixed, tested):
        rows = [tested.index(number) for number in numbers]
        for layer, (probe, x) in enumerate(zip(probes, states, strict=True)):
            read = probe(x.flatten(0, 1)).view_as(targets)
            errors[layer, rows] = ((read - targets) ** 2).sum(1).numpy()
        found |= dict(zip(rows, targets, strict=True))
    mean = torch.cat(list(found.values())).mean(0)
    spreads = [((found[row] - mean) ** 2).sum(0) for row in range(len(tested))]
    return errors, torch.stack(spreads).numpy()


def _states(
    reading: Reading, fed: Codes, mixed: Codes, chosen: list[int]
) -> Iterator[tuple[list[int], list[Tensor], Float[Tensor, "B T_less_1 3"]]]:
    """Yield numbers of texts, states of every layer [B, T − 1, d], and targets."""
    model, _, texts, codes, _, progress = reading
    levels = feedback_of(model).embedding.levels
    rows = [texts[number] for number in chosen]
    with evaluating_feedback(model), progress.task("Reading states", sum(map(len, rows))) as task:
        for some in text_batches(model, rows):
            numbers = [chosen[row] for row in some]
            ids = stacked(texts, numbers)
            output = run(model, ids, stacked(fed, numbers), output_hidden_states=True)
            if output.get("hidden_states") is None:
                raise InputError(f"{type(model).__name__} gives no hidden_states to probe.")
            states = [x[:, 1:].float().cpu() for x in output["hidden_states"]]
            targets = [stacked(c, numbers) / (levels - 1) for c in (codes, mixed)]
            targets.append(entropies(output.logits))
            yield numbers, states, torch.stack(targets, -1)[:, 1:].double()
            task.advance(ids.numel())


class Moments:
    """Count, sums and second moments of rows [x, y], widths ``inputs`` and ``targets``; float64."""

    def __init__(self, inputs: int, targets: int) -> None:
        self.inputs, width = inputs, inputs + targets
        self.count = 0
        self.total = torch.zeros(width, dtype=torch.float64)
        self.second = torch.zeros(width, width, dtype=torch.float64)

    def add(self, x: Float[Tensor, "N d"], y: Float[Tensor, "N C"]) -> None:
        """Add N rows."""
        rows = torch.cat([x.double(), y.double()], 1)
        self.count += len(rows)
        self.total += rows.sum(0)
        self.second += rows.T @ rows

    def fit(self) -> Readout:
        """Return the ridge regression of each target, its penalty by cross-validation.

            w = argmin mean (y − w·x̃)² + λ ‖w‖²,   x̃ = (x − mean) / deviation

        λ of each target is the one of ten-fold steps from 1e-6 to 100 with the least generalised
        cross-validation error, mse / (1 − degrees of freedom / N)² (Golub, Heath and Wahba 1979).
        A λ that leaves less than a tenth of the N rows free is no choice; without any, w is 0.
        """
        check_whole("the number of positions to fit a probe on", self.count, 2)
        check_finite("hidden states", self.second)
        mean = self.total / self.count
        covariance = self.second / self.count - mean[:, None] * mean
        d = self.inputs
        variance = covariance.diagonal()[:d]
        # A constant input has rounding for its variance.
        varies = variance > 1e-12 * (1 + mean[:d] ** 2)
        scale = torch.where(varies, variance.clamp_min(0).rsqrt(), torch.zeros(()).double())
        cross = covariance[:d, d:] * scale[:, None]
        values, vectors = torch.linalg.eigh(covariance[:d, :d] * scale[:, None] * scale)
        values, turned = values.clamp_min(0), vectors.T @ cross
        best = torch.full((cross.shape[1],), torch.inf, dtype=torch.float64)
        weight = torch.zeros_like(cross)
        for penalty in PENALTIES:
            shrunk = values / (values + penalty)
            fitted = turned / (values + penalty)[:, None]
            error = covariance.diagonal()[d:] - (fitted * turned * (2 - shrunk[:, None])).sum(0)
            freedom = 1 - (float(shrunk.sum()) + 1) / self.count
            if freedom < LEAST_FREEDOM:
                continue
            better = error / freedom**2 < best
            best = torch.where(better, error / freedom**2, best)
            weight[:, better] = (vectors @ fitted * scale[:, None])[:, better]
        return Readout(weight, mean[d:] - mean[:d] @ weight)


class Readout(NamedTuple):
    """A linear map from states to targets: y ≈ w·x + b."""

    weight: Float[Tensor, "d C"]
    bias: Float[Tensor, " C"]

    def __call__(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "N C"]:
        """Return what is read from states."""
        return x.double() @ self.weight + self.bias
