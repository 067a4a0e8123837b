"""Do direct parts say what happens without a channel or a token? Interventions, with controls.

    python -m benchmarks.prototype_mixer.chain MODEL CORPUS [--positions 400] [--seed 0]

At positions of held-out text, for the prototype with the largest activation: the channel with the
largest positive direct part is masked (MaskWrite), and beside it a random other channel of its
layer, the one of its layer with the smallest part, and the loudest other of all layers: the one
whose reading is longest, whatever its direction, which knows nothing of the prototype. The change
of the activation is compared with the direct part. Likewise for the token credited most in that
channel and a random earlier one at a similar distance: its write into the channel is taken out, or
the token replaced by another.

Every intervention is a forward pass of its own, over the text up to the position.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.corpus.sequences import Sequences
from prismlm.edits.channels.interventions import MaskWrite
from prismlm.edits.channels.scope import intervene
from prismlm.explain.language_model import PrismLM
from prismlm.explain.residual_stream import DirectPath, read_direct_path
from prismlm.layers import MixerEvidence
from prismlm.models.decoders.mixers import mixers_of
from prismlm.models.seam import capture
from prismlm.ops.channel_parts import channel_parts, token_parts
from prismlm.statistics import interval_of

LENGTH, EARLIEST, PER_SEQUENCE = 256, 24, 4
REPLACEMENTS = 4
SAME_LAYER_ARMS = ("largest", "random", "smallest")
CHANNEL_ARMS = (*SAME_LAYER_ARMS, "loudest")
TOKEN_ARMS = ("credited", "distant")


@dataclass
class Case:
    """One prototype at one position, and what interventions did to its activation.

    Attributes:
        activation: before.
        layer, channel: those with the largest direct part.
        source, distance: the token credited most, and how far back it is.
        shares: of embedding, each SwiGLU and each mixer in the activation.
        error: |sum of parts − activation| / τ.
        is_loudest: whether the channel's reading is also the longest of all.
        channels: (part, change) of each arm, the change being activation before minus after.
        writes, tokens: likewise, of the token credited most and the one beside it.
    """

    activation: float
    layer: int
    channel: int
    source: int
    distance: int
    shares: list[float]
    error: float
    is_loudest: bool
    channels: dict[str, list[float]]
    writes: dict[str, list[float]]
    tokens: dict[str, list[float]]


def activation(
    lm: PrismLM, ids: Tensor, prototype: int, held: AbstractContextManager[None] | None = None
) -> float:
    """Return τ cos(z, p) after the last of ``ids``."""
    with held or nullcontext(), torch.no_grad(), capture(lm.model, logits=False) as seen:
        lm.model(input_ids=ids[None], use_cache=False)
    z, p = seen.z[0, -1].double(), lm.head.prototypes[prototype].detach().double()
    return float(lm.head.scale) * float(nn.functional.cosine_similarity(z, p, dim=0))


@contextmanager
def without_write(gates: nn.Module, position: int, channel: int) -> Iterator[None]:
    """Take one position's write into one channel out."""

    def after(module: nn.Module, args: Any, output: MixerEvidence) -> MixerEvidence:
        write = output.write.clone()
        write[:, position, channel] = 0
        return MixerEvidence(write, output.read)

    handle = gates.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def beside(source: int, position: int, rng: np.random.Generator) -> int | None:
    """Return another earlier token whose distance differs by at most a quarter, or by two."""
    distance = position - source
    near = max(2, distance // 4)
    others = [
        j for j in range(max(0, source - near), min(position, source + near + 1)) if j != source
    ]
    return int(rng.choice(others)) if others else None


def loudness(path: DirectPath, position: int) -> Tensor:
    """Return how long each channel's reading is in z, ‖g ⊙ α U read S / M‖ [L, R], but for rms."""
    gain = path.gain.double()[:, None]
    return torch.stack(
        [
            channel_parts(flow, position, gain * output.double()).norm(dim=0)
            for flow, output in zip(path.flows, path.outputs, strict=True)
        ]
    )


def examine(lm: PrismLM, ids: Tensor, rng: np.random.Generator, pool: Tensor) -> Case | None:
    """Examine the last position of ``ids``; None where no channel has a positive part."""
    position = len(ids) - 1
    path = read_direct_path(lm.model, lm.head, ids)
    routing = lm.head.nearest(path.states[-1:].float())
    chosen = routing.indices[0, :1]
    prototype, own = int(chosen), float(routing.activations[0, 0])
    parts = path.parts(position, chosen)
    layer, channel = divmod(int(parts.channels[0].argmax()), parts.channels.shape[2])
    of_layer = parts.channels[0, layer]
    if of_layer[channel] <= 0:
        return None
    others = [k for k in range(len(of_layer)) if k != channel]
    loud = loudness(path, position)
    is_loudest = bool(loud[layer, channel] == loud.max())
    loud[layer, channel] = -1
    arms = {
        "largest": (layer, channel),
        "random": (layer, int(rng.choice(others))),
        "smallest": (layer, int(of_layer.abs().argmin())),
        "loudest": divmod(int(loud.argmax()), loud.shape[1]),
    }
    channels = {
        name: [
            float(parts.channels[0, at, k]),
            own - activation(lm, ids, prototype, intervene(lm.model, MaskWrite(at, k))),
        ]
        for name, (at, k) in arms.items()
    }
    given = path.token_parts(position, chosen, layer, torch.tensor([channel]))[0]
    source = int(given.argmax())
    other = beside(source, position, rng)
    if other is None:
        return None
    shares = [parts.embedding[0], *parts.mlps[0], *parts.channels[0].sum(1)]
    writes, tokens = _tokens(lm, path, ids, (layer, channel), (source, other), prototype, rng, pool)
    return Case(
        own,
        layer,
        channel,
        source,
        position - source,
        [float(share) / own for share in shares],
        float((parts.total[0] - own).abs()) / path.scale,
        is_loudest,
        channels,
        writes,
        tokens,
    )


def _tokens(
    lm: PrismLM,
    path: DirectPath,
    ids: Tensor,
    place: tuple[int, int],
    pair: tuple[int, int],
    prototype: int,
    rng: np.random.Generator,
    pool: Tensor,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return part and change of both tokens: their write taken out, and they replaced."""
    layer, channel = place
    position, chosen, split = len(ids) - 1, torch.tensor([prototype]), torch.tensor([channel])
    given = path.token_parts(position, chosen, layer, split)[0]
    # A write is of a position's value, which a convolution has mixed: so is its part.
    flow = path.flows[layer]
    whole = flow._replace(inputs=flow.values, kernel=torch.ones_like(flow.kernel[:1]))
    written = token_parts(whole, position, path.along(position, chosen, layer), split)[0]
    own = activation(lm, ids, prototype)
    gates = mixers_of(lm.model)[layer].gates
    drawn = torch.from_numpy(rng.choice(len(pool), REPLACEMENTS))
    writes: dict[str, list[float]] = {}
    tokens: dict[str, list[float]] = {}
    for name, j in zip(TOKEN_ARMS, pair, strict=True):
        held = without_write(gates, j, channel)
        writes[name] = [float(written[j]), own - activation(lm, ids, prototype, held)]
        after: list[float] = []
        for token in pool[drawn].tolist():
            changed = ids.clone()
            changed[j] = token
            after.append(activation(lm, changed, prototype))
        tokens[name] = [float(given[j]), own - float(np.mean(after))]
    return writes, tokens


def agreement(pairs: list[list[float]], seed: int = 0) -> dict[str, Any]:
    """Compare parts with changes: correlations with 95 % bootstrap intervals, signs, ratios."""
    part, change = np.array(pairs).T
    return {
        "cases": len(part),
        "pearson": _interval(part, change, ranked=False, seed=seed),
        "spearman": _interval(part, change, ranked=True, seed=seed),
        "same_sign": float((np.sign(part) == np.sign(change)).mean()),
        "median_ratio": float(np.median(change[part != 0] / part[part != 0])),
        "median_part": float(np.median(part)),
        "median_change": float(np.median(change)),
        "median_absolute_change": float(np.median(np.abs(change))),
    }


def correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the correlation of x and y along the last axis, 0 where one of them does not vary."""
    own, other = (a - a.mean(-1, keepdims=True) for a in (x, y))
    size = np.sqrt((own**2).sum(-1) * (other**2).sum(-1))
    varies = (np.ptp(x, axis=-1) > 0) & (np.ptp(y, axis=-1) > 0)
    return np.divide((own * other).sum(-1), size, out=np.zeros_like(size), where=varies)


def _interval(x: np.ndarray, y: np.ndarray, *, ranked: bool, seed: int) -> list[float]:
    """Return Pearson's or Spearman's correlation with its 95 % interval over resampled cases."""

    def of(cases: np.ndarray) -> np.ndarray:
        pair = (x[cases], y[cases])
        return correlation(*(stats.rankdata(a, axis=-1) for a in pair) if ranked else pair)

    found = interval_of(of, len(x), seed=seed)
    return [found.value, found.low, found.high]


def larger(cases: list[Case], kind: str, first: str, second: str) -> float:
    """Return the share of cases in which the first arm changes the activation more."""
    pairs = [getattr(case, kind) for case in cases]
    return float(np.mean([abs(pair[first][1]) > abs(pair[second][1]) for pair in pairs]))


def summary(cases: list[Case]) -> dict[str, Any]:
    """Return everything the page shows."""
    layers = sorted({case.layer for case in cases})
    return {
        "channels": {arm: agreement([c.channels[arm] for c in cases]) for arm in CHANNEL_ARMS},
        "channels_pooled": agreement([c.channels[arm] for c in cases for arm in SAME_LAYER_ARMS]),
        "by_layer": {
            str(layer): agreement(
                [c.channels[arm] for c in cases if c.layer == layer for arm in SAME_LAYER_ARMS]
            )
            for layer in layers
            if sum(c.layer == layer for c in cases) >= 10
        },
        "writes": {arm: agreement([c.writes[arm] for c in cases]) for arm in TOKEN_ARMS},
        "tokens": {arm: agreement([c.tokens[arm] for c in cases]) for arm in TOKEN_ARMS},
        "larger": {
            "largest channel than random": larger(cases, "channels", "largest", "random"),
            "largest channel than smallest": larger(cases, "channels", "largest", "smallest"),
            "largest channel than the loudest other": larger(
                cases, "channels", "largest", "loudest"
            ),
            "credited write than another": larger(cases, "writes", *TOKEN_ARMS),
            "credited token than another": larger(cases, "tokens", *TOKEN_ARMS),
        },
        "shares": np.median([case.shares for case in cases], axis=0).tolist(),
        "largest_share": float(np.median([c.channels["largest"][0] / c.activation for c in cases])),
        "is_loudest": float(np.mean([case.is_loudest for case in cases])),
        "median_activation": float(np.median([case.activation for case in cases])),
        "median_distance": float(np.median([case.distance for case in cases])),
        "largest_error": max(case.error for case in cases),
    }


def texts(corpus: Corpus, wanted: int, rng: np.random.Generator) -> Iterator[Tensor]:
    """Yield held-out sequences up to a drawn position each, four of a sequence."""
    found = 0
    for batch in Sequences(corpus, length=LENGTH).batches():
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
            length = int(mask.sum())
            if length <= EARLIEST + PER_SEQUENCE:
                continue
            for end in sorted(rng.choice(np.arange(EARLIEST, length), PER_SEQUENCE, False)):
                yield ids[: int(end) + 1]
                found += 1
                if found >= wanted:
                    return


def main() -> None:
    """Measure and write the result."""
    parser = script_options(__doc__, RESULTS / "chain.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--positions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lm, corpus = prismlm.load(given.model), Corpus.open(given.corpus)
    rng = np.random.default_rng(given.seed)
    sequences = list(texts(corpus, given.positions, rng))
    pool = torch.cat(sequences)
    examined = [examine(lm, ids, rng, pool) for ids in sequences]
    cases = [case for case in examined if case is not None]
    training = json.loads((given.model / "prismlm.json").read_text(encoding="utf-8"))
    result = {
        "environment": environment(),
        "model": {
            "type": lm.model.config.model_type,
            "parameters": sum(p.numel() for p in lm.model.parameters()),
            "layers": lm.model.config.num_hidden_layers,
            "channels": lm.model.config.num_channels,
            "prototypes": lm.head.num_prototypes,
            "scale": float(lm.head.scale),
            "steps": training.get("provenance", {}).get("steps"),
        },
        "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint},
        "settings": {
            "positions": given.positions,
            "seed": given.seed,
            "replacements": REPLACEMENTS,
            "left_out": len(examined) - len(cases),
        },
        "summary": summary(cases),
    }
    write(given.out, result, cases)
    print(json.dumps(result["summary"], indent=2))


def write(path: Path, result: dict[str, Any], cases: list[Case]) -> None:
    """Write the result, with every case in a line of its own."""
    rows = ",\n".join(f"  {json.dumps(_rounded(asdict(case)))}" for case in cases)
    head = json.dumps(result, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "cases": [\n{rows}\n ]\n}}\n', encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
