"""Fine-tuning of all weights on one task, with early stopping on its dev set.

AdamW, the rate rising over the warm-up's share of all steps and falling linearly to 0. Matrices
decay; embeddings, norms and biases do not. Rows of a batch are of similar length, which halves the
padding.

Source: ProtoT, A.4; decay, clipping, patience and batches by length are not said there and chosen
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import get_length_grouped_indices, get_parameter_names

from prismlm.errors import DivergenceError, check_number, check_whole
from prismlm.eval.glue.classifier import REMEDY, Classifier, GlueModel
from prismlm.progress import Task as Progress

WEIGHT_DECAY, MAX_NORM = 0.1, 1.0
# Dev is measured so often in an epoch; an epoch without a rise ends the run.
EVALUATIONS = PATIENCE = 2


@dataclass(frozen=True)
class GlueOptions:
    """What is asked of every run.

    Attributes:
        data: a directory of Parquet files; None for the hub.
        limit: rows trained on, drawn by a run's seed, the same for every model; None for all.
        dev_limit: rows of each dev set, drawn by seed 0; None for all.
        learning_rate: at its highest; None for that of a search kept in the directory, else the
            source's. A run has one.
        warmup: share of all steps over which it rises, likewise.
        epochs: at most.
        batch_size: rows of a step.
        test: whether to predict the test sets that are there.
    """

    data: Path | None = None
    limit: int | None = None
    dev_limit: int | None = None
    learning_rate: float | None = None
    warmup: float | None = None
    epochs: int = 3
    batch_size: int = 16
    test: bool = True

    def __post_init__(self) -> None:
        for name in ("limit", "dev_limit", "epochs", "batch_size"):
            if getattr(self, name) is not None:
                # Correlations of ranks take three rows.
                check_whole(name, getattr(self, name), 3 if name == "dev_limit" else 1)
        if self.learning_rate is not None:
            check_number("learning_rate", self.learning_rate, "above 0", lambda rate: rate > 0)
        if self.warmup is not None:
            check_number("warmup", self.warmup, "a share of 0 to 1", lambda share: 0 <= share <= 1)

    def steps(self, rows: int) -> int:
        """Return how many steps a run takes at most."""
        return self.epochs * math.ceil(rows / self.batch_size)

    def note(self, lm: GlueModel) -> dict[str, Any]:
        """Return what must stay as it is where a study goes on."""
        data = "hub" if self.data is None else str(self.data.resolve())
        return asdict(self) | {"format_version": 1, "model": lm.identity, "data": data}


class Examples(NamedTuple):
    """Rows as tokens, with their labels: numbers of classes, or scores."""

    rows: list[list[int]]
    labels: list[float]


def fine_tune(
    classifier: Classifier,
    train: Examples,
    judge: Callable[[], float],
    options: GlueOptions,
    seed: int,
    progress: Progress,
) -> list[float]:
    """Train, and leave the weights that were best on dev in the classifier.

    Args:
        classifier: of one output for scores.
        train: what it is trained on.
        judge: measures the classifier as it is on dev; larger is better.
        options: of the run.
        seed: of the order of rows, and of dropout.
        progress: is told of every step, and of what ``judge`` said.

    Returns:
        What ``judge`` said each time.

    Raises:
        DivergenceError: the loss is not finite.
    """
    step = trainer(classifier, options, options.steps(len(train.rows)))
    torch.manual_seed(seed)
    order, lengths = torch.Generator().manual_seed(seed), [len(row) for row in train.rows]
    said: list[float] = []
    best: dict[str, Tensor] = {}
    for _ in range(options.epochs):
        drawn = get_length_grouped_indices(lengths, options.batch_size, generator=order)
        batches = torch.tensor(drawn).split(options.batch_size)
        stops = {math.ceil(len(batches) * (k + 1) / EVALUATIONS) for k in range(EVALUATIONS)}
        for number, batch in enumerate(batches, start=1):
            step(Examples(*([part[i] for i in batch.tolist()] for part in train)))
            progress.advance(1)
            if number in stops:
                said.append(judge())
                progress.note(f"dev {said[-1]:.3f}")
                if said[-1] > max(said[:-1], default=-math.inf):
                    best = {k: v.to("cpu", copy=True) for k, v in classifier.state_dict().items()}
        if len(said) - 1 - said.index(max(said)) >= PATIENCE:
            break
    classifier.load_state_dict(best)
    return said


def trainer(classifier: Classifier, options: GlueOptions, steps: int) -> Callable[[Examples], None]:
    """Return a function that takes one optimizer step on a batch, of ``steps`` in all."""
    rate, warmup = options.learning_rate, options.warmup
    assert rate is not None
    assert warmup is not None
    optimizer = torch.optim.AdamW(parameter_groups(classifier), lr=rate)
    schedule = get_linear_schedule_with_warmup(optimizer, round(warmup * steps), steps)
    device = classifier.out.weight.device

    def step(batch: Examples) -> None:
        classifier.train()
        outputs = classifier(batch.rows)
        labels = torch.tensor(batch.labels, device=device)
        if outputs.shape[1] == 1:
            loss = F.mse_loss(outputs[:, 0], labels.float())
        else:
            loss = F.cross_entropy(outputs, labels.long())
        if not bool(torch.isfinite(loss)):
            raise DivergenceError(f"the loss is {loss.item()} at the rate {rate:g}: {REMEDY}")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(classifier.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()

    return step


def parameter_groups(classifier: Classifier) -> list[dict[str, Any]]:
    """Return the weights that decay and those that do not, tied ones once."""
    outside = set(get_parameter_names(classifier, [nn.Embedding]))
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, p in classifier.named_parameters():
        if p.requires_grad:
            decays = p.ndim > 1 and name in outside and not getattr(p, "_no_weight_decay", False)
            groups[decays].append(p)
    return [
        {"params": groups[True], "weight_decay": WEIGHT_DECAY},
        {"params": groups[False], "weight_decay": 0.0},
    ]
