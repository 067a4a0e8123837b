"""From a recipe to a trainer: corpus, rows, model, head, callbacks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import TrainerCallback, TrainingArguments

from prismlm.allocator import keep_freed_memory
from prismlm.corpus.packing import PackedDataset, pack
from prismlm.corpus.store import Corpus
from prismlm.errors import InputError
from prismlm.layers import PrototypeHead
from prismlm.models.presets import build_config, build_model
from prismlm.models.sidecar import weight_of
from prismlm.models.uncertainty_feedback import attach_uncertainty
from prismlm.training import distributed, parallel
from prismlm.training.block_dropout import add_dropout
from prismlm.training.callbacks import EvaluateEvery, HeadSchedule
from prismlm.training.device import device_of, resolved, versions
from prismlm.training.evaluation import HeldOut
from prismlm.training.isolation import keeps_documents_apart
from prismlm.training.model import PrismForCausalLM
from prismlm.training.noise_weight import check_noise_weight_of, noise_weight_callbacks
from prismlm.training.recipe import Recipe
from prismlm.training.revival import ReviveUnused, Usage
from prismlm.training.trainer import PrismTrainer
from prismlm.training.training_signal import set_training_signal

AnyTrainer = TypeVar("AnyTrainer", bound=PrismTrainer)
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
# A share of each group's own peak: the model's and the head's.
COSINE_WITH_FLOOR = "cosine_with_min_lr"


@dataclass(frozen=True)
class Prepared:
    """What a run needs, built from a recipe.

    Attributes:
        recipe: the recipe.
        corpus: the opened corpus.
        rows: its packed training rows.
        heldout: its held-out text.
        model: the model with its head, prototypes not placed yet.
    """

    recipe: Recipe
    corpus: Corpus
    rows: PackedDataset
    heldout: HeldOut
    model: PrismForCausalLM

    def provenance(self, *, steps: int, tokens: int) -> dict[str, Any]:
        """Return how the model was made, as it stands in ``prismlm.json``."""
        return {
            "recipe": self.recipe.to_dict(),
            "resolved": resolved(self.recipe),
            "corpus": {"name": self.corpus.name, "fingerprint": self.corpus.fingerprint},
            "seed": self.recipe.seed,
            "steps": steps,
            "tokens": tokens,
            "head_placed": self.model.placed,
            "versions": versions("torch", "transformers"),
        }


def prepare(recipe: Recipe) -> Prepared:
    """Open the corpus, build the model and lay out its training rows.

    Raises:
        InputError: the device is not there; the corpus is missing, of another vocabulary than
            the model, or too small; documents that share a row would see each other.
        FormatError: the corpus is damaged.
    """
    device_of(recipe)
    corpus = Corpus.open(recipe.corpus)
    backbone = build_backbone(recipe, corpus)
    share_rows = recipe.data.packing != "padded" and keeps_documents_apart(backbone)
    if recipe.data.packing == "packed" and not share_rows:
        raise InputError(
            f"models of type {backbone.config.model_type!r} let a document see the one before it "
            "in the same training row: they do not start anew where position ids do. Set "
            "data.packing to padded or auto, so that every row holds one document."
        )
    rows = training_rows(recipe, corpus, share_rows=share_rows)
    heldout = HeldOut(corpus, recipe.data.length, recipe.seed)
    heldout.batches(1)
    recipe = with_steps(recipe, rows)
    return Prepared(recipe, corpus, rows, heldout, attach_head(recipe, backbone))


def with_steps(recipe: Recipe, rows: PackedDataset) -> Recipe:
    """Return a recipe whose steps are known: those of its epochs, if it has none.

    The last step of an epoch takes the micro-batches that are left. Rows that do not fill one in
    every process are not seen in that epoch.

    Raises:
        InputError: prototypes would be placed after the last step.
    """
    if recipe.steps or recipe.epochs is None:
        return recipe
    micro_batches = len(rows) // (recipe.batch_size * distributed.world_size())
    steps = recipe.epochs * math.ceil(micro_batches / recipe.gradient_accumulation)
    found = recipe.model_copy(update={"steps": steps})
    try:
        found.check_placing()
    except ValueError as error:
        raise InputError(f"{error}.") from None
    return found


def training_rows(recipe: Recipe, corpus: Corpus, *, share_rows: bool) -> PackedDataset:
    """Return the training rows of a recipe.

    Raises:
        InputError: there is too little text.
    """
    data = recipe.data
    documents = chosen_documents(corpus, data.documents)
    rows = pack(corpus, documents, data.length, recipe.seed, share_rows=share_rows)
    needed = recipe.batch_size * recipe.gradient_accumulation * distributed.world_size()
    if len(rows) < needed:
        raise InputError(
            f"the corpus {corpus.name!r} fills {len(rows)} rows of {data.length} tokens, "
            f"and one step takes {needed}. Use more text, or lower batch_size, "
            "gradient_accumulation or data.length."
        )
    if rows.num_tokens < recipe.head.prototypes:
        raise InputError(
            f"the corpus {corpus.name!r} has {rows.num_tokens} positions to train on, and "
            f"{recipe.head.prototypes} prototypes are to be placed on different ones. Use more "
            "text, or lower head.prototypes."
        )
    return rows


def chosen_documents(corpus: Corpus, count: int | None) -> np.ndarray:
    """Return the numbers of training documents: all, or so many drawn alike whatever the seed.

    Raises:
        InputError: there are fewer.
    """
    documents = corpus.split("train")
    if count is None:
        return documents
    if count > len(documents):
        raise InputError(
            f"data.documents is {count}, and the corpus {corpus.name!r} has {len(documents)} to "
            "train on. Use more text, or lower it."
        )
    return np.sort(np.random.default_rng(0).permutation(documents)[:count])


def build_backbone(recipe: Recipe, corpus: Corpus) -> Any:
    """Build the decoder of a recipe; weights are drawn from its seed.

    Raises:
        InputError: the tokenizer gives ids that the model has no embedding for, λ is set for
            a model that has none or where training does not look, or dropout for a model in
            which it is not known where it goes.
    """
    vocab_size = len(corpus.tokenizer)
    config = build_config(dict(recipe.model), vocab_size, corpus.eos_token_id)
    if getattr(config, "vocab_size", vocab_size) < vocab_size:
        raise InputError(
            f"the corpus {corpus.name!r} has {vocab_size} tokens, and the model only "
            f"{config.vocab_size}. Build the corpus with this model's tokenizer."
        )
    torch.manual_seed(recipe.seed)
    model = build_model(config)
    check_noise_weight_of(recipe, model)
    add_dropout(model, recipe.dropout)
    return model


def attach_head(recipe: Recipe, backbone: Any) -> PrismForCausalLM:
    """Put head and feedback of a recipe beside its decoder, prototypes not placed yet."""
    settings = recipe.uncertainty_feedback
    if settings.enabled:
        feedback = attach_uncertainty(
            backbone,
            settings.levels,
            rows=settings.rows,
            deviation=settings.deviation,
            passes=settings.passes,
        )
        # From a generator of its own, as the head.
        feedback.embedding.reset_parameters(torch.Generator().manual_seed(recipe.seed))
    return PrismForCausalLM(
        backbone,
        head_of(recipe, backbone),
        weights=recipe.losses.weights(),
        detach=recipe.head.detach,
        residual_reduction=recipe.losses.residual_reduction,
        position_share=recipe.head.position_share,
        placed=False,
    )


def head_of(recipe: Recipe, backbone: Any) -> PrototypeHead:
    """Return a recipe's head for a decoder, drawn at random from a generator of its own."""
    settings = recipe.head
    head = PrototypeHead(
        weight_of(backbone).shape[1],
        settings.prototypes,
        settings.prototypes_per_token,
        scale=settings.scale,
    )
    head.reset_parameters(torch.Generator().manual_seed(recipe.seed))
    return head


