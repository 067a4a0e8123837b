"""Hugging Face's Trainer with a head that is optimised, clipped, logged and saved apart."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from prismlm.allocator import keep_freed_memory
from prismlm.corpus.packing import IGNORED
from prismlm.corpus.windows import WindowBatch
from prismlm.errors import DivergenceError, FormatError, NotFiniteError
from prismlm.explain.quality import HeadQuality, measure_quality
from prismlm.files import discard, room_to_write, share
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.models.device import uses_bf16
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar
from prismlm.models.uncertainty_feedback import TABLE
from prismlm.training import parallel
from prismlm.training.layer_logs import LayerLog
from prismlm.training.model import PrismForCausalLM
from prismlm.training.noise_weight import NoiseWeightSchedule, noise_weight_of
from prismlm.training.prototypes import HeadSchedule, ReviveUnused
from prismlm.training.recipe import NoiseWeightRecipe, Recipe
from prismlm.training.setup import Prepared, decayed_names, device_of
from prismlm.training.training_signal import set_training_signal

CHECKPOINTS = "checkpoints"
# Where one is written, before it gets its place.
SAVING = ".saving"
STATE_FILE, TRAINER_STATE_FILE = "prismlm_training_state.pt", "trainer_state.json"
# Bytes per parameter: its float32 weight and AdamW's two moments.
BYTES_PER_PARAMETER = 12
# The share that a cosine may end at is of each group's own peak: the model's and the head's.
SCHEDULES = {
    "cosine": "cosine_with_min_lr",
    "linear": "linear",
    "constant": "constant_with_warmup",
}
REMEDY = (
    "--resume starts again from there, to the same end unless the cause was outside of the run. "
    "Otherwise train into another out with a lower optimizer.learning_rate or "
    "optimizer.head_learning_rate, smaller weights under losses, or precision: float32."
)


class PrismTrainer(Trainer):
    """Train a :class:`PrismForCausalLM`.

    Beside what Trainer does: the head has a learning rate of its own, no weight decay and its own
    clipping, so that with ``detach`` the decoder's weights are bit for bit those of a run without
    one; a checkpoint is a model directory, whole or absent; logs hold each part of the loss.

    A step's loss is the mean over all of its predictions, however its rows are split into
    micro-batches and processes: each micro-batch counts by its labels. R1 and DIV are of single
    micro-batches, and R2, RES and losses over a share of the positions nearly so.

    A step waits for nothing that the device computes: whether losses were finite is looked at with
    the next log.

    Args:
        prepared: what is trained on what; its recipe says how.
        directory: of the run; its checkpoints go to ``checkpoints`` in it.
        callbacks: beside those that the recipe asks for.

    Attributes:
        layer_log: measures the layers at evaluations.
    """

    model: PrismForCausalLM

    def __init__(
        self, prepared: Prepared, directory: Path, callbacks: Iterable[TrainerCallback] = ()
    ) -> None:
        recipe, model = prepared.recipe, prepared.model
        device = device_of(recipe)
        if device == "cpu":
            keep_freed_memory()
        self.layer_log = LayerLog(prepared)
        if recipe.gradient_checkpointing:
            parallel.recompute_activations(model.model)
        if recipe.compile:
            parallel.compile_blocks(model.model)
        self.prepared = prepared
        self.bf16_autocast = uses_bf16(recipe.precision, device)
        self._checkpoints = directory / CHECKPOINTS
        self._parts: dict[str, list[Tensor]] = {}
        self._shares: list[Tensor] = []
        self._tokens = torch.zeros((), dtype=torch.int64)
        self._head_norm: Tensor | None = None
        args = training_arguments(recipe, self._checkpoints)
        # Trainer would otherwise wrap the model in nn.DataParallel, which no hook survives.
        args._n_gpu = min(args.n_gpu, 1)
        super().__init__(
            model=model,
            args=args,
            train_dataset=prepared.rows,  # pyright: ignore[reportArgumentType]
            processing_class=prepared.corpus.tokenizer,
            data_collator=default_collate,
            callbacks=[*_callbacks(prepared), *callbacks],
        )
        self.remove_callback(PrinterCallback)
        self.spread = parallel.chosen(recipe.parallel)
        # Trainer then counts the labels of a step, and leaves the division to compute_loss.
        self.model_accepts_loss_kwargs = True

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.spread == "fsdp2":
            # The optimizer, which Trainer makes first, has to hold the shards.
            parallel.shard(self.model.model, self.args.device)
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.spread != "none":
            # Dropout differs between the processes; a checkpoint's generators replace this.
            torch.manual_seed(self.args.seed + self.args.process_index)
        return prepared

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        if self.spread == "fsdp2" and training and model is self.model:
            return parallel.Sharded(self.model, self.model.model)
        return model

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return AdamW over matrices, vectors, feedback, and the head with a rate of its own."""
        if self.optimizer is None:
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = kind(self._parameter_groups(), **settings)
            if self.spread == "fsdp2":
                self.optimizer.register_state_dict_post_hook(parallel.gather_shards)
                self.optimizer.register_load_state_dict_pre_hook(parallel.take_shards)
        return self.optimizer

    def _parameter_groups(self) -> list[dict[str, Any]]:
        decoder, optimizer = self.model.model, self.prepared.recipe.optimizer
        decayed = decayed_names(decoder, optimizer.weight_decay_exempt)
        matrices, others = list[nn.Parameter](), list[nn.Parameter]()
        for name, parameter in decoder.named_parameters():
            if parameter.requires_grad and not name.startswith(TABLE):
                (matrices if name in decayed else others).append(parameter)
        head = list(self.model.prototype_head.parameters())
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": self.args.weight_decay},
            {"params": others, "weight_decay": 0.0},
            {"params": head, "weight_decay": 0.0, "lr": optimizer.head_learning_rate},
        ]
        if table := self.model.table_parameters():
            # Rows that no code of a step asked for are to stay where they are.
            groups.append({"params": table, "weight_decay": 0.0})
        return groups

    def compute_loss_context_manager(self) -> ExitStack:
        """Run the forward pass under autocast, without a float32 copy of the logits after it."""
        stack = super().compute_loss_context_manager()
        if self.bf16_autocast:
            stack.enter_context(torch.autocast(self.args.device.type, dtype=torch.bfloat16))
        return stack

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return what one micro-batch contributes to the step's loss, noting its parts.

        Args:
            model: the model, as it is spread.
            inputs: the micro-batch.
            return_outputs: return the model's output as well.
            num_items_in_batch: labels of the whole step, in all processes.
        """
        assert num_items_in_batch is not None
        output = model(**inputs)
        loss = output.loss
        share = (inputs["labels"] != IGNORED).sum() / num_items_in_batch
        for name, value in (output.losses | {"loss": loss.detach()}).items():
            self._parts.setdefault(name, []).append(value)
        self._shares.append(share)
        self._tokens = self._tokens.to(loss.device) + inputs["token_mask"].sum()
        # DDP and FSDP2 take the mean over processes where the shares are to be added.
        loss = loss * (share * self.args.world_size)
        if self.spread == "ddp":
            # A parameter that has no part in a loss would keep the other processes waiting.
            loss = loss + 0 * sum(p.sum() for p in self.model.prototype_head.parameters())
        return (loss, output) if return_outputs else loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        head, recipe = self.model.prototype_head, self.prepared.recipe
        if not self.model.placed:
            # DDP wants a gradient in each step; the optimizer is to leave the head alone.
            head.zero_grad(set_to_none=True)
        if self.spread == "fsdp2":
            parallel.average_gradients(head)
        step, every = self.state.global_step + 1, recipe.evaluation.every
        if step == recipe.steps or (every and step % every == 0):
            self.layer_log.read_gradients()
        table = self.model.table_parameters()
        apart = set(map(id, table))
        decoder = [p for p in self.model.model.parameters() if id(p) not in apart]
        norm = self._clip(decoder, self.args.max_grad_norm)
        if table:
            self._clip(table, self.args.max_grad_norm)
        head_norm = self._clip(list(head.parameters()), recipe.optimizer.head_max_grad_norm)
        self._head_norm = head_norm if self.model.placed else None
        return norm

    def _clip(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        norm = self.accelerator.clip_grad_norm_(parameters, limit)
        assert isinstance(norm, Tensor)
        return parallel.full(norm)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure head and layers on held-out text, and log the figures as ``eval_…``.

        Before the prototypes are placed only the cross-entropy is reported of the head.
        """
        tokens = self.prepared.recipe.evaluation.tokens
        quality = self.measure(self.prepared.heldout.batches(tokens)).to_dict()
        names = quality if self.model.placed else ("tokens", "ce")
        figures = {f"eval_{name}": quality[name] for name in names} | self.layer_log.figures()
        self.log(dict(figures))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, figures
        )
        return figures

    def measure(self, text: Iterable[WindowBatch]) -> HeadQuality:
        """Measure the head on a text; every process has to call."""
        decoder, head = self.model.model, self.model.prototype_head
        with parallel.whole(decoder):
            quality = measure_quality(decoder, head, LogitMap.of(decoder), text)
        if not math.isfinite(quality.ce):
            raise NotFiniteError(f"the cross-entropy on held-out text is {quality.ce}.")
        return quality

    def tokens_seen(self) -> int:
        """Return the tokens trained on so far, without padding; every process has to call."""
        return int(parallel.over_processes(self._tokens))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss, the head's gradient norm, λ, codes and tokens to a log."""
        if "train_runtime" in logs:
            return
        if "loss" in logs:
            logs |= self._drain_parts()
            logs["loss_scale"] = self.model.loss_scale if self.model.placed else 0.0
            if self._head_norm is not None:
                logs["head_grad_norm"] = self._head_norm.item()
            noise_weight = noise_weight_of(self.model.model)
            if noise_weight is not None:
                logs["noise_weight"] = noise_weight
            if self.model.uncertainty is not None:
                logs["uncertainty_codes_seen"] = self._codes_seen()
            logs["tokens"] = self.tokens_seen()
        super().log(logs, start_time)

    def _codes_seen(self) -> int:
        """Return how many rows of the table of codes any process has asked for."""
        assert self.model.uncertainty is not None
        seen = self.model.uncertainty.embedding.seen
        seen.copy_(parallel.over_processes(seen.int()) > 0)
        return int(seen.sum())

    def _drain_parts(self) -> dict[str, float]:
        """Return the mean of each part of the loss over the steps since the last call."""
        weights, sums = torch.stack(self._shares), []
        for values in self._parts.values():
            # A part that has begun since is of the last micro-batches alone.
            own = weights[-len(values) :]
            sums.append(torch.stack([torch.stack(values).float() @ own, own.sum()]))
        totals = parallel.over_processes(torch.stack(sums))
        means = dict(zip(self._parts, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))
        self._parts, self._shares = {}, []
        if not math.isfinite(means["loss"]):
            raise self.diverged(f"the loss is {means['loss']}.")
        return means

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step, main = self.state.global_step, parallel.is_main()
        check_weights_finite(self.model, step, self._checkpoints)
        if self.model.uncertainty is not None:
            self._codes_seen()
        needed = BYTES_PER_PARAMETER * sum(p.numel() for p in self.model.parameters())
        what = f"a checkpoint in {self._checkpoints}"
        hidden = self._checkpoints / SAVING
        with guard_writing(what, self._checkpoints, needed):
            try:
                if main:
                    shutil.rmtree(hidden, ignore_errors=True)
                parallel.barrier()
                super()._save_checkpoint(model, trial)
                # Each process has added its random generators.
                parallel.barrier()
                if main:
                    keep = self.prepared.recipe.checkpoint.keep
                    publish(hidden / f"checkpoint-{step}", self._checkpoints, keep)
            finally:
                if main:
                    shutil.rmtree(hidden, ignore_errors=True)
        parallel.barrier()

    def _get_output_dir(self, trial: Any) -> str:
        """Return where Trainer writes a checkpoint."""
        return str(self._checkpoints / SAVING)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model; every process has to call, since a sharded one is gathered by all."""
        directory = self._checkpoints if output_dir is None else Path(output_dir)
        tokens = self.tokens_seen()
        provenance = self.prepared.provenance(steps=self.state.global_step, tokens=tokens)
        self.write_model(directory, provenance)
        save_state(directory, self.model, tokens, self.layer_log.gradient_norms)

    def write_model(self, directory: Path, provenance: dict[str, Any]) -> None:
        """Write a prismlm model directory: Hugging Face checkpoint, tokenizer, then the sidecar.

        ``prismlm.json`` comes last: a directory that has one is complete. The first process writes;
        every process has to call.
        """
        model, decoder = self.model, self.model.model
        weights = parallel.full_state(decoder) if self.spread == "fsdp2" else None
        with parallel.whole(decoder):
            if parallel.is_main():
                decoder.save_pretrained(directory, state_dict=weights)
                self.prepared.corpus.tokenizer.save_pretrained(directory)
                share(directory)
                base, logit_map = base_of(decoder), LogitMap.of(decoder)
                save_sidecar(directory, Sidecar(model.prototype_head, logit_map, base, provenance))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.spread == "fsdp2" and not self.args.should_save:
            assert self.optimizer is not None
            # For its part in what the first process gathers and writes.
            self.optimizer.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)

    def load_finished(self, checkpoint: Path) -> None:
        """Take over model and state of a run's last checkpoint."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_FILE))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        tokens, norms = load_state(Path(resume_from_checkpoint), self.model)
        self.layer_log.gradient_norms = norms
        self._tokens = torch.tensor(tokens if parallel.is_main() else 0)

    def diverged(self, cause: str) -> DivergenceError:
        """Return what ends a run where a figure is not finite, with what is left of it."""
        return DivergenceError(
            f"training diverged by step {self.state.global_step}: {cause} "
            f"{last_good(self._checkpoints)} {REMEDY}"
        )


