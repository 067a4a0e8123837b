"""How far a model's routing explains the change of its predictions when a text is changed.

    PMR = (JS_base − JS_clamped) / JS_base

JS_base is the divergence after a text x and its variant x′, JS_clamped that after x and x′ with the
routing of x: the gates of prototype channels, or the attention weights of a Hugging Face model. The
control clamps the routing of a random other text at the same positions.

Source: ProtoT, §5.2, Table 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from prismlm.errors import InputError
from prismlm.eval.pairs import Pair
from prismlm.eval.robustness import (
    OpenedModel,
    encode,
    index_texts,
    jensen_shannon,
    last_logits,
    log_probabilities,
    logits_on_disk,
)
from prismlm.interventions.attention import clamp_attention, record_attention
from prismlm.interventions.channels import OWN, ClampGates, intervene, record_gates
from prismlm.models.attention import attention_layers
from prismlm.models.decoders.protot import has_mixers
from prismlm.probes.results import Row
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap, mean_intervals

FLOOR = 1e-4
"""Minimum JS_base in bits of a pair with a PMR."""
ROUNDING = 1e-5
"""|PMR| below this is rounding: routing before the first change is the same."""
MIN_ALIGNED = 0.5
"""Minimum share of the longer text's positions with a counterpart."""
# Within clamp(ids, alignment), the model reads a text with the routing of these tokens.
Clamp = Callable[[Sequence[int], list[int]], AbstractContextManager[None]]


class Divergences(NamedTuple):
    """Divergences of one pair, in bits, from the prediction after the original."""

    slice: str
    base: float
    clamped: float
    control: float  # with a random text's routing; NaN if no other text is long enough
    equal_length: bool  # in tokens


def routing_of(model: PreTrainedModel) -> tuple[str, Clamp]:
    """Return the kind of routing, channels if there are any, otherwise attention, and its clamp."""
    if has_mixers(model):

        def clamp_gates(ids: Sequence[int], alignment: list[int]) -> AbstractContextManager[None]:
            record = record_gates(model, torch.tensor(ids))
            return intervene(model, ClampGates(record, alignment=alignment))

        return "channels", clamp_gates
    try:
        attention_layers(model)
    except InputError as error:
        raise InputError(
            f"a model of type {model.config.model_type!r} has no routing that could be clamped: "
            "expected prototype channels (ProtoT) or attention heads (such as a Llama)."
        ) from error
    return "attention", lambda ids, alignment: clamp_attention(
        model, record_attention(model, torch.tensor(ids)), alignment
    )


def measure_clamping(
    opened: OpenedModel, pairs: Sequence[Pair], *, seed: int = 0, progress: Reporter = SILENT
) -> Row:
    """Read each changed text with the routing of its original, and of a random other original.

    ``slices`` are those of :func:`slice_mediation`.
    """
    name, model, tokenizer = opened
    kind, clamp = routing_of(model)
    texts = index_texts(pairs)
    rows = encode(model, tokenizer, list(texts))
    with progress.task(name, len(rows), "texts") as task:
        logits = logits_on_disk(model, rows, task.advance)
    originals = sorted({pair.original for pair in pairs if rows[texts[pair.original]]})
    results: list[Divergences] = []
    unaligned: list[str] = []
    generator = np.random.default_rng(seed)
    with progress.task("clamped", len(pairs), "pairs") as task:
        for pair in pairs:
            task.advance()
            first, second = texts[pair.original], texts[pair.perturbed]
            x, changed = rows[first], rows[second]
            alignment = align(x, changed)
            if alignment is None:
                unaligned.append(pair.slice)
                continue
            others = [rows[texts[text]] for text in originals if text != pair.original]
            other = random_text(others, len(x), generator)
            after = [logits[second]]
            for routed in (x, other) if other else (x,):
                with clamp(routed, alignment):
                    after.append(last_logits(model, torch.tensor([changed]))[0].numpy())
            before = log_probabilities(logits[first][None])
            js = jensen_shannon(before, log_probabilities(np.stack(after)))
            base, js_clamped, control = [*js.tolist(), float("nan")][:3]
            same_length = len(x) == len(changed)
            results.append(Divergences(pair.slice, base, js_clamped, control, same_length))
    return {
        "name": name,
        "routing": kind,
        "seed": seed,
        "slices": tuple(
            slice_mediation(part, [r for r in results if r.slice == part], unaligned, seed)
            for part in dict.fromkeys(pair.slice for pair in pairs)
        ),
        "unit": "bits",
        "floor": FLOOR,
        "least_share": MIN_ALIGNED,
    }


