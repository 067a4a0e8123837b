"""Held-out loss of a model with uncertainty feedback, by what signal it is fed.

The windows are the same for every model of a corpus: cut
end to end out of the held-out documents, and drawn from all of them by a fixed seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from prismlm.corpus import Corpus
from prismlm.corpus.windows import WindowBatch, WindowGrid, document_windows, window_batches
from prismlm.errors import InputError
from prismlm.models.uncertainty_feedback import codes_fed_back, uncertainty_of
from prismlm.ops.uncertainty_feedback import NO_CODE, normalised_entropy, quantise, shuffle_codes
from prismlm.statistics import bootstrap
from prismlm.training.callbacks import PreviousBatch

WINDOWS, SAMPLE = 384, 64
SEED = 0
TOKENS_PER_BATCH = 4096
PLAIN, NEUTRAL, OWN, THIRD = "no feedback", "neutral", "2 passes", "3 passes"
ZERO, SHUFFLED, RECURSION = "zero", "shuffled", "token by token"
PREVIOUS = "previous batch"
Figures = dict[str, Any]


class Fed(NamedTuple):
    """What one signal gave for rows of a batch."""

    losses: Tensor
    """Of the token after each position, float32 [B, T − 1]."""
    codes: Tensor | None
    """int64 [B, T]."""


class Scores:
    """Summed losses of each document, by signal."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[int, float]] = {}
        self.tokens: dict[int, int] = {}
        self.windows = 0

    def add(self, batch: WindowBatch, fed: dict[str, Fed]) -> None:
        """Add the predictions of a batch whose target is a token of the same window."""
        scored = batch.attention_mask[:, 1:] & batch.owned[:, :-1]
        for row, document in enumerate(batch.document.tolist()):
            self.windows += 1
            count = int(scored[row].sum())
            self.tokens[document] = self.tokens.get(document, 0) + count
            for name, found in fed.items():
                of_documents = self.sums.setdefault(name, {})
                loss = found.losses[row][scored[row]].double().sum().item()
                of_documents[document] = of_documents.get(document, 0.0) + loss

    def to_dict(self, beside: str) -> Figures:
        """Return nats per token of every signal, and what it has more than ``beside``."""
        tokens = np.array(list(self.tokens.values()), dtype=np.float64)
        sums = {
            name: np.array([losses[document] for document in self.tokens])
            for name, losses in self.sums.items()
        }
        return {
            "windows": self.windows,
            "documents": len(tokens),
            "tokens": int(tokens.sum()),
            "losses": {name: float(found.sum() / tokens.sum()) for name, found in sums.items()},
            "more_than": beside,
            "differences": {
                name: _difference(found - sums[beside], tokens)
                for name, found in sums.items()
                if name != beside
            },
        }


def _difference(more: np.ndarray, tokens: np.ndarray) -> Figures:
    """Return a difference per token with its 95 % interval over resampled documents."""
    found = bootstrap(more, tokens, seed=SEED)
    return {"mean": found.value, "low": found.low, "high": found.high}


def validate(model: PreTrainedModel, corpus: Corpus, length: int) -> Figures:
    """Return the loss of held-out windows by signal; of a small sample also token by token."""
    model.eval()
    every, _ = windows(corpus, length)
    feedback = uncertainty_of(model)
    levels = 2 if feedback is None else feedback.embedding.levels
    scores = Scores()
    shuffled, before = torch.Generator().manual_seed(SEED), PreviousBatch(levels)
    for batch in every:
        scores.add(batch, by_signal(model, batch, shuffled, before))
    _, few = windows(corpus, length)
    sampled, distances = Scores(), Distances()
    shuffled, before = torch.Generator().manual_seed(SEED), PreviousBatch(levels)
    for batch in few:
        fed = by_signal(model, batch, shuffled, before)
        if uncertainty_of(model) is not None:
            fed[RECURSION] = token_by_token(model, batch.input_ids)
            distances.add(batch, fed)
        sampled.add(batch, fed)
    plain = uncertainty_of(model) is None
    found = {
        "all": scores.to_dict(PLAIN if plain else OWN),
        "sample": sampled.to_dict(PLAIN if plain else RECURSION),
    }
    return found if plain else found | {"codes": distances.to_dict(model)}


