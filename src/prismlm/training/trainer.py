"""Hugging Face's Trainer with a head that is optimised, clipped, logged and saved apart."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from prismlm.errors import DivergenceError, InputError
from prismlm.explain.quality import HeadQuality, measure_quality
from prismlm.files import share
from prismlm.models.device import uses_bf16
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar
from prismlm.models.uncertainty_feedback.model_class import TABLE
from prismlm.training import checkpoints, distributed, parallel
from prismlm.training.device import device_of
from prismlm.training.meter import LossMeter
from prismlm.training.model import IGNORED_AT_INFERENCE, PrismForCausalLM
from prismlm.training.noise_weight import noise_weight_of
from prismlm.training.objective import NO_LABEL
from prismlm.training.step import OptimizerStep
from prismlm.training.weight_decay import decayed_names

if TYPE_CHECKING:
    from prismlm.corpus.windows import WindowBatch
    from prismlm.training.logs.heads import LayerGradients
    from prismlm.training.setup import Prepared

REMEDY = (
    "--resume goes on from there, to the same end unless the cause was outside of the run. Else "
    "train into another out with a lower optimizer.learning_rate or optimizer.head_learning_rate, "
    "smaller weights under losses, or precision: float32."
)


class PrismTrainer(Trainer):
    """Train a :class:`PrismForCausalLM`.

    Beside what Trainer does: prototypes and scale have a learning rate of their own and no weight
    decay; the gradients of head and decoder are clipped each by its own norm, so that with
    ``detach`` the decoder's weights are bit for bit those of a run without a head; every
    checkpoint is a model directory and appears complete or not at all; and the logs hold each
    part of the loss, averaged since the last log.

    A step's gradient, its losses and what is logged are those of all its tokens, however they are
    split into processes and micro-batches (see :class:`OptimizerStep`).

    Args:
        prepared: what is trained on what; its recipe says how.
        args: Trainer's arguments; ``bf16`` stays off, since weights stay float32 and forward passes
            run under autocast.
        callbacks: as Trainer's.

    Attributes:
        layer_gradients: reads each step's gradients before they are clipped, if it is set; what it
            read goes into checkpoints.

    Raises:
        InputError: the arguments do not know of the other processes.
    """

    model: PrismForCausalLM

    def __init__(
        self,
        prepared: Prepared,
        args: TrainingArguments,
        callbacks: list[TrainerCallback],
    ) -> None:
        recipe = prepared.recipe
        self.prepared = prepared
        self.bf16_autocast = uses_bf16(recipe.precision, device_of(recipe))
        self.meter = LossMeter()
        self._head_norm: float | None = None
        self.layer_gradients: LayerGradients | None = None
        assert args.output_dir is not None
        self._checkpoints = Path(args.output_dir)
        self._staging: Path | None = None
        self._last_log: tuple[float, int] | None = None
        self._step: OptimizerStep | None = None
        self._first_pass = True
        if args.world_size != distributed.world_size():
            raise InputError(
                f"TrainingArguments know of {args.world_size} processes, and "
                f"{distributed.world_size()} were started; on CPUs give them use_cpu=True."
            )
        # Trainer would otherwise wrap the model in nn.DataParallel, which no hook survives.
        args._n_gpu = min(args.n_gpu, 1)
        super().__init__(
            model=prepared.model,
            args=args,
            train_dataset=prepared.rows,  # pyright: ignore[reportArgumentType]
            processing_class=prepared.corpus.tokenizer,
            data_collator=default_collate,
            callbacks=callbacks,
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
        if self.spread == "none" or not training or model is not self.model:
            return model
        if self.spread == "fsdp2":
            return parallel.Sharded(self.model, self.model.model)
        return parallel.wrap_ddp(self.model, self.args.device)

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
            if not int(self._step.labels):
                raise InputError(
                    f"no token of step {number + 1} is to be predicted: the labels of its rows "
                    f"are {NO_LABEL} after the first position. Leave such rows out."
                )
        return batches, None if self._step is None else self._step.labels

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return AdamW over matrices, vectors, feedback, and the head with a rate of its own."""
        if self.optimizer is None:
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = kind(self._parameter_groups(), **settings)
            self.optimizer.register_state_dict_post_hook(checkpoints.as_of_one_run)
        return self.optimizer

    def _parameter_groups(self) -> list[dict[str, Any]]:
        decoder, table = self.model.model, self.model.table_parameters()
        trained = [(n, p) for n, p in decoder.named_parameters() if p.requires_grad]
        trained = [(n, p) for n, p in trained if not n.startswith(TABLE)]
        decayed = decayed_names(decoder, self.prepared.recipe.optimizer.weight_decay_exempt)
        groups: list[dict[str, Any]] = [
            {
                "params": [p for n, p in trained if n in decayed],
                "weight_decay": self.args.weight_decay,
            },
            {"params": [p for n, p in trained if n not in decayed], "weight_decay": 0.0},
            {
                "params": list(self.model.prototype_head.parameters()),
                "weight_decay": 0.0,
                "lr": self.prepared.recipe.optimizer.head_learning_rate,
            },
        ]
        if table:
            # Rows that no code of a step asked for are to stay where they are.
            groups.append({"params": table, "weight_decay": 0.0})
        return groups

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        head = self.model.prototype_head
        if not self.model.placed:
            # DDP wants a gradient in each step; the optimizer is to leave the head alone.
            head.zero_grad(set_to_none=True)
        if self.spread == "fsdp2":
            distributed.average_gradients(head)
        if self.layer_gradients is not None:
            self.layer_gradients.read(self.state.global_step + 1)
        table = self.model.table_parameters()
        held = set(map(id, table))
        decoder = [p for p in self.model.model.parameters() if id(p) not in held]
        norm = self._clip(decoder, self.args.max_grad_norm)
        if table:
            self._clip(table, self.args.max_grad_norm)
        limit = self.prepared.recipe.optimizer.head_max_grad_norm
        head_norm = self._clip(list(head.parameters()), limit)
        for name, value in (("the model", norm), ("the prototype head", head_norm)):
            if not torch.isfinite(value):
                raise self._diverged(f"the gradient of {name} is {value.item()}")
        self._head_norm = head_norm.item() if self.model.placed else None
        return norm

    def _clip(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        norm = self.accelerator.clip_grad_norm_(parameters, limit)
        assert isinstance(norm, Tensor)
        return parallel.full(norm)

    def _diverged(self, what: str, parts: str = "") -> DivergenceError:
        weight = checkpoints.not_finite(self.model)
        where = "" if weight is None else f" The weight {weight} is not finite."
        return DivergenceError(
            f"{what} at step {self.state.global_step + 1}{parts}.{where} "
            f"{checkpoints.last_good(self._checkpoints)} {REMEDY}"
        )

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

        Raises:
            DivergenceError: the loss is not finite.
        """
        step = self._step if model.training else None
        if step is None:
            output = model(**inputs)
            return (output.loss, output) if return_outputs else output.loss
        output = model(**inputs, within=step)
        if not torch.isfinite(output.loss):
            parts = ", ".join(f"{k} {v.item():.4g}" for k, v in output.losses.items())
            raise self._diverged(f"the loss is {output.loss.item()}", f" ({parts})")
        shares = {"loss": output.loss.detach()} | output.losses
        self.meter.add(shares, first=self._first_pass)
        if self._first_pass:
            self.meter.tokens += int(step.tokens)
        self._first_pass = False
        # DDP and FSDP2 take the mean over processes where the shares are to be added.
        loss = output.loss * self.args.world_size if self.spread != "none" else output.loss
        if self.spread == "ddp":
            # A parameter that has no part in a loss would keep the other processes waiting.
            loss = loss + 0 * sum(p.sum() for p in self.model.prototype_head.parameters())
        return (loss, output) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Leave what is no tensor per row out of predictions."""
        ignored = [*(ignore_keys or ()), *IGNORED_AT_INFERENCE]
        return super().prediction_step(model, inputs, prediction_loss_only, ignored)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the head on held-out text and log the figures as ``eval_…``.

        Before the prototypes are placed only the cross-entropy is reported.
        """
        tokens = self.prepared.recipe.evaluation.tokens
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
            return measure_quality(decoder, head, LogitMap.of(decoder), text)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss, the head's gradient norm, λ, codes and the pace to a log."""
        if "train_runtime" in logs:
            return
        if "loss" in logs:
            logs |= self.meter.drain()
            logs["loss_scale"] = self.model.loss_scale if self.model.placed else 0.0
            if self._head_norm is not None:
                logs["head_grad_norm"] = self._head_norm
            noise_weight = noise_weight_of(self.model.model)
            if noise_weight is not None:
                logs["noise_weight"] = noise_weight
            if self.model.uncertainty is not None:
                distributed.union(self.model.uncertainty.embedding.seen)
                logs["uncertainty_codes_seen"] = int(self.model.uncertainty.embedding.seen.sum())
            logs["tokens"] = self.meter.tokens
            now = time.monotonic()
            if self._last_log is not None:
                since, before = self._last_log
                logs["tokens_per_second"] = (self.meter.tokens - before) / max(now - since, 1e-9)
            self._last_log = (now, self.meter.tokens)
        super().log(logs, start_time)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        directory = self._checkpoints
        checkpoints.check_weights_finite(self.model, self.state.global_step, directory)
        if self.model.uncertainty is not None:
            distributed.union(self.model.uncertainty.embedding.seen)
        needed = checkpoints.BYTES_PER_PARAMETER * sum(p.numel() for p in self.model.parameters())
        with ExitStack() as stack:
            staging = checkpoints.staging(directory, needed)
            self._staging = distributed.on_main(lambda: stack.enter_context(staging))
            try:
                super()._save_checkpoint(model, trial)
                # Every process adds its random generators before the directory is renamed.
                distributed.barrier()
            finally:
                self._staging = None
        if distributed.is_main():
            checkpoints.keep_newest(directory, self.prepared.recipe.checkpoint.keep)
        distributed.barrier()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model; every process has to call, since a sharded one is gathered by all."""
        # transformers 5.17 would have the first process alone call _save.
        self._save(output_dir)

    def _save(
        self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None
    ) -> None:
        directory = self._checkpoints if output_dir is None else Path(output_dir)
        steps, tokens = self.state.global_step, self.meter.tokens
        self.write_model(directory, self.prepared.provenance(steps=steps, tokens=tokens))
        meter = self.meter.state()
        uses = None if self.model.usage is None else self.model.usage.state()
        norms = None if self.layer_gradients is None else self.layer_gradients.norms
        if distributed.is_main():
            checkpoints.save_state(directory, self.model, meter, uses, norms)

    def write_model(self, directory: Path, provenance: dict[str, Any]) -> None:
        """Write a prismlm model directory: Hugging Face checkpoint, tokenizer, then the sidecar.

        ``prismlm.json`` comes last: a directory that has one is complete. The first process writes;
        every process has to call.
        """
        model, decoder = self.model, self.model.model
        weights = parallel.full_state(decoder) if self.spread == "fsdp2" else None
        with parallel.whole(decoder):
            if distributed.is_main():
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

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        meter, norms = checkpoints.load_state(Path(resume_from_checkpoint), self.model)
        self.meter.load(meter)
        if self.layer_gradients is not None and norms is not None:
            self.layer_gradients.norms = norms
