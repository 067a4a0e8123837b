"""The variants of protopnet.py: one decoder each, its output head, and its optimizer."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

from benchmarks.prototype_head.dense_prototype_head import DensePrototypeHead
from prismlm.corpus import WindowBatch
from prismlm.corpus.packing import PackedDataset
from prismlm.layers import PrototypeHead
from prismlm.models.seam import capture
from prismlm.training import LossWeights, PrismForCausalLM
from prismlm.training.prototypes import place_prototypes, progress

VARIANTS = ("plain", "prism", "through", "dense", "dense-k")
# Those that predict through their head, whose peak rate is chosen for each.
SEARCHED = ("through", "dense", "dense-k")
# R1, R2 and RES, reaching the model.
SOURCE_LOSSES = LossWeights(0.1, 0.1, 0.1, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Settings:
    """What all variants share.

    Attributes:
        preset: backbone by name.
        prototypes: K.
        prototypes_per_token: k, of all but ``plain`` and ``dense``.
        steps: optimizer steps.
        rows: rows of a step.
        length: tokens of a row.
        learning_rate: peak rate of the backbone, W among it.
        prism_head_rate: peak rate of the head of ``prism``.
        weight_decay: of matrices, M among them; not of prototypes.
        betas: of AdamW.
        warmup: share of the steps in which rates rise; they fall along a cosine.
        max_grad_norm: norm that backbone and head are clipped to, each by itself.
        place_at: share of the steps before which ``prism`` places its prototypes.
        full_at: share of the steps after which the losses of ``prism`` have full weight.
        bf16: whether forward passes run under bf16 autocast.
    """

    preset: str
    prototypes: int
    prototypes_per_token: int
    steps: int
    rows: int
    length: int
    bf16: bool
    learning_rate: float = 2e-3
    prism_head_rate: float = 3e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = 0.05
    max_grad_norm: float = 1.0
    place_at: float = 0.1
    full_at: float = 0.6


@dataclass
class Contestant:
    """One variant in training, with the time its own steps took.

    Attributes:
        name: one of :data:`VARIANTS`.
        module: everything that is trained.
        backbone: the decoder in it.
        logits: from states z to logits, as predictions are made and judged.
        loss: of a batch of rows, before the step of that number.
        cpu: CPU seconds of this process in steps so far, evaluations left out.
        wall: wall-clock seconds of the same.
        curve: one point per evaluation.
    """

    name: str
    module: nn.Module
    backbone: Any
    head: nn.Module | None
    logits: Callable[[Tensor], Tensor]
    loss: Callable[[dict[str, Tensor], int], Tensor]
    optimizer: torch.optim.Optimizer
    schedule: Any
    settings: Settings
    step: int = 0
    tokens: int = 0
    cpu: float = 0.0
    wall: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def train_on(self, batch: dict[str, Tensor]) -> None:
        """Take one step, and its time."""
        cpu, wall = time.process_time(), time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.settings.bf16):
            loss = self.loss(batch, self.step)
        loss.backward()
        limit = self.settings.max_grad_norm
        nn.utils.clip_grad_norm_(self.backbone.parameters(), limit)
        if self.head is not None:
            nn.utils.clip_grad_norm_(self.head.parameters(), limit)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.cpu += time.process_time() - cpu
        self.wall += time.perf_counter() - wall
        self.step += 1
        self.tokens += int(batch["token_mask"].sum())

    @torch.no_grad()
    def evaluate(self, batches: list[WindowBatch]) -> None:
        """Add a point: held-out CE in nats per token against steps, tokens and seconds."""
        self.module.eval()
        point = {
            "step": self.step,
            "tokens": self.tokens,
            "cpu_seconds": round(self.cpu, 3),
            "wall_seconds": round(self.wall, 3),
            "ce": heldout_ce(self.backbone, self.logits, batches, self.settings.bf16),
        }
        if isinstance(self.module, PrismForCausalLM) and self.module.placed:
            through = through_prototypes(self.backbone, self.module.prototype_head)
            point["prototype_only_ce"] = heldout_ce(
                self.backbone, through, batches, self.settings.bf16
            )
        self.module.train()
        self.curve.append(point)


def build(
    name: str,
    initial: Any,
    rows: PackedDataset,
    settings: Settings,
    head_rate: float,
    seed: int,
) -> Contestant:
    """Return a variant that starts from the weights of ``initial``.

    Prototypes are drawn alike in all variants, and M starts as W P; so ``through`` and
    ``dense-k`` are the same function at the first step. τ starts where the logits of a batch are
    as large as those of the plain decoder.
    """
    backbone = copy.deepcopy(initial)
    weight = backbone.get_output_embeddings().weight
    vocab_size, width = weight.shape
    count, k = settings.prototypes, settings.prototypes_per_token
    head: nn.Module | None = None
    if name == "plain":
        logits = backbone.get_output_embeddings()
    elif name in ("prism", "through"):
        head = PrototypeHead(width, count, k)
        head.reset_parameters(torch.Generator().manual_seed(seed))
        logits = through_prototypes(backbone, head)
    else:
        kept = k if name == "dense-k" else None
        head = DensePrototypeHead(width, vocab_size, count, prototypes_per_token=kept)
        drawn = PrototypeHead(width, count, k)
        drawn.reset_parameters(torch.Generator().manual_seed(seed))
        head.place(drawn.prototypes, weight)
        logits = head
    if name in SEARCHED:
        assert isinstance(head, PrototypeHead | DensePrototypeHead)
        match_logits(backbone, head, logits, rows)
    if name == "prism":
        assert isinstance(head, PrototypeHead)
        module: nn.Module = PrismForCausalLM(
            backbone, head, weights=SOURCE_LOSSES, detach=False, placed=False
        )
        loss = prism_loss(module, rows, settings, seed)
        logits = backbone.get_output_embeddings()
    else:
        module = nn.ModuleList([backbone, *([] if head is None else [head])])
        loss = ce_loss(backbone, logits)
    optimizer = make_optimizer(backbone, head, settings, head_rate)
    schedule = get_cosine_schedule_with_warmup(
        optimizer, round(settings.warmup * settings.steps), settings.steps
    )
    module.train()
    return Contestant(name, module, backbone, head, logits, loss, optimizer, schedule, settings)


def through_prototypes(backbone: Any, head: PrototypeHead) -> Callable[[Tensor], Tensor]:
    """Return W ẑ as a function of z [B, T, d] or [N, d]."""
    embedding = backbone.get_output_embeddings()

    def logits(z: Tensor) -> Tensor:
        return embedding(head(z).reconstruction.unflatten(0, z.shape[:-1]))

    return logits


@torch.no_grad()
def match_logits(
    backbone: Any,
    head: PrototypeHead | DensePrototypeHead,
    logits: Callable[[Tensor], Tensor],
    rows: PackedDataset,
) -> None:
    """Set τ so that the first row's logits, linear in it, have the root mean square of W z."""
    z = states(backbone, rows[0])
    wanted = backbone.get_output_embeddings()(z).square().mean()
    head.log_scale += 0.5 * (wanted / logits(z).square().mean()).log()


