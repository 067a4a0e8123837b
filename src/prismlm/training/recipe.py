"""What a training recipe says: every key, its type, its range and what it is for."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
    model_validator,
)

from prismlm.training.losses import LossWeights

Exempt = Literal["embeddings", "prototypes", "decays"]
EXEMPT: tuple[Exempt, ...] = get_args(Exempt)
Scalar: TypeAlias = bool | int | float | str
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
AnyPath = Annotated[Path, Field(strict=False)]
Beta = Annotated[float, Strict(), Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe: unknown keys and values of another type are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class HeadRecipe(Section):
    """The prototype head."""

    prototypes: Count = 2048
    """K, how many prototypes"""
    prototypes_per_token: Count = 16
    """k, how many a token may rely on; k ≤ K"""
    scale: Positive = 1.0
    """τ at the start, the factor on cosines"""
    initialise_at_step: int | None = Field(default=None, ge=0)
    """the step before which prototypes are placed; half of the steps if left out"""
    initialise: Literal["states", "kmeans", "random"] = "kmeans"
    """placed on hidden states, on centres of clusters of them, or left as drawn"""
    enabled: bool = True
    """false trains the plain model, for comparison"""
    detach: bool = True
    """train the head beside the model without touching the model"""
    position_share: float = Field(default=0.25, gt=0, le=1)
    """share of the positions that the head is trained on in each step"""
    anneal_from: Count | None = None
    """prototypes per token at first, falling to k; none for k always"""
    anneal_until: Share = 0.5
    """share of all steps after which k is reached"""
    revive_every: Whole = 0
    """steps without any use after which a prototype is put elsewhere; 0 for never"""
    revive_until: Share = 0.8
    """share of all steps after which none is revived any more"""

    @model_validator(mode="after")
    def _fits(self) -> HeadRecipe:
        if self.prototypes_per_token > self.prototypes:
            raise ValueError(
                f"prototypes_per_token is {self.prototypes_per_token}, more than the "
                f"{self.prototypes} prototypes; choose at most that many"
            )
        if self.anneal_from is not None and not (
            self.prototypes_per_token <= self.anneal_from <= self.prototypes
        ):
            raise ValueError(
                f"anneal_from is {self.anneal_from}; k falls from it, so choose from "
                f"{self.prototypes_per_token} (prototypes_per_token) to {self.prototypes}"
            )
        return self


class LossRecipe(Section):
    """Weights of the head's losses beside the cross-entropy.

    They rise linearly from 0 when the prototypes are placed to full at ``warmup``, or are full at
    once. R1, behind ``prototype_pull``, takes its minimum over the states of one micro-batch of
    one process.
    """

    prototype_pull: NonNegative = 0.01
    """weight of R1"""
    point_pull: NonNegative = 0.01
    """weight of R2"""
    residual: NonNegative = 1.0
    """weight of RES"""
    diversity: NonNegative = 0.0
    """weight of DIV"""
    prototype_only_ce: NonNegative = 0.0
    """weight of the cross-entropy that ẑ alone gives"""
    prototype_only_kl: NonNegative = 1.0
    """weight of KL(model, ẑ alone): the same without label noise"""
    kl_tokens: int = Field(default=1024, ge=4)
    """tokens that this KL is taken over in a step: three quarters the most frequent of the corpus,
    the others drawn anew; all of a vocabulary with no more"""
    residual_reduction: Literal["mean", "sum"] = "mean"
    """mean or sum over the elements of a state in RES"""
    warmup: Share = 0.0
    """share of all steps after which weights are full; 0 for at once"""

    def weights(self) -> LossWeights:
        """Return the weights as the model takes them."""
        return LossWeights(
            **{field.name: getattr(self, field.name) for field in fields(LossWeights)}
        )


class DataRecipe(Section):
    """How text becomes training rows."""

    length: int = Field(default=256, ge=2)
    """tokens of a training row"""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """packed: documents share rows; padded: one piece of a document per row; auto: packed where
    the model keeps the documents of a row apart"""
    documents: Count | None = None
    """how many of the training documents are used, drawn from the corpus alone, not from the seed;
    all if left out"""


class OptimizerRecipe(Section):
    """AdamW, with groups of its own for the head: another rate, no weight decay, own clipping.

    Vectors (norms, biases, temperatures, decays of channels) never decay.
    """

    learning_rate: Positive = 0.001
    """peak rate of the model"""
    learning_rate_length: Count | None = None
    """the length of rows that learning_rate is for: with others the model's peak is times
    √(data.length / it); the same for all lengths if left out"""
    head_learning_rate: Positive = 0.1
    """peak rate of prototypes and scale"""
    weight_decay: NonNegative = 0.1
    """of the model's matrices"""
    weight_decay_exempt: Annotated[tuple[Exempt, ...], Field(strict=False)] = Field(
        default=EXEMPT,
        description="matrices without weight decay: embeddings (a tied output embedding with "
        "them), the prototypes of mixers, and what decays are computed from",
    )
    warmup: Share = 0.05
    """share of all steps in which the rate rises"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the rate falls after the warm-up: cosine, linear or constant"""
    final_learning_rate_share: Share = 0.0
    """share of its peak that a cosine's rate ends at"""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="decay rates of the two moments"
    )
    max_grad_norm: Positive = 1.0
    """gradient norm the model is clipped to"""
    head_max_grad_norm: Positive = 1.0
    """gradient norm the head is clipped to"""

    @model_validator(mode="after")
    def _has_a_floor(self) -> OptimizerRecipe:
        if self.final_learning_rate_share and self.schedule != "cosine":
            raise ValueError(
                f"final_learning_rate_share is {self.final_learning_rate_share}, and the schedule "
                f"{self.schedule!r} ends where it always does; leave it out, or choose 'cosine'"
            )
        return self


