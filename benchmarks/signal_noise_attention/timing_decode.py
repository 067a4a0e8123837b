"""Time one generated token with a cache of one tensor per head, and with keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from benchmarks.prototype_mixer.timing_decode import generation
from benchmarks.shared.turns import against, in_turns, milliseconds
from prismlm.ops.signal_noise_attention import attend, rotate

MIB = 2**20
BASELINE = "gpt2-laptop"


@torch.no_grad()
def decode_models(
    models: dict[str, Any], positions: tuple[int, ...], tokens: int, rounds: int, device: str
) -> list[dict[str, Any]]:
    """Return a row per position: each model's time for a token, and the size of its cache.

    The baseline is GPT-2 with Hugging Face's DynamicCache of keys and values.
    """
    rows: list[dict[str, Any]] = []
    vocab = models[BASELINE].config.vocab_size
    for position in positions:
        ids = torch.randint(vocab, (1, position)).to(device)
        caches = {
            name: model(ids, use_cache=True, logits_to_keep=1).past_key_values
            for name, model in models.items()
        }
        held = {name: bytes_of(cache) for name, cache in caches.items()}
        forms = {
            name: generation(model, caches[name], tokens, device) for name, model in models.items()
        }
        turns = in_turns(forms, rounds, device)
        rows.append(
            {
                "what": "models",
                "position": position,
                **sizes(held, BASELINE),
                "milliseconds": {n: round(t / tokens, 4) for n, t in milliseconds(turns).items()},
                "ratios": against(turns, BASELINE),
                "baseline": BASELINE,
            }
        )
        print(rows[-1], flush=True)
    return rows


@torch.no_grad()
def decode_heads(
    shape: tuple[int, int], positions: tuple[int, ...], rounds: int, device: str, dtype: str
) -> list[dict[str, Any]]:
    """Return a row per position: one token's attention in 2H heads, by what the cache holds.

    one tensor: u unrotated; all of it is rotated again for each token. keys and values: rotated
    once, two tensors. Both append to what they hold, as Hugging Face's caches do.
    """
    rows: list[dict[str, Any]] = []
    for position in positions:
        forms, bytes_held = head_forms(shape, position, device, getattr(torch, dtype))
        turns = in_turns(forms, rounds, device)
        rows.append(
            {
                "what": "heads",
                "position": position,
                "heads": shape[0],
                "head_size": shape[1],
                **sizes(bytes_held, "keys and values"),
                "milliseconds": milliseconds(turns),
                "ratios": against(turns, "keys and values"),
                "baseline": "keys and values",
            }
        )
        print(rows[-1], flush=True)
    return rows


def head_forms(
    shape: tuple[int, int], position: int, device: str, dtype: torch.dtype
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, int]]:
    """Return both forms of one token's attention, and the bytes that their caches hold."""
    heads, size = shape
    torch.manual_seed(0)
    held = torch.randn(1, heads, position, size, device=device, dtype=dtype)
    new = torch.randn(1, heads, 1, size, device=device, dtype=dtype)
    omega = torch.logspace(0, -4, size // 2, device=device)
    seen = torch.arange(position, device=device)[None, None]
    keys = rotate(held, seen, omega)
    signs = torch.ones(heads, device=device, dtype=dtype)
    signs[heads // 2 :] = -0.1

    def one_tensor() -> Float[Tensor, "1 G 1 p"]:
        u = torch.cat([held, new], 2)
        return attend(
            u[:, : heads // 2],
            u[:, heads // 2 :],
            0.1,
            signal_frequencies=omega,
            noise_frequencies=omega,
            queries=1,
        )

    def keys_and_values() -> Float[Tensor, "1 G 1 p"]:
        turned = rotate(new, seen[..., -1:] + 1, omega)
        every, values = torch.cat([keys, turned], 2), torch.cat([held, new], 2)
        return F.scaled_dot_product_attention(turned, every, values) * signs[:, None, None]

    assert torch.allclose(one_tensor(), keys_and_values(), atol=1e-4 if dtype.itemsize > 2 else 0.1)
    return (
        {"one tensor": one_tensor, "keys and values": keys_and_values},
        {"one tensor": held.nbytes, "keys and values": keys.nbytes + held.nbytes},
    )


def bytes_of(cache: Any) -> int:
    """Return the size of what a cache holds; positions too, where it holds those."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def sizes(held: dict[str, int], baseline: str) -> dict[str, dict[str, float]]:
    """Return the sizes of caches, and over that of one of them."""
    return {
        "cache_mib": {name: round(size / MIB, 4) for name, size in held.items()},
        "cache_ratios": {name: round(size / held[baseline], 3) for name, size in held.items()},
    }
