"""A decoder as a classifier, and fine-tuning of all its weights on one task.

A linear layer reads the state of a row's last token. Rows are ``sentence EOS`` or ``first EOS
second EOS``, after a BOS if the tokenizer adds one, so that the last token sees the complete row
and is the same in all rows.

AdamW with linear warm-up and decay; embeddings, norms and biases are not decayed. Rows of a batch
are of similar length, which halves the padding. Training stops early by the dev metric.

Source: ProtoT, A.4, which leaves weight decay, clipping, patience and batching by length open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)
from transformers.trainer_pt_utils import get_length_grouped_indices, get_parameter_names

from prismlm import fingerprints
from prismlm.corpus.encode import around_text, encoder_of
from prismlm.errors import DivergenceError, check_number, check_whole
from prismlm.eval.glue.data import Task
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.device import learned_positions, uses_bf16
from prismlm.models.presets import build_model
from prismlm.models.seam import capture, output_embedding
from prismlm.models.watch import evaluating
from prismlm.progress import Task as Progress

MAX_LENGTH = 512  # tokens per row
DEVIATION = 0.02  # of the new layer's initial weights, as in Hugging Face's classifiers
WEIGHT_DECAY, MAX_NORM = 0.1, 1.0
EVALUATIONS = 2  # per epoch, on dev
PATIENCE = 2  # evaluations without improvement before a run stops, at the end of an epoch
REMEDY = "give a smaller rate by --learning-rate, or let --search choose one."


@dataclass(frozen=True)
class GlueOptions:
    """Settings of every run.

    Attributes:
        data: a directory of Parquet files; None for the hub.
        limit: training rows, drawn by a run's seed, the same for every model; None for all.
        dev_limit: rows of each dev set, drawn by seed 0; None for all.
        learning_rate: the maximum; None for that of a stored search, by default ProtoT's.
        warmup: fraction of all steps over which it rises, likewise.
        epochs: maximum.
        batch_size: rows per step.
        test: whether to predict the test sets.
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
        check_whole("epochs", self.epochs, 1)
        check_whole("batch_size", self.batch_size, 1)
        # A rank correlation needs three rows.
        for name, least in (("limit", 1), ("dev_limit", 3)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        if self.learning_rate is not None:
            check_number("learning_rate", self.learning_rate, "above 0", lambda rate: rate > 0)
        if self.warmup is not None:
            expected = "a share from 0 to 1"
            check_number("warmup", self.warmup, expected, lambda share: 0 <= share <= 1)

    def note(self, lm: GlueModel) -> dict[str, Any]:
        """Return the settings that must not change when a study is resumed."""
        data = "hub" if self.data is None else str(self.data.resolve())
        return asdict(self) | {"format_version": 1, "model": lm.identity, "data": data}


class GlueModel:
    """A model, and a copy of its weights, which every run starts from."""

    def __init__(self, path: Path | str, *, device: str = "cpu") -> None:
        self.name = Path(path).name
        self.model, self.tokenizer = read_checkpoint(path, device=device)
        self.model.float()
        self.identity = fingerprints.of_model(self.model)
        self.length = min(MAX_LENGTH, learned_positions(self.model) or MAX_LENGTH)
        self._weights = _copy_weights(self.model)

    def classifier(self, task: Task, seed: int, *, from_scratch: bool = False) -> Classifier:
        """Return the model under a new layer, with its weights or freshly initialised."""
        torch.manual_seed(seed)
        if from_scratch:
            fresh = build_model(self.model.config).to(self.model.device)  # pyright: ignore
            return Classifier(fresh.float(), len(task.labels) or 1)
        self.model.load_state_dict(self._weights)
        return Classifier(self.model, len(task.labels) or 1)


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, ...]], length: int
) -> list[list[int]]:
    """Return the tokens of rows; in rows that are too long, the longer sentence is cut."""
    encoder = encoder_of(tokenizer).text
    columns = [
        [text.ids for text in encoder.encode_batch(list(column), add_special_tokens=False)]
        for column in zip(*texts, strict=True)
    ]
    begin, eos = around_text(tokenizer)[0], tokenizer.eos_token_id
    end = encoder.encode("\n", add_special_tokens=False).ids if eos is None else [eos]
    room = length - len(begin) - len(columns) * len(end)
    rows: list[list[int]] = []
    for first, *others in zip(*columns, strict=True):
        rest = sum(map(len, others))
        first = first[: max(room - rest, -(-room // len(columns)))]
        row = begin + first + end
        for other in others:
            row += other[: room - len(first)] + end
        rows.append(row)
    return rows


class Classifier(nn.Module):
    """y = W z_T + b, with z_T [d] the last hidden state of the last token.

    Rows are padded on the right, which a causal model does not see. The output embedding of the
    model is not computed.
    """

    def __init__(self, model: PreTrainedModel, outputs: int) -> None:
        super().__init__()
        weight: Any = output_embedding(model).weight
        self.model, self.out = model, nn.Linear(weight.shape[1], outputs)
        nn.init.normal_(self.out.weight, std=DEVIATION)
        nn.init.zeros_(self.out.bias)
        self.out.to(weight.device)
        self.bf16 = uses_bf16("auto", weight.device.type)

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return y [B, C], float32, for rows of tokens of any length."""
        device = self.out.weight.device
        sizes = torch.tensor([len(row) for row in rows])
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        mask = (torch.arange(ids.shape[1]) < sizes[:, None]).long()
        with (
            torch.autocast(device.type, torch.bfloat16, enabled=self.bf16),
            capture(self.model, logits=False) as captured,
        ):
            self.model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
        last = captured.z[torch.arange(len(rows), device=device), (sizes - 1).to(device)]
        return self.out(last.float())

    def predict(self, rows: Sequence[Sequence[int]], batch_size: int = 32) -> np.ndarray:
        """Return y [N, C] in evaluation mode."""
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        outputs = np.zeros((len(rows), self.out.out_features), np.float32)
        with evaluating(self):
            for first in range(0, len(order), batch_size):
                batch = order[first : first + batch_size]
                outputs[batch] = self([rows[row] for row in batch]).cpu().numpy()
        if not np.isfinite(outputs).all():
            raise DivergenceError(f"the classifier's outputs are not finite: {REMEDY}")
        return outputs

    def loss(self, rows: Sequence[Sequence[int]], labels: Sequence[float]) -> Tensor:
        """Return the mean squared error of scores, or the cross-entropy of classes."""
        outputs = self(rows)
        target = torch.tensor(labels, device=outputs.device)
        if outputs.shape[1] == 1:
            return F.mse_loss(outputs[:, 0], target.float())
        return F.cross_entropy(outputs, target.long())


def fine_tune(
    classifier: Classifier,
    rows: Sequence[list[int]],
    labels: Sequence[float],
    evaluate: Callable[[], float],
    options: GlueOptions,
    seed: int,
    progress: Progress,
) -> list[float]:
    """Train, restore the weights with the best dev metric, and return the history of that metric.

    ``labels`` are class numbers or scores; ``evaluate`` returns the dev metric, larger is better.
    """
    rate, warmup = options.learning_rate, options.warmup
    assert rate is not None
    assert warmup is not None
    steps = options.epochs * math.ceil(len(rows) / options.batch_size)
    optimizer = torch.optim.AdamW(parameter_groups(classifier), lr=rate, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, round(warmup * steps), steps)
    torch.manual_seed(seed)
    generator, lengths = torch.Generator().manual_seed(seed), [len(row) for row in rows]
    history: list[float] = []
    best: dict[str, Tensor] = {}
    for _ in range(options.epochs):
        order = get_length_grouped_indices(lengths, options.batch_size, generator=generator)
        batches = [batch.tolist() for batch in torch.tensor(order).split(options.batch_size)]
        stops = {math.ceil(len(batches) * (k + 1) / EVALUATIONS) for k in range(EVALUATIONS)}
        for number, batch in enumerate(batches, start=1):
            classifier.train()
            loss = classifier.loss([rows[row] for row in batch], [labels[row] for row in batch])
            if not bool(torch.isfinite(loss)):
                raise DivergenceError(f"the loss is {loss.item()} at the rate {rate:g}: {REMEDY}")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(classifier.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            progress.advance(1)
            if number in stops:
                history.append(evaluate())
                progress.note(f"dev {history[-1]:.3f}")
                if history[-1] > max(history[:-1], default=-math.inf):
                    best = _copy_weights(classifier)
        if len(history) - 1 - history.index(max(history)) >= PATIENCE:
            break
    classifier.load_state_dict(best)
    return history


def _copy_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in module.state_dict().items()}


def parameter_groups(classifier: Classifier) -> list[dict[str, Any]]:
    """Return parameters with and without weight decay, tied ones once."""
    not_embedded = set(get_parameter_names(classifier, [nn.Embedding]))
    groups: dict[float, list[nn.Parameter]] = {WEIGHT_DECAY: [], 0.0: []}
    for name, p in classifier.named_parameters():
        decays = p.ndim > 1 and name in not_embedded and not getattr(p, "_no_weight_decay", False)
        if p.requires_grad:
            groups[WEIGHT_DECAY if decays else 0.0].append(p)
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
