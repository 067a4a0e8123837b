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
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from prismlm.errors import InputError
from prismlm.eval import next_token
from prismlm.eval.pairs import INTERVENTIONS, SLICES
from prismlm.eval.robustness import OpenedModel, Pair, texts_of
from prismlm.interventions.attention import clamp_attention, record_attention
from prismlm.interventions.channels import OWN, ClampGates, intervene, record_gates
from prismlm.models.attention import attention_layers
from prismlm.models.decoders.mixers import has_mixers
from prismlm.probes.results import Row
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap, mean_intervals

FLOOR = 1e-4
"""JS_base in bits below which a pair has no PMR: there is nothing to mediate."""
ROUNDING = 1e-5
"""|PMR| up to which clamping moved nothing: routing before the first change is the same."""
LEAST_SHARE = 0.5
"""Of the longer text's positions, those that must have a counterpart."""


class Routing(NamedTuple):
    """What of a model is clamped, "channels" or "attention", and how.

    In a block of ``clamp(ids, alignment)`` a text is read with the routing of the tokens given.
    """

    kind: str
    clamp: Callable[[Sequence[int], list[int]], AbstractContextManager[None]]


class Clamped(NamedTuple):
    """One pair: JS in bits to what the model says after the original.

    ``control`` is with a random text's routing, and NaN where no other text is long enough;
    ``equal_length`` says whether both texts have as many tokens.
    """

    slice: str
    base: float
    clamped: float
    control: float
    equal_length: bool


def routing_of(model: PreTrainedModel) -> Routing:
    """Return what can be clamped: prototype channels where there are any, else attention."""
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
) -> Row:
    """Read each changed text with the original's routing, and with a random other original's.

    Args:
        opened: the model.
        pairs: of :func:`prismlm.eval.robustness.drawn_pairs`.
        seed: of the random texts, and of the bootstrap.
        progress: shows the texts, then the pairs.

    Returns:
        ``name`` of the model, ``routing``, ``seed``, and ``slices``, of :func:`slice_mediation`.

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
            before = next_token.log_probabilities(logits[texts[pair.original]][None])
            divergences = next_token.jensen_shannon(
                before, next_token.log_probabilities(np.stack(after))
            )
            base, clamped, control = [*divergences.tolist(), float("nan")][:3]
            found.append(Clamped(pair.slice, base, clamped, control, len(x) == len(changed)))
    return {
        "name": name,
        "routing": routing.kind,
        "seed": seed,
        "slices": tuple(
            slice_mediation(part, [one for one in found if one.slice == part], unaligned, seed)
            for part in SLICES + INTERVENTIONS
            if any(pair.slice == part for pair in pairs)
        ),
        "unit": "bits",
        "floor": FLOOR,
        "least_share": LEAST_SHARE,
    }


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
) -> Row:
    """Return the figures of one slice, of its pairs and the slice of each pair left out.

    Returns:
        ``pairs`` with a PMR, ``of_equal_length`` among them, and those left out: ``unaligned``, or
        too long for the model, and ``below_floor``. With the original's routing, ``clamped``, and a
        random text's, ``control``: ``mean``, ``deviation`` and ``share_positive`` of PMR;
        ``unmoved`` pairs, whose PMR is rounding; ``pooled`` 1 − Σ JS_clamped / Σ JS_base, which no
        pair with a small JS_base dominates; mean JS_base, ``base``, and JS_clamped, ``js``.
        ``gain``: mean of JS_control − JS_clamped over the same pairs. None without pairs.
    """
    kept = [one for one in found if one.base >= FLOOR]
    row: Row = {
        "name": name,
        "pairs": len(kept),
        "of_equal_length": sum(one.equal_length for one in kept),
        "unaligned": unaligned.count(name),
        "below_floor": len(found) - len(kept),
    } | dict.fromkeys(("clamped", "control", "gain"))
    if kept:
        base, clamped, control = np.array([one[1:4] for one in kept]).T
        row["clamped"] = _mediation(base, clamped, seed)
        if (with_control := ~np.isnan(control)).any():
            row["control"] = _mediation(base[with_control], control[with_control], seed)
            row["gain"] = bootstrap((control - clamped)[with_control], seed=seed)
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
