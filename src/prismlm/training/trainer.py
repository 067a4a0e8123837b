"""Hugging Face's Trainer with separate optimisation, clipping and logging of the head."""

from __future__ import annotations

import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from signal import SIGINT
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from prismlm.allocator import keep_freed_memory
from prismlm.corpus.windows import IGNORED, WindowBatch
from prismlm.errors import DivergenceError, FormatError, NotFiniteError
from prismlm.explain.quality import HeadQuality, measure_quality
from prismlm.files import atomic_file, discard, json_text, room_to_write, share
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.models.device import uses_bf16
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar, weight_of
from prismlm.models.uncertainty_feedback import TABLE, UNCERTAINTY_FILE
from prismlm.progress import SILENT, Task
from prismlm.run_state import Interrupts
from prismlm.training import parallel
from prismlm.training.model import PrismForCausalLM, initialise_prototypes
from prismlm.training.recipe import SHARDED, NoiseWeightRecipe, Recipe
from prismlm.training.setup import (
    Prepared,
    decayed_names,
    describe_run,
    device_of,
    set_training_signal,
    versions,
)

HISTORY_FILE = "training.jsonl"
# In a checkpoint, SHARDS has model and optimizer of a run with fsdp2 or hsdp.
CHECKPOINTS, SHARDS = "checkpoints", "shards"
# Where a checkpoint is written before it is renamed.
SAVING = ".saving"
STATE_FILE, TRAINER_STATE_FILE = "prismlm_training_state.pt", "trainer_state.json"
SCHEDULES = {
    "cosine": "cosine_with_min_lr",
    "linear": "linear",
    "constant": "constant_with_warmup",
}


