"""Whether a model's routing is what keeps its predictions when a text is changed.

    PMR = (JS_base − JS_clamped) / JS_base

JS_base is that of a text x and its variant x′, JS_clamped that of x and x′ read with x's routing:
the gates of prototype channels, or a Hugging Face model's attention weights. Beside it stands a
control: x′ read with the routing of a random other text, at the same positions.

Source: ProtoT, §5.2, Table 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from prismlm.edits.attention import clamp_attention, record_attention
from prismlm.edits.channels import ClampGates, intervene, record_gates
from prismlm.edits.channels.clamp import OWN
from prismlm.errors import InputError
from prismlm.eval import next_token
from prismlm.eval.pairs import INTERVENTIONS, SLICES
from prismlm.eval.robustness import OpenedModel, Pair, texts_of
from prismlm.models.attention import attention_layers
from prismlm.models.decoders.mixers import has_mixers
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import Interval, bootstrap, mean_intervals

FLOOR = 1e-4
"""JS_base in bits below which a pair has no PMR: there is nothing to mediate."""
ROUNDING = 1e-5
"""|PMR| up to which clamping moved nothing: routing before the first change is the same."""
LEAST_SHARE = 0.5
"""Of the longer text's positions, those that must have a counterpart."""


class Routing(NamedTuple):
    """What of a model is clamped.

    Attributes:
        kind: "channels" or "attention".
        clamp: a block in which a text is read with the routing of the tokens given, by an
            alignment.
    """

    kind: str
    clamp: Callable[[Sequence[int], list[int]], AbstractContextManager[None]]


@dataclass(frozen=True)
class Clamped:
    """One pair: divergences in bits from what the model says after the original.

    Attributes:
        slice: of the pair.
        base, clamped: JS.
        control: with a random text's routing; NaN where no other text is long enough.
        equal_length: whether both texts have as many tokens.
    """

    slice: str
    base: float
    clamped: float
    control: float
    equal_length: bool


@dataclass(frozen=True)
class Mediation:
    """PMR over the pairs of a slice.

    Attributes:
        pairs: n.
        unmoved: those whose PMR is 0, but for rounding; none of them is positive.
        mean, deviation, share_positive: of PMR.
        pooled: 1 − Σ JS_clamped / Σ JS_base, which no pair with a small JS_base rules.
        base, js: mean JS_base and JS_clamped.
    """

    pairs: int
    unmoved: int

    mean: Interval
    deviation: float
    share_positive: float
    pooled: Interval
    base: Interval
    js: Interval


@dataclass(frozen=True)
class SliceMediation:
    """One slice.

    Attributes:
        name: of the slice.
        pairs: n, those with a PMR.
        of_equal_length: how many of them.
        unaligned: pairs whose tokens could not be aligned, or that the model cannot read.
        below_floor: pairs whose JS_base is below ``FLOOR``.
        clamped: with the original's routing; None without pairs, as what follows.
        control: with a random text's, over the pairs that have one.
        gain: mean of JS_control − JS_clamped over the same pairs.
    """

    name: str
    pairs: int
    of_equal_length: int
    unaligned: int
    below_floor: int
    clamped: Mediation | None
    control: Mediation | None
    gain: Interval | None


