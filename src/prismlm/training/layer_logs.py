"""Statistics of each layer at evaluations: channels.csv of prototype mixers, heads.csv of heads."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
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
    cross_terms,
    head_uses,
    layer_rates,
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
QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
GATE_FIGURES = ("gini", "use_gini", "top_share", "top_channel_share")
HEAD_FIGURES = ("distance", "entropy", "self_share", "first_share")
GROUPS = ("signal", "noise")
# By column, the path of a figure in a row of layer_rates.
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

Row = dict[str, float]


class LayerLog:
    """Measures the layers of a run's decoder, if it has prototype mixers or noise heads."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, self._decoder = prepared, prepared.model.model
        settings = prepared.recipe.evaluation
        has_heads = isinstance(self._decoder, SignalNoiseForCausalLM)
        self._channel_tokens = settings.channel_tokens if has_mixers(self._decoder) else 0
        self._head_tokens = settings.attention_head_tokens if has_heads else 0
        # Before FSDP2 changes the classes of the blocks.
        self._blocks = parallel.blocks(self._decoder) if self._head_tokens else []
        # Of each block before clipping, as of the last read_gradients().
        self.gradient_norms = [math.nan] * len(self._blocks)

    @torch.no_grad()
    def read_gradients(self) -> None:
        """Compute the norms of the current gradients; every process has to call."""
        for layer, block in enumerate(self._blocks):
            gradients = [p.grad for p in block.parameters() if p.grad is not None]
            norms = [parallel.full(gradient.float().norm()) for gradient in gradients]
            self.gradient_norms[layer] = float(torch.stack(norms).norm()) if norms else 0.0

    def figures(self) -> Row:
        """Measure the decoder; return ``eval_TABLE/LAYER/COLUMN``. Every process has to call."""
        tables: dict[str, list[Row]] = {}
        heldout, decoder = self._prepared.heldout, self._decoder
        if self._channel_tokens:
            batches = heldout.batches(self._channel_tokens)
            tables[CHANNELS_FILE] = channels_figures(decoder, batches)
        if self._head_tokens:
            batches, length = heldout.batches(self._head_tokens), self._prepared.recipe.data.length
            tables[HEADS_FILE] = heads_figures(decoder, batches, length, self.gradient_norms)
        return {
            f"eval_{file.removesuffix('.csv')}/{layer}/{column}": value
            for file, rows in tables.items()
            for layer, row in enumerate(rows)
            for column, value in row.items()
        }

    def write(self, out: Path, history: Iterable[dict[str, Any]]) -> None:
        """Write the tables, with a row for each layer and evaluation of a history."""
        evaluations = [row for row in history if "eval_ce" in row]
        tables = {CHANNELS_FILE: self._channel_tokens, HEADS_FILE: self._head_tokens}
        for file in (file for file, tokens in tables.items() if tokens and evaluations):
            prefix, rows = f"eval_{file.removesuffix('.csv')}/", []
            for evaluation in evaluations:
                layers: dict[int, Row] = defaultdict(dict)
                for key, value in evaluation.items():
                    if key.startswith(prefix):
                        layer, column = key.removeprefix(prefix).split("/")
                        layers[int(layer)][column] = value
                ce, tokens = evaluation["eval_ce"], evaluation["eval_tokens"]
                measured = {"ce": ce, "perplexity": perplexity(ce), "ce_tokens": tokens}
                step = {name: evaluation[name] for name in ("step", "epoch")}
                rows += [step | {"layer": n} | layers[n] | measured for n in sorted(layers)]
            # Of the newest evaluation: those restored from a checkpoint are sorted by name.
            with atomic_file(out / file) as temporary:
                put_csv(temporary, list(rows[-1]), rows)

    def write_report(self, out: Path) -> None:
        """Write ``heads.json``, as of ``prismlm inspect spectra``; every process has to call."""
        tokens, recipe = self._head_tokens, self._prepared.recipe
        if not tokens:
            return
        length = recipe.data.length
        documents = min(DOCUMENTS, max(1, tokens // length))
        with parallel.unsharded(self._decoder), parallel.uncompiled(self._decoder):
            report = spectra_report(
                cast("PreTrainedModel", self._decoder),
                Sequences(self._prepared.corpus, "heldout", length, tokens),
                name=out.name,
                trained_length=length,
                documents=documents,
                seed=recipe.seed,
            )
        if parallel.is_main():
            write_json(out / REPORT_FILE, report.to_dict(), indent=1)


def channels_figures(decoder: nn.Module, batches: Iterable[WindowBatch]) -> list[Row]:
    """Return the columns of ``channels.csv`` for each layer; half-lives by token are NaN."""
    with parallel.unsharded(decoder):
        uses = gate_uses(decoder, batches)
    return [
        _mixer_parameters(mixer)
        | {f"{gate}_{name}": use[gate][name] for gate in ("write", "read") for name in GATE_FIGURES}
        | {"gate_tokens": use["tokens"]}
        for mixer, use in zip(mixers_of(decoder), uses, strict=True)
    ]


@torch.no_grad()
def _mixer_parameters(mixer: PrototypeMixer) -> Row:
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
    """Return the columns of ``heads.csv`` for each layer.

    Figures of heads are means over a group, or NaN if no document is long enough.
    """
    model, least = cast("PreTrainedModel", decoder), min(MIN_VISIBLE, length)
    batches = list(batches)
    with parallel.unsharded(decoder), parallel.uncompiled(decoder):
        states = read_states(model, batches)
        uses = head_uses(model, batches, least_visible=least)
    crosses = cross_terms(states, length=length).rows
    return [
        {name: figure_at(rates, path) for name, path in RATES.items()}
        | {f"cross_{name}": cross[name] for name in CROSS_TERMS}
        | _group_means(uses, rates["layer"])
        | {"gradient_norm": norm, "positions": rates["positions"]}
        for rates, cross, norm in zip(layer_rates(states).rows, crosses, norms, strict=True)
    ]


def _group_means(uses: Table, layer: int) -> Row:
    row: Row = {"attention_tokens": uses["tokens"] if uses.rows else 0}
    for group in GROUPS:
        heads = [use for use in uses.rows if (use["layer"], use["group"]) == (layer, group)]
        for name in HEAD_FIGURES:
            values = [use[name] for use in heads]
            row[f"{group}_{name}"] = statistics.fmean(values) if values else math.nan
    return row
