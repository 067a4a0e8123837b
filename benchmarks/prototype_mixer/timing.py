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
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

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
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.own_decoder import RecurrentCache
from prismlm.models.presets import PRESETS, build_config, build_model

HEADS, CHANNELS = 4, 32
# Beyond this length a model's forward pass takes more memory than a laptop has.
LONGEST = {"mamba": 2**16}
PREFILL = 4096  # positions that a state is set up from at once
Row = dict[str, Any]


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


# -- parts


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
