"""Models small enough to be trained a hundred times, each on some of the same documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.judges.tail_patch import log_probability, passage_loss
from prismlm.models.presets import build_config, build_model


@dataclass(frozen=True)
class SmallTraining:
    """How every model of a study is trained, from scratch; ``rows`` are documents of a step."""

    preset: str = "llama-tiny"
    rows: int = 8
    epochs: int = 4
    learning_rate: float = 3e-3

    def train(self, bank: PassageBank, documents: np.ndarray, seed: int) -> PreTrainedModel:
        """Train on the passages ``documents`` of a bank of beginnings.

        The seed decides the first weights and the order of *all* documents of the bank, from
        which those that are left out are missing: two models differ in documents alone.
        """
        torch.manual_seed(seed)
        corpus = bank.corpus
        config = build_config({"preset": self.preset}, len(corpus.tokenizer), corpus.eos_token_id)
        model = build_model(config).train()
        generator = np.random.default_rng(seed)
        orders = [generator.permutation(len(bank)) for _ in range(self.epochs)]
        order = np.concatenate([o[np.isin(o, documents)] for o in orders])
        fit(model, bank, order, self.rows, self.learning_rate, weight_decay=0.1)
        return model.eval()


def fit(
    model: PreTrainedModel,
    bank: PassageBank,
    order: np.ndarray,
    rows: int,
    learning_rate: float,
    *,
    weight_decay: float = 0.0,
) -> None:
    """Train what requires a gradient on passages in this order, ``rows`` of them a step."""
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, -(-len(order) // rows), pct_start=0.05, cycle_momentum=False
    )
    for first in range(0, len(order), rows):
        loss = passage_loss(model, [bank.tokens(row) for row in order[first : first + rows]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()


def log_probabilities(model: PreTrainedModel, predictions: Sequence[Prediction]) -> np.ndarray:
    """Return the log-probability of each target, in nats, float64 [predictions]."""
    return np.array([log_probability(model, prediction) for prediction in predictions])
