"""Figures of each layer while a model trains: channels.csv of prototype mixers, heads.csv of heads.

At every evaluation and at the end one row for each layer. A run that is resumed writes the rows
after its checkpoint anew.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from prismlm.corpus.sequences import Sequences
from prismlm.corpus.windows import WindowBatch
from prismlm.files import atomic_file, write_json
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.mixers import half_life, has_mixers, mixers_of
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.outputs import put_csv
from prismlm.probes.channels import gate_uses
from prismlm.probes.heads import (
    SpectraOptions,
    layer_rates,
    own_cross_terms,
    read_states_and_heads,
    spectra_report,
)
from prismlm.probes.heads.spectra import DOCUMENTS
from prismlm.probes.heads.use import MIN_VISIBLE
from prismlm.probes.results import Table, figure_at
from prismlm.training import checkpoints, parallel
from prismlm.training.checkpoints import CHECKPOINTS
from prismlm.training.evaluation import perplexity
from prismlm.training.trainer import PrismTrainer

CHANNELS_FILE, HEADS_FILE, REPORT_FILE = "channels.csv", "heads.csv", "heads.json"
PLACE = ("step", "epoch", "layer")
EVALUATED = ("ce", "perplexity", "ce_tokens")
# TensorBoard has these as an axis or elsewhere, or they are counts of what was read.
NOT_DRAWN = ("step", "layer", "ce", "ce_tokens", "gate_tokens", "positions", "attention_tokens")
QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
GATE_FIGURES = ("gini", "use_gini", "top_share", "top_channel_share")
CHANNEL_COLUMNS = (
    "alpha",
    "tau_write",
    "tau_read",
    *(f"{gate}_{name}" for gate in ("write", "read") for name in GATE_FIGURES),
    *(f"half_life_{name}" for name in QUANTILES),
    "gate_tokens",
)
HEAD_FIGURES = ("distance", "entropy", "self_share", "first_share")
GROUPS = ("signal", "noise")
# Columns of the log, with the figure of layer_rates in each.
RATES = {
    "noise_weight": "noise_weight",
    "rate": "before.whole",
    "signal_rate": "before.signal",
    "noise_rate": "before.noise",
    "difference": "before.difference",
    "gain": "gain",
    "gain_over_scaled": "gain_over_scaled",
    "gain_over_shuffled": "gain_over_shuffled",
    "gradient_cosine": "gradient_cosine",
    "step_size": "step_size",
    "incoherence": "incoherence.own",
    "random_incoherence": "incoherence.random",
}
CROSS_TERMS = ("signal_noise", "signal_signal", "noise_noise", "normalised")
HEAD_COLUMNS = (
    *RATES,
    *(f"cross_{name}" for name in CROSS_TERMS),
    *(f"{group}_{name}" for group in GROUPS for name in HEAD_FIGURES),
    "gradient_norm",
    "positions",
    "attention_tokens",
)

Row = dict[str, float]


def layer_logs(trainer: PrismTrainer, out: Path, tensorboard: str, done: int) -> list[LayerLog]:
    """Return the logs that a run's model and recipe ask for.

    ``done`` is the step of the checkpoint that the run is resumed from, or 0.
    """
    prepared = trainer.prepared
    decoder, heldout, recipe = prepared.model.model, prepared.heldout, prepared.recipe
    drawn = out / tensorboard if recipe.logging.tensorboard else None
    logs: list[LayerLog] = []
    channel_tokens, head_tokens = recipe.evaluation.channel_tokens, _head_tokens(trainer)
    # Found now: FSDP2 gives them other classes.
    blocks = parallel.blocks(decoder) if head_tokens else []
    norms = [math.nan] * len(blocks)

    def channels() -> list[Row]:
        return channels_figures(decoder, heldout.batches(channel_tokens))

    def heads() -> list[Row]:
        return heads_figures(decoder, heldout.batches(head_tokens), recipe.data.length, norms)

    if channel_tokens and has_mixers(decoder):
        logs.append(LayerLog(trainer, out / CHANNELS_FILE, CHANNEL_COLUMNS, channels, done, drawn))
    if head_tokens:
        trainer.on_gradients = partial(_read_gradients, trainer, blocks, norms)
        logs.append(LayerLog(trainer, out / HEADS_FILE, HEAD_COLUMNS, heads, done, drawn))
    return logs


class LayerLog(TrainerCallback):
    """Measures the layers of a model at every evaluation; keeps the figures in a CSV file.

    ``measure`` returns the ``columns`` of each layer; ``done`` is the step of the checkpoint that
    the run is resumed from; ``tensorboard`` its directory for TensorBoard, or None.
    """

    def __init__(
        self,
        trainer: PrismTrainer,
        file: Path,
        columns: Sequence[str],
        measure: Callable[[], Sequence[Row]],
        done: int = 0,
        tensorboard: Path | None = None,
    ) -> None:
        self._trainer, self._file, self._measure = trainer, file, measure
        self.columns = (*PLACE, *columns, *EVALUATED)
        self._done, self._tensorboard = done, tensorboard
        self._writer: Any = None
        self.rows: list[dict[str, Any]] = self._read() if done and file.is_file() else []

    def _read(self) -> list[dict[str, Any]]:
        """Return the rows up to the checkpoint, as they stand there."""
        with self._file.open(encoding="utf-8", newline="") as opened:
            return [row for row in csv.DictReader(opened) if int(row["step"]) <= self._done]

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Measure the model that was evaluated."""
        figures: dict[str, float] = kwargs["metrics"]
        ce, ce_tokens = figures["eval_ce"], int(figures["eval_tokens"])
        self.add(step=state.global_step, ce=ce, ce_tokens=ce_tokens)

    def add(self, *, step: int, ce: float, ce_tokens: int) -> None:
        """Measure the model after a step, and write the file. Every process has to call.

        A run whose rows of the step are there, since it was finished before, keeps them.
        """
        if any(int(row["step"]) == step for row in self.rows):
            return
        epoch = self._trainer.tokens_seen() / self._trainer.prepared.rows.num_tokens
        same = {"ce": ce, "perplexity": perplexity(ce), "ce_tokens": ce_tokens}
        rows = [
            {"step": step, "epoch": epoch, "layer": layer} | own | same
            for layer, own in enumerate(self._measure())
        ]
        self.rows += [{name: row[name] for name in self.columns} for row in rows]
        if parallel.is_main():
            with checkpoints.guard_writing(str(self._file), self._file.parent / CHECKPOINTS):
                with atomic_file(self._file) as temporary:
                    put_csv(temporary, self.columns, self.rows)
                self._draw(rows)

    def _draw(self, rows: list[Row]) -> None:
        if self._tensorboard is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            purge = self._done + 1 if self._done else None
            run = self._tensorboard / self._file.stem
            self._writer = SummaryWriter(str(run), purge_step=purge)
        for row in rows:
            for name in self.columns:
                if name not in NOT_DRAWN and not math.isnan(row[name]):
                    self._writer.add_scalar(f"layer {row['layer']}/{name}", row[name], row["step"])
        self._writer.flush()


