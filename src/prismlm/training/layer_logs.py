"""Figures of the channels of prototype mixers at evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from prismlm.corpus.windows import WindowBatch
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.protot import half_life, has_mixers, mixers_of
from prismlm.probes.channels import gate_uses
from prismlm.training import parallel
from prismlm.training.setup import Prepared

QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
GATE_FIGURES = ("gini", "use_gini", "top_share", "top_channel_share")

Row = dict[str, float]


def layer_figures(prepared: Prepared) -> Row:
    """Measure the layers of a decoder with prototype mixers on held-out text.

    Returns ``eval_channels/LAYER/FIGURE``. Every process has to call.
    """
    decoder, tokens = prepared.model.model, prepared.recipe.evaluation.channel_tokens
    if not tokens or not has_mixers(decoder):
        return {}
    rows = channels_figures(decoder, prepared.heldout.batches(tokens))
    return {
        f"eval_channels/{layer}/{name}": value
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
