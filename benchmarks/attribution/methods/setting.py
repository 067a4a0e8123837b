"""What methods are made of: a model, passages, and the state of every position of the passages.

A :class:`Setting` is read once and kept beside the model, so that every method and judge after the
first begins at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.attribution.judges.passages import PassageBank, Prediction
from prismlm.corpus import Corpus, document_windows, window_batches
from prismlm.explain.prediction import OutputLayer, split_predictions
from prismlm.files import read_json
from prismlm.layers import PrototypeHead
from prismlm.models.checkpoint import load_checkpoint
from prismlm.models.seam import LogitMap, capture
from prismlm.models.sidecar import weight_of
from prismlm.ops.prototype_head.routing import inverse_norms

TOKENS_PER_BATCH = 4096
ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows sorted by a number that each has."""

    order: np.ndarray
    edges: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Rows:
        """Sort by the values, int [N], at least 0."""
        edges = np.concatenate([[0], np.cumsum(np.bincount(values))])
        return cls(np.argsort(values, kind="stable"), edges)

    def __getitem__(self, value: int) -> np.ndarray:
        """Return the rows with this value, ascending; none if no row has it."""
        if not 0 <= value < len(self.edges) - 1:
            return self.order[:0]
        return self.order[self.edges[value] : self.edges[value + 1]]


@dataclass(frozen=True, eq=False)
class Positions:
    """Every position n of a bank whose next token is of the same document, in the corpus's order.

    ``passage``, ``token`` y_n (the next one), ``read`` x_n and ``cell`` (the nearest prototype) are
    int32 [N]; ``probability`` of y_n, ``log_total`` = log Σ_v exp(logit_nv) and ``size`` of the
    state float32 [N]; ``state`` are unit states, float16 [N, d].
    """

    passage: np.ndarray
    token: np.ndarray
    read: np.ndarray
    probability: np.ndarray
    log_total: np.ndarray
    cell: np.ndarray
    size: np.ndarray
    state: np.ndarray

    def __len__(self) -> int:
        return len(self.token)

    @cached_property
    def by_token(self) -> Rows:
        """The positions that each token stands after."""
        return Rows.of(self.token)

    @cached_property
    def second_moment(self) -> np.ndarray:
        """Mean of z zᵀ over unit states, float64 [d, d]."""
        total = np.zeros((self.state.shape[1],) * 2)
        for first in range(0, len(self), ROWS_AT_ONCE):
            part = self.state[first : first + ROWS_AT_ONCE].astype(np.float32)
            total += part.T @ part
        return total / len(self)


@dataclass(frozen=True, eq=False)
class Asked:
    """What the model makes of Q predictions.

    Unit ``states`` [Q, d], their ``size``, ``targets``, the token ``read`` before each,
    ``probability`` of the targets, the ``prototypes`` in use [Q, k] and the ``evidence`` of each
    for the target [Q, k].
    """

    states: np.ndarray
    size: np.ndarray
    targets: np.ndarray
    read: np.ndarray
    probability: np.ndarray
    prototypes: np.ndarray
    evidence: np.ndarray


@dataclass(frozen=True, eq=False)
class Setting:
    """A model with its head, the passages it was trained on, and their positions."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    head: PrototypeHead
    logit_map: LogitMap
    bank: PassageBank
    positions: Positions
    window: int

    def ask(self, predictions: Sequence[Prediction]) -> Asked:
        """Read predictions, each with the last ``window`` tokens before it.

        Those of one text after another are read in one pass.
        """
        columns = [self._read(run) for run in runs_of(predictions, self.window)]
        return Asked(*(np.concatenate(column) for column in zip(*columns, strict=True)))

    @torch.no_grad()
    def _read(self, run: Sequence[Prediction]) -> tuple[np.ndarray, ...]:
        last = run[-1]
        read = [*last.ids[-self.window :].tolist(), last.target]
        ids = torch.tensor([read], device=self.model.device)
        with capture(self.model) as seen:
            output = OutputLayer.from_model(self.model, self.logit_map)
            split = split_predictions(self.model, self.head, output, ids, len(read) - 1)
        columns = (
            split.states,
            seen.z[0, : len(read) - 1].float().norm(dim=-1),
            split.targets,
            split.tokens,
            split.scores.log_probabilities.exp(),
            split.routing.indices,
            split.evidence,
        )
        return tuple(column[-len(run) :].cpu().numpy() for column in columns)

    def weight(self) -> Tensor:
        """Return W with the model's own factor on logits, float32 [V, d]."""
        return weight_of(self.model).detach().float() * self.logit_map.scale