class PrismTrainer(Trainer, TrainerCallback):
    """Train a :class:`PrismForCausalLM`; the trainer is its own callback.

    The head has its own learning rate and gradient clipping: with ``detach`` the decoder's weights
    are bit for bit those of a run without a head. A step's loss is the mean over its predictions,
    however its rows are split; R1 and DIV are of single micro-batches.

    A step does not synchronise with the device: whether losses are finite is checked when they are
    logged.

    Attributes:
        task: shows the progress of steps.
        interrupts: after a signal, training stops at the end of the step with a checkpoint.
    """

    model: PrismForCausalLM

    def __init__(self, prepared: Prepared, directory: Path) -> None:
        recipe, model = prepared.recipe, prepared.model
        device = device_of(recipe)
        if device == "cpu":
            keep_freed_memory()
        if recipe.gradient_checkpointing:
            parallel.recompute_activations(model.model)
        if recipe.compile:
            parallel.compile_blocks(model.model)
        self.prepared, self.directory = prepared, directory
        self.task: Task = SILENT
        self.interrupts = Interrupts()
        self.bf16_autocast = uses_bf16(recipe.precision, device)
        # By name, each loss of a micro-batch and the fraction of the step's labels that it is of.
        self._losses = defaultdict[str, list[Tensor]](list)
        self._tokens = torch.zeros((), dtype=torch.int64)
        self._head_norm: Tensor | None = None
        self.checkpoints = directory / CHECKPOINTS
        args = training_arguments(recipe, self.checkpoints)
        # Otherwise Trainer wraps the model in nn.DataParallel, which breaks hooks.
        args._n_gpu = min(args.n_gpu, 1)
        super().__init__(
            model=model,
            args=args,
            train_dataset=prepared.rows,  # pyright: ignore[reportArgumentType]
            processing_class=prepared.corpus.tokenizer,
            data_collator=default_collate,
            callbacks=[self],
        )
        self.remove_callback(PrinterCallback)
        self.sharded = isinstance(model.model, FSDPModule)
        # Of one process too, so that several can resume.
        self._writes_shards = recipe.parallel in SHARDED
        # The checkpoint that is written in the background, and its step.
        self._writing: tuple[Future[Any], int] | None = None
        self._previous = set_training_signal(recipe, model)
        # Trainer then counts the labels of a step and leaves the division to compute_loss.
        self.model_accepts_loss_kwargs = True

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if parallel.world_size() > 1:
            # Dropout differs between processes; resuming restores the generators afterwards.
            torch.manual_seed(self.args.seed + self.args.process_index)
        return prepared

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        if self.sharded and training and model is self.model:
            return parallel.Sharded(self.model)
        return model

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return AdamW, with parameter groups for matrices, vectors, head and feedback table."""
        if self.optimizer is None:
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = kind(self._parameter_groups(), **settings)
        return self.optimizer

    def _parameter_groups(self) -> list[dict[str, Any]]:
        decoder, optimizer = self.model.model, self.prepared.recipe.optimizer
        decayed = decayed_names(decoder, optimizer.weight_decay_exempt)
        trained = [(n, p) for n, p in decoder.named_parameters() if p.requires_grad]
        trained = [(n, p) for n, p in trained if not n.startswith(TABLE)]
        head = list(self.model.prototype_head.parameters())
        matrices = [p for n, p in trained if n in decayed]
        others = [p for n, p in trained if n not in decayed]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": self.args.weight_decay},
            {"params": others, "weight_decay": 0.0},
            {"params": head, "weight_decay": 0.0, "lr": optimizer.head_learning_rate},
        ]
        if table := self.model.table_parameters():
            # No weight decay, so that rows without a gradient stay unchanged.
            groups.append({"params": table, "weight_decay": 0.0})
        return groups

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Initialise the prototypes before step t₀, then scale their losses; set λ.

        s(t) = min(1, (t − t₀) / (warmup · steps − t₀))
        """
        recipe, model, step = self.prepared.recipe, self.model, self.state.global_step
        model.step = step
        if recipe.head.enabled:
            start = recipe.initialisation_step
            if step >= start and not model.initialised:
                generator = torch.Generator().manual_seed(recipe.seed)
                initialise_prototypes(model, self.prepared.rows, generator, recipe.head.initialise)
                for parameter in model.prototype_head.parameters():
                    parallel.broadcast(parameter)
            rising = recipe.losses.warmup * recipe.steps - start
            model.loss_scale = min(1.0, max(0, step - start) / rising) if rising > 0 else 1.0
        if isinstance(model.model, SignalNoiseForCausalLM):
            ends = (recipe.noise_weight or NoiseWeightRecipe()).model_dump()
            model.model.set_noise_weight(noise_weight_at(step, recipe.steps, **ends))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Publish a checkpoint that has been written, show progress, and say what comes next."""
        self.finish_checkpoint(wait=False)
        recipe, step, control = self.prepared.recipe, self.state.global_step, self.control
        self.task.advance(recipe.positions_per_step * parallel.world_size())
        every = recipe.evaluation.every
        control.should_evaluate = bool(every) and step % every == 0 and step < recipe.steps
        stopped = torch.tensor(int(self.interrupts.received is not None))
        if parallel.sum_over_processes(stopped):
            # Whichever process a signal came to, all stop at the same step.
            self.interrupts.received = self.interrupts.received or SIGINT
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def compute_loss_context_manager(self) -> ExitStack:
        """Return a context for the forward pass, with autocast that keeps logits in bf16."""
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
        """Return a micro-batch's part of the step's loss, and record the single losses."""
        assert num_items_in_batch is not None
        output = model(**inputs)
        loss = output.loss
        fraction = (inputs["labels"] != IGNORED).sum() / num_items_in_batch
        for name, value in (output.losses | {"loss": loss.detach()}).items():
            self._losses[name].append(torch.stack([value.float(), fraction]))
        self._tokens = self._tokens.to(loss.device) + inputs["token_mask"].sum()
        # DDP and FSDP2 average over processes, but the fractions have to be summed.
        loss = loss * (fraction * self.args.world_size)
        if parallel.world_size() > 1 and not self.sharded:
            # DDP waits for the gradient of every parameter.
            loss = loss + 0 * sum(p.sum() for p in self.model.prototype_head.parameters())
        return (loss, output) if return_outputs else loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        head, recipe = self.model.prototype_head, self.prepared.recipe
        if not self.model.initialised:
            # Without gradients, which DDP needed, the optimizer skips the head.
            head.zero_grad(set_to_none=True)
        if self.sharded:
            parallel.average_gradients(head)
        table = {*self.model.table_parameters()}
        decoder = [p for p in self.model.model.parameters() if p not in table]
        clip: Any = self.accelerator.clip_grad_norm_
        norm = clip(decoder, self.args.max_grad_norm)
        if table:
            clip(table, self.args.max_grad_norm)
        head_norm = clip(head.parameters(), recipe.optimizer.head_max_grad_norm)
        self._head_norm = head_norm if self.model.initialised else None
        return parallel.full(norm)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the model and, once it is initialised, the head; log ``eval_…``."""
        tokens = self.prepared.recipe.evaluation.tokens
        quality = self.measure(self.prepared.heldout.batches(tokens)).to_dict()
        names = quality if self.model.initialised else ("tokens", "ce")
        figures = {f"eval_{name}": quality[name] for name in names}
        self.log(dict(figures))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, figures
        )
        return figures

    def measure(self, text: Iterable[WindowBatch]) -> HeadQuality:
        """Measure model and head on a text; every process has to call."""
        decoder, head = self.model.model, self.model.prototype_head
        with parallel.unsharded(decoder):
            quality = measure_quality(decoder, head, LogitMap.of(decoder), text)
        if not math.isfinite(quality.ce):
            raise NotFiniteError(f"the cross-entropy on held-out text is {quality.ce}.")
        return quality

    def tokens_seen(self) -> int:
        """Return the number of tokens trained on, without padding; every process has to call."""
        return int(parallel.sum_over_processes(self._tokens))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the single losses, the head's gradient norm, λ, codes and tokens to a log."""
        if "train_runtime" in logs:
            return
        if "loss" in logs:
            logs |= self._mean_losses()
            logs["loss_scale"] = self.model.loss_scale if self.model.initialised else 0.0
            if self._head_norm is not None:
                logs["head_grad_norm"] = self._head_norm.item()
            if isinstance(self.model.model, SignalNoiseForCausalLM):
                logs["noise_weight"] = self.model.model.model.noise_weight.item()
            if self.model.uncertainty is not None:
                logs["uncertainty_codes_seen"] = self._codes_seen()
            logs["tokens"] = self.tokens_seen()
            self.task.note(f"step {self.state.global_step} · CE {logs['ce']:.2f}")
        super().log(logs, start_time)

    def _codes_seen(self) -> int:
        """Return how many rows of the code table have been used in any process."""
        assert self.model.uncertainty is not None
        seen = self.model.uncertainty.embedding.seen
        seen.copy_(parallel.sum_over_processes(seen.int()) > 0)
        return int(seen.sum())

    def _mean_losses(self) -> dict[str, float]:
        """Return the mean of each loss over the steps since the last call."""
        sums: list[Tensor] = []
        for rows in self._losses.values():
            values, fractions = torch.stack(rows, 1)
            sums.append(torch.stack([values @ fractions, fractions.sum()]))
        totals = parallel.sum_over_processes(torch.stack(sums))
        means = dict(zip(self._losses, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))
        self._losses.clear()
        if not math.isfinite(means["loss"]):
            raise self.diverged(f"the loss is {means['loss']}.")
        return means

    def diverged(self, cause: str) -> DivergenceError:
        """Return the error for a figure that is not finite, with the last good checkpoint."""
        return DivergenceError(
            f"training diverged by step {self.state.global_step}: {cause} "
            f"{last_good(self.checkpoints)} Train into another out with a lower "
            "optimizer.learning_rate or optimizer.head_learning_rate, or precision: float32."
        )

    def check_weights(self) -> None:
        """Raise DivergenceError unless every weight is finite, so that what is written is sound."""
        for name, parameter in self.model.named_parameters():
            shard: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not torch.isfinite(shard).all():
                raise self.diverged(f"the weight {name} is not finite.")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.finish_checkpoint()
        self.check_weights()
        if self.model.uncertainty is not None:
            self._codes_seen()
        with guard_writing("a checkpoint", self.checkpoints):
            remove_unfinished(self.checkpoints)
            parallel.barrier()
            super()._save_checkpoint(model, trial)
            if self._writing is None:
                self._publish(self.state.global_step)
            if parallel.is_main():
                write_history(self.directory, self.state.log_history)

    def _publish(self, step: int) -> None:
        """Move a complete checkpoint into place, and delete all but the newest."""
        # Every process writes its random generators.
        parallel.barrier()
        if parallel.is_main():
            name = f"checkpoint-{step}"
            os.rename(self.checkpoints / SAVING / name, self.checkpoints / name)
            for old in list_checkpoints(self.checkpoints)[: -self.prepared.recipe.checkpoint.keep]:
                discard(old)
        remove_unfinished(self.checkpoints)
        parallel.barrier()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Publish the last checkpoint."""
        self.finish_checkpoint()

    def finish_checkpoint(self, *, wait: bool = True) -> None:
        """Publish the checkpoint that is being written; every process has to call."""
        if self._writing is None:
            return
        future, step = self._writing
        done = parallel.sum_over_processes(torch.tensor(int(future.done())))
        if wait or int(done) == parallel.world_size():
            self._writing = None
            with guard_writing("a checkpoint", self.checkpoints), parallel.cause_raised():
                future.result()
            self._publish(step)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.checkpoints / SAVING)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model for a checkpoint; every process has to call."""
        directory = Path(output_dir or self.checkpoints)
        state: dict[str, Any] = {"head_placed": self.model.initialised}
        state["tokens"] = self.tokens_seen()
        if self._writes_shards:
            optimizer, scheduler = self._optimizer_and_scheduler()
            # The shards have the rest.
            state["optimizer_groups"] = optimizer.state_dict()["param_groups"]
            state["scheduler"] = scheduler.state_dict()
        else:
            self.write_model(directory, self.provenance())
            state["head"] = self.model.prototype_head.state_dict()
        if self._previous is not None and self._previous.codes is not None:
            state["codes"] = parallel.concatenate(self._previous.codes)
        if parallel.is_main():
            directory.mkdir(parents=True, exist_ok=True)
            torch.save(state, directory / STATE_FILE)
        parallel.barrier()

    def provenance(self) -> dict[str, Any]:
        """Return how the model was trained until now; every process has to call."""
        recipe = self.prepared.recipe
        return {
            **describe_run(recipe, self.prepared.corpus),
            "seed": recipe.seed,
            "steps": self.state.global_step,
            "tokens": self.tokens_seen(),
            "head_placed": self.model.initialised,
            "versions": versions("torch", "transformers"),
        }

    def write_model(self, directory: Path, provenance: dict[str, Any]) -> None:
        """Write checkpoint, tokenizer and, if enabled, the head; every process has to call."""
        decoder, weight = self.model.model, parallel.full(weight_of(self.model.model))
        if self.sharded:
            parallel.save_pretrained(decoder, directory)
        if parallel.is_main():
            if not self.sharded:
                decoder.save_pretrained(directory)
            self.prepared.corpus.tokenizer.save_pretrained(directory)
            share(directory)
            if self.prepared.recipe.head.enabled:
                base, logit_map = base_of(decoder, weight), LogitMap.of(decoder)
                head = self.model.prototype_head
                save_sidecar(directory, Sidecar(head, logit_map, base, provenance))

    def _optimizer_and_scheduler(self) -> tuple[Any, Any]:
        return self.optimizer, self.lr_scheduler

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._writes_shards:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        shards, (optimizer, _) = Path(output_dir) / SHARDS, self._optimizer_and_scheduler()
        background = self.prepared.recipe.checkpoint.asynchronous
        future = parallel.save_shards(shards, self.model, optimizer, background)
        self._writing = None if future is None else (future, self.state.global_step)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / SHARDS).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer, scheduler = self._optimizer_and_scheduler()
        with resumable(Path(checkpoint)):
            saved = torch.load(Path(checkpoint) / STATE_FILE, weights_only=True)
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            state = parallel.load_optimizer(Path(checkpoint) / SHARDS, parameters)
            groups = saved["optimizer_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            scheduler.load_state_dict(saved["scheduler"])

    def load_finished(self, checkpoint: Path) -> None:
        """Load model and state from the last checkpoint of a finished run."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_FILE))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        directory, prism = Path(resume_from_checkpoint), self.model
        with resumable(directory):
            state = torch.load(directory / STATE_FILE, map_location="cpu", weights_only=True)
            if (directory / SHARDS).is_dir():
                parallel.load_shards(directory / SHARDS, prism)
            else:
                decoder: PreTrainedModel = type(prism.model).from_pretrained(
                    directory, dtype=prism.model.dtype, local_files_only=True
                )
                weights = decoder.state_dict()
                if prism.uncertainty is not None:
                    saved = load_file(directory / UNCERTAINTY_FILE)
                    weights[f"{TABLE}.weight"] = saved["embedding"]
                    weights[f"{TABLE}.seen"] = saved["seen"]
                prism.model.load_state_dict(weights)
                prism.prototype_head.load_state_dict(state["head"])
            if self._previous is not None and "codes" in state:
                codes = state["codes"].tensor_split(parallel.world_size())[parallel.rank()]
                self._previous.codes = codes.to(prism.model.device)
            prism.initialised = state["head_placed"]
            self._tokens = torch.tensor(state["tokens"] if parallel.is_main() else 0)


def noise_weight_at(step: int, steps: int, *, initial: float, final: float) -> float:
    """Return λ at a step.

        λ(t) = λ₀ + (λ₁ − λ₀) (1 − cos(π t / (T − 1))) / 2,   t = 0 … T − 1

    A run of a single step has λ₁. Source: Prism, §3, where λ rises from 0.01 to 0.1.
    """
    progress = min(1.0, step / (steps - 1)) if steps > 1 else 1.0
    return initial + (final - initial) * (1 - math.cos(math.pi * progress)) / 2


@contextmanager
def resumable(checkpoint: Path) -> Iterator[None]:
    """Turn errors of reading a checkpoint into a FormatError."""
    try:
        yield
    except Exception as error:  # torch, safetensors and transformers raise various errors
        raise FormatError(
            f"the checkpoint {checkpoint} cannot be resumed from "
            f"({str(error) or type(error).__name__}). Delete it to resume from the previous one."
        ) from error


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
        # Without it, accelerate does not initialise CPU processes.
        use_cpu=device == "cpu",
        dataloader_pin_memory=device == "cuda",
        # For the saved configuration; the forward pass in training disables the cache.
        use_cache=True,
    )


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    paths = directory.glob("checkpoint-*")
    return sorted((p for p in paths if p.name.partition("-")[2].isdigit()), key=step_of)


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    return next(reversed(list_checkpoints(directory)), None)


def remove_unfinished(directory: Path) -> None:
    """Remove the checkpoint that is being written, in the first process."""
    if parallel.is_main():
        shutil.rmtree(directory / SAVING, ignore_errors=True)


def last_good(directory: Path) -> str:
    """Return a sentence that names the newest checkpoint."""
    newest = latest_checkpoint(directory)
    if newest is None:
        return "There is no checkpoint yet."
    return f"The last good checkpoint is {newest} (step {step_of(newest)})."


def guard_writing(what: str, checkpoints: Path) -> AbstractContextManager[None]:
    """Turn a write error, such as a full disk, into an error that names the last checkpoint."""

    def way_out() -> str:
        return f"{last_good(checkpoints)} Make room, then resume with --resume."

    return room_to_write(f"{what} in {checkpoints.parent}", checkpoints.parent, way_out)


def write_history(out: Path, history: list[dict[str, Any]]) -> None:
    """Write one JSON object per line, atomically."""
    with atomic_file(out / HISTORY_FILE) as temporary:
        # Sorted, as the rows restored from a checkpoint are.
        lines = [json_text(row, sort_keys=True) for row in history]
        temporary.write_text("\n".join([*lines, ""]), encoding="utf-8")
