"""Training recipes: every key with its type, range, default and meaning; reading from YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    ValidationError,
    model_validator,
)

from prismlm.errors import InputError, suggest
from prismlm.files import read_text

Exempt = Literal["embeddings", "prototypes", "decays"]
EXEMPT: tuple[Exempt, ...] = get_args(Exempt)
# Values of `parallel` with which no process holds the whole model.
SHARDED = ("fsdp2", "hsdp")
Scalar: TypeAlias = bool | int | float | str
Fraction = Annotated[float, Field(ge=0, le=1)]
FROM_TOKENIZER = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}
RecipePath = Annotated[Path, Field(strict=False)]
Beta = Annotated[float, Strict(), Field(ge=0, lt=1)]
Tracker = Literal["wandb", "mlflow", "trackio"]


class Section(BaseModel):
    """A section of a recipe; unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class HeadRecipe(Section):
    """The prototype head."""

    prototypes: PositiveInt = 2048  # K, the number of prototypes
    prototypes_per_token: PositiveInt = 16  # k, the number of prototypes per token; k ≤ K
    scale: PositiveFloat = 1.0  # initial τ, the factor on cosines
    initialise_at_step: int | None = Field(default=None, ge=0)  # by default half of the steps
    # from hidden states, from cluster centres of hidden states, or at random
    initialise: Literal["states", "kmeans", "random"] = "kmeans"
    enabled: bool = True  # false trains the model without a head, for comparison
    detach: bool = True  # keep the gradients of the head out of the model
    # of a step's positions, that the head is trained on
    position_share: float = Field(default=0.25, gt=0, le=1)

    @model_validator(mode="after")
    def _fits(self) -> HeadRecipe:
        if self.prototypes_per_token > self.prototypes:
            raise ValueError(
                f"prototypes_per_token is {self.prototypes_per_token}: expected at most "
                f"prototypes, {self.prototypes}"
            )
        return self


class LossWeights(Section):
    """Weights of the head's losses, which are added to the cross-entropy."""

    prototype_pull: NonNegativeFloat = 0.01  # R1, which pulls every prototype to its nearest state
    point_pull: NonNegativeFloat = 0.01  # R2, which pulls every state to its nearest prototype
    residual: NonNegativeFloat = 1.0  # RES, ‖z − ẑ‖²
    diversity: NonNegativeFloat = 0.0  # DIV, the mean squared cosine between prototypes
    prototype_only_ce: NonNegativeFloat = 0.0  # cross-entropy of the prediction from ẑ alone
    prototype_only_kl: NonNegativeFloat = 1.0  # KL(model ‖ prediction from ẑ alone)


class LossRecipe(LossWeights):
    """Losses of the head, whose weights rise linearly from the initialisation to ``warmup``."""

    # vocabulary sample for this KL: three quarters are the most frequent tokens of the corpus, the
    # rest is redrawn in each step; the whole vocabulary if it is no larger
    kl_tokens: int = Field(default=1024, ge=4)
    residual_reduction: Literal["mean", "sum"] = "mean"  # of RES, over the elements of a state
    warmup: Fraction = 0.0  # fraction of the steps after which weights are full


class DataRecipe(Section):
    """How text becomes training rows."""

    length: int = Field(default=256, ge=2)  # tokens per training row
    # packed: documents share rows; padded: one per row; auto: packed if the model allows it
    packing: Literal["auto", "packed", "padded"] = "auto"
    # number of training documents to use, the same subset for every seed; by default all
    documents: PositiveInt | None = None


