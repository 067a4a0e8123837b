"""Figures of each layer at evaluations: channels of prototype mixers, signal and noise heads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from prismlm.corpus.windows import WindowBatch
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.protot import half_life, has_mixers, mixers_of
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.probes.channels import gate_uses
from prismlm.probes.heads import (
    cross_terms,
    head_uses,
    layer_rates,
    read_states,
)
from prismlm.probes.heads.attention import MIN_VISIBLE
from prismlm.probes.results import Table, figure_at
from prismlm.training import parallel
from prismlm.training.setup import Prepared

QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
GATE_FIGURES = ("gini", "use_gini", "top_share", "top_channel_share")
HEAD_FIGURES = ("distance", "entropy", "self_share", "first_share")
GROUPS = ("signal", "noise")
# By name, the path of a figure in a row of layer_rates.
RATES = {
    "noise_weight": "noise_weight",
    "rate": "before.whole",
    "signal_rate": "before.signal",
    "noise_rate": "before.noise",
    "difference": "before.difference",
    "gain": "gain",
    "incoherence": "incoherence.own",
}
CROSS_TERMS = ("signal_noise", "normalised")

Row = dict[str, float]


def layer_figures(prepared: Prepared) -> Row:
    """Measure the layers of a decoder with prototype mixers or noise heads, on held-out text.

    Returns ``eval_channels/LAYER/FIGURE`` or ``eval_heads/LAYER/FIGURE``. Every process has to
    call.
    """
    settings, decoder, heldout = prepared.recipe.evaluation, prepared.model.model, prepared.heldout
    kind, rows = "", list[Row]()
    if has_mixers(decoder) and settings.channel_tokens:
        kind, rows = "channels", channels_figures(decoder, heldout.batches(settings.channel_tokens))
    elif isinstance(decoder, SignalNoiseForCausalLM) and settings.attention_head_tokens:
        batches = heldout.batches(settings.attention_head_tokens)
        kind, rows = "heads", heads_figures(decoder, batches, prepared.recipe.data.length)
    return {
        f"eval_{kind}/{layer}/{name}": value
        for layer, row in enumerate(rows)
        for name, value in row.items()
    }


def channels_figures(decoder: nn.Module, batches: Iterable[WindowBatch]) -> list[Row]:
    """Return the figures of the channels of each layer; half-lives by token are NaN."""
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


def heads_figures(decoder: nn.Module, batches: Iterable[WindowBatch], length: int) -> list[Row]:
    """Return the figures of the heads of each layer.

    Figures of heads are means over a group, or NaN if no document is long enough.
    """
    model, least = cast("PreTrainedModel", decoder), min(MIN_VISIBLE, length)
    batches = list(batches)
    with parallel.unsharded(decoder), parallel.uncompiled(decoder):
        states = read_states(model, batches)
        uses = head_uses(model, batches, least_visible=least)
    own_rotation = cross_terms(states, length=length).rows[0]
    layers = layer_rates(states).rows
    return [
        {name: figure_at(rates, path) for name, path in RATES.items()}
        | {f"cross_{name}": cross[name] for name in CROSS_TERMS}
        | _group_means(uses, rates["layer"])
        | {"positions": rates["positions"]}
        for rates, cross in zip(layers, own_rotation["layers"], strict=True)
    ]


def _group_means(uses: Table, layer: int) -> Row:
    row: Row = {"attention_tokens": uses["tokens"] if uses.rows else 0}
    for group in GROUPS:
        heads = [use for use in uses.rows if (use["layer"], use["group"]) == (layer, group)]
        for name in HEAD_FIGURES:
            values = [use[name] for use in heads]
            row[f"{group}_{name}"] = statistics.fmean(values) if values else math.nan
    return row
