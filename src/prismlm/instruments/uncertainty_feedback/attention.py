"""Do positions that were fed a high code receive more attention than others at their place?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from prismlm.errors import InputError, check_finite
from prismlm.instruments.results import Row, Table, finding
from prismlm.instruments.uncertainty_feedback.signal import (
    Codes,
    Reading,
    different,
    evaluating_feedback,
    longer_than,
    no_codes,
    run,
    stacked,
    text_batches,
)
from prismlm.models.attention import attention_layers, reading_attention
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap, spearman

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PERMUTATIONS = 999
CHUNK = 256
LEAST_LATER = 8
"""A position counts that so many later tokens can attend to."""
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class MatchedRanks:
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
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> MatchedRanks:
    """Correlate x with y by rank within positions.

    Under the null the texts' rows of x may be exchanged: every x stays at its position, and what
    goes together along a text stays together, which shuffling each position by itself would tear
    apart, for too small p.

    Args:
        x: of text i at position j.
        y: likewise.
        permutations: of rows; the same for the same n and seed.
        seed: of the permutations.
    """
    texts = len(x)
    own, other = _centred_ranks(x), _centred_ranks(y)
    norm = float(np.sqrt((own**2).sum() * (other**2).sum()))
    if not norm:
        return MatchedRanks(0.0, np.zeros(texts), 1.0)
    # Of row i of y with row π(i) of x.
    products = other @ own.T / norm
    rows = np.arange(texts)

    def size(order: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.abs(products[rows, order].sum(axis))

    null = stats.permutation_test(
        (rows,),
        size,
        permutation_type="pairings",
        vectorized=True,
        n_resamples=permutations,
        batch=CHUNK,
        alternative="greater",
        rng=np.random.default_rng(seed),
    )
    found = float(np.trace(products))
    return MatchedRanks(found, texts * np.diagonal(products), float(null.pvalue))


def _centred_ranks(values: Float[np.ndarray, "n P"]) -> Float[np.ndarray, "n P"]:
    """Return each column's ranks, ties sharing their mean, less their mean."""
    return stats.rankdata(values, axis=0) - (len(values) + 1) / 2


def attention_probe(reading: Reading, *, permutations: int = PERMUTATIONS) -> Table:
    """Compare the attention that positions receive with the code that was fed to them.

    Received is the mean over the tokens after it, since earlier positions are seen by more. It
    still falls with the position, and so may codes: the comparison is among texts at the same
    position. Texts of at least ten tokens are cut to their median length and shorter ones left out,
    so that every text has every position and as many tokens after it.

    Source: PRISMA, "Attention probe"; both controls are ours.

    Args:
        reading: texts and their codes.
        permutations: of texts, for p.

    Returns:
        Rows by ``layer``: mean attention received by positions whose code is in the ``top`` and in
        the ``bottom`` quartile of all, and the rank correlation over all positions, ``unmatched``,
        which a mere dependence of both on the position makes. Then compared among texts at the same
        position: ``matched_top`` and ``matched_bottom``, of the quarter of texts with the highest
        and the lowest codes; the rank ``correlation``, with ``p`` of both sides and ``q``,
        corrected over layers by Benjamini and Hochberg; ``without``, the correlation with the same
        codes where nothing was fed to the model; and ``added``, what the signal adds to it,
        resampled over texts with ranks as they are.

    Raises:
        InputError: a model without feedback or attention, or texts too few or too short.
    """
    model, _, texts, codes, options, progress = reading
    attention_layers(model)
    kept, length = _of_median_length(texts)
    places = length - 1 - LEAST_LATER
    cut = [texts[number][:length] for number in kept]
    given = tuple(codes[number][:length] for number in kept)
    # No code is at position 0.
    span = slice(1, 1 + places)
    x = torch.stack(given)[:, span].double().numpy()
    own = received(model, cut, given, progress=progress)[:, :, span]
    bare = received(model, cut, no_codes(cut), progress=progress)[:, :, span]
    found = [
        [matched_ranks(x, y, permutations=permutations, seed=options.seed) for y in pair]
        for pair in zip(own, bare, strict=True)
    ]
    q = stats.false_discovery_control([fed.p for fed, _ in found])
    rows = tuple(
        _layer(number, x, own[number], fed, unfed, float(q[number]), options.seed)
        for number, (fed, unfed) in enumerate(found)
    )
    code_count = different(given)
    return Table(
        f"Attention received by code, {len(kept)} texts of {length} tokens",
        {"layer": "", "top": ".2g", "bottom": ".2g", "unmatched": "+.2f", "matched_top": ".2g",
         "matched_bottom": ".2g", "correlation": "+.3f", "q": ".2g", "without": "+.3f",
         "added": "+.2f"},
        rows,
        {"texts": len(kept), "length": length, "positions": places,
         "left_out": len(texts) - len(kept), "codes": code_count},
        (strongest(rows, code_count),),
    )  # fmt: skip


