"""Hugging Face's Trainer with a head that is optimised, clipped, logged and saved apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from prismlm.corpus.packing import IGNORED
from prismlm.errors import InputError, PrismError
from prismlm.lens.quality import measure_quality
from prismlm.models.seam import LogitMap
from prismlm.training import checkpoints
from prismlm.training.evaluation import HeldOut
from prismlm.training.initialise import Rows
from prismlm.training.meter import LossMeter
from prismlm.training.model import IGNORED_AT_INFERENCE, PrismForCausalLM

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

    Args:
        model: what to train.
        args: Trainer's arguments; ``bf16`` stays off, see ``bf16_autocast``.
        rows: training rows.
        tokenizer: saved with every checkpoint.
        head_learning_rate: peak rate of prototypes and scale.
        head_max_grad_norm: norm the head's gradient is clipped to.
        bf16_autocast: run forward passes under bf16 autocast; weights stay float32.
        keep_checkpoints: how many of the newest checkpoints are kept.
        heldout: text for evaluations, or None to have none.
        evaluation_tokens: how much of it an evaluation reads.
        provenance: returns what ``prismlm.json`` says of how a checkpoint was made.
        callbacks: as Trainer's.
    """

    model: PrismForCausalLM

    def __init__(
        self,
        model: PrismForCausalLM,
        args: TrainingArguments,
        rows: Rows,
        tokenizer: PreTrainedTokenizerFast,
        *,
        head_learning_rate: float,
        head_max_grad_norm: float,
        bf16_autocast: bool = False,
        keep_checkpoints: int = 2,
        heldout: HeldOut | None = None,
        evaluation_tokens: int = 20_000,
        provenance: Callable[[PrismTrainer], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        self.head_learning_rate = head_learning_rate
        self.head_max_grad_norm = head_max_grad_norm
        self.bf16_autocast = bf16_autocast
        self.keep_checkpoints = keep_checkpoints
        self.heldout = heldout
        self.evaluation_tokens = evaluation_tokens
        self.meter = LossMeter()
        self._provenance = provenance
        self._head_norm: float | None = None
        assert args.output_dir is not None
        self._checkpoints = Path(args.output_dir)
        self._staging: Path | None = None
        self._last_log: tuple[float, int] | None = None
        # Trainer would otherwise wrap the model in nn.DataParallel, which no hook survives.
        args._n_gpu = min(args.n_gpu, 1)
        super().__init__(
            model=model,
            args=args,
            train_dataset=rows,  # pyright: ignore[reportArgumentType]
            processing_class=tokenizer,
            data_collator=default_collate,
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return AdamW over matrices, vectors, and the head with a rate of its own."""
        if self.optimizer is None:
            backbone = self.model.model
            decayed = set(self.get_decay_parameter_names(backbone))
            trained = [(n, p) for n, p in backbone.named_parameters() if p.requires_grad]
            groups = [
                {
                    "params": [p for n, p in trained if n in decayed],
                    "weight_decay": self.args.weight_decay,
                },
                {"params": [p for n, p in trained if n not in decayed], "weight_decay": 0.0},
                {
                    "params": list(self.model.prototype_head.parameters()),
                    "weight_decay": 0.0,
                    "lr": self.head_learning_rate,
                },
            ]
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = kind(groups, **settings)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        head = self.model.prototype_head
        norm = self.accelerator.clip_grad_norm_(
            self.model.model.parameters(), self.args.max_grad_norm
        )
        head_norm = self.accelerator.clip_grad_norm_(head.parameters(), self.head_max_grad_norm)
        assert isinstance(norm, Tensor)
        assert isinstance(head_norm, Tensor)
        for name, value in (("the model", norm), ("the prototype head", head_norm)):
            if not torch.isfinite(value):
                raise self._diverged(f"the gradient of {name} is {value.item()}")
        self._head_norm = head_norm.item() if self.model.placed else None
        return norm

    def _diverged(self, what: str, parts: str = "") -> PrismError:
        weight = checkpoints.not_finite(self.model)
        where = "" if weight is None else f" The weight {weight} is not finite."
        return PrismError(
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
        """Return the loss of one micro-batch, noting its parts while training.

        Raises:
            InputError: no token of the micro-batch is to be predicted.
            PrismError: the loss is not finite.
        """
        output = model(**inputs)
        if model.training:
            if not torch.isfinite(output.loss):
                if (inputs["labels"][:, 1:] == IGNORED).all():
                    raise InputError(
                        f"no token of a micro-batch of {list(inputs['labels'].shape)} at step "
                        f"{self.state.global_step + 1} is to be predicted: its labels are "
                        f"{IGNORED} after the first position. Leave such rows out."
                    )
                parts = ", ".join(f"{k} {v.item():.4g}" for k, v in output.losses.items())
                raise self._diverged(f"the loss is {output.loss.item()}", f" ({parts})")
            mask = inputs.get("token_mask")
            tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
            self.meter.add(output.loss.detach(), output.losses, tokens)
        return (output.loss, output) if return_outputs else output.loss

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
        if self.heldout is None:
            return {}
        model = self.model
        quality = measure_quality(
            model.model,
            model.prototype_head,
            LogitMap.of(model.model),
            self.heldout.batches(self.evaluation_tokens),
        ).to_dict()
        names = quality if model.placed else ("tokens", "ce")
        figures = {f"eval_{name}": quality[name] for name in names}
        self.log(dict(figures))
        self._last_log = None
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, figures
        )
        return figures

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss, the head's gradient norm and the pace to a training log."""
        if "train_runtime" in logs:
            return
        if "loss" in logs:
            logs |= self.meter.drain()
            logs["loss_scale"] = self.model.loss_scale if self.model.placed else 0.0
            if self._head_norm is not None:
                logs["head_grad_norm"] = self._head_norm
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
        checkpoints.check_finite(self.model, self.state.global_step, directory)
        needed = checkpoints.BYTES_PER_PARAMETER * sum(p.numel() for p in self.model.parameters())
        with checkpoints.staging(directory, needed) as hidden:
            self._staging = hidden
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staging = None
        checkpoints.keep_newest(directory, self.keep_checkpoints)

    def _save(
        self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None
    ) -> None:
        directory = self._checkpoints if output_dir is None else Path(output_dir)
        tokenizer = self.processing_class
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        provenance = {} if self._provenance is None else self._provenance(self)
        checkpoints.write_model(directory, self.model, tokenizer, provenance)
        checkpoints.save_state(directory, self.model, self.meter.state())

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        state = checkpoints.load_state(Path(resume_from_checkpoint), self.model)
        self.meter.load(state)
