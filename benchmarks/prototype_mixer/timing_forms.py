"""What the prototype mixer is timed beside, and training steps and generation of whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prismlm.layers import PrototypeMixer
from prismlm.models.presets import PRESETS, build_config, build_model

CHANNELS = 32


class Attention(nn.Module):
    """Causal self-attention, its four projections and PyTorch's own kernel; no rotation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        """Mix the positions of every row."""
        heads = self.projections(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class MixerSizes(NamedTuple):
    """Sizes of a mixer and its input."""

    rows: int
    length: int
    width: int
    heads: int


MIXERS: dict[str, Callable[[MixerSizes], nn.Module]] = {
    "mixer": lambda sizes: PrototypeMixer(sizes.width, CHANNELS),
    "attention": lambda sizes: Attention(sizes.width, sizes.heads),
}


def mixing_step(name: str, sizes: MixerSizes, device: str, dtype: str) -> Callable[[], None]:
    """Return a forward and a backward pass of a mixer, to its input and its parameters."""
    torch.manual_seed(0)
    module = MIXERS[name](sizes).to(device)
    shape = (sizes.rows, sizes.length, sizes.width)
    x = torch.randn(shape, device=device, requires_grad=True)
    gradient = torch.randn(shape, device=device)

    def run() -> None:
        x.grad = None
        module.zero_grad()
        with autocast(device, dtype):
            y = module(x)
            y = y if isinstance(y, Tensor) else y.output
        y.backward(gradient.to(y.dtype))

    return run


def autocast(device: str, dtype: str) -> torch.autocast:
    """Return the context of a dtype in training: bfloat16 is autocast."""
    return torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16")


def without_dropout(preset: str) -> dict[str, Any]:
    """Return the changes of a preset that leave dropout out."""
    keys = [key for key in ("dropout", "attention_dropout") if PRESETS[preset].get(key)]
    return dict.fromkeys(keys, 0.0)


def model_of(preset: str, vocab: int, device: str, **changes: Any) -> Any:
    """Return a preset's model, freshly drawn, for training."""
    torch.manual_seed(0)
    model: Any = build_model(build_config({"preset": preset} | changes, vocab, 0))
    return model.to(device)


def inference_model(preset: str, vocab: int, device: str, dtype: str, **changes: Any) -> Any:
    """Return a preset's model with its weights in a dtype, without dropout."""
    model = model_of(preset, vocab, device, **changes)
    return model.to(getattr(torch, dtype)).eval()


def training_step(
    model: Any, rows: int, length: int, device: str, dtype: str
) -> Callable[[], None]:
    """Return a training step: loss, backward pass, clipping and AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(model.config.vocab_size, (rows, length), device=device)

    def run() -> None:
        with autocast(device, dtype):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def generation(model: Any, cache: Any, tokens: int, device: str) -> Callable[[], None]:
    """Return a run of single tokens, each the most likely one after those before it."""
    last = torch.zeros((1, 1), dtype=torch.long, device=device)

    def run() -> None:
        following = last
        for _ in range(tokens):
            logits = model(input_ids=following, past_key_values=cache, use_cache=True).logits
            following = logits[:, -1:].argmax(-1)

    return run