def runs_of(predictions: Sequence[Prediction], window: int) -> list[list[Prediction]]:
    """Group predictions of which each was made one token after the one before."""
    runs: list[list[Prediction]] = []
    for prediction in predictions:
        before = runs[-1][-1] if runs else None
        goes_on = (
            before is not None
            and len(prediction.ids) == len(before.ids) + 1 <= window
            and prediction.ids[-1] == before.target
            and np.array_equal(prediction.ids[:-1], before.ids)
        )
        if goes_on:
            runs[-1].append(prediction)
        else:
            runs.append([prediction])
    return runs


@torch.no_grad()
def read_positions(
    model: PreTrainedModel,
    head: PrototypeHead,
    logit_map: LogitMap,
    bank: PassageBank,
    *,
    window: int,
    stride: int,
) -> Positions:
    """Run the model over the bank, in the windows that an index reads.

    Where the bank keeps the beginnings of documents, only those are read.
    """
    corpus = bank.corpus
    ends = bank.first + bank.length
    last = np.searchsorted(bank.document, np.arange(len(bank.documents)), side="right") - 1
    lengths = np.zeros_like(corpus.lengths)
    lengths[bank.documents] = ends[last] - corpus.starts[bank.documents]
    grid = document_windows(bank.documents, corpus.starts, lengths, window, stride)
    parts: list[list[np.ndarray]] = []
    places: list[np.ndarray] = []
    for batch in window_batches(grid, corpus, TOKENS_PER_BATCH):
        attended = batch.attention_mask
        with capture(model) as seen:
            model(input_ids=batch.input_ids, attention_mask=attended.long(), use_cache=False)
        assert seen.embedded is not None
        # A state counts where the token after it is in the same window.
        kept = batch.owned[:, :-1] & (batch.positions[:, 1:] >= 0)
        z = seen.z[:, :-1][kept].float()
        targets = batch.input_ids[:, 1:][kept]
        logits = logit_map(seen.embedded[:, :-1][kept].float())
        total = logits.logsumexp(-1)
        own = logits.gather(1, targets[:, None])[:, 0]
        cell = head.nearest(z).indices[:, 0]
        unit = (z * inverse_norms(z)).to(torch.float16)
        read = batch.input_ids[:, :-1][kept]
        columns = (targets, read, (own - total).exp(), total, cell, z.norm(dim=-1), unit)
        parts.append([column.numpy() for column in columns])
        places.append(batch.positions[:, :-1][kept].numpy())
    position = np.concatenate(places)
    order = np.argsort(position, kind="stable")
    columns = [np.concatenate(column)[order] for column in zip(*parts, strict=True)]
    for number in (0, 1, 4):
        columns[number] = columns[number].astype(np.int32)
    return Positions(bank.passage_at(position[order]).astype(np.int32), *columns)


def planted_setting(planted: Path) -> Setting:
    """Open the planted model, and read the positions of its training text unless they are there."""
    window = int(read_json(planted / "model" / "training.json")["recipe"]["data"]["length"])
    corpus = Corpus.open(planted / "corpus")
    return model_setting(planted / "model", corpus, window, planted / "positions")


def model_setting(directory: Path, corpus: Corpus, window: int, positions: Path) -> Setting:
    """Open a model with its head, and the positions of a corpus, read once into a folder."""
    checkpoint = load_checkpoint(directory)
    bank = PassageBank.of(corpus, corpus.split("train"))
    model, head, logit_map = checkpoint.model, checkpoint.sidecar.head, checkpoint.sidecar.logit_map
    files = {name: positions / f"{name}.npy" for name in Positions.__dataclass_fields__}
    if not all(file.exists() for file in files.values()):
        positions.mkdir(parents=True, exist_ok=True)
        stride = window * 3 // 4
        read = read_positions(model, head, logit_map, bank, window=window, stride=stride)
        for name, file in files.items():
            np.save(file, getattr(read, name))
    stored = Positions(*map(np.load, files.values()))
    return Setting(model, checkpoint.tokenizer, head, logit_map, bank, stored, window)
