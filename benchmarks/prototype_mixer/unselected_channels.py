"""What is read of channels that no concept chose: ten drawn, and all of them; for channels.py."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from benchmarks.prototype_mixer.channel_concepts import Loaded, Settings
from benchmarks.prototype_mixer.proposed_concepts import TokenGates, concept_tokens
from prismlm.corpus import Corpus
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.models.decoders.protot import half_lives
from prismlm.probes.channels.concepts import EMERGES
from prismlm.probes.channels.report import channel_report, quartiles
from prismlm.statistics import spearman

CHANNELS_SHOWN = 10
TOKENS_SHOWN = 8


def unselected(loaded: Loaded, gates: TokenGates, seed: int) -> list[dict[str, Any]]:
    """Return channels drawn by a seed, with the tokens that write most."""
    lives = half_lives(loaded.model)
    places = [(layer, channel) for layer, life in enumerate(lives) for channel in range(len(life))]
    order = np.random.default_rng(seed).permutation(len(places))[:CHANNELS_SHOWN]
    return [
        {
            "layer": layer,
            "channel": channel,
            "half_life": float(lives[layer][channel]),
            "mean_gate": float(gates.mean(layer)[channel]),
            "tokens": [
                asdict(token)
                for token in concept_tokens(
                    gates, loaded.tokenizer, layer, channel, count=TOKENS_SHOWN
                )
            ],
        }
        for layer, channel in (places[i] for i in order.tolist())
    ]


def locality(loaded: Loaded, text: Sequences) -> dict[str, Any]:
    """Return whether channels of a short half-life keep to few tokens."""
    layers = channel_report(loaded.model, loaded.tokenizer, text).layers
    channels = [channel for layer in layers for channel in layer.channels]
    lives = np.array([channel["half_life"] for channel in channels], dtype=np.float64)
    scores = np.array([channel["repetition"] for channel in channels], dtype=np.float64)
    try:
        return {
            "spearman": asdict(spearman(lives, scores)),
            "quartiles": _finite(quartiles(lives, scores)),
            "said": None,
        }
    except InputError as error:
        return {"spearman": None, "quartiles": None, "said": str(error)}


def lags(loaded: Loaded, corpus: Corpus, settings: Settings) -> list[dict[str, Any]]:
    """Return at which lag reading and writing hang together, by layer, beside shuffled reading."""
    text = Sequences(corpus, "heldout", max_tokens=settings.lag_tokens)
    rows: list[dict[str, Any]] = []
    report = channel_report(loaded.model, loaded.tokenizer, text, seed=settings.seed)
    for layer in report.layers:
        found = layer.lags
        assert found is not None
        known = torch.isfinite(found.p)
        peaks = found.peak[known].tolist()
        rows.append(
            {
                "layer": layer.layer,
                "channels": len(peaks),
                "peaks": {str(lag): peaks.count(lag) for lag in found.lags.tolist()},
                "beyond_chance": int((found.p[known] < EMERGES).sum()),
                "correlation": _finite(found.correlation[known].nanmean(0).tolist()),
                "null_mean": _finite(found.null_mean[known].nanmean(0).tolist()),
            }
        )
    return rows


def _finite(value: Any) -> Any:
    """Return a value with None for what is not a number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def described(loaded: Loaded) -> dict[str, Any]:
    """Return the size of a model and the half-lives of its channels."""
    lives = half_lives(loaded.model)
    return {
        "name": loaded.name,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "layers": len(lives),
        "channels": [len(life) for life in lives],
        "half_lives": [
            [float(q) for q in torch.quantile(life, torch.tensor([0.0, 0.5, 1.0]).double())]
            for life in lives
        ],
    }
