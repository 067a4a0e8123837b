"""What the channels of prototype mixers do while a model trains, layer by layer: channels.csv."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from prismlm.instruments.channels import GateUse, gate_uses
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.mixers import half_life, has_mixers, mixers_of
from prismlm.training import parallel
from prismlm.training.logs.layers import LayerLog, Row
from prismlm.training.setup import Prepared
from prismlm.training.trainer import PrismTrainer

if TYPE_CHECKING:
    from prismlm.corpus.windows import WindowBatch

CHANNELS_FILE = "channels.csv"
QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
GATE_COLUMNS = ("gini", "use_gini", "top_share", "top_channel_share")
COLUMNS = (
    "alpha",
    "tau_write",
    "tau_read",
    *(f"write_{name}" for name in GATE_COLUMNS),
    *(f"read_{name}" for name in GATE_COLUMNS),
    *(f"half_life_{name}" for name in QUANTILES),
    "gate_tokens",
)


def channels_log(prepared: Prepared, done: int, trainer: PrismTrainer) -> LayerLog | None:
    """Return the log of a run's channels; None for a model without prototype mixers.

    Columns: ``alpha``; ``tau_write`` and ``tau_read``, equal with shared gates; the figures of
    :class:`GateUse` for both gates; quantiles of the channels' half-lives, in positions, or NaN
    with decays by token; ``gate_tokens``, the held-out tokens behind the gates' figures.

    Args:
        prepared: the run; gates are read on ``evaluation.channel_tokens`` of its held-out text,
            the same each time.
        done: the step of the checkpoint that it goes on from, or 0.
        trainer: of the run, which counts its tokens.

    Raises:
        FormatError: there is a ``channels.csv`` that was written by something else.
    """
    tokens = prepared.recipe.evaluation.channel_tokens
    if not tokens or not has_mixers(prepared.model.model):
        return None
    return LayerLog(
        prepared,
        trainer,
        done,
        CHANNELS_FILE,
        columns=COLUMNS,
        counts=("gate_tokens",),
        measure=lambda decoder: channels_figures(decoder, prepared.heldout.batches(tokens)),
    )


def channels_figures(decoder: nn.Module, batches: Iterable[WindowBatch]) -> list[Row]:
    """Return the columns of each layer, gates read on a text."""
    with parallel.whole(decoder):
        uses = gate_uses(decoder, batches)
    return [
        _parameters(mixer)
        | _named("write", use.write)
        | _named("read", use.read)
        | {"gate_tokens": use.tokens}
        for mixer, use in zip(mixers_of(decoder), uses, strict=True)
    ]


@torch.no_grad()
def _parameters(mixer: PrototypeMixer) -> Row:
    """Return a mixer's α, temperatures and half-lives; its parameters may be sharded."""
    write = parallel.full(mixer.log_write_temperature)
    read = None if mixer.shared_gates else mixer.log_read_temperature
    row: Row = {
        "alpha": parallel.full(mixer.alpha).float().mean().item(),
        "tau_write": write.float().exp().mean().item(),
        "tau_read": (write if read is None else parallel.full(read)).float().exp().mean().item(),
    }
    return row | _half_lives(mixer)


def _half_lives(mixer: PrototypeMixer) -> Row:
    """Return quantiles over the channels; NaN with decays by token, as no channel then has one."""
    names = [f"half_life_{name}" for name in QUANTILES]
    if mixer.decay_map is not None:
        return dict.fromkeys(names, math.nan)
    lives = half_life(parallel.full(mixer.decay).cpu())
    places = torch.tensor(list(QUANTILES.values()), dtype=lives.dtype)
    return dict(zip(names, lives.quantile(places).tolist(), strict=True))


def _named(gate: str, use: GateUse) -> Row:
    return {f"{gate}_{name}": getattr(use, name) for name in GATE_COLUMNS}
