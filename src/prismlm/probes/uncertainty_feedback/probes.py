"""What the codes leave inside a model: attention that they draw, and states that tell them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from prismlm.errors import InputError, check_finite
from prismlm.models.attention import attention_layers, reading_attention
from prismlm.probes.results import Row, Table, finding
from prismlm.probes.uncertainty_feedback.signal import (
    Codes,
    Reading,
    batches_of,
    different,
    feedback_of,
    longer_than,
    no_codes,
    permuted,
    run,
    stacked,
)
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import Interval, bootstrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_LATER = 8
"""A position counts that so many later tokens can attend to."""
SIGNIFICANT = 0.05
TEST_SHARE = 1 / 3
EXPECTED_DEPTH = 2 / 3
PENALTIES = tuple(10.0**power for power in range(-6, 3))
LEAST_FREEDOM = 0.1
"""Closer to a fit that goes through every row, the validation error is mere rounding."""


def attention_probe(reading: Reading, *, permutations: int = 999) -> Table:
    """Compare the attention that positions receive with the code that was fed to them.

    Received is the mean over the tokens after it, since earlier positions are seen by more. It
    still falls with the position, and so may codes: the comparison is among texts at the same
    position. Texts of at least ten tokens are cut to their median length and shorter ones left out,
    so that every text has every position and as many tokens after it.
    Source: PRISMA, "Attention probe"; both controls are ours.

    Returns:
        Rows by ``layer``: the rank ``correlation`` among texts at the same position, with ``p`` of
        both sides and ``q``, corrected over layers by Benjamini and Hochberg; ``without``, the
        correlation with the same codes where nothing was fed to the model; and ``added``, the
        difference, resampled over texts with ranks as they are.
    """
    model, _, texts, codes, options, progress = reading
    # The median is over texts that are long enough by themselves.
    lengths = sorted(len(texts[number]) for number in longer_than(texts, LEAST_LATER + 2))
    length = lengths[(len(lengths) - 1) // 2]
    kept = longer_than(texts, length)
    cut = [texts[number][:length] for number in kept]
    given = tuple(codes[number][:length] for number in kept)
    # No code is at position 0.
    span = slice(1, length - LEAST_LATER)
    x = torch.stack(given)[:, span].double().numpy()
    own, bare = (
        received(model, cut, fed, progress=progress)[:, :, span] for fed in (given, no_codes(cut))
    )
    rows: list[Row] = []
    for number, (y, unfed) in enumerate(zip(own, bare, strict=True)):
        fed_ranks, bare_ranks = (
            matched_ranks(x, one, permutations=permutations, seed=options.seed)
            for one in (y, unfed)
        )
        added = bootstrap(fed_ranks.by_text - bare_ranks.by_text, seed=options.seed)
        row = {"layer": number, "correlation": fed_ranks.correlation, "p": fed_ranks.p}
        rows.append(row | {"without": bare_ranks.correlation, "added": added})
    corrected = stats.false_discovery_control([row["p"] for row in rows]).tolist()
    table = tuple(row | {"q": q} for row, q in zip(rows, corrected, strict=True))
    codes_used = different(given)
    columns = {"layer": "", "correlation": "+.3f", "q": ".2g", "without": "+.3f", "added": "+.2f"}
    facts = {"texts": len(kept), "length": length, "positions": x.shape[1]}
    facts |= {"left_out": len(texts) - len(kept), "codes": codes_used}
    title = f"Attention received by code, {len(kept)} texts of {length} tokens"
    return Table(title, columns, table, facts, (strongest(table, codes_used),))


def strongest(rows: Sequence[Row], codes: int) -> Row:
    """Return the finding: of later layers that attend to high codes, where the signal adds most."""
    later = rows[len(rows) // 2 :]
    more = [row for row in later if row["correlation"] > 0 and row["q"] <= SIGNIFICANT]
    best = max(more or later, key=lambda r: r["added"].value if more else r["correlation"])
    name = f"attention: ρ with the code in layer {best['layer']}, fed − not fed"
    added = best["added"] if codes > 1 else None
    return finding(name, added, best["without"], clear=bool(more))


def received(
    model: PreTrainedModel, texts: Sequence[Tensor], codes: Codes, *, progress: Reporter = SILENT
) -> Float[np.ndarray, "layers texts T"]:
    """Return the attention that each position of equally long texts receives.

    Σ_{i>j} a_ij / (T − 1 − j), mean over heads; 0 at the last position
    """
    length, depth = len(texts[0]), len(attention_layers(model))
    later = torch.arange(length - 1, -1, -1).clamp_min(1).double()
    found = np.zeros((depth, len(texts), length))
    numbers: list[int] = []

    def read(layer: int, weights: Tensor) -> None:
        heads = weights.float().mean(1).tril(-1)
        found[layer, numbers] = (heads.sum(1, dtype=torch.float64).cpu() / later).numpy()

    with (
        reading_attention(model, read),
        batches_of(model, texts, "Reading attention", progress) as batches,
    ):
        for numbers in batches:
            run(model, stacked(texts, numbers), stacked(codes, numbers))
    check_finite("attention weights", torch.from_numpy(found))
    return found


class MatchedRanks(NamedTuple):
    """x and y of n texts at P positions, compared among texts at the same position.

    Attributes:
        correlation: Σ x̂ ŷ / √(Σ x̂² Σ ŷ²), x̂ and ŷ ranks among the texts at a position, less
            their mean; 0 where either never differs.
        by_text: n times each text's part of it: their mean is the correlation.
        p: of both sides: of all orders of the texts where these are fewer than the permutations,
            else (1 + as large under permutation) / (1 + permutations).
    """

    correlation: float
    by_text: np.ndarray
    p: float


def matched_ranks(
    x: Float[np.ndarray, "n P"],
    y: Float[np.ndarray, "n P"],
    *,
    permutations: int = 999,
    seed: int = 0,
) -> MatchedRanks:
    """Correlate x with y by rank within positions.

    Under the null the texts' rows of x may be exchanged: every x stays at its position, and what
    goes together along a text stays together. Shuffling each position by itself would tear that
    apart and make p too small.
    """
    texts = len(x)
    own, other = (stats.rankdata(values, axis=0) - (texts + 1) / 2 for values in (x, y))
    norm = float(np.sqrt((own**2).sum() * (other**2).sum()))
    if not norm:
        return MatchedRanks(0.0, np.zeros(texts), 1.0)
    # Of row i of y with row π(i) of x.
    products = other @ own.T / norm
    rows = np.arange(texts)
    null = stats.permutation_test(
        (rows,),
        lambda order, axis=-1: np.abs(products[rows, order].sum(axis)),
        permutation_type="pairings",
        vectorized=True,
        n_resamples=permutations,
        batch=256,
        alternative="greater",
        rng=np.random.default_rng(seed),
    )
    diagonal = np.diagonal(products)
    return MatchedRanks(float(np.trace(products)), texts * diagonal, float(null.pvalue))


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
        anything fed, what the text says of them; and what the signal ``added``, paired by text.
    """
    texts, codes, seed = reading.texts, reading.codes, reading.options.seed
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
            "code": r2(own, 0),
            "shuffled": r2(own, 1),
            "without": r2(unfed, 0),
            "added": bootstrap(unfed[:, 0] - own[:, 0], spreads[:, 0], seed=seed),
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
               "without.value": "+.3f", "added": "+.3f"}  # fmt: skip
    facts = {"fitted_on": len(fitted), "tested_on": len(tested)}
    facts |= {"positions": sum(len(texts[number]) - 1 for number in fitted)}
    facts |= {"expected_depth": EXPECTED_DEPTH, "codes": codes_used}
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
    """Return squared errors [layers, texts, 2] and squares about the mean [texts, 2].

    Targets are the code and the shuffled code.
    """
    moments: list[Moments] = []
    for _, states, targets in _states(reading, fed, mixed, fitted):
        moments = moments or [Moments(x.shape[-1], 2) for x in states]
        for own, x in zip(moments, states, strict=True):
            own.add(x.flatten(0, 1), targets.flatten(0, 1))
    fits = [own.fit() for own in moments]
    errors = np.zeros((len(fits), len(tested), 2))
    by_row: dict[int, Tensor] = {}
    for numbers, states, targets in _states(reading, fed, mixed, tested):
        rows = [tested.index(number) for number in numbers]
        for layer, ((weight, bias), x) in enumerate(zip(fits, states, strict=True)):
            errors[layer, rows] = ((x.double() @ weight + bias - targets) ** 2).sum(1).numpy()
        by_row |= dict(zip(rows, targets, strict=True))
    mean = torch.cat(list(by_row.values())).mean(0)
    spreads = [((by_row[row] - mean) ** 2).sum(0) for row in range(len(tested))]
    return errors, torch.stack(spreads).numpy()


