"""What a training recipe says: every key, its type, its range and what it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from prismlm.training.model import LossWeights

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
AnyPath = Annotated[Path, Field(strict=False)]
Beta = Annotated[float, Strict(), Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe: unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class HeadRecipe(Section):
    """The prototype head."""

    prototypes: Count = Field(default=2048, description="K, how many prototypes")
    prototypes_per_token: Count = Field(
        default=16, description="k, how many a token may rely on; k ≤ K"
    )
    scale: float = Field(default=1.0, gt=0, description="τ at the start, the factor on cosines")
    initialise_at_step: int = Field(
        default=100,
        ge=0,
        description="the step before which prototypes are placed on hidden states",
    )
    detach: bool = Field(
        default=False, description="train the head beside the model without touching the model"
    )

    @model_validator(mode="after")
    def _fits(self) -> HeadRecipe:
        if self.prototypes_per_token > self.prototypes:
            raise ValueError(
                f"prototypes_per_token is {self.prototypes_per_token}, more than the "
                f"{self.prototypes} prototypes; choose at most that many"
            )
        return self


class LossRecipe(Section):
    """Weights of the head's losses beside the cross-entropy.

    They rise linearly from 0 when the prototypes are placed to full at ``warmup``. R1, behind
    ``prototype_pull``, takes its minimum over one micro-batch: with a smaller ``batch_size`` it
    pulls each prototype towards a worse nearest state, so it is not the same loss.
    """

    prototype_pull: float = Field(default=0.1, ge=0, description="weight of R1")
    point_pull: float = Field(default=0.1, ge=0, description="weight of R2")
    residual: float = Field(default=0.1, ge=0, description="weight of RES")
    diversity: float = Field(default=0.0, ge=0, description="weight of DIV")
    residual_reduction: Literal["mean", "sum"] = Field(
        default="mean", description="mean or sum over the elements of a state in RES"
    )
    warmup: Share = Field(
        default=0.6, description="share of all steps after which weights are full"
    )

    def weights(self) -> LossWeights:
        """Return the weights as the model takes them."""
        return LossWeights(self.prototype_pull, self.point_pull, self.residual, self.diversity)


class DataRecipe(Section):
    """How text becomes training rows."""

    length: int = Field(default=256, ge=2, description="tokens of a training row")
    packing: Literal["auto", "packed", "padded"] = Field(
        default="auto",
        description="packed: documents share rows; padded: one piece of a document per row; "
        "auto: packed where the model keeps the documents of a row apart",
    )


class OptimizerRecipe(Section):
    """AdamW, with groups of its own for the head: another rate, no weight decay, own clipping."""

    learning_rate: float = Field(default=1e-3, gt=0, description="peak rate of the model")
    head_learning_rate: float = Field(
        default=3e-3, gt=0, description="peak rate of prototypes and scale"
    )
    weight_decay: float = Field(default=0.1, ge=0, description="of the model's matrices")
    warmup: Share = Field(default=0.05, description="share of all steps in which the rate rises")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine",
        description="how the rate falls after the warm-up: cosine, linear or constant",
    )
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="decay rates of the two moments"
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="gradient norm the model is clipped to"
    )
    head_max_grad_norm: float = Field(
        default=1.0, gt=0, description="gradient norm the head is clipped to"
    )


class EvaluationRecipe(Section):
    """Figures on held-out text."""

    every: int = Field(default=200, ge=0, description="steps between two evaluations; 0 for none")
    tokens: Count = Field(
        default=20_000, description="held-out tokens of an evaluation while training"
    )
    final_tokens: Count = Field(
        default=100_000, description="held-out tokens of the figures at the end"
    )


class CheckpointRecipe(Section):
    """Checkpoints to resume from, each a model directory of its own."""

    every: Count = Field(default=200, description="steps between two checkpoints")
    keep: Count = Field(default=2, description="how many of the newest are kept")


class LoggingRecipe(Section):
    """What is written while training."""

    every: Count = Field(default=10, description="steps that one line of the history averages over")
    tensorboard: bool = Field(default=True, description="whether to write OUT/tensorboard")


class Recipe(Section):
    """Everything that decides a training run, besides the corpus it names.

    Paths are relative to the current directory. ``batch_size`` rows make a micro-batch, and
    ``gradient_accumulation`` micro-batches a step.
    """

    corpus: AnyPath = Field(description="the corpus directory")
    out: AnyPath = Field(description="the model directory to write")
    seed: int = Field(default=0, ge=0, lt=2**32, description="of weights, row order and prototypes")
    model: dict[str, Any] = Field(
        description="preset: NAME, or model_type: NAME, and any key of its configuration"
    )
    head: HeadRecipe = HeadRecipe()
    losses: LossRecipe = LossRecipe()
    data: DataRecipe = DataRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    steps: Count = Field(description="optimizer steps")
    batch_size: Count = Field(default=8, description="rows of a micro-batch")
    gradient_accumulation: Count = Field(default=1, description="micro-batches of a step")
    precision: Literal["auto", "float32", "bf16"] = Field(
        default="auto", description="auto, float32 or bf16; auto is bf16 autocast where it is fast"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto, cpu or cuda; auto is a GPU where there is one"
    )
    evaluation: EvaluationRecipe = EvaluationRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    logging: LoggingRecipe = LoggingRecipe()

    @model_validator(mode="after")
    def _places_in_time(self) -> Recipe:
        if self.head.initialise_at_step >= self.steps:
            raise ValueError(
                f"head.initialise_at_step is {self.head.initialise_at_step}, and training has "
                f"{self.steps} steps; prototypes placed that late would not be trained"
            )
        return self

    @property
    def positions_per_step(self) -> int:
        """How many positions, padding among them, one step trains on."""
        return self.batch_size * self.gradient_accumulation * self.data.length

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain JSON values, defaults among them."""
        return self.model_dump(mode="json")
