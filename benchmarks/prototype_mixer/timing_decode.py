"""Time one generated token after a number of others, for ProtoT and LLaMA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.prototype_mixer.timing_forms import inference_model
from benchmarks.shared.turns import against, in_turns, milliseconds, too_large
from prismlm.models.decoders.caches import RecurrentCache

MIB = 2**20
PREFILL = 4096
"""Positions that the state is set up from at once."""


@torch.no_grad()
def decode(
    positions: tuple[int, ...],
    tokens: int,
    rounds: int,
    device: str,
    dtype: str,
    *,
    changes: dict[str, Any],
    vocab: int,
) -> list[dict[str, Any]]:
    """Return a row per model and position; ratios are to ProtoT at the first position.

    ProtoT's state comes from a parallel pass over random tokens. LLaMA's keys and values are
    drawn: what they are makes no difference to the time, and computing them would take minutes.
    """
    protot = inference_model("protot", vocab, device, dtype, **changes)
    longest = {"max_position_embeddings": 2 * positions[-1]}
    llama = inference_model("llama", vocab, device, dtype, **changes, **longest)
    forms: dict[str, Callable[[], None]] = {}
    rows: list[dict[str, Any]] = []
    for position in positions:
        row = {"model": "protot", "position": position}
        cache: Any = prefilled(protot, position, device)
        rows.append(row | {"cache_mib": cache_mib(cache)})
        forms[label(row)] = generation(protot, cache, tokens, device)
        row = {"model": "llama", "position": position}
        config = llama.config
        size = 2 * 4 * position * config.hidden_size * config.num_hidden_layers / MIB
        # Twice, since appending a token copies a layer's keys and values; in float32, at most.
        if reason := too_large(2 * size, device):
            rows.append(row | {"skipped": reason})
            continue
        cache = drawn(config, position, device, dtype)
        rows.append(row | {"cache_mib": cache_mib(cache)})
        forms[label(row)] = generation(llama, cache, tokens, device)
    turns = in_turns(forms, rounds, device)
    first = label(rows[0])
    times, ratios = milliseconds(turns), against(turns, first)
    for row in rows:
        name = label(row)
        if name in times:
            row["milliseconds_per_token"] = round(times[name] / tokens, 4)
            row["ratios"] = {clock: found[name] for clock, found in ratios.items() if name in found}
        print(row, flush=True)
    return rows


def label(row: dict[str, Any]) -> str:
    """Return the name of a form."""
    return f"{row['model']} at {row['position']}"


def generation(model: Any, cache: Any, tokens: int, device: str) -> Callable[[], None]:
    """Return a run of single tokens, each the most likely one after those before it."""
    last = torch.zeros((1, 1), dtype=torch.long, device=device)

    def run() -> None:
        following = last
        for _ in range(tokens):
            logits = model(input_ids=following, past_key_values=cache, use_cache=True).logits
            following = logits[:, -1:].argmax(-1)

    return run


def prefilled(model: Any, position: int, device: str) -> RecurrentCache:
    """Return the state after that many random tokens."""
    cache = RecurrentCache(model.config.num_hidden_layers)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, position), generator=generator).to(device)
    for piece in ids.split(PREFILL, 1):
        model.base_model(input_ids=piece, past_key_values=cache, use_cache=True)
    return cache


def drawn(config: Any, position: int, device: str, dtype: str) -> DynamicCache:
    """Return keys and values of that many positions."""
    cache = DynamicCache()
    heads = config.num_key_value_heads
    shape = (1, heads, position, config.hidden_size // heads)
    for layer in range(config.num_hidden_layers):
        keys, values = (
            torch.randn(shape, device=device, dtype=getattr(torch, dtype)) for _ in range(2)
        )
        cache.update(keys, values, layer)
    return cache


def cache_mib(cache: Any) -> float:
    """Return the size of what a cache holds."""
    held = [
        layer.state if isinstance(cache, RecurrentCache) else (layer.keys, layer.values)
        for layer in cache.layers
    ]
    return round(sum(t.nbytes for state in held for t in tensors(state)) / MIB, 3)


def tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of a state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from tensors(part)
