"""Time signal/noise attention beside plain attention.

    python -m benchmarks.signal_noise_attention.timing
    python -m benchmarks.signal_noise_attention.timing --parts step      # only this part again
    python -m benchmarks.signal_noise_attention.timing --device cuda \\
        --out docs/results/signal_noise_cuda.json
    python -m benchmarks.signal_noise_attention.timing --quick --out /tmp/signal_noise.json
    python -m benchmarks.render signal_noise_attention

attention: forward and backward passes of 2H heads. step: a training step of whole models. decode:
one token after a number of others, and the size of the cache. Compared forms take turns in one
process; a ratio is the median over rounds, with its 95 % interval over resampled rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.prototype_mixer.timing import (
    autocast,
    generation,
    inference_model,
    model_of,
    training_step,
)
from benchmarks.shared.options import RESULTS
from benchmarks.shared.turns import (
    Setting,
    against,
    compared,
    in_turns,
    milliseconds,
    parts_parser,
    run_parts,
)

NOISE_WEIGHT = 0.1
BASELINE = "gpt2-laptop"
# Presets, and changes to them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    BASELINE: (BASELINE, {}),
    "signal-noise-laptop-wide": ("signal-noise-laptop-wide", {}),
    "signal-noise-laptop-untied": ("signal-noise-laptop", {"tied_output": False}),
    "signal-noise-laptop": ("signal-noise-laptop", {}),
}
Row = dict[str, Any]


class Sizes(NamedTuple):
    """Sizes of the parts; whole models have those of their presets, but for ``changes``."""

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


QUICK = Sizes(2, 8, 64, (32,), 64, 64, 16, (8, 16), 2, {"num_hidden_layers": 1})


def main() -> None:
    """Run the parts, and write each as soon as it is measured."""
    out = RESULTS / "signal_noise_attention.json"
    args = parts_parser(__doc__, PARTS, rounds=9, out=out).parse_args()
    run_parts(args, PARTS, QUICK if args.quick else Sizes())


def attention(setting: Setting) -> list[Row]:
    """Time one call of PyTorch's attention, and the same with S − λN of its output."""
    sizes, rows = setting.sizes, []
    for length in sizes.lengths:
        count, heads = sizes.tokens // length, 2 * sizes.heads
        shape = (count, heads, length, sizes.head_size)
        torch.manual_seed(0)
        x = torch.randn(shape, device=setting.device, requires_grad=True)
        gradient = torch.randn_like(x)
        signs = torch.ones(heads, device=setting.device)
        signs[sizes.heads :] = -NOISE_WEIGHT

        def passes(combine: bool, x: Tensor = x, g: Tensor = gradient, s: Tensor = signs) -> None:
            x.grad = None
            with autocast(setting.device, setting.dtype):
                y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
                y = y * s.to(y.dtype)[:, None, None] if combine else y
            y.backward(g.to(y.dtype))

        forms = {
            "plain": lambda run=passes: run(False),
            "combined": lambda run=passes: run(True),
        }
        row: Row = {"rows": count, "heads": heads, "length": length, "head_size": sizes.head_size}
        turns = in_turns(forms, setting.rounds, setting.device)
        row["passes"] = "forward and backward"
        rows.append(compared(turns, "plain", **row))
    return rows


def step(setting: Setting) -> list[Row]:
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
    row: Row = {"rows": count, "length": sizes.step_length}
    row["parameters"] = {n: sum(p.numel() for p in m.parameters()) for n, m in models.items()}
    return [compared(turns, BASELINE, **row)]


@torch.no_grad()
def decoding(setting: Setting) -> list[Row]:
    """Time single tokens after others."""
    sizes = setting.sizes
    longest = sizes.positions[-1] + sizes.decoded * (setting.rounds + 1)
    models = {
        name: inference_model(
            name, sizes.vocab, setting.device, setting.dtype, **sizes.changes,
            **({"n_positions": longest} if name == BASELINE else {}),
        )
        for name in (BASELINE, "signal-noise-laptop")
    }  # fmt: skip
    rows: list[Row] = []
    for position in sizes.positions:
        ids = torch.randint(sizes.vocab, (1, position)).to(setting.device)
        caches = {
            name: model(ids, use_cache=True, logits_to_keep=1).past_key_values
            for name, model in models.items()
        }
        held = {
            name: sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            for name, cache in caches.items()
        }
        forms = {
            name: generation(model, caches[name], sizes.decoded, setting.device)
            for name, model in models.items()
        }
        turns = in_turns(forms, setting.rounds, setting.device)
        rows.append(
            {
                "what": "models",
                "position": position,
                "cache_ratios": {n: round(size / held[BASELINE], 3) for n, size in held.items()},
                "milliseconds": milliseconds(turns),
                "ratios": {"elapsed": against(turns, BASELINE)},
            }
        )
        print(rows[-1], flush=True)
    return rows


PARTS: dict[str, Callable[[Setting], list[Row]]] = {
    "attention": attention,
    "step": step,
    "decode": decoding,
}


if __name__ == "__main__":
    main()
