"""The codes inside a model: attention received by code, and codes read from hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from prismlm.errors import InputError, check_finite
from prismlm.models.attention import attention_layers, reading_attention
from prismlm.probes.results import Row, Table, finding
from prismlm.probes.uncertainty_feedback.signal import (
    CheckInputs,
    Codes,
    count_codes,
    feedback_of,
    long_texts,
    no_codes,
    permute_codes,
    run,
    stack,
)
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import Interval, bootstrap

MIN_LATER = 8
"""Positions count that at least so many later tokens can attend to."""
SIGNIFICANT = 0.05
TEST_SHARE = 1 / 3
PENALTIES = torch.logspace(-6, 2, 9, dtype=torch.float64)
MIN_FREEDOM = 0.1
"""With a smaller share of free rows the validation error is mostly rounding."""


def attention_probe(inputs: CheckInputs, *, permutations: int = 999) -> Table:
    """Compare the attention that positions receive with the code that was fed to them.

    Received attention is averaged over the tokens after the position, since more tokens see an
    early position. It still falls with the position, and codes may too: texts are compared at equal
    positions. Texts of at least ten tokens are cut to their median length and shorter ones left
    out, so that every text has every position and as many tokens after it.
    Source: PRISMA, "Attention probe"; both controls are ours.

    Rows are by ``layer``: the rank ``correlation`` among texts at equal positions, with two-sided
    ``p``, and ``q``, corrected over layers by Benjamini and Hochberg; ``without``, the correlation
    with the same codes when nothing is fed to the model; and ``added``, their difference,
    resampled over texts with fixed ranks.
    """
    model, _, texts, codes, options, progress = inputs
    # The median is over texts that are long enough by themselves.
    lengths = sorted(len(texts[index]) for index in long_texts(texts, MIN_LATER + 2))
    length = lengths[(len(lengths) - 1) // 2]
    indices = long_texts(texts, length)
    cut = [texts[index][:length] for index in indices]
    own = tuple(codes[index][:length] for index in indices)
    # Position 0 has no code.
    span = slice(1, length - MIN_LATER)
    x = torch.stack(own)[:, span].double().numpy()
    fed, bare = (
        received_attention(model, cut, signal, progress=progress)[:, :, span]
        for signal in (own, no_codes(cut))
    )
    rows: list[Row] = []
    ranking = {"permutations": permutations, "seed": options.seed}
    for layer, pair in enumerate(zip(fed, bare, strict=True)):
        with_codes, without = (matched_ranks(x, attention, **ranking) for attention in pair)
        added = bootstrap(with_codes.by_text - without.by_text, seed=options.seed)
        row: Row = {"layer": layer, "correlation": with_codes.correlation, "p": with_codes.p}
        rows.append(row | {"without": without.correlation, "added": added})
    corrected = stats.false_discovery_control([row["p"] for row in rows]).tolist()
    rows = [row | {"q": q} for row, q in zip(rows, corrected, strict=True)]
    codes_used = count_codes(own)
    columns = "layer correlation:+.3f q:.2g without:+.3f added:+.2f"
    facts = {"texts": len(cut), "length": length, "positions": x.shape[1]}
    facts |= {"left_out": len(texts) - len(cut), "codes": codes_used}
    title = f"Attention received by code, {len(cut)} texts of {length} tokens"
    return Table(title, columns, tuple(rows), facts, (strongest_layer(rows, codes_used),))


def strongest_layer(rows: Sequence[Row], codes: int) -> Row:
    """Return the finding: the later layer with q ≤ 0.05 and ρ > 0 to which the signal adds most."""
    later = rows[len(rows) // 2 :]
    clear = [row for row in later if row["correlation"] > 0 and row["q"] <= SIGNIFICANT]
    best = max(clear or later, key=lambda r: r["added"].value if clear else r["correlation"])
    name = f"attention: ρ with the code in layer {best['layer']}, fed − not fed"
    added = best["added"] if codes > 1 else None
    return finding(name, added, best["without"], clear=bool(clear))


def received_attention(
    model: PreTrainedModel, texts: Sequence[Tensor], codes: Codes, *, progress: Reporter = SILENT
) -> Float[np.ndarray, "layers texts T"]:
    """Return the attention that each position of equally long texts receives.

    Σ_{i>j} a_ij / (T − 1 − j), averaged over heads; 0 at the last position
    """
    length = len(texts[0])
    later = torch.arange(length - 1, -1, -1).clamp_min(1).double()
    attention = np.zeros((len(attention_layers(model)), len(texts), length))
    received: dict[int, Tensor] = {}

    def record(layer: int, weights: Tensor) -> None:
        past = weights.float().mean(1).tril(-1)
        received[layer] = past.sum(1, dtype=torch.float64).cpu() / later

    with reading_attention(model, record):
        for batch, *_ in run(model, texts, codes, title="Reading attention", progress=progress):
            for layer, shares in received.items():
                attention[layer, batch] = shares.numpy()
    check_finite("attention weights", torch.from_numpy(attention))
    return attention


class MatchedRanks(NamedTuple):
    """Rank correlation of x and y of n texts at P positions, among texts at equal positions.

    Σ x̂ ŷ / √(Σ x̂² Σ ŷ²),   ranks among the texts at a position minus their mean
    """

    correlation: float  # 0 if x or y is constant at every position
    by_text: np.ndarray  # n times each text's part of it
    p: float  # two-sided; exact if there are fewer orders of the texts than permutations


def matched_ranks(
    x: Float[np.ndarray, "n P"],
    y: Float[np.ndarray, "n P"],
    *,
    permutations: int = 999,
    seed: int = 0,
) -> MatchedRanks:
    """Correlate x with y by rank within positions.

    The null permutes the texts' rows of x, so that every x stays at its position and dependence
    along a text is preserved. Permuting each position separately would make p too small.
    """
    texts = len(x)
    x_ranks, y_ranks = (stats.rankdata(a, axis=0) - (texts + 1) / 2 for a in (x, y))
    norm = float(np.sqrt((x_ranks**2).sum() * (y_ranks**2).sum()))
    if not norm:
        return MatchedRanks(0.0, np.zeros(texts), 1.0)
    products = y_ranks @ x_ranks.T / norm
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


def code_probe(inputs: CheckInputs) -> Table:
    """Fit a ridge regression from each layer's states to the code, and test it on other texts.

    The test texts are a random third. States are the model's ``hidden_states``: in most families
    the last is after the final norm. The first token of a text has no code and is left out.
    Source: PRISMA, which expects the signal "approximately two-thirds through the network";
    the probe and its controls are ours.

    Rows are by ``layer``, 0 being the embeddings with the vectors of the codes. R² on the test
    texts is of the ``code`` that was fed; of codes ``shuffled`` among all positions; of the same
    codes ``without`` anything fed, which is what the text predicts of them; and what the signal
    ``added``, paired by text.
    """
    texts, codes, seed = inputs.texts, inputs.codes, inputs.options.seed
    order = np.random.default_rng(seed).permutation(len(texts))
    tested = order[: max(2, round(TEST_SHARE * len(texts)))].tolist()
    fitted = [index for index in range(len(texts)) if index not in set(tested)]
    shuffled = permute_codes(codes, seed + 1)
    errors, spreads = _errors(inputs, codes, shuffled, fitted, tested)
    bare_errors, _ = _errors(inputs, no_codes(texts), shuffled, fitted, tested)

    def r2(error: np.ndarray, target: int) -> Interval:
        share = bootstrap(error[:, target], spreads[:, target], seed=seed)
        return Interval(1 - share.value, 1 - share.high, 1 - share.low)

    rows = tuple(
        {
            "layer": layer,
            "code": r2(fed, 0),
            "shuffled": r2(fed, 1),
            "without": r2(bare, 0),
            "added": bootstrap(bare[:, 0] - fed[:, 0], spreads[:, 0], seed=seed),
        }
        for layer, (fed, bare) in enumerate(zip(errors, bare_errors, strict=True))
    )
    codes_used = count_codes(codes)
    best, clear = best_layer(rows)
    defined = codes_used > 1 and np.isfinite([best["code"].value, best["shuffled"].value]).all()
    name = f"probe: R² of the code in layer {best['layer']}, fed − not fed"
    added = best["added"] if defined else None
    result = finding(name, added, best["without"].value, clear=clear)
    columns = "layer code:.3f shuffled.value:+.3f without.value:+.3f added:+.3f"
    facts = {"fitted_on": len(fitted), "tested_on": len(tested)}
    facts |= {"positions": sum(len(texts[index]) - 1 for index in fitted)}
    facts |= {"codes": codes_used}
    title = f"The code predicted from hidden states: R² on {len(tested)} texts"
    return Table(title, columns, rows, facts, (result,))


def best_layer(rows: Sequence[Row]) -> tuple[Row, bool]:
    """Return the layer with the best R² of the code, and whether it is clearly above 0."""
    above = [row for row in rows if row["code"].value > max(0.0, row["shuffled"].value)]
    clear = [row for row in above if row["code"].above_zero]
    # Comparisons with NaN are false.
    best = max(
        clear or above or rows, key=lambda row: np.nan_to_num(row["code"].value, nan=-np.inf)
    )
    return best, bool(clear)


def _errors(
    inputs: CheckInputs, fed: Codes, shuffled: Codes, fitted: list[int], tested: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return squared errors [layers, texts, 2] and squares about the mean [texts, 2].

    The targets are the code and the shuffled code.
    """
    moments: list[Tensor] = []
    for _, states, targets in _states(inputs, fed, shuffled, fitted):
        ones = torch.ones_like(targets[..., :1])
        rows = [torch.cat([ones, x.double(), targets], -1).flatten(0, 1) for x in states]
        products = [x.T @ x for x in rows]
        moments = list(map(torch.add, moments, products)) or products
    fits = [ridge(layer, targets=2) for layer in moments]
    errors = np.zeros((len(fits), len(tested), 2))
    by_row: dict[int, Tensor] = {}
    for rows, states, targets in _states(inputs, fed, shuffled, tested):
        for layer, ((weight, bias), x) in enumerate(zip(fits, states, strict=True)):
            errors[layer, rows] = ((x.double() @ weight + bias - targets) ** 2).sum(1).numpy()
        by_row |= dict(zip(rows, targets, strict=True))
    mean = torch.cat(list(by_row.values())).mean(0)
    spreads = [((by_row[row] - mean) ** 2).sum(0) for row in range(len(tested))]
    return errors, torch.stack(spreads).numpy()


