"""What a run can be expected to give, and what it gave, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from prismlm.corpus.store import Corpus
from prismlm.training import distributed
from prismlm.training.setup import Prepared

# Up to four passes over a text are worth nearly as much as new text, further ones less and less
# (Muennighoff et al. 2023, Scaling Data-Constrained Language Models).
MOST_PASSES = 4
# Nats by which an evaluation must be worse than the best: 5 % of perplexity.
WORSE = 0.05
# Tokens of each split that frequencies are counted on, and held-out documents scored.
COUNTED = 5_000_000


def many_passes(prepared: Prepared) -> str | None:
    """Say so where a run reads the same text again and again; None up to four passes."""
    recipe, rows = prepared.recipe, prepared.rows
    read = recipe.steps * recipe.positions_per_step * distributed.world_size()
    passes = read / (len(rows) * recipe.data.length)
    if passes < MOST_PASSES + 0.5:
        return None
    count = recipe.data.documents or len(prepared.corpus.split("train"))
    documents = "1 document" if count == 1 else f"{count:,} documents"
    enough = max(1, round(recipe.steps * MOST_PASSES / passes))
    return (
        f"{passes:,.0f} passes over {documents}: beyond {MOST_PASSES}, repeated text teaches a "
        "model less and less, and it may learn it by heart. Use more text, or fewer steps "
        f"(--set steps={enough})."
    )


def unigram_ce(corpus: Corpus) -> float:
    """Return the cross-entropy, in nats per token, of guessing tokens by their frequency alone.

        −Σ_v h_v ln((c_v + 1) / Σ_u (c_u + 1)) / Σ_v h_v

    with c_v and h_v how often token v occurs in training and in held-out documents.
    """
    training, heldout = (_counts(corpus, corpus.split(split)) for split in ("train", "heldout"))
    guess = np.log(training + 1) - math.log((training + 1).sum())
    return float(-(heldout @ guess) / max(1, heldout.sum()))


def _counts(corpus: Corpus, documents: np.ndarray) -> np.ndarray:
    """Return how often each token occurs in some documents, drawn at random if they are long."""
    counts, read = np.zeros(len(corpus.tokenizer), dtype=np.int64), 0
    for number in np.random.default_rng(0).permutation(documents).tolist():
        tokens = corpus.tokens(int(corpus.starts[number]), int(corpus.lengths[number]))
        counts += np.bincount(tokens, minlength=len(counts))
        read += len(tokens)
        if read >= COUNTED:
            break
    return counts


def verdict(ce: float, unigram: float, history: Sequence[dict[str, Any]]) -> str:
    """Return what a cross-entropy on held-out text says of a run, in a sentence or two.

    Args:
        ce: of the model, in nats per token.
        unigram: of guessing by frequency.
        history: of the run: its evaluations say whether the model was better before.
    """
    if ce >= unigram:
        return (
            "The model has learned nothing yet: guessing tokens by their frequency alone does as "
            "well on held-out text. Train it longer, or try another learning rate."
        )
    figures = [(row["eval_ce"], row["step"]) for row in history if "eval_ce" in row]
    if figures and figures[-1][0] - min(figures)[0] > WORSE:
        return (
            f"The model was better on held-out text at step {min(figures)[1]:,}: since then it has "
            "been learning the training text by heart. Use more text, or stop there."
        )
    return (
        "The model has learned from the text: guessing tokens by their frequency alone would be "
        f"{math.exp(unigram - ce):,.1f} times as perplexed by held-out text."
    )
