"""What signal and noise heads do while a model trains: heads.csv, and heads.json at the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from prismlm.corpus.sequences import Sequences
from prismlm.files import write_json
from prismlm.instruments.heads import (
    SpectraOptions,
    layer_rates,
    own_cross_terms,
    read_states_and_heads,
    spectra_report,
)
from prismlm.instruments.heads.spectra import DOCUMENTS
from prismlm.instruments.heads.use import LEAST_VISIBLE
from prismlm.instruments.results import Table, figure_at
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.training import checkpoints, distributed, parallel
from prismlm.training.logs.layers import LayerLog, Row
from prismlm.training.recipe import Recipe
from prismlm.training.setup import CHECKPOINTS, Prepared
from prismlm.training.trainer import PrismTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

HEADS_FILE = "heads.csv"
REPORT_FILE = "heads.json"
HEAD_FIGURES = ("distance", "entropy", "self_share", "first_share")
GROUPS = ("signal", "noise")
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
"""Columns of the log, with the figure of :func:`layer_rates` in each."""
CROSS_TERMS = ("signal_noise", "signal_signal", "noise_noise", "normalised")
COLUMNS = (
    *RATES,
    *(f"cross_{name}" for name in CROSS_TERMS),
    *(f"{group}_{name}" for group in GROUPS for name in HEAD_FIGURES),
    "gradient_norm",
    "positions",
    "attention_tokens",
)


class LayerGradients:
    """‖∂L/∂θ_ℓ‖ over all parameters θ_ℓ of block ℓ, before clipping.

    Read once an evaluation, so that other steps cost nothing, and kept in checkpoints: the last
    rows are written after the last of them.

    Attributes:
        norms: of each block at the last step that was read; NaN before.

    Args:
        blocks: of the decoder.
        recipe: says after which steps there is an evaluation.
    """

    def __init__(self, blocks: Sequence[nn.Module], recipe: Recipe) -> None:
        self._blocks, self._recipe = blocks, recipe
        self.norms = [math.nan] * len(blocks)

    def read(self, step: int) -> None:
        """Take in the gradients of a step, counted from 1. Every process has to call."""
        every = self._recipe.evaluation.every
        if step == self._recipe.steps or (every and step % every == 0):
            self.norms = [_norm(block) for block in self._blocks]


@torch.no_grad()
def _norm(block: nn.Module) -> float:
    grads = [p.grad for p in block.parameters() if p.grad is not None]
    each: list[Tensor] = [parallel.full(grad.float().norm()) for grad in grads]
    return float(torch.stack(each).norm()) if each else 0.0


def heads_log(prepared: Prepared, done: int, trainer: PrismTrainer) -> LayerLog | None:
    """Return the log of a run's signal and noise heads; None for a model without them.

    Columns: λ; R(Z), R(Z|U_s), R(Z|U_n) and ΔR in nats, what a layer's step adds to ΔR and the
    rest of :func:`layer_rates`; K_SN, K_SS, K_NN and K_SN / √(K_SS K_NN) of the model's own
    rotations, with the content of this text; means over the heads of each group of figures of
    :func:`head_uses`; the norm of the layer's gradient in the step before, unclipped; ``positions``
    behind the rates and ``attention_tokens`` behind the heads, whose queries see 16 tokens, or a
    whole row if that is shorter. Where no document is that long, heads are NaN, of 0 tokens.

    Everything but the gradient comes from one forward pass over the text, without logits.

    Args:
        prepared: the run; heads are read on ``evaluation.attention_head_tokens`` of its held-out
            text, the same each time.
        done: the step of the checkpoint that it goes on from, or 0.
        trainer: of the run, which counts its tokens, and whose gradients are read.

    Raises:
        FormatError: there is a ``heads.csv`` that was written by something else.
    """
    recipe, tokens = prepared.recipe, _tokens(prepared)
    if not tokens:
        return None
    gradients = LayerGradients(parallel.blocks(prepared.model.model), recipe)
    trainer.layer_gradients = gradients
    return LayerLog(
        prepared,
        trainer,
        done,
        HEADS_FILE,
        columns=COLUMNS,
        counts=("positions", "attention_tokens"),
        measure=lambda decoder: heads_figures(
            decoder, prepared.heldout.batches(tokens), recipe.data.length, gradients
        ),
    )


def write_heads_report(prepared: Prepared) -> None:
    """Write ``heads.json``, what ``prismlm inspect spectra`` says of the model, if it has heads.

    What ``heads.csv`` leaves out: cross terms of every ratio, small denominators, and the loss
    by length of context up to twice a row, of at most ``evaluation.attention_head_tokens`` tokens
    of rows. Every process has to call; the first writes.
    """
    recipe, tokens = prepared.recipe, _tokens(prepared)
    if not tokens:
        return
    length, decoder = recipe.data.length, prepared.model.model
    options = SpectraOptions(
        trained_length=length,
        documents=min(DOCUMENTS, max(1, tokens // length)),
        seed=recipe.seed,
    )
    with parallel.whole(decoder), parallel.uncompiled(decoder):
        report = spectra_report(
            cast("PreTrainedModel", decoder),
            Sequences(prepared.corpus, "heldout", length, tokens),
            name=recipe.out.name,
            options=options,
        )
    if distributed.is_main():
        file = recipe.out / REPORT_FILE
        with checkpoints.guard_writing(str(file), recipe.out / CHECKPOINTS):
            write_json(file, report.to_dict(), indent=1)


def heads_figures(
    decoder: nn.Module, batches: Iterable[WindowBatch], length: int, gradients: LayerGradients
) -> list[Row]:
    """Return the columns of each layer.

    Args:
        decoder: with signal and noise heads.
        batches: the text that they are read on.
        length: tokens of a training row, at least 2, over which cross terms are means.
        gradients: of the step before.
    """
    model, least = cast("PreTrainedModel", decoder), min(LEAST_VISIBLE, length)
    with parallel.whole(decoder), parallel.uncompiled(decoder):
        states, uses = read_states_and_heads(model, batches, least_visible=least)
    terms = own_cross_terms(states, length=length)["layers"]
    layers = layer_rates(states).rows
    return [
        {name: figure_at(rates, figure) for name, figure in RATES.items()}
        | {f"cross_{name}": own[name] for name in CROSS_TERMS}
        | _heads(uses, rates["layer"])
        | {"gradient_norm": norm, "positions": rates["positions"]}
        for rates, own, norm in zip(layers, terms, gradients.norms, strict=True)
    ]


def _tokens(prepared: Prepared) -> int:
    """Return how many tokens heads are read on; 0 of a model without signal and noise heads."""
    has_heads = isinstance(prepared.model.model, SignalNoiseForCausalLM)
    return prepared.recipe.evaluation.attention_head_tokens if has_heads else 0


def _heads(uses: Table | None, layer: int) -> Row:
    row: Row = {"attention_tokens": 0 if uses is None else uses["tokens"]}
    for group in GROUPS:
        of = () if uses is None else uses.rows
        heads = [use for use in of if (use["layer"], use["group"]) == (layer, group)]
        for name in HEAD_FIGURES:
            values = [use[name] for use in heads]
            row[f"{group}_{name}"] = statistics.fmean(values) if values else math.nan
    return row
