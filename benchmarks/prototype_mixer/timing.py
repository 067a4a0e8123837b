"""Time the prototype mixer beside attention; write docs/results/mixer.json.

    python -m benchmarks.prototype_mixer.timing                every part, one after the other
    python -m benchmarks.prototype_mixer.timing --parts step            # only this again
    python -m benchmarks.prototype_mixer.timing --device cuda --out docs/results/mixer_cuda.json
    python -m benchmarks.prototype_mixer.timing --quick --out /tmp/mixer.json
    python -m benchmarks.render mixer

mixer: a forward and a backward pass of one mixer. step: a training step of whole models.
throughput: a forward pass of whole models without output embedding, one row, as the source's Table
14 has it. decode: one token after a number of others. Compared things take turns in one process; a
ratio is the median over rounds, with its 95 % interval over resampled rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from benchmarks.prototype_mixer.timing_forms import (
    MIXERS,
    MixerSizes,
    generation,
    inference_model,
    mixing_step,
    model_of,
    training_step,
    without_dropout,
)
from benchmarks.shared.options import RESULTS
from benchmarks.shared.turns import (
    MIB,
    Setting,
    against,
    compared,
    in_turns,
    milliseconds,
    parts_parser,
    run_parts,
)
from prismlm.models.decoders.own_decoder import RecurrentCache

HEADS = 4
# Beyond this length a model's forward pass takes more memory than a laptop has.
LONGEST = {"mamba": 2**16}
PREFILL = 4096  # positions that a state is set up from at once
Row = dict[str, Any]


class Sizes(NamedTuple):
    """Sizes of the parts; whole models have those of their presets, but for ``changes``."""

    width: int = 256
    vocab: int = 16_000
    mixer_tokens: int = 16_384
    mixer_lengths: tuple[int, ...] = (256, 1024, 4096, 16_384)
    step_tokens: int = 8192
    step_lengths: tuple[int, ...] = (256, 4096)
    throughput_lengths: tuple[int, ...] = tuple(2**n for n in range(10, 18))
    positions: tuple[int, ...] = (1000, 10_000, 100_000)
    decoded: int = 16
    changes: dict[str, Any] = {}  # noqa: RUF012 (never written to)

    def mixer(self, length: int) -> MixerSizes:
        """Return the sizes of a mixer's input; every length has the same number of tokens."""
        return MixerSizes(self.mixer_tokens // length, length, self.width, HEADS)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2}
QUICK = Sizes(32, 64, 256, (64,), 128, (32, 64), (32, 64), (20, 40), 2, SMALL)


def main() -> None:
    """Run the parts, and write each as soon as it is measured."""
    args = parts_parser(__doc__, PARTS, rounds=7, out=RESULTS / "mixer.json").parse_args()
    run_parts(args, PARTS, QUICK if args.quick else Sizes())


def mixer(setting: Setting) -> list[Row]:
    """Time forward and backward passes of a mixer alone."""
    rows: list[Row] = []
    for shape in map(setting.sizes.mixer, setting.sizes.mixer_lengths):
        forms = {name: mixing_step(name, shape, setting.device, setting.dtype) for name in MIXERS}
        turns = in_turns(forms, setting.rounds, setting.device)
        rows.append(compared(turns, "mixer", **shape._asdict()))
    return rows


def step(setting: Setting) -> list[Row]:
    """Time training steps of ProtoT and LLaMA, without dropout."""
    sizes, device = setting.sizes, setting.device
    rows: list[Row] = []
    for length in sizes.step_lengths:
        count = sizes.step_tokens // length
        forms: dict[str, Callable[[], None]] = {}
        for name in ("protot", "llama"):
            model = model_of(name, sizes.vocab, device, **sizes.changes, **without_dropout(name))
            forms[name] = training_step(model, count, length, device, setting.dtype)
        turns = in_turns(forms, setting.rounds, device)
        rows.append(compared(turns, "protot", rows=count, length=length, dropout=False))
    return rows


@torch.no_grad()
def throughput(setting: Setting) -> list[Row]:
    """Time forward passes over one row of growing length; the longest takes minutes."""
    sizes, device, rounds = setting.sizes, setting.device, min(2, setting.rounds)
    longest = {"max_position_embeddings": sizes.throughput_lengths[-1]}
    models = {
        name: inference_model(
            name, sizes.vocab, device, setting.dtype, **sizes.changes,
            **(longest if name == "llama" else {}),
        ).base_model
        for name in ("protot", "llama", "mamba", "deltanet")
    }  # fmt: skip
    rows: list[Row] = []
    for length in sizes.throughput_lengths:
        ids = torch.randint(sizes.vocab, (1, length), device=device)
        forms = {
            name: lambda model=model, ids=ids: model(input_ids=ids, use_cache=False)
            for name, model in models.items()
            if length <= LONGEST.get(name, length)
        }
        turns = in_turns(forms, rounds, device)
        rows.append(compared(turns, "protot", length=length))
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
    forms: dict[str, Callable[[], None]] = {}
    rows: list[Row] = []
    for position in sizes.positions:
        for name, model in (("protot", protot), ("llama", llama)):
            row: Row = {"model": name, "position": position}
            rows.append(row)
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
    return round(sum(leaf.nbytes for leaf in tree_leaves(held) if leaf is not None) / MIB, 3)


PARTS: dict[str, Callable[[Setting], list[Row]]] = {
    "mixer": mixer,
    "step": step,
    "throughput": throughput,
    "decode": decode,
}


if __name__ == "__main__":
    main()