def states(backbone: Any, row: dict[str, Tensor]) -> Tensor:
    """Return z [1, T, d] of one training row."""
    with capture(backbone, logits=False) as seen:
        backbone(
            input_ids=row["input_ids"][None],
            position_ids=row["position_ids"][None],
            use_cache=False,
        )
    return seen.z


def ce_loss(
    backbone: Any, logits: Callable[[Tensor], Tensor]
) -> Callable[[dict[str, Tensor], int], Tensor]:
    """Return the cross-entropy of ``logits``; the decoder's own loss function, and no W z."""

    def loss(batch: dict[str, Tensor], step: int) -> Tensor:
        with capture(backbone, logits=False) as seen:
            backbone(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
            )
        predicted = logits(seen.z)
        return backbone.loss_function(
            logits=predicted, labels=batch["labels"], vocab_size=predicted.shape[-1]
        )

    return loss


def prism_loss(
    module: PrismForCausalLM, rows: PackedDataset, settings: Settings, seed: int
) -> Callable[[dict[str, Tensor], int], Tensor]:
    """Return the loss of ``prism``: prototypes are placed and their losses rise as in a recipe."""
    place_at = round(settings.place_at * settings.steps)

    def loss(batch: dict[str, Tensor], step: int) -> Tensor:
        if step == place_at:
            place_prototypes(module, rows, torch.Generator().manual_seed(seed))
        module.loss_scale = progress(step, place_at, settings.full_at * settings.steps)
        return module(**batch).loss

    return loss


def make_optimizer(
    backbone: Any, head: nn.Module | None, settings: Settings, head_rate: float
) -> torch.optim.Optimizer:
    """Return AdamW as the package's trainer sets it up; M decays as W does, prototypes do not."""
    decay, rate = settings.weight_decay, settings.learning_rate
    weights = list(backbone.parameters())
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": decay, "lr": rate},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0, "lr": rate},
    ]
    for name, parameter in [] if head is None else head.named_parameters():
        own_decay = decay if name == "signatures" else 0.0
        groups.append({"params": [parameter], "weight_decay": own_decay, "lr": head_rate})
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, fused=True)


@torch.no_grad()
def heldout_ce(
    backbone: Any, logits: Callable[[Tensor], Tensor], batches: list[WindowBatch], bf16: bool
) -> float:
    """Return the mean cross-entropy of held-out predictions whose context their window owns."""
    total, count = 0.0, 0
    for batch in batches:
        kept = scored(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            with capture(backbone, logits=False) as seen:
                backbone(
                    input_ids=batch.input_ids,
                    attention_mask=batch.attention_mask.long(),
                    use_cache=False,
                )
            predicted = logits(seen.z[:, :-1][kept])
        targets = batch.input_ids[:, 1:][kept]
        total += F.cross_entropy(predicted.float(), targets, reduction="sum").item()
        count += len(targets)
    return total / count


def scored(batch: WindowBatch) -> Tensor:
    """Return which positions [B, T − 1] are judged: owned by their window, and followed in it."""
    return batch.owned[:, :-1] & batch.attention_mask[:, 1:]