class EvaluateEvery(TrainerCallback):
    """Asks for an evaluation every ``steps`` steps, but not after the last, which has its own."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Ask if it is time."""
        if state.global_step < state.max_steps and state.global_step % self._steps == 0:
            control.should_evaluate = True


def _callbacks(prepared: Prepared) -> list[TrainerCallback]:
    """Return what a recipe asks for between the steps."""
    recipe, model = prepared.recipe, prepared.model
    callbacks: list[TrainerCallback] = []
    if recipe.head.enabled:
        callbacks.append(HeadSchedule(prepared.rows, recipe))
        if model.usage is not None:
            callbacks.append(ReviveUnused(recipe))
    if isinstance(model.model, SignalNoiseForCausalLM):
        noise_weight = recipe.noise_weight or NoiseWeightRecipe()
        callbacks.append(NoiseWeightSchedule(model.model, noise_weight))
    if model.uncertainty is not None:
        callbacks += set_training_signal(recipe, model.uncertainty)
    if recipe.evaluation.every:
        callbacks.append(EvaluateEvery(recipe.evaluation.every))
    return callbacks


def training_arguments(recipe: Recipe, directory: Path) -> TrainingArguments:
    """Return Trainer's arguments for a recipe."""
    optimizer, device = recipe.optimizer, device_of(recipe)
    floor = {"min_lr_rate": optimizer.final_learning_rate_share}
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
        lr_scheduler_type=SCHEDULES[optimizer.schedule],
        lr_scheduler_kwargs=floor if optimizer.schedule == "cosine" else None,
        warmup_steps=round(optimizer.warmup * recipe.steps),
        seed=recipe.seed,
        data_seed=recipe.seed,
        logging_steps=recipe.logging.every,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=recipe.checkpoint.every,
        eval_strategy="no",
        report_to=list(recipe.logging.report_to),
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_drop_last=True,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        # accelerate leaves processes without GPUs alone unless told so.
        use_cpu=device == "cpu",
        dataloader_pin_memory=device == "cuda",
        # The saved configuration keeps its cache; the forward pass in training asks for none.
        use_cache=True,
    )


