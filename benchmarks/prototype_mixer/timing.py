"""Time the prototype mixer beside attention and its direct form; write docs/results/mixer.json.

    python -m benchmarks.prototype_mixer.timing                every part, one after the other
    python -m benchmarks.prototype_mixer.timing --parts memory step     # only these again
    python -m benchmarks.prototype_mixer.timing --device cuda --out docs/results/mixer_cuda.json
    python -m benchmarks.prototype_mixer.timing --quick --out /tmp/mixer.json
    python -m benchmarks.render mixer

mixer: a forward and a backward pass of one mixer. memory: the peak of the same, each in a fresh
process. step: a training step of whole models. throughput: a forward pass of whole models without
output embedding, one row, as the source's Table 14 has it. decode: one token after a number of
others. Compared things take turns in one process; a ratio is the median over rounds, with its
95 % interval over resampled rounds. What would take too much memory is noted and left out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.prototype_mixer.timing_forms import (
    MIXERS,
    MixerSizes,
    direct_bytes,
    generation,
    inference_model,
    mixing_step,
    model_of,
    training_step,
    without_dropout,
)
from benchmarks.shared.environment import ROOT
from benchmarks.shared.options import RESULTS
from benchmarks.shared.turns import (
    MIB,
    SHARE_OF_MEMORY,
    Turns,
    against,
    cost,
    forecast,
    in_turns,
    milliseconds,
    parts_parser,
    rounds_of,
    run_parts,
    too_large,
)
from prismlm.models.decoders.own_decoder import RecurrentCache

HEADS = 4
# Tensors of the size of all scores that attention with dropout keeps for each layer on a CPU.
KEPT_BY_DROPOUT = 4
PREFILL = 4096  # positions that a state is set up from at once
Row = dict[str, Any]


class Sizes(NamedTuple):
    """Sizes of the parts; whole models have those of their presets, but for ``changes``."""

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

    def mixer(self, length: int) -> MixerSizes:
        """Return the sizes of a mixer's input; every length has the same number of tokens."""
        return MixerSizes(self.mixer_tokens // length, length, self.width, HEADS)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2}
QUICK = Sizes(32, 64, 256, (64,), 1, 128, (32, 64), (32, 64), (20, 40), 2, SMALL)


class Setting(NamedTuple):
    """What all parts are run with."""

    sizes: Sizes
    rounds: int
    device: str
    dtype: str
    memory_share: float


def main() -> None:
    """Run the parts, and write each as soon as it is measured."""
    parser = parts_parser(__doc__, PARTS, rounds=7, out=RESULTS / "mixer.json")
    parser.add_argument(
        "--memory-share",
        type=float,
        default=SHARE_OF_MEMORY,
        help="share of free memory that one pass of a throughput may take",
    )
    parser.add_argument("--throughput-rounds", type=int, help="in place of --rounds, of that part")
    parser.add_argument("--peak", nargs=2, metavar=("FORM", "SIZES"), help="used by the script")
    args = parser.parse_args()
    if args.peak:
        name, sizes = args.peak
        shape = MixerSizes(*json.loads(sizes))
        print(peak(name, shape, args.device, args.dtypes[0]))
        return
    sizes = QUICK if args.quick else Sizes()

    def rows_of(part: str, dtype: str) -> list[Row]:
        rounds = rounds_of(part, args)
        return PARTS[part](Setting(sizes, rounds, args.device, dtype, args.memory_share))

    run_parts(args, rows_of, memory_share=args.memory_share)


def too_large_forms(shape: MixerSizes, device: str) -> dict[str, str]:
    """Return which mixers are not run, and why."""
    reason = too_large(direct_bytes(shape) / MIB, device)
    return {"direct": reason} if reason else {}


def mixer(setting: Setting) -> list[Row]:
    """Time forward and backward passes of a mixer alone."""
    rows: list[Row] = []
    for shape in map(setting.sizes.mixer, setting.sizes.mixer_lengths):
        skipped = too_large_forms(shape, setting.device)
        forms = {
            name: mixing_step(name, shape, setting.device, setting.dtype)
            for name in MIXERS
            if name not in skipped
        }
        turns = in_turns(forms, setting.rounds, setting.device)
        rows.append(compared(turns, "mixer", skipped, **shape._asdict()))
    return rows


def compared(turns: Turns, name: str, skipped: dict[str, str], **row: Any) -> Row:
    """Return a row: medians, ratios to ``name``, what was left out; and print its ratios."""
    ratios = against(turns, name)
    shown = {other: f"{r['ratio']:.3g}" for other, r in ratios.items()}
    skipped = skipped | turns.failed
    print(", ".join(f"{k} {v}" for k, v in row.items()), shown | skipped, flush=True)
    times = {"milliseconds": milliseconds(turns), "ratios": {"elapsed": ratios}}
    return row | times | {"skipped": skipped}


def memory(setting: Setting) -> list[Row]:
    """Measure the peak memory of the same passes, several times each."""
    rows: list[Row] = []
    for shape in map(setting.sizes.mixer, setting.sizes.mixer_lengths):
        skipped = too_large_forms(shape, setting.device)
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
        print(f"length {shape.length}: MiB {medians}", flush=True)
    return rows


def fresh_peak(name: str, shape: MixerSizes, setting: Setting) -> float:
    """Return the MiB of a pass, on a CPU in a process of its own.

    A GPU's allocator counts what is in use, whatever ran before.
    """
    if setting.device == "cuda":
        return peak(name, shape, setting.device, setting.dtype)
    command = [sys.executable, "-m", "benchmarks.prototype_mixer.timing"]
    command += ["--device", setting.device, "--dtypes", setting.dtype]
    command += ["--peak", name, json.dumps(shape)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def peak(name: str, shape: MixerSizes, device: str, dtype: str) -> float:
    """Return the MiB that a pass needs beyond its input; on a CPU in a fresh process."""
    torch.set_num_threads(1)
    mixing_step(name, MixerSizes(1, 32, shape.width, shape.heads), device, dtype)()
    return cost(mixing_step(name, shape, device, dtype), device).mib


def step(setting: Setting) -> list[Row]:
    """Time training steps of ProtoT and LLaMA, without dropout and as the presets have it."""
    sizes, device = setting.sizes, setting.device
    rows: list[Row] = []
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
                    # PyTorch's fast attention on CPUs has no dropout: all scores are kept.
                    scores = 4 * count * HEADS * length**2 / MIB
                    layers = model.config.num_hidden_layers
                    reason = too_large(KEPT_BY_DROPOUT * layers * scores, device)
                if reason:
                    skipped[name] = reason
                else:
                    forms[name] = training_step(model, count, length, device, setting.dtype)
            turns = in_turns(forms, setting.rounds, device)
            shape = {"rows": count, "length": length, "dropout": dropout}
            rows.append(compared(turns, "protot", skipped, **shape))
    return rows


@torch.no_grad()
def throughput(setting: Setting) -> list[Row]:
    """Time forward passes over one row of growing length."""
    sizes, device = setting.sizes, setting.device
    longest = {"max_position_embeddings": sizes.throughput_lengths[-1]}
    models = {
        name: inference_model(
            name, sizes.vocab, device, setting.dtype, **sizes.changes,
            **(longest if name == "llama" else {}),
        ).base_model
        for name in ("protot", "llama", "mamba", "deltanet")
    }  # fmt: skip
    mib: dict[str, list[float]] = {name: [] for name in models}
    skipped: dict[str, str] = {}
    rows: list[Row] = []
    for length in sizes.throughput_lengths:
        ids = torch.randint(sizes.vocab, (1, length), device=device)
        for name in models.keys() - skipped.keys():
            expected = forecast(mib[name])
            if reason := expected and too_large(expected, device, setting.memory_share):
                skipped[name] = f"from {length:,} on: {reason}"
        forms = {
            name: lambda model=model, ids=ids: model(input_ids=ids, use_cache=False)
            for name, model in models.items()
            if name not in skipped
        }
        turns = in_turns(forms, setting.rounds, device)
        for name, first in turns.first.items():
            mib[name].append(first.mib)
        skipped |= {name: f"from {length:,} on: {why}" for name, why in turns.failed.items()}
        rows.append(compared(turns, "protot", dict(skipped), length=length))
    return rows


@torch.no_grad()
def decode(setting: Setting) -> list[Row]:
    """Time a token after growing numbers of others; ratios are to ProtoT after the fewest.

    ProtoT's state comes from a parallel pass over random tokens. LLaMA's keys and values are
    random: their values make no difference to the time, and computing them would take minutes.
    """
    sizes, device, dtype = setting.sizes, setting.device, setting.dtype
    protot = inference_model("protot", sizes.vocab, device, dtype, **sizes.changes)
    longest = {"max_position_embeddings": 2 * sizes.positions[-1]}
    llama = inference_model("llama", sizes.vocab, device, dtype, **sizes.changes, **longest)
    config = llama.config
    forms: dict[str, Callable[[], None]] = {}
    rows: list[Row] = []
    for position in sizes.positions:
        size = 2 * 4 * position * config.hidden_size * config.num_hidden_layers / MIB
        # Twice, since appending a token copies a layer's keys and values; in float32, at most.
        reason = too_large(2 * size, device)
        for name, model in (("protot", protot), ("llama", llama)):
            row: Row = {"model": name, "position": position}
            rows.append(row)
            if name == "llama" and reason:
                row["skipped"] = reason
                continue
            cache = (prefilled if name == "protot" else random_cache)(model, position, setting)
            row["cache_mib"] = cache_mib(cache)
            forms[f"{name} at {position}"] = generation(model, cache, sizes.decoded, device)
    turns = in_turns(forms, setting.rounds, device)
    times, ratios = milliseconds(turns), against(turns, next(iter(forms)))
    for row in rows:
        name = f"{row['model']} at {row['position']}"
        if name in times:
            row["milliseconds_per_token"] = round(times[name] / sizes.decoded, 4)
            row["ratios"] = {"elapsed": ratios[name]} if name in ratios else {}
        print(row, flush=True)
    return rows


def prefilled(model: Any, position: int, setting: Setting) -> RecurrentCache:
    """Return the state after that many random tokens."""
    cache = RecurrentCache(model.config.num_hidden_layers)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, position), generator=generator)
    for piece in ids.to(setting.device).split(PREFILL, 1):
        model.base_model(input_ids=piece, past_key_values=cache, use_cache=True)
    return cache


def random_cache(model: Any, position: int, setting: Setting) -> DynamicCache:
    """Return random keys and values of that many positions."""
    cache, config = DynamicCache(), model.config
    heads = config.num_key_value_heads
    shape = (2, 1, heads, position, config.hidden_size // heads)
    dtype = getattr(torch, setting.dtype)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(shape, device=setting.device, dtype=dtype)
        cache.update(keys, values, layer)
    return cache


def cache_mib(cache: Any) -> float:
    """Return the size of what a cache holds."""
    recurrent = isinstance(cache, RecurrentCache)
    held = [layer.state if recurrent else (layer.keys, layer.values) for layer in cache.layers]
    return round(sum(tensor.nbytes for state in held for tensor in tensors(state)) / MIB, 3)


def tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of a state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from tensors(part)


PARTS: dict[str, Callable[[Setting], list[Row]]] = {
    "mixer": mixer,
    "memory": memory,
    "step": step,
    "throughput": throughput,
    "decode": decode,
}


if __name__ == "__main__":
    main()