class OptimizerRecipe(Section):
    """AdamW; the head has its own learning rate and clipping, and no weight decay.

    Vectors (norms, biases, temperatures, channel decays) have no weight decay.
    """

    learning_rate: PositiveFloat = 0.001  # peak learning rate of the model
    # row length that learning_rate is for; it is scaled by √(data.length / this length)
    learning_rate_length: PositiveInt | None = None
    head_learning_rate: PositiveFloat = 0.1  # peak learning rate of prototypes and scale
    weight_decay: NonNegativeFloat = 0.1  # weight decay of the model's matrices
    # matrices without weight decay: embeddings (and a tied output embedding), prototypes of mixers,
    # and the matrices that decays are computed from
    weight_decay_exempt: Annotated[tuple[Exempt, ...], Field(strict=False)] = EXEMPT
    warmup: Fraction = 0.05  # fraction of the steps over which the learning rate rises
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after the warm-up
    final_learning_rate_share: Fraction = 0.0  # of the peak, where a cosine ends
    # decay rates of AdamW's two moments
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    max_grad_norm: PositiveFloat = 1.0  # maximum gradient norm of the model
    head_max_grad_norm: PositiveFloat = 1.0  # maximum gradient norm of the head

    @model_validator(mode="after")
    def _has_a_floor(self) -> OptimizerRecipe:
        if self.final_learning_rate_share and self.schedule != "cosine":
            raise ValueError(
                f"final_learning_rate_share is for the schedule 'cosine', not {self.schedule!r}"
            )
        return self


class EvaluationRecipe(Section):
    """Evaluation on held-out text."""

    every: NonNegativeInt = 200  # steps between evaluations; 0 for none
    tokens: PositiveInt = 20000  # held-out tokens per evaluation during training
    final_tokens: PositiveInt = 100000  # held-out tokens of the final evaluation


class CheckpointRecipe(Section):
    """Checkpoints to resume from: model directories, or shards with parallel: fsdp2 or hsdp."""

    every: PositiveInt = 200  # steps between checkpoints
    keep: PositiveInt = 2  # number of checkpoints to keep, the newest ones
    asynchronous: bool = False  # write shards while training continues, from a copy in CPU memory


class LoggingRecipe(Section):
    """Logging during training."""

    every: PositiveInt = 10  # steps between log rows, with means of the losses
    tensorboard: bool = True  # whether to write OUT/tensorboard
    # other trackers, configured beforehand: wandb, mlflow, trackio
    report_to: Annotated[tuple[Tracker, ...], Field(strict=False)] = ()


class NoiseWeightRecipe(Section):
    """λ, the weight of the noise heads of signal/noise attention, on a cosine schedule.

    Two equal values keep it constant; two zeros disable the noise heads.
    """

    initial: Fraction = 0.01  # λ in the first step
    final: Fraction = 0.1  # λ in the last step


class UncertaintyFeedbackRecipe(Section):
    """Uncertainty feedback: the entropy of each prediction is fed back to the next input."""

    enabled: bool = False  # whether to train with uncertainty feedback
    levels: int = Field(default=65536, ge=2)  # number of uncertainty codes
    # rows of the embedding table, interpolated between; null for one row per code
    rows: int | None = Field(default=64, ge=2)
    # initial standard deviation of the table; null for the model's initializer_range
    deviation: float | None = Field(default=0.0, ge=0, allow_inf_nan=False)
    passes: PositiveInt = 2  # forward passes per step; with 1, only the neutral code is fed back
    # own, or a control used in training only: shuffled (codes permuted over the batch) or
    # previous_batch (as in the source's pseudo-code, with passes: 1)
    signal: Literal["own", "shuffled", "previous_batch"] = "own"

    @model_validator(mode="after")
    def _fits(self) -> UncertaintyFeedbackRecipe:
        if self.signal == "shuffled" and self.passes == 1:
            raise ValueError("with passes: 1 there is one code, which cannot be shuffled")
        return self


class Range(Section):
    """A number from ``low`` to ``high``, both included; log-uniform with ``log``."""

    low: int | float
    high: int | float
    log: bool = False

    @model_validator(mode="after")
    def _is_not_empty(self) -> Range:
        if self.low >= self.high or (self.log and self.low <= 0):
            raise ValueError(f"{self.low} to {self.high} is empty, or has no logarithm")
        return self


# An entry of search.space: {low: 1e-4, high: 1e-2, log: true}, or a list of choices.
Dimension = Range | Annotated[tuple[Scalar, ...], Field(strict=False, min_length=1)]