def align(original: Sequence[int], changed: Sequence[int]) -> list[int] | None:
    """Return for each token of ``changed`` its position in ``original``, or −1 for none.

    Texts of equal length are aligned by position. Otherwise difflib aligns unchanged tokens, and
    replaced tokens between them are aligned from their end: the last token of a word completes it.
    The result is None if no token is unchanged, or less than ``MIN_ALIGNED`` has a counterpart.
    """
    if not original or not changed:
        return None
    if len(original) == len(changed):
        return list(range(len(changed)))
    positions = [OWN] * len(changed)
    blocks = SequenceMatcher(None, original, changed, autojunk=False).get_opcodes()
    for kind, start, end, first, last in blocks:
        if kind in ("equal", "replace"):
            count = min(end - start, last - first)
            positions[last - count : last] = range(end - count, end)
    aligned = sum(position != OWN for position in positions)
    anchored = any(kind == "equal" for kind, *_ in blocks)
    longest = max(len(original), len(changed))
    return positions if anchored and aligned >= MIN_ALIGNED * longest else None


def random_text(
    others: Sequence[Sequence[int]], length: int, generator: np.random.Generator
) -> Sequence[int] | None:
    """Return a random text of ``length`` tokens, or of the next larger available number; or None.

    It ends where the original ends, since last tokens are routed differently.
    """
    shortest = min((len(text) for text in others if len(text) >= length), default=None)
    candidates = [text for text in others if len(text) == shortest]
    return candidates[int(generator.integers(len(candidates)))] if candidates else None


def slice_mediation(
    name: str, results: Sequence[Divergences], unaligned: Sequence[str], seed: int = 0
) -> Row:
    """Return the figures of one slice, from its pairs and the slices of unaligned pairs.

    ``clamped`` is with the original's routing, ``control`` with a random text's: figures of PMR;
    ``unmoved`` pairs, whose PMR is rounding; ``pooled`` 1 − Σ JS_clamped / Σ JS_base, which no
    pair with a small JS_base dominates; mean JS_base, ``base``, and JS_clamped, ``js``. ``gain`` is
    the mean of JS_control − JS_clamped over the same pairs. None without pairs.
    """
    usable = [pair for pair in results if pair.base >= FLOOR]
    row: Row = {
        "name": name,
        "pairs": len(usable),
        "of_equal_length": sum(pair.equal_length for pair in usable),
        "unaligned": unaligned.count(name),
        "below_floor": len(results) - len(usable),
    } | dict.fromkeys(("clamped", "control", "gain"))
    if usable:
        base, js, control = np.array([pair[1:4] for pair in usable]).T
        row["clamped"] = _mediation(base, js, seed)
        if (with_control := ~np.isnan(control)).any():
            row["control"] = _mediation(base[with_control], control[with_control], seed)
            row["gain"] = bootstrap((control - js)[with_control], seed=seed)
    return row


def _mediation(base: np.ndarray, clamped: np.ndarray, seed: int) -> Row:
    pmr = (base - clamped) / base
    mean, of_base, js = mean_intervals(np.stack([pmr, base, clamped], 1), seed=seed)
    return {
        "pairs": len(pmr),
        "unmoved": int((abs(pmr) <= ROUNDING).sum()),
        "mean": mean,
        "deviation": float(pmr.std(ddof=1)) if len(pmr) > 1 else float("nan"),
        "share_positive": float((pmr > ROUNDING).mean()),
        "pooled": bootstrap(base - clamped, base, seed=seed),
        "base": of_base,
        "js": js,
    }