def build_trainer(
    prepared: Prepared,
    directory: Path,
    callbacks: list[TrainerCallback],
    kind: type[AnyTrainer] = PrismTrainer,
) -> AnyTrainer:
    """Return a trainer that writes its checkpoints under ``directory``."""
    recipe = prepared.recipe
    if device_of(recipe) == "cpu":
        keep_freed_memory()
    if recipe.gradient_checkpointing:
        parallel.recompute_activations(prepared.model.model)
    if recipe.compile:
        parallel.compile_blocks(prepared.model.model)
    own = head_callbacks(prepared) + noise_weight_callbacks(recipe, prepared.model.model)
    own += set_training_signal(recipe, prepared.model.uncertainty)
    if recipe.evaluation.every:
        own.append(EvaluateEvery(recipe.evaluation.every))
    arguments = training_arguments(recipe, directory / CHECKPOINTS)
    return kind(prepared, arguments, [*own, *callbacks])


def head_callbacks(prepared: Prepared) -> list[TrainerCallback]:
    """Return what places, schedules and revives the prototypes; nothing for a plain model."""
    recipe, head = prepared.recipe, prepared.recipe.head
    if not head.enabled:
        return []
    found: list[TrainerCallback] = [HeadSchedule(prepared.rows, recipe)]
    if head.revive_every:
        prepared.model.usage = Usage(head.prototypes)
        found.append(ReviveUnused(recipe))
    return found


def training_arguments(recipe: Recipe, directory: Path) -> TrainingArguments:
    """Return Trainer's arguments for a recipe."""
    optimizer = recipe.optimizer
    schedule, floor = SCHEDULES[optimizer.schedule], optimizer.final_learning_rate_share
    if floor:
        schedule = COSINE_WITH_FLOOR
    return TrainingArguments(
        output_dir=str(directory),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation,
        learning_rate=recipe.peak_learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        max_grad_norm=optimizer.max_grad_norm,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs={"min_lr_rate": floor} if floor else None,
        warmup_steps=round(optimizer.warmup * recipe.steps),
        seed=recipe.seed,
        data_seed=recipe.seed,
        logging_steps=recipe.logging.every,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=recipe.checkpoint.every,
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_drop_last=True,
        # accelerate leaves processes without GPUs alone unless told so.
        use_cpu=device_of(recipe) == "cpu",
        dataloader_pin_memory=device_of(recipe) == "cuda",
        # The saved configuration keeps its cache; the forward pass in training asks for none.
        use_cache=True,
    )