class SearchRecipe(Section):
    """A hyper-parameter search (``prismlm train RECIPE --search``); defaults as in ProtoT, §4."""

    trials: PositiveInt = 50  # number of trials, including failed ones
    startup_trials: NonNegativeInt = 15  # random trials before the sampler takes over
    seeds: PositiveInt = 3  # runs per trial, with the seeds seed, seed + 1, …
    # Gaussian processes, tree-structured Parzen estimators, or random search
    sampler: Literal["botorch", "tpe", "random"] = "botorch"
    # URL of a database of Optuna for the study, such as sqlite:///study.db; by default a file
    storage: str | None = None
    # by recipe key: a list of choices, or a range (low, high and log)
    space: dict[str, Dimension] = Field(
        default={
            "batch_size": (32, 64, 128),
            "optimizer.learning_rate": Range(low=3e-05, high=0.03, log=True),
        },
        min_length=1,
    )


class Recipe(Section):
    """All settings of a training run; paths are relative to the current directory."""

    corpus: RecipePath  # the corpus directory
    out: RecipePath  # the model directory to write
    seed: int = Field(default=0, ge=0, lt=2**32)  # random seed of weights, row order and prototypes
    model: dict[str, Any]  # preset: NAME or model_type: NAME, and any keys of that configuration
    head: HeadRecipe = HeadRecipe()
    losses: LossRecipe = LossRecipe()
    data: DataRecipe = DataRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    noise_weight: NoiseWeightRecipe | None = None  # λ of signal/noise attention
    uncertainty_feedback: UncertaintyFeedbackRecipe = UncertaintyFeedbackRecipe()
    # dropout of Llama-like and Mamba models; prismlm's own models have model.dropout
    dropout: float = Field(default=0.0, ge=0, lt=1)
    steps: NonNegativeInt = 0  # optimizer steps; set either steps or epochs
    epochs: PositiveInt | None = None  # passes over the training rows, instead of steps
    batch_size: PositiveInt = 8  # rows per micro-batch and process
    gradient_accumulation: PositiveInt = 1  # micro-batches per step and process
    precision: Literal["auto", "float32", "bf16"] = "auto"  # auto is bf16 autocast where it is fast
    # how several processes train one model: auto (ddp), ddp, fsdp2 (sharded), or hsdp (sharded
    # within groups of processes, each of which has a copy)
    parallel: Literal["auto", "ddp", "fsdp2", "hsdp"] = "auto"
    shard_processes: PositiveInt | None = None  # of a group of hsdp; by default of a machine
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    compile: bool = False  # compile the model's blocks
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto is a GPU if there is one
    evaluation: EvaluationRecipe = EvaluationRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    logging: LoggingRecipe = LoggingRecipe()
    # Excluded from the recipe stored with a run, which it does not affect.
    search: SearchRecipe = Field(default=SearchRecipe(), exclude=True)

    @model_validator(mode="after")
    def _has_a_length(self) -> Recipe:
        if bool(self.steps) == (self.epochs is not None):
            raise ValueError("set either steps or epochs")
        if self.steps:
            self.check_initialisation_step()
        if self.checkpoint.asynchronous and self.parallel not in SHARDED:
            raise ValueError(
                f"checkpoint.asynchronous is for parallel: {' or '.join(SHARDED)}, whose "
                f"checkpoints are sharded, not {self.parallel!r}"
            )
        if self.shard_processes is not None and self.parallel != "hsdp":
            raise ValueError(f"shard_processes is for parallel: hsdp, not {self.parallel!r}")
        return self

    def check_initialisation_step(self) -> None:
        """Raise InputError if prototypes would be initialised after the last step."""
        if self.head.enabled and self.initialisation_step >= self.steps:
            raise InputError(
                f"head.initialise_at_step is {self.initialisation_step}, but there are only "
                f"{self.steps} steps, so that the prototypes would not be trained; lower it."
            )

    @property
    def initialisation_step(self) -> int:
        """The step before which the prototypes are initialised."""
        step = self.head.initialise_at_step
        return self.steps // 2 if step is None else step

    @property
    def peak_learning_rate(self) -> float:
        """The model's peak learning rate for rows of this length."""
        rate, length = self.optimizer.learning_rate, self.optimizer.learning_rate_length
        return rate if length is None else rate * math.sqrt(self.data.length / length)

    @property
    def positions_per_step(self) -> int:
        """The positions per step and process, including padding."""
        return self.batch_size * self.gradient_accumulation * self.data.length

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON values, with defaults and without ``search``."""
        return self.model_dump(mode="json")


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe; ``a.b=value`` overrides, parsed as YAML, replace single values.

    InputError names the file and the dotted key.
    """
    settings = _parse(read_text(path), str(path))
    if not isinstance(settings, dict):
        raise InputError(f"{path} has no keys such as corpus, out, model and steps.")
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise InputError(f"--set {override}: expected KEY=VALUE, such as head.prototypes=512.")
        source = f"--set {override}"
        set_value(settings, key.strip(), _parse(text, source), source)
    return build_recipe(settings, str(path))