def channels_figures(decoder: nn.Module, batches: Iterable[WindowBatch]) -> list[Row]:
    """Return the columns of each layer, gates read on a text.

    ``alpha``; both temperatures, equal with shared gates; the figures of :class:`GateUse`;
    quantiles of half-lives, in positions, or NaN with decays by token; ``gate_tokens``.
    """
    with parallel.whole(decoder):
        uses = gate_uses(decoder, batches)
    return [
        _parameters(mixer)
        | {f"write_{name}": getattr(use.write, name) for name in GATE_FIGURES}
        | {f"read_{name}": getattr(use.read, name) for name in GATE_FIGURES}
        | {"gate_tokens": use.tokens}
        for mixer, use in zip(mixers_of(decoder), uses, strict=True)
    ]


@torch.no_grad()
def _parameters(mixer: PrototypeMixer) -> Row:
    """Return a mixer's α, temperatures and half-lives; its parameters may be sharded."""
    write = mixer.log_write_temperature
    read = write if mixer.shared_gates else mixer.log_read_temperature
    row: Row = {"alpha": parallel.full(mixer.alpha).float().mean().item()}
    for name, logarithm in (("tau_write", write), ("tau_read", read)):
        row[name] = parallel.full(logarithm).float().exp().mean().item()
    names = [f"half_life_{name}" for name in QUANTILES]
    if mixer.decay_map is not None:
        return row | dict.fromkeys(names, math.nan)
    lives = half_life(parallel.full(mixer.decay).cpu())
    places = torch.tensor(list(QUANTILES.values()), dtype=lives.dtype)
    return row | dict(zip(names, lives.quantile(places).tolist(), strict=True))