def windows(corpus: Corpus, length: int) -> tuple[Iterator[WindowBatch], Iterator[WindowBatch]]:
    """Return the batches of all windows, and of the sample, which is the first drawn of them.

    Raises:
        InputError: no document is held out.
    """
    documents = corpus.split("heldout")
    if not len(documents):
        raise InputError(
            f"the corpus {corpus.name!r} holds no document out, so there is nothing to measure on: "
            "build it with a larger --heldout share."
        )
    grid = document_windows(documents, corpus.starts, corpus.lengths, length, length)
    order = np.random.default_rng(SEED).permutation(np.flatnonzero(grid.length > 1))
    pad = corpus.eos_token_id
    every, few = (
        window_batches(_chosen(grid, order[:count]), corpus, TOKENS_PER_BATCH, pad)
        for count in (WINDOWS, SAMPLE)
    )
    return every, few


def _chosen(grid: WindowGrid, which: np.ndarray) -> WindowGrid:
    return WindowGrid(
        grid.document[which], grid.start[which], grid.length[which], grid.skip[which], grid.window
    )


@torch.no_grad()
def by_signal(
    model: PreTrainedModel,
    batch: WindowBatch,
    generator: torch.Generator,
    before: PreviousBatch,
) -> dict[str, Fed]:
    """Run a model on a batch with every signal; one without feedback has none to choose from."""
    ids, mask = batch.input_ids, batch.attention_mask.long()

    def run(codes: Tensor | None = None) -> Any:
        given = {} if codes is None else {"uncertainty_codes": codes}
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **given)

    feedback = uncertainty_of(model)
    if feedback is None:
        return {PLAIN: Fed(_losses(run().logits, ids), None)}
    feedback.passes = 1
    output = run()
    codes: Tensor = output.uncertainty_codes
    fed = {NEUTRAL: Fed(_losses(output.logits, ids), codes)}
    for name in (OWN, THIRD):
        predicted = quantise(normalised_entropy(output.logits), feedback.embedding.levels)
        codes = codes_fed_back(codes, predicted)
        output = run(codes)
        fed[name] = Fed(_losses(output.logits, ids), codes)
    own = fed[OWN].codes
    assert own is not None
    for name, codes in (
        (ZERO, torch.full_like(own, NO_CODE)),
        (SHUFFLED, shuffle_codes(own, generator)),
    ):
        fed[name] = Fed(_losses(run(codes).logits, ids), codes)
    codes = before(own)
    output = run(codes)
    before.remember(output.logits)
    return fed | {PREVIOUS: Fed(_losses(output.logits, ids), codes)}


@torch.no_grad()
def token_by_token(model: PreTrainedModel, ids: Tensor) -> Fed:
    """Run a model as it generates: each token has the code of the prediction before it.

    Padding follows the text, so that no token of the text sees it.
    """
    losses: list[Tensor] = []
    codes: list[Tensor] = []
    cache = None
    for at in range(ids.shape[1]):
        output: Any = model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        codes.append(output.uncertainty_codes)
        if at + 1 < ids.shape[1]:
            losses.append(
                F.cross_entropy(output.logits[:, 0].float(), ids[:, at + 1], reduction="none")
            )
    return Fed(torch.stack(losses, 1), torch.cat(codes, 1))


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    targets = ids[:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none"
    )
    return losses.view_as(targets)


class Distances:
    """How far codes of a few passes are from those of the recursion."""

    def __init__(self) -> None:
        self.apart: dict[str, list[Tensor]] = {NEUTRAL: [], OWN: [], THIRD: []}

    def add(self, batch: WindowBatch, fed: dict[str, Fed]) -> None:
        """Add the positions of a batch that have a code."""
        true = fed[RECURSION].codes
        for name, found in self.apart.items():
            codes = fed[name].codes
            assert codes is not None
            assert true is not None
            known = batch.attention_mask & (codes != NO_CODE)
            found.append((codes - true)[known].abs())

    def to_dict(self, model: PreTrainedModel) -> Figures:
        """Return the share of codes that are the same, and the mean distance of all, in levels."""
        feedback = uncertainty_of(model)
        assert feedback is not None
        figures: Figures = {}
        for name, found in self.apart.items():
            apart = torch.cat(found).double()
            figures[name] = {
                "same": (apart == 0).double().mean().item(),
                # Of the largest entropy.
                "distance": apart.mean().item() / (feedback.embedding.levels - 1),
            }
        return figures
