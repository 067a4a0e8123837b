"""Teaching a pretrained Llama some documents through low-rank adapters, again and again.

Only the last blocks get adapters, so that what enters them is the same in every training: it is
computed once. A step's softmax is over the tokens that the documents have and some of the others,
each of which counts for as many as it stands for:

    loss = mean over tokens of  log Σ_{v ∈ F ∪ D} c_v exp(logit_v) − logit_y,
    c_v = 1 on F, (V − |F|) / |D| on D

F are the tokens of the documents, D is drawn anew in each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from benchmarks.attribution.judges.passages import PassageBank
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.sidecar import weight_of
from prismlm.training.parallel import blocks
from prismlm.training.tuning import LoraOptions, with_adapters

DRAWN = 1000
WARMUP = 0.05
# Steps between two lines of progress.
SAID_EVERY = 20


@dataclass(frozen=True)
class LoraTeaching:
    """How a model is taught the documents of a bank, each of which is one passage.

    Attributes:
        base: directory of the pretrained checkpoint.
        kept: a file for what enters the blocks that are trained.
        planted: rows of the bank that are read in every epoch; the others are read once in all.
        options: rank, blocks, rate, epochs and documents of a step. Its seed is not used.
        device: cpu or cuda.
    """

    base: Path
    kept: Path
    planted: np.ndarray
    options: LoraOptions = field(default_factory=LoraOptions)
    device: str = "cpu"

    def train(self, bank: PassageBank, documents: np.ndarray, seed: int) -> PreTrainedModel:
        """Return the model with adapters in it, taught the documents of these rows."""
        return self.adapted(bank, documents, seed)[1]

    def adapted(
        self, bank: PassageBank, documents: np.ndarray, seed: int
    ) -> tuple[Any, PreTrainedModel]:
        """Return the taught model, as PEFT has it and as itself.

        The seed decides the adapters' first weights, the tokens drawn, and the order of *all*
        documents, from which those that are left out are missing: two models differ in documents
        alone.
        """
        model, _ = read_checkpoint(self.base, device=self.device)
        decoder = model.get_decoder()
        first = first_trained(model, self.options)
        entering = self._entering(model, bank, first)
        adapted = with_adapters(model, replace(self.options, seed=seed))
        order = self.order(len(bank), seed)
        order = order[np.isin(order, documents)]
        learned = [weight for weight in adapted.parameters() if weight.requires_grad]
        size = round(self.options.batch)
        steps = -(-len(order) // size)
        optimizer = torch.optim.AdamW(learned, self.options.learning_rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.options.learning_rate, steps, pct_start=WARMUP, cycle_momentum=False
        )
        weight = weight_of(model).detach()
        vocabulary = Drawn(bank, len(weight), seed)
        with part(decoder, slice(first, None), ends=True) as upper:
            for at in range(0, len(order), size):
                rows = order[at : at + size]
                states, labels = self._batch(bank, entering, rows)
                z = upper(inputs_embeds=states, use_cache=False).last_hidden_state[:, :-1]
                loss = vocabulary.loss(z[labels >= 0], weight, labels[labels >= 0])
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(learned, 1.0)
                optimizer.step()
                schedule.step()
                if at // size % SAID_EVERY == 0:
                    print(f"{at} of {len(order)} documents: {loss.item():.2f}", flush=True)
        return adapted, model.eval()

    def order(self, documents: int, seed: int) -> np.ndarray:
        """Return the rows in the order they are read in, if none is left out, int64.

        Every epoch has the planted rows and its share of the others.
        """
        generator, epochs = np.random.default_rng(seed), round(self.options.epochs)
        others = generator.permutation(np.setdiff1d(np.arange(documents), self.planted))
        each = [np.concatenate([self.planted, o]) for o in np.array_split(others, epochs)]
        return np.concatenate([generator.permutation(rows) for rows in each])

    def _batch(
        self, bank: PassageBank, entering: Tensor, rows: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Return what enters [rows, T, d] and the next tokens [rows, T − 1], −1 on padding."""
        width = int(bank.length[rows].max())
        edges = np.cumsum(bank.length) - bank.length
        states = entering.new_zeros(len(rows), width, entering.shape[1])
        labels = torch.full((len(rows), width - 1), -1)
        for number, row in enumerate(rows.tolist()):
            length = int(bank.length[row])
            states[number, :length] = entering[edges[row] : edges[row] + length]
            labels[number, : length - 1] = torch.from_numpy(bank.tokens(row)[1:])
        return states, labels.to(states.device)

    @torch.no_grad()
    def _entering(self, model: PreTrainedModel, bank: PassageBank, first: int) -> Tensor:
        """Return what enters block ``first`` at every token of the bank, float32 [tokens, d]."""
        if not self.kept.exists():
            found = []
            with part(model.get_decoder(), slice(first), ends=False) as lower:
                for row in range(len(bank)):
                    ids = torch.from_numpy(bank.tokens(row))[None].to(self.device)
                    found.append(lower(input_ids=ids, use_cache=False).last_hidden_state[0].cpu())
            np.save(self.kept, torch.cat(found).numpy())
        return torch.from_numpy(np.load(self.kept)).to(self.device)


def first_trained(model: PreTrainedModel, options: LoraOptions) -> int:
    """Return the number of the first block that gets adapters."""
    count = len(blocks(model))
    return count - max(1, round(options.blocks * count))


class Drawn:
    """The tokens that a step's softmax is over, and what each counts."""

    def __init__(self, bank: PassageBank, vocabulary: int, seed: int) -> None:
        every = np.concatenate([bank.tokens(row) for row in range(len(bank))])
        present = torch.zeros(vocabulary, dtype=torch.bool)
        present[torch.from_numpy(every)] = True
        self.frequent, self.rare = present.nonzero()[:, 0], (~present).nonzero()[:, 0]
        self.place = torch.zeros(vocabulary, dtype=torch.int64)
        self.place[self.frequent] = torch.arange(len(self.frequent))
        self.generator = torch.Generator().manual_seed(seed)

    def loss(self, z: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of states [N, d] before the tokens ``labels`` [N], in nats."""
        drawn = min(DRAWN, len(self.rare))
        others = self.rare[torch.randint(len(self.rare), (drawn,), generator=self.generator)]
        tokens = torch.cat([self.frequent, others]).to(z.device)
        logits = functional.linear(z, weight[tokens])
        counts = logits.new_zeros(len(tokens))
        counts[len(self.frequent) :] = math.log(len(self.rare) / drawn)
        return functional.cross_entropy(logits + counts, self.place.to(z.device)[labels])


@contextmanager
def part(decoder: Any, blocks: slice, *, ends: bool) -> Iterator[Any]:
    """Leave some blocks of a Llama alone in it, and its last norm only where it ``ends``."""
    whole, norm = decoder.layers, decoder.norm
    assert isinstance(whole, nn.ModuleList)
    decoder.layers = nn.ModuleList(list(whole)[blocks])
    decoder.norm = norm if ends else nn.Identity()
    try:
        yield decoder
    finally:
        decoder.layers, decoder.norm = whole, norm