def _of_median_length(texts: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the numbers of texts that are at least as long as the median, and its tokens."""
    # Of texts that are long enough by themselves: short ones among them are left out.
    lengths = sorted(len(texts[number]) for number in longer_than(texts, LEAST_LATER + 2))
    length = lengths[(len(lengths) - 1) // 2] if lengths else 0
    kept = longer_than(texts, length) if length else []
    if len(kept) < 4:
        raise InputError(
            f"{len(kept)} texts of {length} tokens: the attention probe needs at least 4, of at "
            f"least {LEAST_LATER + 2} tokens."
        )
    return kept, length


def strongest(rows: Sequence[Row], codes: int) -> Row:
    """Return the finding: of later layers that attend to high codes, where the signal adds most."""
    later = rows[len(rows) // 2 :]
    more = [row for row in later if row["correlation"] > 0 and row["q"] <= SIGNIFICANT]
    by = "added" if more else "correlation"
    best = max(more or later, key=lambda row: row[by].value if more else row[by])
    return finding(
        f"attention: ρ with the code in layer {best['layer']}, fed − not fed",
        best["added"] if codes > 1 else None,
        best["without"],
        clear=bool(more),
    )


def received(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    codes: Codes,
    *,
    progress: Reporter = SILENT,
) -> Float[np.ndarray, "layers texts T"]:
    """Return the attention that each position of equally long texts receives.

        Σ_{i>j} a_ij / (T − 1 − j), mean over heads; 0 at the last position

    Raises:
        InputError: as :func:`reading_attention`, or weights that are not finite.
    """
    length, depth = len(texts[0]), len(attention_layers(model))
    later = torch.arange(length - 1, -1, -1).clamp_min(1).double()
    found = np.zeros((depth, len(texts), length))
    numbers: list[int] = []

    def read(layer: int, weights: Tensor) -> None:
        heads = weights.float().mean(1).tril(-1)
        found[layer, numbers] = (heads.sum(1, dtype=torch.float64).cpu() / later).numpy()

    title = "Reading attention"
    with (
        evaluating_feedback(model),
        reading_attention(model, read),
        progress.task(title, length * len(texts)) as task,
    ):
        for numbers in text_batches(model, texts):
            run(model, stacked(texts, numbers), stacked(codes, numbers))
            task.advance(length * len(numbers))
    check_finite("attention weights", torch.from_numpy(found))
    return found


def _layer(
    number: int,
    x: np.ndarray,
    y: np.ndarray,
    matched: MatchedRanks,
    unfed: MatchedRanks,
    q: float,
    seed: int,
) -> Row:
    low, high = np.quantile(x, [0.25, 0.75])
    quarter = max(1, len(x) // 4)
    order = np.argsort(x, axis=0, kind="stable")
    ranked = np.take_along_axis(y, order, axis=0)
    return {
        "layer": number,
        "top": float(y[x >= high].mean()),
        "bottom": float(y[x <= low].mean()),
        "unmatched": spearman(x.ravel(), y.ravel()).rho,
        "matched_top": float(ranked[-quarter:].mean()),
        "matched_bottom": float(ranked[:quarter].mean()),
        "correlation": matched.correlation,
        "p": matched.p,
        "q": q,
        "without": unfed.correlation,
        "added": bootstrap(matched.by_text - unfed.by_text, seed=seed),
    }
