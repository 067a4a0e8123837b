"""What the routers of prototype mixers do while a model trains, layer by layer: routing.csv."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from prismlm.errors import FormatError
from prismlm.files import atomic_file
from prismlm.layers import PrototypeMixer
from prismlm.lens.routing import GateUse, gate_uses, half_life, mixers_of
from prismlm.training import checkpoints, distributed, parallel
from prismlm.training.evaluation import perplexity
from prismlm.training.setup import CHECKPOINTS

if TYPE_CHECKING:
    from prismlm.corpus.windows import WindowBatch

ROUTING_FILE = "routing.csv"
QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
GATE_COLUMNS = ("gini", "use_gini", "top_share", "top_channel_share")
COLUMNS = (
    "step",
    "epoch",
    "layer",
    "alpha",
    "tau_write",
    "tau_read",
    *(f"write_{name}" for name in GATE_COLUMNS),
    *(f"read_{name}" for name in GATE_COLUMNS),
    *(f"half_life_{name}" for name in QUANTILES),
    "gate_tokens",
    "ce",
    "perplexity",
    "ce_tokens",
)
# What TensorBoard has elsewhere, or as its own axis.
NOT_DRAWN = ("step", "layer", "gate_tokens", "ce", "ce_tokens")

Row = dict[str, float]


class RoutingLog:
    """Measures the routers of a model on held-out text and keeps the figures in ``routing.csv``.

    A row is one layer after one step. A run that is resumed writes the rows after its checkpoint
    anew, so that the file is that of a run that was never interrupted.

    Columns: ``step``; ``epoch``, tokens trained on over tokens of the training text; ``layer``,
    from 0; ``alpha``; ``tau_write`` and ``tau_read``, equal with shared routing; the figures of
    :class:`GateUse` for both gates; quantiles of the channels' half-lives, in positions;
    ``gate_tokens``, the held-out tokens behind the gates' figures; ``ce``, of the evaluation that
    the rows belong to, ``perplexity`` = exp(ce) and ``ce_tokens``, the predictions behind it.

    Args:
        out: the run's directory.
        done: the step of the checkpoint that the run goes on from, or 0.
        batches: returns the held-out text that gates are read on, the same each time.
        corpus_tokens: tokens of the training text.
        tensorboard: where to draw the figures too, or None.

    Raises:
        FormatError: there is a ``routing.csv`` that was written by something else.
    """

    def __init__(
        self,
        out: Path,
        done: int,
        *,
        batches: Callable[[], Iterable[WindowBatch]],
        corpus_tokens: int,
        tensorboard: Path | None = None,
    ) -> None:
        self._file = out / ROUTING_FILE
        self._checkpoints = out / CHECKPOINTS
        self._batches = batches
        self._corpus_tokens = corpus_tokens
        self._drawn = tensorboard
        self._done = done
        self._writer: Any = None
        self.rows = [row for row in _read(self._file) if row["step"] <= done]

    def add(self, decoder: nn.Module, *, step: int, tokens: int, ce: float, ce_tokens: int) -> None:
        """Measure a model after a step, and write the file. Every process has to call.

        Args:
            decoder: a model with prototype mixers.
            step: optimizer steps done.
            tokens: tokens trained on.
            ce: the model's cross-entropy on held-out text, in nats per token.
            ce_tokens: the predictions it is a mean over.
        """
        with parallel.whole(decoder):
            uses = gate_uses(decoder, self._batches())
        parameters = [_parameters(mixer) for mixer in mixers_of(decoder)]
        same = {"ce": ce, "perplexity": perplexity(ce), "ce_tokens": ce_tokens}
        place = {"step": step, "epoch": tokens / self._corpus_tokens}
        found: list[Row] = []
        for layer, (use, own) in enumerate(zip(uses, parameters, strict=True)):
            gates = _named("write", use.write) | _named("read", use.read)
            row = place | {"layer": layer, "gate_tokens": use.tokens} | own | gates | same
            found.append({name: row[name] for name in COLUMNS})
        self.rows = [row for row in self.rows if row["step"] != step] + found
        if distributed.is_main():
            with checkpoints.writing(str(self._file), self._checkpoints):
                self._write()
                self._draw(found)

    def close(self) -> None:
        """Write out what TensorBoard is to draw."""
        if self._writer is not None:
            self._writer.close()

    def _write(self) -> None:
        with (
            atomic_file(self._file) as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)

    def _draw(self, rows: list[Row]) -> None:
        if self._drawn is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A run of its own for TensorBoard, which watches one file in each directory.
            purge = self._done + 1 if self._done else None
            self._writer = SummaryWriter(str(self._drawn), purge_step=purge)
        for row in rows:
            for name in COLUMNS:
                if name not in NOT_DRAWN:
                    tag = f"layer {row['layer']}/{name}"
                    self._writer.add_scalar(tag, row[name], int(row["step"]))
        self._writer.flush()


class LogRouting(TrainerCallback):
    """Adds to a :class:`RoutingLog` at every evaluation.

    Args:
        log: what is added to.
        decoder: the model with the mixers.
        tokens: returns the tokens trained on so far.
    """

    def __init__(self, log: RoutingLog, decoder: nn.Module, tokens: Callable[[], int]) -> None:
        self._log = log
        self._decoder = decoder
        self._tokens = tokens

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the routers of the model that was evaluated."""
        figures: dict[str, float] = kwargs["metrics"]
        self._log.add(
            self._decoder,
            step=state.global_step,
            tokens=self._tokens(),
            ce=figures["eval_ce"],
            ce_tokens=int(figures["eval_tokens"]),
        )


@torch.no_grad()
def _parameters(mixer: PrototypeMixer) -> Row:
    """Return a mixer's α, temperatures and half-lives; its parameters may be sharded."""
    write = parallel.full(mixer.log_write_temperature)
    read = None if mixer.shared_routing else mixer.log_read_temperature
    lives = half_life(parallel.full(mixer.decay).cpu())
    row = {
        "alpha": parallel.full(mixer.alpha).float().mean().item(),
        "tau_write": write.float().exp().mean().item(),
        "tau_read": (write if read is None else parallel.full(read)).float().exp().mean().item(),
    }
    places = torch.tensor(list(QUANTILES.values()), dtype=lives.dtype)
    for name, value in zip(QUANTILES, lives.quantile(places).tolist(), strict=True):
        row[f"half_life_{name}"] = value
    return row


def _named(gate: str, use: GateUse) -> Row:
    return {f"{gate}_{name}": getattr(use, name) for name in GATE_COLUMNS}


def _read(file: Path) -> list[Row]:
    if not file.is_file():
        return []
    whole = ("step", "layer", "gate_tokens", "ce_tokens")
    with file.open(encoding="utf-8", newline="") as opened:
        reader = csv.DictReader(opened)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise FormatError(
                f"{file} has other columns than this version of prismlm writes. Move it away, and "
                "the run goes on with a new one."
            )
        try:
            return [
                {name: int(text) if name in whole else float(text) for name, text in row.items()}
                for row in reader
            ]
        except (TypeError, ValueError) as error:
            raise FormatError(
                f"{file} is damaged ({error}). Move it away, and the run goes on with a new one."
            ) from error