def build_recipe(settings: dict[str, Any], source: str = "recipe") -> Recipe:
    """Build a recipe from plain values; InputError names ``source`` and the dotted key."""
    try:
        recipe = Recipe.model_validate(settings)
    except ValidationError as error:
        messages = [f"{source}: {_explain(item)}" for item in error.errors()]
        raise InputError("\n".join(messages)) from None
    _check_model(recipe, source)
    return recipe


def _explain(error: Any) -> str:
    """Turn one of pydantic's errors into a sentence that names the key."""
    # Without the names that pydantic gives to the kinds of an entry of search.space.
    key = ".".join(part for part in map(str, error["loc"]) if "[" not in part)
    if error["type"] == "extra_forbidden":
        return f"there is no setting {key!r}.{suggest(key, [*_keys(Recipe)])}"
    if error["type"] == "value_error":
        return f"{key + ': ' if key else ''}{error['ctx']['error']}".rstrip(".") + "."
    given = "missing" if error["type"] == "missing" else repr(error["input"])
    return f"{key} is {given}: {error['msg']}."


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, f"{prefix}{name}.")


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key."""
    values: dict[str, Any] = {}
    for key, item in value.items():
        nested = isinstance(item, dict)
        values |= flat(item, f"{prefix}{key}.") if nested else {prefix + key: item}
    return values


def _check_model(recipe: Recipe, source: str) -> None:
    """Build the model without weights, so that a wrong key fails before the corpus is packed."""
    import torch

    from prismlm.models.presets import build_config, build_model

    for key in recipe.model.keys() & FROM_TOKENIZER:
        raise InputError(f"{source}: model.{key} comes from the corpus's tokenizer. Leave it out.")
    try:
        config = build_config(dict(recipe.model), vocab_size=64, eos_token_id=0)
        with torch.device("meta"):
            build_model(config)
    except Exception as error:  # configurations of other families raise anything
        raise InputError(f"{source}: model cannot be built: {error}") from error
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and recipe.data.length > positions:
        raise InputError(
            f"{source}: data.length is {recipe.data.length}, but the model has only {positions} "
            "positions. Lower it, or raise model.max_position_embeddings."
        )


class _StrictLoader(yaml.SafeLoader):
    """YAML without two traps: duplicate keys, and 1e-3 parsed as a string."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names: list[Any] = []
        for key, _ in node.value:
            if key.value in names:
                message = f"the key {key.value!r} is given twice"
                raise yaml.MarkedYAMLError(None, None, message, key.start_mark)
            names.append(key.value)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{source} is not valid YAML: {error}.") from error


def set_value(settings: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Set a value by its dotted key; InputError names ``source`` and what is not a section."""
    *sections, name = key.split(".")
    section: Any = settings
    for part in sections:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise InputError(f"{source}: {part} is a single value, not a section.")
    section[name] = value