class EvaluationRecipe(Section):
    """Figures on held-out text."""

    every: Whole = 200
    """steps between two evaluations; 0 for none"""
    tokens: Count = 20000
    """held-out tokens of an evaluation while training"""
    final_tokens: Count = 100000
    """held-out tokens of the figures at the end"""
    channel_tokens: Whole = 8192
    """held-out tokens that the gates of prototype mixers are read on; 0 for none"""
    attention_head_tokens: Whole = 8192
    """held-out tokens that signal and noise heads are read on; 0 for none"""


class CheckpointRecipe(Section):
    """Checkpoints to resume from, each a model directory of its own."""

    every: Count = 200
    """steps between two checkpoints"""
    keep: Count = 2
    """how many of the newest are kept"""


class LoggingRecipe(Section):
    """What is written while training."""

    every: Count = 10
    """steps between two lines of the history: losses are means over them, the gradient's norm is
    that of the last alone"""
    tensorboard: bool = True
    """whether to write OUT/tensorboard"""
    report_to: Annotated[tuple[Literal["wandb", "mlflow", "trackio"], ...], Field(strict=False)] = (
        Field(default=(), description="where else to: wandb, mlflow, trackio; each as it is set up")
    )


class NoiseWeightRecipe(Section):
    """λ, what the noise heads of signal/noise attention count; it follows a cosine.

    Two equal values keep it fixed, two zeros leave the noise heads out.
    """

    initial: Share = 0.01
    """in the first step"""
    final: Share = 0.1
    """in the last step"""


class UncertaintyFeedbackRecipe(Section):
    """The entropy of the last prediction, fed back to the next input."""

    enabled: bool = False
    """whether the model is trained with it"""
    levels: int = Field(default=65536, ge=2)
    """how many codes there are"""
    rows: int | None = Field(default=64, ge=2)
    """of the table, interpolated between, at most one a code; null for one a code, with which
    rounding alone changes the vector of 65,536 levels by 130 %"""
    deviation: float | None = Field(default=0.0, ge=0, allow_inf_nan=False)
    """of the table at the start; null for the model's initializer_range"""
    passes: Count = 2
    """forward passes of a step; 1 feeds the neutral code alone, so that only its row learns"""
    signal: Literal["own", "shuffled", "previous_batch"] = "own"
    """own, or in training another token's code as a control: shuffled over the batch, or
    previous_batch, as the source's pseudo-code trains (with passes 1)"""

    @model_validator(mode="after")
    def _fits(self) -> UncertaintyFeedbackRecipe:
        if self.signal == "shuffled" and self.passes == 1:
            raise ValueError(
                "signal is shuffled, and with passes 1 all codes are the neutral one, which looks "
                "the same in any order; choose passes: 2"
            )
        return self


class Range(Section):
    """A number from ``low`` to ``high``, both included; with ``log`` factors are equally likely."""

    low: int | float
    high: int | float
    log: bool = False

    @model_validator(mode="after")
    def _holds_numbers(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"it is empty: low is {self.low} and high {self.high}; low < high")
        if self.log and self.low <= 0:
            raise ValueError(f"low is {self.low}; with log: true it has to be above 0")
        return self


