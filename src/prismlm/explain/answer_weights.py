"""What counts in a whole answer: tokens that tell something, and documents that carry several.

A prediction of the token y counts by how much y tells under the corpus, p(y) being the share of its
positions after which y came next:

    w_t = ε + max(0, −ln p(y_t) − c)²

so that names count, and "the" hardly does. What a prediction relies on is spread over documents as
:mod:`prismlm.explain.positions` says, q_t(d). Of an answer as a whole one document explains more
predictions than another. With θ(d) how likely the answer is to draw on document d, at first its
share π(d) of all positions, a few rounds of expectation maximisation of a mixture of documents
with a Dirichlet prior about π (as of topics, Hofmann 1999) give

    θ(d) = (a π(d) + Σ_t w̄_t q_t(d)) / (a + T)        q_t(d) ∝ q⁰_t(d) θ(d) / π(d)

with w̄ the weights at a mean of 1. So a document with several telling tokens comes before one that
shares a common word. The evidence of each prediction stays what it was: shares and what is
unattributed sum to 1 over Σ_t w_t e_t. A single prediction is not weighed.
"""

from __future__ import annotations

import numpy as np

# c in nats; ε; rounds; a in predictions.
COMMON = 5.0
LEAST = 0.01
ROUNDS = 3
PRIOR = 3.0


def token_weights(rates: np.ndarray, positions: int, common: float = COMMON) -> np.ndarray:
    """Return w of predictions, float64 [T].

    Args:
        rates: the share of each predicted token in the corpus; one that never comes next there
            counts as half a position.
        positions: of the corpus.
        common: c.
    """
    telling = np.maximum(0.0, -np.log(np.maximum(rates, 0.5 / positions)) - common)
    return LEAST + telling**2


def focused(
    prediction: np.ndarray,
    document: np.ndarray,
    part: np.ndarray,
    weights: np.ndarray,
    rates: np.ndarray,
    *,
    rounds: int = ROUNDS,
    prior: float = PRIOR,
) -> np.ndarray:
    """Return the evidence of positions with the documents behind the whole answer in view.

    Args:
        prediction: of each position, int64 [u].
        document: that it lies in, int64 [u].
        part: the evidence of the prediction that falls on it, float64 [u].
        weights: w of each prediction, float64 [T].
        rates: π of each document, float64 [D].
        rounds: of expectation maximisation; 0 leaves the parts as they are.
        prior: a; the smaller, the more few tokens decide on a document.

    Returns:
        float64 [u]; its sum over each prediction is that of ``part``.
    """
    count = len(weights)
    pairs, pair = np.unique(prediction * len(rates) + document, return_inverse=True)
    owner, place = np.divmod(pairs, len(rates))
    first = np.bincount(pair, part)
    now = _normalised(first, owner, count)
    weighed = (weights / weights.mean())[owner]
    for _ in range(rounds):
        carried = np.bincount(place, weighed * now, minlength=len(rates))[place]
        now = _normalised(first * (prior + carried / rates[place]), owner, count)
    evidence = np.bincount(prediction, part, minlength=count)[owner]
    return part * np.divide(now * evidence, first, out=np.zeros_like(now), where=first > 0)[pair]


def _normalised(values: np.ndarray, owner: np.ndarray, count: int) -> np.ndarray:
    """Return values as shares of the sum of each owner's; zeros stay."""
    sums = np.bincount(owner, values, minlength=count)[owner]
    return np.divide(values, sums, out=np.zeros_like(values), where=sums > 0)
