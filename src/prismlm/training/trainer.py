"""Hugging Face's Trainer with a head that is optimised, clipped, logged and saved apart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from prismlm.allocator import keep_freed_memory
from prismlm.corpus.windows import WindowBatch
from prismlm.errors import DivergenceError, NotFiniteError
from prismlm.explain.quality import HeadQuality, measure_quality
from prismlm.files import share
from prismlm.models.device import uses_bf16
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar
from prismlm.models.uncertainty_feedback.model_class import TABLE
from prismlm.training import checkpoints, parallel
from prismlm.training.backbone import decayed_names
from prismlm.training.losses import OptimizerStep
from prismlm.training.model import PrismForCausalLM
from prismlm.training.noise_weight import noise_weight_callbacks, noise_weight_of
from prismlm.training.prototypes import HeadSchedule, ReviveUnused
from prismlm.training.recipe import Recipe
from prismlm.training.setup import Prepared, device_of
from prismlm.training.training_signal import set_training_signal

CHECKPOINTS = "checkpoints"
# The share that a cosine may end at is of each group's own peak: the model's and the head's.
SCHEDULES = {
    "cosine": "cosine_with_min_lr",
    "linear": "linear",
    "constant": "constant_with_warmup",
}
WATCHED = ("loss", "gradient of the model", "gradient of the prototype head")
REMEDY = (
    "--resume starts again from there, to the same end unless the cause was outside of the run. "
    "Otherwise train into another out with a lower optimizer.learning_rate or "
    "optimizer.head_learning_rate, smaller weights under losses, or precision: float32."
)


class PrismTrainer(Trainer):
    """Train a :class:`PrismForCausalLM`.

    Beside what Trainer does: prototypes and scale have a learning rate of their own and no weight
    decay; the gradients of head and decoder are clipped each by its own norm, so that with
    ``detach`` the decoder's weights are bit for bit those of a run without a head; every
    checkpoint is a model directory and appears complete or not at all; and the logs hold each
    part of the loss, averaged since the last log.

    A step's gradient, its losses and what is logged are those of all its tokens, however they are
    split into processes and micro-batches (see :class:`OptimizerStep`). A step waits for nothing
    that the device computes: whether losses and gradients were finite is looked at with the next
    log, evaluation or checkpoint, and the first step that was not is named.

    Args:
        prepared: what is trained on what; its recipe says how.
        directory: of the run; its checkpoints go to ``checkpoints`` in it.
        callbacks: beside those that the recipe asks for.

    Attributes:
        meter: averages of the losses, and the tokens trained on.
        on_gradients: called with each step's number, from 1, before its gradients are clipped.
    """

    model: PrismForCausalLM

    def __init__(
        self, prepared: Prepared, directory: Path, callbacks: Iterable[TrainerCallback] = ()
    ) -> None:
        recipe, model = prepared.recipe, prepared.model
        device = device_of(recipe)
        if device == "cpu":
            keep_freed_memory()
        if recipe.gradient_checkpointing:
            parallel.recompute_activations(model.model)
        if recipe.compile:
            parallel.compile_blocks(model.model)
        self.prepared = prepared
        self.bf16_autocast = uses_bf16(recipe.precision, device)
        self.meter = LossMeter()
        self.on_gradients: Callable[[int], object] = lambda step: None
        self._head_norm: Tensor | None = None
        self._checkpoints = directory / CHECKPOINTS
        self._last_log: tuple[float, int] | None = None
        self._step: OptimizerStep | None = None
        self._first_pass = True
        # The first step in which each of WATCHED was not finite.
        self._broken = torch.full((len(WATCHED),), math.inf)
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
        # Trainer then leaves the division by micro-batches to compute_loss.
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
                self.optimizer.register_state_dict_post_hook(checkpoints.gather_shards)
        return self.optimizer

    def _parameter_groups(self) -> list[dict[str, Any]]:
        decoder, optimizer = self.model.model, self.prepared.recipe.optimizer
        trained = {
            name: p
            for name, p in decoder.named_parameters()
            if p.requires_grad and not name.startswith(TABLE)
        }
        decayed = decayed_names(decoder, optimizer.weight_decay_exempt)
        matrices = [p for name, p in trained.items() if name in decayed]
        vectors = [p for name, p in trained.items() if name not in decayed]
        head = list(self.model.prototype_head.parameters())
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": self.args.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
            {"params": head, "weight_decay": 0.0, "lr": optimizer.head_learning_rate},
        ]
        if table := self.model.table_parameters():
            # Rows that no code of a step asked for are to stay where they are.
            groups.append({"params": table, "weight_decay": 0.0})
        return groups

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """Return the micro-batches of a step, and the predictions in it in all processes."""
        batches = list(islice(epoch_iterator, num_batches))
        self._step, self._first_pass = None, True
        if batches:
            length, number = batches[0]["input_ids"].shape[1], self.state.global_step
            positions = self.model.head_positions(length, number, device)
            self._step = OptimizerStep.of(batches, positions)
        return batches, None if self._step is None else self._step.labels

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

        Outside of training, the mean over the micro-batch.
        """
        step = self._step if model.training else None
        if step is None:
            output = model(**inputs)
            return (output.loss, output) if return_outputs else output.loss
        output = model(**inputs, within=step)
        self._watch("loss", output.loss.detach())
        tokens = step.tokens if self._first_pass else None
        self.meter.add({"loss": output.loss.detach()} | output.losses, tokens)
        self._first_pass = False
        # DDP and FSDP2 take the mean over processes where the shares are to be added.
        loss = output.loss * self.args.world_size if self.spread != "none" else output.loss
        if self.spread == "ddp":
            # A parameter that has no part in a loss would keep the other processes waiting.
            loss = loss + 0 * sum(p.sum() for p in self.model.prototype_head.parameters())
        return (loss, output) if return_outputs else loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        head = self.model.prototype_head
        if not self.model.placed:
            # DDP wants a gradient in each step; the optimizer is to leave the head alone.
            head.zero_grad(set_to_none=True)
        if self.spread == "fsdp2":
            parallel.average_gradients(head)
        self.on_gradients(self.state.global_step + 1)
        table = self.model.table_parameters()
        apart = set(map(id, table))
        decoder = [p for p in self.model.model.parameters() if id(p) not in apart]
        norm = self._clip(decoder, self.args.max_grad_norm)
        if table:
            self._clip(table, self.args.max_grad_norm)
        limit = self.prepared.recipe.optimizer.head_max_grad_norm
        head_norm = self._clip(list(head.parameters()), limit)
        self._watch("gradient of the model", norm)
        self._watch("gradient of the prototype head", head_norm)
        self._head_norm = head_norm if self.model.placed else None
        return norm

    def _clip(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        norm = self.accelerator.clip_grad_norm_(parameters, limit)
        assert isinstance(norm, Tensor)
        return parallel.full(norm)

    def _watch(self, what: str, value: Tensor) -> None:
        """Note the first step in which a value is not finite, without waiting for it."""
        self._broken = self._broken.to(value.device)
        before = self._broken[WATCHED.index(what)]
        now = before.clamp_max(self.state.global_step + 1)
        before.copy_(torch.where(value.isfinite(), before, now))

    def check_finite(self) -> None:
        """Check the losses and gradients of the steps since the last call; all processes do."""
        self._check_steps(parallel.over_processes(self._broken, dist.ReduceOp.MIN).tolist())

    def _check_steps(self, steps: list[float]) -> None:
        first = min(steps)
        if math.isfinite(first):
            raise DivergenceError(
                f"the {WATCHED[steps.index(first)]} is not finite at step {int(first)}. "
                f"{checkpoints.last_good(self._checkpoints)} {REMEDY}"
            )

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the head on held-out text and log the figures as ``eval_…``.

        Before the prototypes are placed only the cross-entropy is reported.
        """
        self.check_finite()
        tokens = self.prepared.recipe.evaluation.tokens
        with self.reporting_divergence():
            quality = self.measure(self.prepared.heldout.batches(tokens)).to_dict()
            names = quality if self.model.placed else ("tokens", "ce")
            figures = {f"eval_{name}": quality[name] for name in names}
            self.log(dict(figures))
            self._last_log = None
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

    @contextmanager
    def reporting_divergence(self) -> Iterator[None]:
        """Report figures that are not finite as losses that are not."""
        try:
            yield
        except NotFiniteError as error:
            # It may have come in this process alone: the others are not asked.
            self._check_steps(self._broken.tolist())
            raise DivergenceError(
                f"a figure is not finite after step {self.state.global_step}: {error} "
                f"{checkpoints.last_good(self._checkpoints)} {REMEDY}"
            ) from error

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss, the head's gradient norm, λ, codes and the pace to a log."""
        if "train_runtime" in logs:
            return
        if "loss" in logs:
            self.check_finite()
            logs |= self.meter.drain()
            logs["loss_scale"] = self.model.loss_scale if self.model.placed else 0.0
            if self._head_norm is not None:
                logs["head_grad_norm"] = self._head_norm.item()
            noise_weight = noise_weight_of(self.model.model)
            if noise_weight is not None:
                logs["noise_weight"] = noise_weight
            if self.model.uncertainty is not None:
                parallel.union(self.model.uncertainty.embedding.seen)
                logs["uncertainty_codes_seen"] = int(self.model.uncertainty.embedding.seen.sum())
            now, tokens = time.monotonic(), self.meter.tokens
            logs["tokens"] = tokens
            if self._last_log is not None:
                since, before = self._last_log
                logs["tokens_per_second"] = (tokens - before) / max(now - since, 1e-9)
            self._last_log = (now, tokens)
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.check_finite()
        checkpoints.check_weights_finite(self.model, self.state.global_step, self._checkpoints)
        if self.model.uncertainty is not None:
            parallel.union(self.model.uncertainty.embedding.seen)
        needed = checkpoints.BYTES_PER_PARAMETER * sum(p.numel() for p in self.model.parameters())
        keep = self.prepared.recipe.checkpoint.keep
        new = checkpoints.new_checkpoint(self._checkpoints, keep, needed)
        with ExitStack() as stack:
            self.args.output_dir = str(parallel.on_main(lambda: stack.enter_context(new)))
            try:
                super()._save_checkpoint(model, trial)
                # Every process adds its random generators before the directory is renamed.
                parallel.barrier()
            finally:
                self.args.output_dir = str(self._checkpoints)
        parallel.barrier()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model; every process has to call, since a sharded one is gathered by all."""
        directory = self._checkpoints if output_dir is None else Path(output_dir)
        steps, tokens = self.state.global_step, self.meter.tokens
        self.write_model(directory, self.prepared.provenance(steps=steps, tokens=tokens))
        meter = self.meter.state()
        uses = None if self.model.usage is None else self.model.usage.state()
        if parallel.is_main():
            checkpoints.save_state(directory, self.model, meter, uses)

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
                of, logit_map = base_of(decoder), LogitMap.of(decoder)
                save_sidecar(directory, Sidecar(model.prototype_head, logit_map, of, provenance))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.spread == "fsdp2" and not self.args.should_save:
            assert self.optimizer is not None
            # For its part in what the first process gathers and writes.
            self.optimizer.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.spread != "fsdp2" or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.optimizer is not None
        assert isinstance(self.lr_scheduler, LRScheduler)
        checkpoints.load_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler)

    def load_checkpoint(self, checkpoint: Path) -> None:
        """Take over model and state of a checkpoint, as of a run that is finished."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        self.meter.load(checkpoints.load_state(Path(resume_from_checkpoint), self.model))


class LossMeter:
    """Adds up what forward passes contribute to their steps, in float64, over all processes."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}
        self._tokens: Tensor | int = 0

    @property
    def tokens(self) -> int:
        """All tokens trained on so far, without padding, in all processes."""
        return int(self._tokens)

    def add(self, shares: dict[str, Tensor], tokens: Tensor | None) -> None:
        """Take in one forward pass; parts may come in later than the loss."""
        for name, value in shares.items():
            before = self._sums.get(name)
            value = value.double()
            self._sums[name] = value if before is None else before.to(value.device) + value
            self._steps[name] = self._steps.get(name, 0) + int(tokens is not None)
        if tokens is not None:
            self._tokens = self._tokens + tokens

    def drain(self) -> dict[str, float]:
        """Return the averages over the steps since the last call, and start again.

        Every process has to call it, as for :meth:`state`, and gets the same.
        """
        averages = {n: (s / self._steps[n]).item() for n, s in self._summed().items()}
        self._sums, self._steps = {}, {}
        return averages

    def state(self) -> dict[str, Any]:
        """Return what :meth:`load` needs to resume exactly."""
        return {"tokens": self.tokens, "sums": self._summed(), "counts": dict(self._steps)}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a saved state, whose sums are those of all processes together."""
        self._tokens = state["tokens"]
        factor = 1.0 if parallel.is_main() else 0.0
        self._sums = {name: value * factor for name, value in state["sums"].items()}
        self._steps = dict(state["counts"])

    def _summed(self) -> dict[str, Tensor]:
        if not self._sums:
            return {}
        sums = parallel.over_processes(torch.stack(list(self._sums.values()))).cpu()
        return dict(zip(self._sums, sums.unbind(), strict=True))


@dataclass(eq=False)
class EvaluateEvery(TrainerCallback):
    """Asks for an evaluation every ``steps`` steps, but not after the last, which has its own."""

    steps: int

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Ask if it is time."""
        if state.global_step < state.max_steps and state.global_step % self.steps == 0:
            control.should_evaluate = True


def _callbacks(prepared: Prepared) -> list[TrainerCallback]:
    """Return what a recipe asks for between the steps."""
    recipe, model = prepared.recipe, prepared.model
    callbacks: list[TrainerCallback] = []
    if recipe.head.enabled:
        callbacks.append(HeadSchedule(prepared.rows, recipe))
        if model.usage is not None:
            callbacks.append(ReviveUnused(recipe))
    callbacks += noise_weight_callbacks(recipe, model.model)
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
        report_to="none",
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