@dataclass(frozen=True)
class Clamping:
    """The study of one model.

    Attributes:
        name: of the model.
        routing: "channels" or "attention".
        seed: of what was drawn, and of the bootstrap.
        slices: in the order of the source.
    """

    name: str
    routing: str
    seed: int
    slices: tuple[SliceMediation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {"unit": "bits", "floor": FLOOR, "least_share": LEAST_SHARE}


def routing_of(model: PreTrainedModel) -> Routing:
    """Return what can be clamped: prototype channels where there are any, else attention.

    Raises:
        InputError: the model has neither.
    """
    if has_mixers(model):

        def clamp_gates(ids: Sequence[int], alignment: list[int]) -> AbstractContextManager[None]:
            record = record_gates(model, torch.tensor(ids))
            return intervene(model, ClampGates(record, alignment=alignment))

        return Routing("channels", clamp_gates)
    try:
        attention_layers(model)
    except InputError as error:
        raise InputError(
            f"a model of type {model.config.model_type!r} has no routing that could be clamped: "
            "expected prototype channels (ProtoT) or attention heads (such as a Llama)."
        ) from error

    def clamp_heads(ids: Sequence[int], alignment: list[int]) -> AbstractContextManager[None]:
        return clamp_attention(model, record_attention(model, torch.tensor(ids)), alignment)

    return Routing("attention", clamp_heads)


def measure_clamping(
    opened: OpenedModel, pairs: Sequence[Pair], *, seed: int = 0, progress: Reporter = SILENT
) -> Clamping:
    """Read each changed text with the original's routing, and with a random other original's.

    Args:
        opened: the model.
        pairs: of :func:`prismlm.eval.robustness.drawn_pairs`.
        seed: of the random texts, and of the bootstrap.
        progress: shows the texts, then the pairs.

    Raises:
        InputError: no routing, as :func:`routing_of`, or attention that cannot be clamped.
        NotFiniteError: logits that are not finite.
    """
    name, model, tokenizer = opened
    routing = routing_of(model)
    texts = texts_of(pairs)
    rows = next_token.encode(tokenizer, list(texts))
    with progress.task(name, len(rows), "texts") as task:
        logits = next_token.kept_logits(model, rows, task.advance)
    tokens = {
        text: rows[row] for text, row in texts.items() if next_token.readable(model, rows[row])
    }
    originals = sorted({pair.original for pair in pairs} & tokens.keys())
    found: list[Clamped] = []
    unaligned: list[str] = []
    generator = np.random.default_rng(seed)
    with progress.task("clamped", len(pairs), "pairs") as task:
        for pair in pairs:
            task.advance()
            x, changed = (tokens.get(text, []) for text in (pair.original, pair.perturbed))
            alignment = align(x, changed) if x and changed else None
            if alignment is None:
                unaligned.append(pair.slice)
                continue
            others = [tokens[text] for text in originals if text != pair.original]
            other = random_text(others, len(x), generator)
            after = [logits[texts[pair.perturbed]]]
            for source in (x, other) if other else (x,):
                with routing.clamp(source, alignment):
                    after.append(next_token.logits_after(model, torch.tensor([changed]))[0].numpy())
            before = logits[texts[pair.original]]
            one, all_after = (next_token.log_probabilities(np.stack(x)) for x in ([before], after))
            divergences = next_token.jensen_shannon(one, all_after).tolist()
            base, clamped, control = [*divergences, float("nan")][:3]
            equal = len(x) == len(changed)
            found.append(Clamped(pair.slice, base, clamped, control, equal))
    slices = tuple(
        slice_mediation(part, [one for one in found if one.slice == part], unaligned, seed)
        for part in SLICES + INTERVENTIONS
        if any(pair.slice == part for pair in pairs)
    )
    return Clamping(name, routing.kind, seed, slices)


def align(original: Sequence[int], changed: Sequence[int]) -> list[int] | None:
    """Return for each token of ``changed`` its position in ``original``, or −1 for none.

    Texts of equal length go position by position. Otherwise tokens that difflib finds unchanged
    are their own counterparts, and what was replaced between them goes token by token from its
    end: a word that falls into more pieces is whole at its last.

    Returns:
        None where nothing is the same in both, or less than ``LEAST_SHARE`` has a counterpart.
    """
    if len(original) == len(changed):
        return list(range(len(changed)))
    found = [OWN] * len(changed)
    blocks = SequenceMatcher(None, original, changed, autojunk=False).get_opcodes()
    for kind, start, end, first, last in blocks:
        if kind in ("equal", "replace"):
            count = min(end - start, last - first)
            found[last - count : last] = range(end - count, end)
    aligned = sum(place != OWN for place in found)
    anchored = any(kind == "equal" for kind, *_ in blocks)
    longest = max(len(original), len(changed))
    return found if anchored and aligned >= LEAST_SHARE * longest else None


def random_text(
    others: Sequence[Sequence[int]], length: int, generator: np.random.Generator
) -> Sequence[int] | None:
    """Return a text of ``length`` tokens, or of the next larger number that there is; or None.

    Its end is then where the original's is: a last token is not routed as one in the middle.
    """
    long_enough = [len(text) for text in others if len(text) >= length]
    if not long_enough:
        return None
    fitting = [text for text in others if len(text) == min(long_enough)]
    return fitting[int(generator.integers(len(fitting)))]


def slice_mediation(
    name: str, found: Sequence[Clamped], unaligned: Sequence[str], seed: int = 0
) -> SliceMediation:
    """Return the figures of one slice.

    Args:
        name: of the slice.
        found: its pairs.
        unaligned: the slice of each pair that was left out, of any slice.
        seed: of the bootstrap.
    """
    kept = [one for one in found if one.base >= FLOOR]
    counts = (
        len(kept),
        sum(one.equal_length for one in kept),
        unaligned.count(name),
        len(found) - len(kept),
    )
    if not kept:
        return SliceMediation(name, *counts, None, None, None)
    base, clamped, control = np.array([(one.base, one.clamped, one.control) for one in kept]).T
    told = ~np.isnan(control)
    return SliceMediation(
        name,
        *counts,
        _mediation(base, clamped, seed),
        _mediation(base[told], control[told], seed) if told.any() else None,
        bootstrap((control - clamped)[told], seed=seed) if told.any() else None,
    )


def _mediation(base: np.ndarray, clamped: np.ndarray, seed: int) -> Mediation:
    pmr = (base - clamped) / base
    mean, of_base, js = mean_intervals(np.stack([pmr, base, clamped], 1), seed=seed)
    return Mediation(
        len(pmr),
        int((abs(pmr) <= ROUNDING).sum()),
        mean,
        float(pmr.std(ddof=1)) if len(pmr) > 1 else float("nan"),
        float((pmr > ROUNDING).mean()),
        bootstrap(base - clamped, base, seed=seed),
        of_base,
        js,
    )