def _all_different(choices: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    if len(set(map(repr, choices))) < len(choices):
        raise ValueError(f"the choices {list(choices)} are to be all different")
    return choices


Choices = Annotated[
    tuple[Scalar, ...], Field(strict=False, min_length=2), AfterValidator(_all_different)
]
# What an entry of search.space is: {low: 1e-4, high: 1e-2, log: true}, or a list of choices.
Dimension = Annotated[
    Annotated[Range, Tag("range")] | Annotated[Choices, Tag("choices")],
    Discriminator(lambda entry: "range" if isinstance(entry, (dict, Range)) else "choices"),
]


class SearchRecipe(Section):
    """A search for hyper-parameters, for ``prismlm train RECIPE --search``.

    The defaults are the setting of the source, ProtoT, §4.
    """

    trials: Count = 50
    """combinations tried, failed ones among them"""
    startup_trials: Whole = 15
    """completed ones, drawn at random, before the sampler is asked"""
    seeds: Count = 3
    """runs averaged over: the recipe's seed and the next"""
    sampler: Literal["botorch", "tpe", "random"] = "botorch"
    """what chooses: Gaussian processes, Parzen trees or chance"""
    space: dict[str, Dimension] = Field(
        default={
            "batch_size": (32, 64, 128),
            "optimizer.learning_rate": Range(low=3e-05, high=0.03, log=True),
        },
        min_length=1,
    )
    """recipe keys: a list of choices, or a range: low, high and log"""


class Recipe(Section):
    """Everything that decides a training run, besides the corpus it names.

    Paths are relative to the current directory. ``batch_size`` rows make a micro-batch, and
    ``gradient_accumulation`` micro-batches of each process a step.
    """

    corpus: AnyPath
    """the corpus directory"""
    out: AnyPath
    """the model directory to write"""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """of weights, row order and prototypes"""
    model: dict[str, Any]
    """preset: NAME, or model_type: NAME, and any key of its configuration"""
    head: HeadRecipe = HeadRecipe()
    losses: LossRecipe = LossRecipe()
    data: DataRecipe = DataRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    noise_weight: NoiseWeightRecipe | None = None
    """λ of signal/noise attention; from 0.01 to 0.1 if left out, and only for it"""
    uncertainty_feedback: UncertaintyFeedbackRecipe = UncertaintyFeedbackRecipe()
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """after the token embeddings, on what blocks add and in the feed-forward network, of Llama-
    like and Mamba models while they train; our own have model.dropout"""
    steps: Whole = 0
    """optimizer steps; follows from epochs if left out"""
    epochs: Count | None = None
    """in place of steps: how often all training rows are seen"""
    batch_size: Count = 8
    """rows of a process's micro-batch"""
    gradient_accumulation: Count = 1
    """micro-batches of each process in a step"""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """auto, float32 or bf16; auto is bf16 autocast where it is fast"""
    parallel: Literal["auto", "ddp", "fsdp2"] = "auto"
    """how several processes share the model; auto is ddp"""
    gradient_checkpointing: bool = False
    """compute activations again instead of keeping them"""
    compile: bool = False
    """compile the model's blocks"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto, cpu or cuda; auto is a GPU where there is one"""
    evaluation: EvaluationRecipe = EvaluationRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    logging: LoggingRecipe = LoggingRecipe()
    # What is searched decides nothing about a run, so the recipe that a run notes is without it.
    search: SearchRecipe = Field(default=SearchRecipe(), exclude=True)

    @model_validator(mode="after")
    def _places_in_time(self) -> Recipe:
        if bool(self.steps) == (self.epochs is not None):
            raise ValueError(
                f"steps is {self.steps or 'not given'} and epochs is "
                f"{self.epochs or 'not given'}; give one of them"
            )
        if self.steps:
            self.check_placing()
        return self

    def check_placing(self) -> None:
        """Raise ValueError if prototypes would be placed after the last step."""
        if self.placing_step >= self.steps:
            raise ValueError(
                f"head.initialise_at_step is {self.placing_step}, and training has "
                f"{self.steps} steps; prototypes placed that late would not be trained"
            )

    @property
    def placing_step(self) -> int:
        """The step before which the prototypes are placed."""
        step = self.head.initialise_at_step
        return self.steps // 2 if step is None else step

    @property
    def peak_learning_rate(self) -> float:
        """The model's peak rate, at this length of rows."""
        rate, length = self.optimizer.learning_rate, self.optimizer.learning_rate_length
        return rate if length is None else rate * math.sqrt(self.data.length / length)

    @property
    def positions_per_step(self) -> int:
        """How many positions, padding among them, one step of one process trains on."""
        return self.batch_size * self.gradient_accumulation * self.data.length

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain JSON values, defaults among them, ``search`` left out."""
        return self.model_dump(mode="json")
