"""Figures of each layer at evaluations: channels.csv of prototype mixers, heads.csv of heads.

They are figures of an evaluation like its cross-entropy, so they stand in a run's history, from
which the tables are written.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from prismlm.corpus.windows import Sequences, WindowBatch
from prismlm.files import atomic_file, write_json
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.protot import half_life, has_mixers, mixers_of
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.outputs import put_csv
from prismlm.probes.channels import gate_uses
from prismlm.probes.heads import (
    SpectraOptions,
    head_uses,
    layer_rates,
    own_cross_terms,
    read_states,
    spectra_report,
)
from prismlm.probes.heads.attention import MIN_VISIBLE
from prismlm.probes.heads.spectra import DOCUMENTS
from prismlm.probes.results import Table, figure_at
from prismlm.training import parallel
from prismlm.training.evaluation import perplexity
from prismlm.training.setup import Prepared

CHANNELS_FILE, HEADS_FILE, REPORT_FILE = "channels.csv", "heads.csv", "heads.json"
STEP_COLUMNS = ("step", "epoch", "layer")
EVALUATION_COLUMNS = ("ce", "perplexity", "ce_tokens")
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
# Columns of the table, with the figure of layer_rates in each.
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


class LayerLog:
    """The figures of each layer of a run's decoder: a table for mixers, one for heads, or none.

    Attributes:
        gradient_norms: ‖∂L/∂θ_ℓ‖ of each block ℓ with heads, before clipping, in the last step that
            :meth:`read_gradients` was called in.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, self._decoder = prepared, prepared.model.model
        settings = prepared.recipe.evaluation
        self._channel_tokens = settings.channel_tokens if has_mixers(self._decoder) else 0
        self._head_tokens = settings.attention_head_tokens if has_heads(self._decoder) else 0
        # Found now: FSDP2 gives them other classes.
        self._blocks = parallel.blocks(self._decoder) if self._head_tokens else []
        self.gradient_norms = [math.nan] * len(self._blocks)

    @torch.no_grad()
    def read_gradients(self) -> None:
        """Take the norms of the gradients as they are now. Every process has to call."""
        for layer, block in enumerate(self._blocks):
            norms = [
                parallel.full(p.grad.float().norm())
                for p in block.parameters()
                if p.grad is not None
            ]
            self.gradient_norms[layer] = float(torch.stack(norms).norm()) if norms else 0.0

    def figures(self) -> Row:
        """Measure the decoder; return ``eval_channels/LAYER/COLUMN``. Every process has to call."""
        tables: dict[str, list[Row]] = {}
        heldout, decoder = self._prepared.heldout, self._decoder
        if self._channel_tokens:
            tables[CHANNELS_FILE] = channels_figures(decoder, heldout.batches(self._channel_tokens))
        if self._head_tokens:
            tables[HEADS_FILE] = heads_figures(
                decoder,
                heldout.batches(self._head_tokens),
                self._prepared.recipe.data.length,
                self.gradient_norms,
            )
        return {
            _key(file, layer, name): value
            for file, rows in tables.items()
            for layer, row in enumerate(rows)
            for name, value in row.items()
        }

    def write(self, out: Path, history: Iterable[dict[str, Any]]) -> None:
        """Write the tables of a history's evaluations, one row for each layer of each."""
        evaluations = [row for row in history if "eval_ce" in row]
        for file, columns in self._columns().items():
            rows = [
                {
                    **{name: row[name] for name in ("step", "epoch")},
                    "layer": layer,
                    **{name: row[_key(file, layer, name)] for name in columns},
                    "ce": row["eval_ce"],
                    "perplexity": perplexity(row["eval_ce"]),
                    "ce_tokens": row["eval_tokens"],
                }
                for row in evaluations
                for layer in range(self._prepared.model.config.num_hidden_layers)
            ]
            with atomic_file(out / file) as temporary:
                put_csv(temporary, (*STEP_COLUMNS, *columns, *EVALUATION_COLUMNS), rows)

    def _columns(self) -> dict[str, tuple[str, ...]]:
        channels = {CHANNELS_FILE: CHANNEL_COLUMNS} if self._channel_tokens else {}
        return channels | ({HEADS_FILE: HEAD_COLUMNS} if self._head_tokens else {})

    def write_report(self, out: Path) -> None:
        """Write ``heads.json``, the report of ``prismlm inspect spectra``, of a model with heads.

        What ``heads.csv`` leaves out: cross terms of every ratio, small denominators, and the loss
        by length of context up to twice a row, of at most ``evaluation.attention_head_tokens``
        tokens of rows. Every process has to call; the first writes.
        """
        tokens, recipe = self._head_tokens, self._prepared.recipe
        if not tokens:
            return
        length = recipe.data.length
        documents = min(DOCUMENTS, max(1, tokens // length))
        with parallel.whole(self._decoder), parallel.uncompiled(self._decoder):
            report = spectra_report(
                cast("PreTrainedModel", self._decoder),
                Sequences(self._prepared.corpus, "heldout", length, tokens),
                name=out.name,
                options=SpectraOptions(
                    trained_length=length, documents=documents, seed=recipe.seed
                ),
            )
        if parallel.is_main():
            write_json(out / REPORT_FILE, report.to_dict(), indent=1)


def _key(file: str, layer: int, column: str) -> str:
    return f"eval_{file.removesuffix('.csv')}/{layer}/{column}"


def has_heads(decoder: nn.Module) -> bool:
    """Say whether a decoder has signal and noise heads."""
    return isinstance(decoder, SignalNoiseForCausalLM)


def channels_figures(decoder: nn.Module, batches: Iterable[WindowBatch]) -> list[Row]:
    """Return the columns of each layer, gates read on a text.

    ``alpha``; both temperatures, equal with shared gates; the figures of :func:`gate_use`;
    quantiles of half-lives, in positions, or NaN with decays by token; ``gate_tokens``.
    """
    with parallel.whole(decoder):
        uses = gate_uses(decoder, batches)
    return [
        _parameters(mixer)
        | {f"write_{name}": use["write"][name] for name in GATE_FIGURES}
        | {f"read_{name}": use["read"][name] for name in GATE_FIGURES}
        | {"gate_tokens": use["tokens"]}
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
    quantiles = lives.quantile(torch.tensor(list(QUANTILES.values()), dtype=lives.dtype))
    return row | dict(zip(names, quantiles.tolist(), strict=True))


def heads_figures(
    decoder: nn.Module, batches: Iterable[WindowBatch], length: int, norms: Sequence[float]
) -> list[Row]:
    """Return the columns of each layer, read on a text.

    :func:`layer_rates`; cross terms of the model's own rotations, with the content of this text;
    means over the heads of each group of :func:`head_uses`, whose queries see 16 tokens, or a whole
    row if that is shorter, NaN where no document is that long; the layer's gradient norm.
    """
    model, least = cast("PreTrainedModel", decoder), min(MIN_VISIBLE, length)
    batches = list(batches)
    with parallel.whole(decoder), parallel.uncompiled(decoder):
        states = read_states(model, batches)
        uses = head_uses(model, batches, least_visible=least)
    terms = own_cross_terms(states, length=length)["layers"]
    layers = layer_rates(states).rows
    return [
        {name: figure_at(rates, figure) for name, figure in RATES.items()}
        | {f"cross_{name}": own[name] for name in CROSS_TERMS}
        | _group_means(uses, rates["layer"])
        | {"gradient_norm": norm, "positions": rates["positions"]}
        for rates, own, norm in zip(layers, terms, norms, strict=True)
    ]


def _group_means(uses: Table, layer: int) -> Row:
    row: Row = {"attention_tokens": uses["tokens"] if uses.rows else 0}
    for group in GROUPS:
        heads = [use for use in uses.rows if (use["layer"], use["group"]) == (layer, group)]
        for name in HEAD_FIGURES:
            values = [use[name] for use in heads]
            row[f"{group}_{name}"] = statistics.fmean(values) if values else math.nan
    return row