def _states(
    reading: Reading, fed: Codes, mixed: Codes, chosen: list[int]
) -> Iterator[tuple[list[int], list[Tensor], Float[Tensor, "B T_less_1 2"]]]:
    """Yield numbers of texts, states of every layer [B, T − 1, d], and targets."""
    model, _, texts, codes, _, progress = reading
    levels = feedback_of(model).embedding.levels
    rows = [texts[number] for number in chosen]
    with batches_of(model, rows, "Reading states", progress) as batches:
        for some in batches:
            numbers = [chosen[row] for row in some]
            ids = stacked(texts, numbers)
            output = run(model, ids, stacked(fed, numbers), output_hidden_states=True)
            if output.get("hidden_states") is None:
                raise InputError(f"{type(model).__name__} gives no hidden_states to probe.")
            states = [x[:, 1:].float().cpu() for x in output["hidden_states"]]
            targets = [stacked(c, numbers)[:, 1:] / (levels - 1) for c in (codes, mixed)]
            yield numbers, states, torch.stack(targets, -1).double()


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

    def fit(self) -> tuple[Float[Tensor, "d C"], Float[Tensor, " C"]]:
        """Return weight and bias of the ridge regression, its penalty by cross-validation.

            w = argmin mean (y − w·x̃)² + λ ‖w‖²,   x̃ = (x − mean) / deviation

        λ of each target is the one of ten-fold steps from 1e-6 to 100 with the least generalised
        cross-validation error, mse / (1 − degrees of freedom / N)² (Golub, Heath and Wahba 1979).
        A λ that leaves less than a tenth of the N rows free is no choice; without any, w is 0.
        """
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
        return weight, mean[d:] - mean[:d] @ weight
