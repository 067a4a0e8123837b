"""Time the prototype mixer beside attention and its direct form; write docs/results/mixer.json.

    python -m benchmarks.prototype_mixer.timing                every part, one after the other
    python -m benchmarks.prototype_mixer.timing --parts memory step    these anew
    python -m benchmarks.prototype_mixer.timing --device cuda --out docs/results/mixer_cuda.json
    python -m benchmarks.prototype_mixer.timing --quick --out /tmp/mixer.json
    python -m benchmarks.render mixer

mixer: a forward and a backward pass of one mixer. memory: the peak of the same, each in a fresh
process. step: a training step of whole models. throughput: a forward pass of whole models without
output embedding, one row, as the source's Table 14 has it. decode: one token after a number of
others. Compared things take turns in one process; a ratio is the median over rounds, with its
95 % interval over resampled rounds, by the clock and by processor time, which says more on a CPU
that has other work. What would take too long or too much memory is noted and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.prototype_mixer.timing_decode import decode
from benchmarks.prototype_mixer.timing_forms import (
    MIXERS,
    MixerSizes,
    direct_bytes,
    inference_model,
    mixing_step,
    model_of,
    training_step,
    without_dropout,
)
from benchmarks.shared.environment import ROOT
from benchmarks.shared.options import RESULTS
from benchmarks.shared.parts import parts_parser, rounds_of, run_parts
from benchmarks.shared.turns import (
    SHARE_OF_MEMORY,
    Cost,
    Turns,
    against,
    cost,
    forecast,
    in_turns,
    milliseconds,
    too_large,
)

MIB = 2**20
HEADS = 4
KEPT_BY_DROPOUT = 4
"""Tensors of the size of all scores that attention with dropout keeps for each layer on a CPU."""


class Sizes(NamedTuple):
    """What is run at which sizes; whole models as their presets are, but for ``changes``."""

    width: int = 256
    vocab: int = 16_000
    mixer_tokens: int = 16_384
    mixer_lengths: tuple[int, ...] = (256, 1024, 4096, 16_384)
    peaks: int = 3
    step_tokens: int = 8192
    step_lengths: tuple[int, ...] = (256, 4096)
    # From 512, so that what 2,048 takes is known before it is tried.
    throughput_lengths: tuple[int, ...] = tuple(2**n for n in range(9, 18))
    positions: tuple[int, ...] = (1000, 10_000, 100_000)
    decoded: int = 16
    changes: dict[str, Any] = {}  # noqa: RUF012 (never written to)


FULL = Sizes()
QUICK = Sizes(
    width=32,
    vocab=64,
    mixer_tokens=256,
    mixer_lengths=(64,),
    peaks=1,
    step_tokens=128,
    step_lengths=(32, 64),
    throughput_lengths=(32, 64),
    positions=(20, 40),
    decoded=2,
    changes={"hidden_size": 32, "num_hidden_layers": 2},
)


class Setting(NamedTuple):
    """What all parts are run with."""

    sizes: Sizes
    rounds: int
    device: str
    dtype: str
    limit: float
    memory_share: float


def main() -> None:
    """Run the parts, and write each as soon as it is there."""
    given = arguments()
    if given.peak:
        name, sizes = given.peak
        print(peak(name, MixerSizes(*json.loads(sizes)), given.device, given.dtypes[0]))
        return
    sizes = QUICK if given.quick else FULL

    def rows_of(part: str, dtype: str) -> list[dict[str, Any]]:
        rounds = rounds_of(part, given)
        setting = Setting(sizes, rounds, given.device, dtype, given.limit, given.memory_share)
        return PARTS[part](setting)

    run_parts(given, rows_of, limit=given.limit, memory_share=given.memory_share)


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = parts_parser(__doc__, PARTS, rounds=7, out=RESULTS / "mixer.json")
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds that one pass of a throughput may take"
    )
    parser.add_argument(
        "--memory-share",
        type=float,
        default=SHARE_OF_MEMORY,
        help="of the memory that is free, what one pass of a throughput may take",
    )
    parser.add_argument("--throughput-rounds", type=int, help="in place of --rounds, of that part")
    parser.add_argument("--peak", nargs=2, metavar=("FORM", "SIZES"), help=argparse.SUPPRESS)
    return parser.parse_args()


def mixer_sizes(sizes: Sizes, length: int) -> MixerSizes:
    """Return the sizes of a mixer's input; the number of tokens is the same at every length."""
    return MixerSizes(sizes.mixer_tokens // length, length, sizes.width, HEADS)


def obstacles(sizes: MixerSizes, device: str) -> dict[str, str]:
    """Return which mixers are not run, and why."""
    reason = too_large(direct_bytes(sizes) / MIB, device)
    return {name: reason for name in MIXERS if reason and name.startswith("direct")}


def mixer(setting: Setting) -> list[dict[str, Any]]:
    """Time forward and backward passes of a mixer alone."""
    rows: list[dict[str, Any]] = []
    for length in setting.sizes.mixer_lengths:
        shape = mixer_sizes(setting.sizes, length)
        skipped = obstacles(shape, setting.device)
        forms = {
            name: mixing_step(name, shape, setting.device, setting.dtype)
            for name in MIXERS
            if name not in skipped
        }
        turns = in_turns(forms, setting.rounds, setting.device)
        rows.append(compared(turns, "mixer", skipped, **shape._asdict()))
    return rows


def compared(turns: Turns, name: str, skipped: dict[str, str], **more: Any) -> dict[str, Any]:
    """Return a row: medians, ratios to ``name``, what was left out; and print its ratios."""
    row = more | {
        "milliseconds": milliseconds(turns),
        "ratios": against(turns, name),
        "skipped": skipped | turns.failed,
    }
    words = {
        other: f"{r['ratio']:.3g}" for other, r in row["ratios"].get("elapsed", {}).items()
    } | row["skipped"]
    print(", ".join(f"{k} {v}" for k, v in more.items()), words, flush=True)
    return row


def memory(setting: Setting) -> list[dict[str, Any]]:
    """Measure the peak memory of the same passes, three times each."""
    rows: list[dict[str, Any]] = []
    for length in setting.sizes.mixer_lengths:
        shape = mixer_sizes(setting.sizes, length)
        skipped = obstacles(shape, setting.device)
        mib = {
            name: [fresh_peak(name, shape, setting) for _ in range(setting.sizes.peaks)]
            for name in MIXERS
            if name not in skipped
        }
        own = mib["mixer"]
        ratios = {
            name: {
                "ratio": round(statistics.median(other) / statistics.median(own), 3),
                "low": round(min(other) / max(own), 3),
                "high": round(max(other) / min(own), 3),
            }
            for name, other in mib.items()
            if name != "mixer"
        }
        medians = {name: round(statistics.median(peaks), 1) for name, peaks in mib.items()}
        rows.append(shape._asdict() | {"mib": medians, "ratios": ratios, "skipped": skipped})
        print(f"length {length}: MiB {medians}", flush=True)
    return rows


def fresh_peak(name: str, shape: MixerSizes, setting: Setting) -> float:
    """Return the MiB of a pass, on a CPU in a process of its own.

    A GPU's allocator counts what is in use, whatever ran before.
    """
    if setting.device == "cuda":
        return peak(name, shape, setting.device, setting.dtype)
    command = [
        sys.executable,
        "-m",
        "benchmarks.prototype_mixer.timing",
    ]
    command += [
        "--device",
        setting.device,
        "--dtypes",
        setting.dtype,
        "--peak",
        name,
        json.dumps(shape),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def peak(name: str, shape: MixerSizes, device: str, dtype: str) -> float:
    """Return the MiB that a pass needs beyond its input; on a CPU of a fresh process."""
    torch.set_num_threads(1)
    mixing_step(name, MixerSizes(1, 32, shape.width, shape.heads), device, dtype)()
    return cost(mixing_step(name, shape, device, dtype), device).mib


def step(setting: Setting) -> list[dict[str, Any]]:
    """Time training steps of ProtoT and LLaMA, without dropout and as the presets have it."""
    sizes, device = setting.sizes, setting.device
    rows: list[dict[str, Any]] = []
    for length in sizes.step_lengths:
        count = sizes.step_tokens // length
        for dropout in (False, True):
            forms: dict[str, Callable[[], None]] = {}
            skipped: dict[str, str] = {}
            for name in ("protot", "llama"):
                changes = sizes.changes if dropout else sizes.changes | without_dropout(name)
                model = model_of(name, sizes.vocab, device, **changes)
                reason = None
                if name == "llama" and dropout and device == "cpu":
                    # PyTorch's quick attention on CPUs has no dropout: all scores are kept.
                    scores = 4 * count * HEADS * length**2 / MIB
                    layers = model.config.num_hidden_layers
                    reason = too_large(KEPT_BY_DROPOUT * layers * scores, device)
                if reason:
                    skipped[name] = reason
                else:
                    forms[name] = training_step(model, count, length, device, setting.dtype)
            turns = in_turns(forms, setting.rounds, device)
            place = {"rows": count, "length": length, "dropout": dropout}
            rows.append(compared(turns, "protot", skipped, **place))
    return rows


@torch.no_grad()
def throughput(setting: Setting) -> list[dict[str, Any]]:
    """Time forward passes over one row of growing length."""
    sizes, device = setting.sizes, setting.device
    longest = {"max_position_embeddings": sizes.throughput_lengths[-1]}
    models = {
        name: inference_model(
            name,
            sizes.vocab,
            device,
            setting.dtype,
            **sizes.changes,
            **(longest if name == "llama" else {}),
        ).base_model
        for name in ("protot", "llama", "mamba", "deltanet")
    }
    seen: dict[str, list[Cost]] = {name: [] for name in models}
    skipped: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for length in sizes.throughput_lengths:
        ids = torch.randint(sizes.vocab, (1, length), device=device)
        for name in models:
            if name not in skipped and (reason := obstacle(forecast(seen[name]), setting)):
                skipped[name] = f"from {length:,} on: {reason}"
        forms = {name: forward(model, ids) for name, model in models.items() if name not in skipped}
        turns = in_turns(forms, setting.rounds, device)
        for name, first in turns.first.items():
            seen[name].append(first)
        skipped |= {name: f"from {length:,} on: {why}" for name, why in turns.failed.items()}
        rows.append(compared(turns, "protot", dict(skipped), length=length))
    return rows


def forward(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    """Return a forward pass."""
    return lambda: model(input_ids=ids, use_cache=False)


def obstacle(expected: Cost | None, setting: Setting) -> str | None:
    """Return why a pass that is expected to take so much is not run, or None."""
    if expected is None:
        return None
    if expected.seconds > setting.limit:
        return f"would take about {expected.seconds:,.0f} s, more than {setting.limit:g}"
    return too_large(expected.mib, setting.device, setting.memory_share)


def decoding(setting: Setting) -> list[dict[str, Any]]:
    """Time single tokens after few and after many others."""
    sizes = setting.sizes
    changes = {"changes": sizes.changes, "vocab": sizes.vocab}
    return decode(
        sizes.positions, sizes.decoded, setting.rounds, setting.device, setting.dtype, **changes
    )


PARTS: dict[str, Callable[[Setting], list[dict[str, Any]]]] = {
    "mixer": mixer,
    "memory": memory,
    "step": step,
    "throughput": throughput,
    "decode": decoding,
}


if __name__ == "__main__":
    main()
