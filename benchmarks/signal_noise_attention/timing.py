"""Time signal/noise attention beside plain attention.

Writes docs/results/signal_noise_attention.json.

    python -m benchmarks.signal_noise_attention.timing
    python -m benchmarks.signal_noise_attention.timing --parts step      these anew
    python -m benchmarks.signal_noise_attention.timing --device cuda --out docs/results/cuda.json
    python -m benchmarks.signal_noise_attention.timing --quick --out /tmp/signal_noise.json
    python -m benchmarks.render signal_noise_attention

attention: forward and backward passes of 2H heads. step: a training step of whole models. decode:
one token after a number of others, and what the cache holds. Compared things take turns in one
process; a ratio is the median over rounds, with its 95 % interval over resampled rounds, by the
clock and by processor time, which says more on a CPU that has other work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from benchmarks.prototype_mixer.timing_forms import (
    autocast,
    inference_model,
    model_of,
    training_step,
)
from benchmarks.shared.options import RESULTS
from benchmarks.shared.parts import parts_parser, run_parts
from benchmarks.shared.turns import Turns, against, in_turns, milliseconds
from benchmarks.signal_noise_attention.timing_decode import decode_heads, decode_models
from prismlm.ops.signal_noise_attention import attend, frequencies, rotate

# The source's: base 10,000 times π for signal heads, over π for noise heads.
BASES = (31_415.9, 3_183.1)
NOISE_WEIGHT = 0.1


class Sizes(NamedTuple):
    """What is run at which sizes; whole models as their presets are, but for ``changes``."""

    heads: int = 8
    head_size: int = 64
    tokens: int = 4096
    lengths: tuple[int, ...] = (256, 512, 2048)
    vocab: int = 4096
    step_tokens: int = 4096
    step_length: int = 256
    positions: tuple[int, ...] = (256, 1024, 4096)
    decoded: int = 8
    changes: dict[str, Any] = {}  # noqa: RUF012 (never written to)


FULL = Sizes()
QUICK = Sizes(
    heads=2,
    head_size=8,
    tokens=64,
    lengths=(32,),
    vocab=64,
    step_tokens=64,
    step_length=16,
    positions=(8, 16),
    decoded=2,
    changes={"num_hidden_layers": 1},
)


class Setting(NamedTuple):
    """What all parts are run with."""

    sizes: Sizes
    rounds: int
    device: str
    dtype: str


def main() -> None:
    """Run the parts, and write each as soon as it is there."""
    out = RESULTS / "signal_noise_attention.json"
    given = parts_parser(__doc__, PARTS, rounds=9, out=out).parse_args()
    sizes = QUICK if given.quick else FULL

    def rows_of(part: str, dtype: str) -> list[dict[str, Any]]:
        return PARTS[part](Setting(sizes, given.rounds, given.device, dtype))

    run_parts(given, rows_of)


def attention(setting: Setting) -> list[dict[str, Any]]:
    """Time forward and backward passes of attention forms with as many heads."""
    sizes, rows = setting.sizes, []
    for length in sizes.lengths:
        shape = (sizes.tokens // length, 2 * sizes.heads, length, sizes.head_size)
        forms = attention_forms(shape, setting)
        named = {"rows": shape[0], "heads": shape[1], "length": length, "head_size": shape[3]}
        for passes in ("forward", "forward and backward"):
            run = {name: passes_of(form, passes, setting) for name, form in forms.items()}
            turns = in_turns(run, setting.rounds, setting.device)
            row = named | {"passes": passes}
            rows.append(compared(turns, row, [("plain", "combined"), ("rotated", "attend")]))
    return rows


def attention_forms(
    shape: tuple[int, int, int, int], setting: Setting
) -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Return the forms by name, each with its input.

    plain: one call of PyTorch's kernel. combined: the same, and S − λN of what it gives. rotated:
    tied heads, one rotation for all. attend: the op, with a rotation for each group.
    """
    device = torch.device(setting.device)
    torch.manual_seed(0)
    x = torch.randn(shape, device=device, requires_grad=True)
    heads, length, size = shape[1] // 2, shape[2], shape[3]
    first, second = (frequencies(size, base, device=device) for base in BASES)
    weight = torch.tensor(NOISE_WEIGHT, device=device)
    positions = torch.arange(length, device=device)[None, None]
    signs = torch.ones(2 * heads, device=device)
    signs[heads:] = -weight

    def plain(u: Float[Tensor, "B G T p"]) -> Tensor:
        return F.scaled_dot_product_attention(u, u, u, is_causal=True)

    def combined(u: Float[Tensor, "B G T p"]) -> Tensor:
        return plain(u) * signs.to(u.dtype)[:, None, None]

    def rotated(u: Float[Tensor, "B G T p"]) -> Tensor:
        keys = rotate(u, positions, first)
        return F.scaled_dot_product_attention(keys, keys, u, is_causal=True)

    def op(u: Float[Tensor, "B G T p"]) -> Tensor:
        signal, noise = u[:, :heads], u[:, heads:]
        return attend(signal, noise, weight, signal_frequencies=first, noise_frequencies=second)

    forms = {"plain": plain, "combined": combined, "rotated": rotated, "attend": op}
    return {name: (x, form) for name, form in forms.items()}