def _states(
    inputs: CheckInputs, fed: Codes, shuffled: Codes, indices: list[int]
) -> Iterator[tuple[list[int], list[Tensor], Float[Tensor, "B T_less_1 2"]]]:
    """Yield rows of ``indices``, states of every layer [B, T − 1, d], and targets."""
    model, _, texts, codes, _, progress = inputs
    rows, own = ([each[index] for index in indices] for each in (texts, fed))
    how = {"title": "Reading states", "progress": progress, "output_hidden_states": True}
    for batch, _, output in run(model, rows, own, **how):
        if output.get("hidden_states") is None:
            raise InputError(f"{type(model).__name__} returns no hidden_states to probe.")
        states = [x[:, 1:].float().cpu() for x in output["hidden_states"]]
        numbers, scale = [indices[row] for row in batch], feedback_of(model).levels - 1
        targets = [stack(c, numbers)[:, 1:] / scale for c in (codes, shuffled)]
        yield batch, states, torch.stack(targets, -1).double()


def ridge(
    moments: Float[Tensor, "n n"], targets: int
) -> tuple[Float[Tensor, "d C"], Float[Tensor, " C"]]:
    """Return weight and bias of a ridge regression, from Σ [1, x, y]ᵀ [1, x, y] over N rows.

        w = argmin mean (y − w·x̃)² + λ ‖w‖²,   x̃ = (x − mean) / deviation

    λ of each target is the power of ten from 1e-6 to 100 with the smallest generalised
    cross-validation error, mse / (1 − degrees of freedom / N)² (Golub, Heath and Wahba 1979).
    A λ that leaves less than a tenth of the N rows free is excluded; without any, w is 0.
    """
    check_finite("hidden states", moments)
    count, d = float(moments[0, 0]), len(moments) - 1 - targets
    mean = moments[0, 1:] / count
    covariance = moments[1:, 1:] / count - mean[:, None] * mean
    variance = covariance.diagonal()[:d]
    # The variance of a constant input is rounding.
    varies = variance > 1e-12 * (1 + mean[:d] ** 2)
    scale = torch.where(varies, variance.clamp_min(0).rsqrt(), torch.zeros(()).double())
    cross = covariance[:d, d:] * scale[:, None]
    values, vectors = torch.linalg.eigh(covariance[:d, :d] * scale[:, None] * scale)
    values, rotated = values.clamp_min(0), vectors.T @ cross
    # By penalty, input and target.
    shrinkage = values / (values + PENALTIES[:, None])
    fitted = rotated / (values + PENALTIES[:, None])[..., None]
    explained = (fitted * rotated * (2 - shrinkage[..., None])).sum(1)
    free = 1 - (shrinkage.sum(1, keepdim=True) + 1) / count
    error = (covariance.diagonal()[d:] - explained) / free**2
    lowest, best = torch.where(free < MIN_FREEDOM, torch.inf, error).min(0)
    chosen = fitted[best, :, torch.arange(len(best))].T
    weight = torch.where(lowest < torch.inf, vectors @ chosen * scale[:, None], 0.0)
    return weight, mean[d:] - mean[:d] @ weight