def save_state(
    directory: Path, model: PrismForCausalLM, tokens: int, gradient_norms: list[float]
) -> None:
    """Write what a model directory lacks to resume training from it; every process has to call."""
    usage = None if model.usage is None else model.usage.state()
    state = {
        "uses": usage,
        "head": model.prototype_head.state_dict(),
        "head_placed": model.placed,
        "tokens": tokens,
        "gradient_norms": gradient_norms,
    }
    if parallel.is_main():
        torch.save(state, directory / STATE_FILE)


def load_state(directory: Path, model: PrismForCausalLM) -> tuple[int, list[float]]:
    """Put a checkpoint's weights into ``model``; return tokens trained on and gradient norms."""
    try:
        state = torch.load(directory / STATE_FILE, map_location="cpu", weights_only=True)
        if "gradient_norms" not in state:
            raise FormatError(
                f"the checkpoint {directory} was written by an earlier version of prismlm. Resume "
                "the run with that version, or train into another out."
            )
        decoder: PreTrainedModel = type(model.model).from_pretrained(
            directory, dtype=model.model.dtype, local_files_only=True
        )
        model.model.load_state_dict(decoder.state_dict())
        model.prototype_head.load_state_dict(state["head"])
        model.placed = state["head_placed"]
        if model.usage is not None and state["uses"] is not None:
            model.usage.load(state["uses"])
        return state["tokens"], state["gradient_norms"]
    except FormatError:
        raise
    except Exception as error:  # torch, safetensors and transformers raise what they like
        raise FormatError(
            f"the checkpoint {directory} cannot be resumed from "
            f"({str(error) or type(error).__name__}). Delete it, and training resumes from the one "
            "before."
        ) from error


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step that a checkpoint was written after; −1 for another name."""
    match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(match.group(1)) if match else -1


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = directory.glob("checkpoint-*")
    return sorted((path for path in found if step_of(path) >= 0), key=step_of)


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    return next(reversed(list_checkpoints(directory)), None)


def publish(checkpoint: Path, directory: Path, keep: int) -> None:
    """Move a checkpoint that is whole to its place, and delete all but the newest."""
    place = directory / checkpoint.name
    if place.exists():
        discard(place)
    os.rename(checkpoint, place)
    for old in list_checkpoints(directory)[:-keep]:
        discard(old)


def last_good(directory: Path) -> str:
    """Say in a sentence which checkpoint of a run is the newest that is whole."""
    newest = latest_checkpoint(directory)
    if newest is None:
        return "No checkpoint was written before."
    return f"The last good checkpoint is {newest} (step {step_of(newest)})."


def guard_writing(what: str, directory: Path, needed: float = 0) -> AbstractContextManager[None]:
    """Turn a disk that is full, or fails, into an error that says what is left to resume from."""
    way_out = "Make room, then resume with --resume."
    return room_to_write(what, directory, lambda: f"{last_good(directory)} {way_out}", needed)


def check_weights_finite(model: nn.Module, step: int, directory: Path) -> None:
    """Check every weight, so that no checkpoint holds what training cannot resume from."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parallel.local(parameter)).all():
            raise DivergenceError(
                f"the weight {name} is not finite after step {step}, so nothing is written of it. "
                f"{last_good(directory)}"
            )