def passes_of(
    form: tuple[Tensor, Callable[[Tensor], Tensor]], passes: str, setting: Setting
) -> Callable[[], None]:
    """Return one run of a form."""
    x, attend_to = form
    gradient = torch.randn(x.shape, device=x.device)

    def forward() -> None:
        with torch.no_grad(), autocast(setting.device, setting.dtype):
            attend_to(x)

    def both() -> None:
        x.grad = None
        with autocast(setting.device, setting.dtype):
            y = attend_to(x)
        y.backward(gradient.to(y.dtype))

    return forward if passes == "forward" else both


def compared(turns: Turns, row: dict[str, Any], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return a row: medians, and the ratio of the second of each pair to the first; print it."""
    ratios = {
        f"{other} / {name}": {
            clock: found[other] for clock, found in against(turns, name).items() if other in found
        }
        for name, other in pairs
    }
    shown = {key: f"{found['elapsed']['ratio']:.3f}" for key, found in ratios.items() if found}
    print(", ".join(f"{k} {v}" for k, v in row.items()), shown, flush=True)
    return row | {"milliseconds": milliseconds(turns), "ratios": ratios, "skipped": turns.failed}


# The second of each pair has the first's parameters, but for GPT-2's positions and biases.
PAIRS = [
    ("gpt2-laptop", "signal-noise-laptop-wide"),
    ("gpt2-laptop", "signal-noise-laptop-untied"),
    ("gpt2-laptop", "signal-noise-laptop"),
]
# Presets, and what is changed of them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-laptop": ("gpt2-laptop", {}),
    "signal-noise-laptop": ("signal-noise-laptop", {}),
    "signal-noise-laptop-wide": ("signal-noise-laptop-wide", {}),
    "signal-noise-laptop-untied": ("signal-noise-laptop", {"tied_output": False}),
}


def step(setting: Setting) -> list[dict[str, Any]]:
    """Time training steps of whole models."""
    sizes, device = setting.sizes, setting.device
    count = sizes.step_tokens // sizes.step_length
    models = {
        name: model_of(preset, sizes.vocab, device, **changes, **sizes.changes)
        for name, (preset, changes) in MODELS.items()
    }
    forms = {
        name: training_step(model, count, sizes.step_length, device, setting.dtype)
        for name, model in models.items()
    }
    turns = in_turns(forms, setting.rounds, device)
    row: dict[str, Any] = {"rows": count, "length": sizes.step_length}
    row["parameters"] = {n: sum(p.numel() for p in m.parameters()) for n, m in models.items()}
    return [compared(turns, row, PAIRS)]


def decoding(setting: Setting) -> list[dict[str, Any]]:
    """Time single tokens, and measure what the caches hold."""
    sizes = setting.sizes
    models = {
        name: inference_model(
            preset,
            sizes.vocab,
            setting.device,
            setting.dtype,
            **changes,
            **sizes.changes,
            **longest(name, sizes.positions[-1] + sizes.decoded * (setting.rounds + 1)),
        )
        for name, (preset, changes) in MODELS.items()
        if name != "signal-noise-laptop-untied"
    }
    shape = (2 * sizes.heads, sizes.head_size)
    return [
        *decode_models(models, sizes.positions, sizes.decoded, setting.rounds, setting.device),
        *decode_heads(shape, sizes.positions, setting.rounds, setting.device, setting.dtype),
    ]


def longest(name: str, position: int) -> dict[str, int]:
    """Return what makes a preset's table of positions long enough."""
    return {"n_positions": position} if name.startswith("gpt2") else {}


PARTS: dict[str, Callable[[Setting], list[dict[str, Any]]]] = {
    "attention": attention,
    "step": step,
    "decode": decoding,
}


if __name__ == "__main__":
    main()
