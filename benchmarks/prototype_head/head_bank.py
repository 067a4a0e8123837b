"""Train several prototype heads, all detached, beside one decoder: the decoder is paid for once.

A head on a detached state changes nothing of the decoder, so each head of a bank is the head that
its own run would give.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.training import PrismForCausalLM, PrismTrainer, Recipe
from prismlm.training.prototypes import HeadSchedule
from prismlm.training.recipe import build_recipe
from prismlm.training.setup import Prepared, head_of, prepare, vocabulary_sample


@dataclass
class BankedHead:
    """One head of a bank: its settings are a recipe's ``head``, ``losses`` and rates."""

    name: str
    recipe: Recipe
    prism: PrismForCausalLM
    schedule: HeadSchedule
    optimizer: torch.optim.Optimizer
    losses: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    @classmethod
    def of(cls, name: str, recipe: Recipe, prepared: Prepared) -> BankedHead:
        """Make a head that is not placed yet."""
        settings, losses = recipe.head, recipe.losses
        backbone: nn.Module = prepared.model.model
        head = head_of(recipe, backbone).to(weight_of(backbone).device)
        prism = PrismForCausalLM(
            backbone,
            head,
            weights=losses,
            detach=True,
            residual_reduction=losses.residual_reduction,
            position_share=settings.position_share,
            initialised=False,
        )
        tokens = len(weight_of(backbone))
        prism.vocabulary = vocabulary_sample(recipe, prepared.corpus, tokens)
        schedule = HeadSchedule(prepared.rows, recipe)
        optimizer = torch.optim.AdamW(
            prism.prototype_head.parameters(),
            lr=recipe.optimizer.head_learning_rate,
            betas=recipe.optimizer.betas,
            weight_decay=0.0,
        )
        return cls(name, recipe, prism, schedule, optimizer)

    def step(self, seen: Any, inputs: dict[str, Tensor], rate: float) -> None:
        """Train the head on the states of one forward pass.

        Args:
            seen: what went through the output embedding.
            inputs: the batch.
            rate: the learning rate as a share of its peak.
        """
        prism, head = self.prism, self.prism.prototype_head
        if not prism.initialised:
            return
        _, parts = prism.run_head(seen, inputs["token_mask"], inputs["labels"])
        loss = prism.total(head.prototypes.new_zeros(()), parts)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), self.recipe.optimizer.head_max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.optimizer.head_learning_rate * rate
        self.optimizer.step()


class BankTrainer(PrismTrainer):
    """Train the plain decoder, and a bank of heads on the states it forms on the way."""

    bank: list[BankedHead]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the decoder's loss; every head takes its own step on the way."""
        for banked in self.bank:
            banked.schedule.on_step_begin(self.args, self.state, self.control, model=banked.prism)
        with capture(self.model.model) as seen:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assert self.optimizer is not None
        rate = float(self.optimizer.param_groups[0]["lr"]) / self.args.learning_rate
        for banked in self.bank:
            banked.prism.train()
            banked.step(seen, inputs, rate)
        return result


def train_bank(
    plain: dict[str, Any], heads: dict[str, dict[str, Any]], directory: Path
) -> BankTrainer:
    """Train one plain decoder with many heads.

    Args:
        plain: settings of the run; its head is switched off.
        heads: by name, settings that replace those of ``plain`` for one head: ``head``,
            ``losses``, ``optimizer``.
        directory: where checkpoints go.
    """
    settings = plain | {"head": plain.get("head", {}) | {"enabled": False}}
    prepared = prepare(build_recipe(settings))
    trainer = BankTrainer(prepared, directory)
    trainer.bank = [
        BankedHead.of(name, build_recipe(merged(plain, changes)), prepared)
        for name, changes in heads.items()
    ]
    trainer.train()
    return trainer


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings with sections updated, not replaced."""
    result = dict(settings)
    for key, value in changes.items():
        before = result.get(key)
        result[key] = before | value if isinstance(before, dict) else value
    return result
