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


def attention_probe(reading: Reading, *, permutations: int = PERMUTATIONS) -> Table:
    """Compare the attention that positions receive with the code that was fed to them.

    Received is the mean over the tokens after it, since earlier positions are seen by more. It
    still falls with the position, and so may codes: the comparison is among texts at the same
    position. Texts of at least ten tokens are cut to their median length and shorter ones left out,
    so that every text has every position and as many tokens after it.
    Source: PRISMA, "Attention probe"; both controls are ours.

    Returns:
        Rows by ``layer``: mean attention received by positions whose code is in the ``top`` and in
        the ``bottom`` quartile of all, and the rank correlation over all positions, ``unmatched``,
        which a mere dependence of both on the position makes. Then compared among texts at the same
        position: ``matched_top`` and ``matched_bottom``, of the quarter of texts with the highest
        and the lowest codes; the rank ``correlation``, with ``p`` of both sides and ``q``,
        corrected over layers by Benjamini and Hochberg; ``without``, the correlation with the same
        codes where nothing was fed to the model; and ``added``, the difference, resampled over
        texts with ranks as they are.
    """
    model, _, texts, codes, options, progress = reading
    attention_layers(model)
    # The median is over texts that are long enough by themselves.
    lengths = sorted(len(texts[number]) for number in longer_than(texts, LEAST_LATER + 2))
    length = lengths[(len(lengths) - 1) // 2] if lengths else 0
    kept = longer_than(texts, length) if length else []
    if len(kept) < 4:
        raise InputError(
            f"{len(kept)} texts of {length} tokens: the attention probe needs at least 4, of at "
            f"least {LEAST_LATER + 2} tokens."
        )
    cut = [texts[number][:length] for number in kept]
    given = tuple(codes[number][:length] for number in kept)
    # No code is at position 0.
    span = slice(1, length - LEAST_LATER)
    x = torch.stack(given)[:, span].double().numpy()
    own, bare = (
        received(model, cut, fed, progress=progress)[:, :, span] for fed in (given, no_codes(cut))
    )
    matched = [
        [matched_ranks(x, y, permutations=permutations, seed=options.seed) for y in pair]
        for pair in zip(own, bare, strict=True)
    ]
    q = stats.false_discovery_control([fed.p for fed, _ in matched])
    rows = tuple(
        _layer(number, x, own[number], fed, unfed, float(q[number]), options.seed)
        for number, (fed, unfed) in enumerate(matched)
    )
    codes_used = different(given)
    columns = {"layer": "", "top": ".2g", "bottom": ".2g", "unmatched": "+.2f",
               "matched_top": ".2g", "matched_bottom": ".2g", "correlation": "+.3f", "q": ".2g",
               "without": "+.3f", "added": "+.2f"}  # fmt: skip
    facts = {"texts": len(kept), "length": length, "positions": x.shape[1]}
    facts |= {"left_out": len(texts) - len(kept), "codes": codes_used}
    title = f"Attention received by code, {len(kept)} texts of {length} tokens"
    return Table(title, columns, rows, facts, (strongest(rows, codes_used),))


def strongest(rows: Sequence[Row], codes: int) -> Row:
    """Return the finding: of later layers that attend to high codes, where the signal adds most."""
    later = rows[len(rows) // 2 :]
    more = [row for row in later if row["correlation"] > 0 and row["q"] <= SIGNIFICANT]
    best = max(more or later, key=lambda r: r["added"].value if more else r["correlation"])
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
    """
    length, depth = len(texts[0]), len(attention_layers(model))
    later = torch.arange(length - 1, -1, -1).clamp_min(1).double()
    found = np.zeros((depth, len(texts), length))
    numbers: list[int] = []

    def read(layer: int, weights: Tensor) -> None:
        heads = weights.float().mean(1).tril(-1)
        found[layer, numbers] = (heads.sum(1, dtype=torch.float64).cpu() / later).numpy()

    with (
        evaluating_feedback(model),
        reading_attention(model, read),
        progress.task("Reading attention", length * len(texts)) as task,
    ):
        for numbers in text_batches(model, texts):
            run(model, stacked(texts, numbers), stacked(codes, numbers))
            task.advance(length * len(numbers))
    check_finite("attention weights", torch.from_numpy(found))
    return found


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
    diagonal = np.diagonal(products)
    return MatchedRanks(float(np.trace(products)), texts * diagonal, float(null.pvalue))


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
