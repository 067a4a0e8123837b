"""What counts in a whole answer: tokens that tell something.

A prediction of the token y counts by how much y tells under the corpus, p(y) being the share of its
positions after which y came next:

    w_t = ε + max(0, −ln p(y_t) − c)²

so that names count, and "the" hardly does. Shares, documents and passages are sums of w_t times the
evidence of each prediction, so they and what is unattributed sum to 1; those of a single prediction
do not depend on w. c = 5 and the square put the document that holds an answer first most often, on
questions to a model that half knew its texts; to one that knows them well they make no difference
(docs/results/asked.md). Documents that carry several telling tokens, by expectation maximisation of
a mixture of documents, were tried too, and came no nearer.
"""

from __future__ import annotations

import numpy as np

# c in nats, and ε.
COMMON = 5.0
LEAST = 0.01


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