@torch.no_grad()
def _read_gradients(
    trainer: PrismTrainer, blocks: list[nn.Module], norms: list[float], step: int
) -> None:
    """Put ‖∂L/∂θ_ℓ‖ of each block ℓ, before clipping, into ``norms``, in steps that are evaluated.

    Every process has to call.
    """
    recipe = trainer.prepared.recipe
    every = recipe.evaluation.every
    if step != recipe.steps and not (every and step % every == 0):
        return
    for layer, block in enumerate(blocks):
        grads = [p.grad for p in block.parameters() if p.grad is not None]
        each = [parallel.full(grad.float().norm()) for grad in grads]
        norms[layer] = float(torch.stack(each).norm()) if each else 0.0


def heads_figures(
    decoder: nn.Module, batches: Iterable[WindowBatch], length: int, norms: Sequence[float]
) -> list[Row]:
    """Return the columns of each layer, from one forward pass over the text without logits.

    :func:`layer_rates`; cross terms of the model's own rotations, with the content of this text;
    means over the heads of each group of :func:`head_uses`, whose queries see 16 tokens, or a whole
    row if that is shorter, NaN where no document is that long; the layer's gradient norm.
    """
    model, least = cast("PreTrainedModel", decoder), min(MIN_VISIBLE, length)
    with parallel.whole(decoder), parallel.uncompiled(decoder):
        states, uses = read_states_and_heads(model, batches, least_visible=least)
    terms = own_cross_terms(states, length=length)["layers"]
    layers = layer_rates(states).rows
    return [
        {name: figure_at(rates, figure) for name, figure in RATES.items()}
        | {f"cross_{name}": own[name] for name in CROSS_TERMS}
        | _heads(uses, rates["layer"])
        | {"gradient_norm": norm, "positions": rates["positions"]}
        for rates, own, norm in zip(layers, terms, norms, strict=True)
    ]


def _heads(uses: Table | None, layer: int) -> Row:
    row: Row = {"attention_tokens": 0 if uses is None else uses["tokens"]}
    for group in GROUPS:
        of = () if uses is None else uses.rows
        heads = [use for use in of if (use["layer"], use["group"]) == (layer, group)]
        for name in HEAD_FIGURES:
            values = [use[name] for use in heads]
            row[f"{group}_{name}"] = statistics.fmean(values) if values else math.nan
    return row


def write_heads_report(trainer: PrismTrainer, out: Path) -> None:
    """Write ``heads.json``, what ``prismlm inspect spectra`` says of the model, if it has heads.

    What ``heads.csv`` leaves out: cross terms of every ratio, small denominators, and the loss
    by length of context up to twice a row, of at most ``evaluation.attention_head_tokens`` tokens
    of rows. Every process has to call; the first writes.
    """
    prepared, tokens = trainer.prepared, _head_tokens(trainer)
    if not tokens:
        return
    length, decoder = prepared.recipe.data.length, prepared.model.model
    options = SpectraOptions(
        trained_length=length,
        documents=min(DOCUMENTS, max(1, tokens // length)),
        seed=prepared.recipe.seed,
    )
    with parallel.whole(decoder), parallel.uncompiled(decoder):
        report = spectra_report(
            cast("PreTrainedModel", decoder),
            Sequences(prepared.corpus, "heldout", length, tokens),
            name=out.name,
            options=options,
        )
    if parallel.is_main():
        with checkpoints.guard_writing(str(out / REPORT_FILE), out / CHECKPOINTS):
            write_json(out / REPORT_FILE, report.to_dict(), indent=1)


def _head_tokens(trainer: PrismTrainer) -> int:
    """Return how many tokens heads are read on; 0 of a model without signal and noise heads."""
    has_heads = isinstance(trainer.model.model, SignalNoiseForCausalLM)
    return trainer.prepared.recipe.evaluation.attention_head_tokens if has_heads else 0
