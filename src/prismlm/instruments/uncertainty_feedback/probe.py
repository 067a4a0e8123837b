"""How well a line through the hidden states of each layer gives the code that was fed in."""

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
    evaluating_feedback,
    feedback_of,
    no_codes,
    permuted,
    read_logits,
    run,
    stacked,
    text_batches,
)
from prismlm.statistics import Interval, bootstrap

TEST_SHARE = 1 / 3
EXPECTED_DEPTH = 2 / 3
CODE, SHUFFLED, NEXT = range(3)


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
        anything fed, what the text tells of them; what the signal ``added``, paired by text; and of
        the ``next_entropy``, that of the prediction made at the position.

    Raises:
        InputError: a model without feedback or hidden states, or fewer than four texts.
    """
    texts, codes, seed = reading.texts, reading.codes, reading.options.seed
    if len(texts) < 4:
        raise InputError(
            f"{len(texts)} texts: a probe is fitted on some and tested on others, at least 4."
        )
    order = np.random.default_rng(seed).permutation(len(texts))
    tested = order[: max(2, round(TEST_SHARE * len(texts)))]
    mixed = permuted(codes, seed + 1)
    fed, bare = (_LayerStates(reading, each, mixed) for each in (codes, no_codes(texts)))
    fitted = [number for number in range(len(texts)) if number not in set(tested.tolist())]
    errors, spreads = fed.read(fitted, tested.tolist())
    errors_bare, _ = bare.read(fitted, tested.tolist())
    rows = tuple(
        _layer(number, len(errors) - 1, errors[number], errors_bare[number], spreads, seed)
        for number in range(len(errors))
    )
    codes_used = different(codes)
    best, clear = best_layer(rows)
    known = codes_used > 1 and np.isfinite([best["code"].value, best["shuffled"].value]).all()
    return Table(
        f"The code read from hidden states: R² on {len(tested)} texts",
        {"layer": "", "depth": ".2f", "code": ".3f", "shuffled.value": "+.3f",
         "without.value": "+.3f", "added": "+.3f", "next_entropy.value": "+.3f"},
        rows,
        {
            "fitted_on": len(fitted),
            "tested_on": len(tested),
            "positions": sum(len(texts[number]) - 1 for number in fitted),
            "expected_depth": EXPECTED_DEPTH,
            "codes": codes_used,
        },
        (
            finding(
                f"probe: R² of the code in layer {best['layer']}, fed − not fed",
                best["added"] if known else None,
                best["without"].value,
                clear=clear,
            ),
        ),
    )  # fmt: skip


def best_layer(rows: Sequence[Row]) -> tuple[Row, bool]:
    """Return the layer the code is read best from, and whether it is clearly read at all."""
    above = [row for row in rows if row["code"].value > max(0.0, row["shuffled"].value)]
    clear = [row for row in above if row["code"].above_zero]
    # Nothing is larger or smaller than NaN.
    best = max(
        clear or above or rows, key=lambda row: np.nan_to_num(row["code"].value, nan=-np.inf)
    )
    return best, bool(clear)


class _LayerStates(NamedTuple):
    """States of every layer along texts, with what is to be read from them."""

    reading: Reading
    fed: Codes
    mixed: Codes

    def read(self, fitted: list[int], tested: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return squared errors [layers, texts, 3] and squares about the mean [texts, 3]."""
        moments: list[Moments] = []
        for _, states, targets in self._batches(fitted):
            if not moments:
                moments = [Moments(x.shape[-1], targets.shape[-1]) for x in states]
            for own, x in zip(moments, states, strict=True):
                own.add(x.flatten(0, 1), targets.flatten(0, 1))
        probes: list[Readout] = [own.fit() for own in moments]
        place = {number: row for row, number in enumerate(tested)}
        errors = np.zeros((len(probes), len(tested), 3))
        found: dict[int, Tensor] = {}
        for numbers, states, targets in self._batches(tested):
            rows = [place[number] for number in numbers]
            for layer, (probe, x) in enumerate(zip(probes, states, strict=True)):
                read = probe(x.flatten(0, 1)).view_as(targets)
                errors[layer, rows] = ((read - targets) ** 2).sum(1).numpy()
            found |= dict(zip(rows, targets, strict=True))
        mean = torch.cat(list(found.values())).mean(0)
        spreads = [((found[row] - mean) ** 2).sum(0) for row in range(len(tested))]
        return errors, torch.stack(spreads).numpy()

    def _batches(self, chosen: list[int]) -> Iterator[tuple[list[int], list[Tensor], Tensor]]:
        model, _, texts, _, _, progress = self.reading
        rows = [texts[number] for number in chosen]
        title = "Reading states"
        with evaluating_feedback(model), progress.task(title, sum(map(len, rows))) as task:
            for some in text_batches(model, rows):
                numbers = [chosen[row] for row in some]
                ids, fed = stacked(texts, numbers), stacked(self.fed, numbers)
                output = run(model, ids, fed, output_hidden_states=True)
                if output.get("hidden_states") is None:
                    raise InputError(f"{type(model).__name__} gives no hidden_states to probe.")
                states = [x[:, 1:].float().cpu() for x in output["hidden_states"]]
                shares = read_logits(output.logits, ids)[1]
                yield numbers, states, self._targets(numbers, shares)
                task.advance(ids.numel())

    def _targets(self, numbers: list[int], shares: Tensor) -> Float[Tensor, "B T_less_1 3"]:
        levels = feedback_of(self.reading.model).embedding.levels
        codes = [stacked(c, numbers) / (levels - 1) for c in (self.reading.codes, self.mixed)]
        return torch.stack([*codes, shares], -1)[:, 1:].double()


def _layer(
    layer: int,
    depth: int,
    errors: Float[np.ndarray, "texts 3"],
    bare: Float[np.ndarray, "texts 3"],
    spreads: Float[np.ndarray, "texts 3"],
    seed: int,
) -> Row:
    def explained(found: np.ndarray, target: int) -> Interval:
        lost = bootstrap(found[:, target], spreads[:, target], seed=seed)
        return Interval(1 - lost.value, 1 - lost.high, 1 - lost.low)

    return {
        "layer": layer,
        "depth": layer / max(1, depth),
        "code": explained(errors, CODE),
        "shuffled": explained(errors, SHUFFLED),
        "without": explained(bare, CODE),
        "added": bootstrap(bare[:, CODE] - errors[:, CODE], spreads[:, CODE], seed=seed),
        "next_entropy": explained(errors, NEXT),
    }


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
        check_whole("the number of positions to fit a probe on", self.count, 2)
        check_finite("hidden states", self.second)
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


class Readout(NamedTuple):
    """A linear map from states to targets: y ≈ w·x + b."""

    weight: Float[Tensor, "d C"]
    bias: Float[Tensor, " C"]

    def __call__(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "N C"]:
        """Return what is read from states."""
        return x.double() @ self.weight + self.bias
