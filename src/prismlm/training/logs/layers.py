"""Figures of each layer while a model trains: a CSV file that a resumed run goes on with."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from prismlm.errors import DivergenceError, FormatError
from prismlm.files import atomic_file
from prismlm.outputs import put_csv
from prismlm.training import checkpoints, distributed
from prismlm.training.evaluation import perplexity
from prismlm.training.setup import CHECKPOINTS, TENSORBOARD, Prepared
from prismlm.training.trainer import REMEDY, PrismTrainer

PLACE = ("step", "epoch", "layer")
EVALUATED = ("ce", "perplexity", "ce_tokens")
COUNTS = ("step", "layer", "ce_tokens")
# What TensorBoard has elsewhere, or as its own axis.
NOT_DRAWN = (*COUNTS, "ce")

Row = dict[str, float]


class LayerLog(TrainerCallback):
    """Measures the layers of a model at every evaluation; keeps the figures in a file of the run.

    A row is one layer after one step. A run that is resumed writes the rows after its checkpoint
    anew, so that the file is that of a run that was never interrupted. In rows that an older
    version wrote, what it did not measure is NaN. A row that is measured again keeps what cannot
    be: gradients, in a run whose steps were all done and whose last checkpoint has none.

    Columns: ``step``; ``epoch``, tokens trained on over tokens of the training text; ``layer``,
    from 0; what is measured; ``ce``, of the evaluation that the rows belong to, ``perplexity`` =
    exp(ce) and ``ce_tokens``, the predictions behind it.

    Args:
        prepared: the run.
        trainer: of the run, which counts its tokens.
        done: the step of the checkpoint that the run goes on from, or 0.
        file: the name of the CSV file; without its ending, of what TensorBoard draws.
        columns: what is measured.
        counts: those of the columns that are whole numbers, and not drawn.
        measure: returns the columns of each layer; every process calls it.

    Raises:
        FormatError: the file is there and was written by something else.
    """

    def __init__(
        self,
        prepared: Prepared,
        trainer: PrismTrainer,
        done: int,
        file: str,
        *,
        columns: Sequence[str],
        counts: Sequence[str] = (),
        measure: Callable[[nn.Module], Sequence[Row]],
    ) -> None:
        out = prepared.recipe.out
        self._file, self._checkpoints = out / file, out / CHECKPOINTS
        self.columns = (*PLACE, *columns, *EVALUATED)
        self._counts = (*COUNTS, *counts)
        self._not_drawn = (*NOT_DRAWN, *counts)
        self._measure = measure
        self._trainer, self._corpus_tokens = trainer, prepared.rows.num_tokens
        # A run of its own for TensorBoard, which watches one file in each directory.
        self._drawn = (
            out / TENSORBOARD / self._file.stem if prepared.recipe.logging.tensorboard else None
        )
        self._done = done
        self._writer: Any = None
        self.rows = [row for row in self._read() if row["step"] <= done]

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the model that was evaluated."""
        figures: dict[str, float] = kwargs["metrics"]
        ce, ce_tokens = figures["eval_ce"], int(figures["eval_tokens"])
        self.add(kwargs["model"].model, step=state.global_step, ce=ce, ce_tokens=ce_tokens)

    def add(self, decoder: nn.Module, *, step: int, ce: float, ce_tokens: int) -> None:
        """Measure a model after a step, and write the file. Every process has to call.

        Args:
            decoder: the model.
            step: optimizer steps done.
            ce: the model's cross-entropy on held-out text, in nats per token.
            ce_tokens: the predictions it is a mean over.

        Raises:
            DivergenceError: the cross-entropy is not finite; then nothing is measured or written.
        """
        if not math.isfinite(ce):
            raise DivergenceError(
                f"the held-out cross-entropy is {ce} after step {step}. "
                f"{checkpoints.last_good(self._checkpoints)} {REMEDY}"
            )
        same = {"ce": ce, "perplexity": perplexity(ce), "ce_tokens": ce_tokens}
        place = {"step": step, "epoch": self._trainer.meter.tokens / self._corpus_tokens}
        before = {row["layer"]: row for row in self.rows if row["step"] == step}
        found: list[Row] = []
        for layer, own in enumerate(self._measure(decoder)):
            row = place | {"layer": layer} | own | same
            row |= {name: v for name, v in before.get(layer, {}).items() if math.isnan(row[name])}
            found.append({name: row[name] for name in self.columns})
        self.rows = [row for row in self.rows if row["step"] != step] + found
        if distributed.is_main():
            with checkpoints.guard_writing(str(self._file), self._checkpoints):
                with atomic_file(self._file) as temporary:
                    put_csv(temporary, self.columns, self.rows)
                self._draw(found)

    def close(self) -> None:
        """Write out what TensorBoard is to draw."""
        if self._writer is not None:
            self._writer.close()

    def _draw(self, rows: list[Row]) -> None:
        if self._drawn is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            purge = self._done + 1 if self._done else None
            self._writer = SummaryWriter(str(self._drawn), purge_step=purge)
        for row in rows:
            for name in self.columns:
                if name not in self._not_drawn and not math.isnan(row[name]):
                    tag = f"layer {row['layer']}/{name}"
                    self._writer.add_scalar(tag, row[name], int(row["step"]))
        self._writer.flush()

    def _read(self) -> list[Row]:
        if not self._file.is_file():
            return []
        with self._file.open(encoding="utf-8", newline="") as opened:
            reader = csv.DictReader(opened)
            there = set(reader.fieldnames or ())
            if not {*PLACE, *self._counts, *EVALUATED} <= there <= set(self.columns):
                raise FormatError(
                    f"{self._file} has other columns than this version of prismlm writes. Move it "
                    "away, and the run goes on with a new one."
                )
            try:
                return [
                    {
                        name: (int if name in self._counts else float)(row.get(name, "nan"))
                        for name in self.columns
                    }
                    for row in reader
                ]
            except (TypeError, ValueError) as error:
                raise FormatError(
                    f"{self._file} is damaged ({error}). Move it away, and the run goes on with a "
                    "new one."
                ) from error
