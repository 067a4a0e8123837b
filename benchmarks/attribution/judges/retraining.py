"""What retraining says: models trained on parts of the documents, against what scores foretold.

**LDS** (linear datamodeling score, Park et al. 2023): many models are trained on random subsets S
of the documents. The scores of a prediction foretell that the more its subset scores, the likelier
the prediction is:

    LDS = mean over predictions of Spearman over S ( Σ_{d in S} score_d , log p_S(target) )

**Forgetting**: models are trained from scratch without the documents that a method names. What
the prediction loses is

    forgetting = mean over seeds of  log p_all(target) − log p_without(target)

Both are in the terms of whole trainings, which no method of attribution computes: they are the
judges that cannot be pleased by looking for what looks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.attribution.judges.passages import Prediction
from prismlm.statistics import spearman

Outputs = Callable[[np.ndarray, int], Callable[[Sequence[Prediction]], np.ndarray]]
"""Rows of documents [n] and a seed to a model trained on them, as its log-probabilities."""


def random_subsets(documents: int, models: int, seed: int) -> np.ndarray:
    """Draw half of the documents for each model, without replacement: bool [models, documents]."""
    generator = np.random.default_rng(seed)
    subsets = np.zeros((models, documents), dtype=bool)
    for row in subsets:
        row[generator.permutation(documents)[: documents // 2]] = True
    return subsets


def linear_datamodeling(scores: np.ndarray, subsets: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return the rank correlation of every prediction, float64 [predictions]; LDS is their mean.

    ``scores`` are [predictions, documents], ``subsets`` what each model was trained on, bool
    [models, documents], ``outputs`` log-probabilities of the targets [predictions, models]. A
    prediction whose scores or outputs are the same for every model gets 0.
    """
    foretold = scores.astype(np.float64) @ subsets.T.astype(np.float64)
    return np.array(
        [spearman(left, right)[0] for left, right in zip(foretold, outputs, strict=True)]
    )


def forgetting(
    train: Outputs,
    documents: int,
    predictions: Sequence[Prediction],
    named: np.ndarray,
    seeds: Sequence[int],
    *,
    together: int = 1,
) -> np.ndarray:
    """Retrain without what was named for each prediction; float64 [predictions, seeds], in nats.

    Positive where the prediction has become less likely. Each seed's models begin at the same
    weights and differ in documents alone. With ``together`` above 1, so many predictions share a
    training without what was named for all of them: that is noise of a size that documents at
    random show too, so only compare methods over the same predictions. ``named`` are the rows, of
    all ``documents``, that are taken away for each prediction, int64 [predictions, n].
    """
    everything = np.arange(documents)
    lost = np.empty((len(predictions), len(seeds)))
    for column, seed in enumerate(seeds):
        lost[:, column] = train(everything, seed)(predictions)
        for first in range(0, len(predictions), together):
            rows = slice(first, first + together)
            model = train(np.setdiff1d(everything, named[rows]), seed)
            lost[rows, column] -= model(predictions[rows])
    return lost
