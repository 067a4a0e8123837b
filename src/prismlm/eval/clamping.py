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
from prismlm.eval.pairs import Pair
from prismlm.eval.robustness import OpenedModel, texts_of
from prismlm.interventions.attention import clamp_attention, record_attention
from prismlm.interventions.channels import OWN, ClampGates, intervene, record_gates
from prismlm.models.attention import attention_layers
from prismlm.models.decoders.protot import has_mixers
from prismlm.probes.results import Row
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap, mean_intervals

FLOOR = 1e-4
"""JS_base in bits below which a pair has no PMR: there is nothing to mediate."""
ROUNDING = 1e-5
"""|PMR| up to which clamping moved nothing: routing before the first change is the same."""
MIN_ALIGNED = 0.5
"""Of the longer text's positions, those that must have a counterpart."""
# In a block of clamp(ids, alignment) a text is read with the routing of the tokens given.
Clamp = Callable[[Sequence[int], list[int]], AbstractContextManager[None]]


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


def routing_of(model: PreTrainedModel) -> tuple[str, Clamp]:
    """Return what can be clamped, and how: channels where there are any, otherwise attention."""
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
    """Read each changed text with the original's routing, and with a random other original's.

    Args:
        opened: the model.
        pairs: of :func:`prismlm.eval.pairs.read_pairs`.
        seed: of the random texts, and of the bootstrap.
        progress: shows the texts, then the pairs.

    Returns:
        ``name`` of the model, ``routing``, ``seed``, and ``slices``, of :func:`slice_mediation`.
    """
    name, model, tokenizer = opened
    kind, clamp = routing_of(model)
    texts = texts_of(pairs)
    rows = next_token.encode(model, tokenizer, list(texts))
    with progress.task(name, len(rows), "texts") as task:
        logits = next_token.kept_logits(model, rows, task.advance)
    originals = sorted({pair.original for pair in pairs if rows[texts[pair.original]]})
    clamped: list[Clamped] = []
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
            for source in (x, other) if other else (x,):
                with clamp(source, alignment):
                    after.append(next_token.logits_after(model, torch.tensor([changed]))[0].numpy())
            before = next_token.log_probabilities(logits[first][None])
            js = next_token.jensen_shannon(before, next_token.log_probabilities(np.stack(after)))
            base, own, control = [*js.tolist(), float("nan")][:3]
            clamped.append(Clamped(pair.slice, base, own, control, len(x) == len(changed)))
    return {
        "name": name,
        "routing": kind,
        "seed": seed,
        "slices": tuple(
            slice_mediation(part, [one for one in clamped if one.slice == part], unaligned, seed)
            for part in dict.fromkeys(pair.slice for pair in pairs)
        ),
        "unit": "bits",
        "floor": FLOOR,
        "least_share": MIN_ALIGNED,
    }


def align(original: Sequence[int], changed: Sequence[int]) -> list[int] | None:
    """Return for each token of ``changed`` its position in ``original``, or −1 for none.

    Texts of equal length go position by position. Otherwise tokens that difflib finds unchanged
    are their own counterparts, and what was replaced between them goes token by token from its
    end: a word that falls into more pieces is whole at its last.

    Returns:
        None where nothing is the same in both, or less than ``MIN_ALIGNED`` has a counterpart.
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
    """Return a text of ``length`` tokens, or of the next larger number that there is; or None.

    Its end is then where the original's is: a last token is not routed as one in the middle.
    """
    shortest = min((len(text) for text in others if len(text) >= length), default=None)
    fitting = [text for text in others if len(text) == shortest]
    return fitting[int(generator.integers(len(fitting)))] if fitting else None


def slice_mediation(
    name: str, clamped: Sequence[Clamped], unaligned: Sequence[str], seed: int = 0
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
    kept = [one for one in clamped if one.base >= FLOOR]
    row: Row = {
        "name": name,
        "pairs": len(kept),
        "of_equal_length": sum(one.equal_length for one in kept),
        "unaligned": unaligned.count(name),
        "below_floor": len(clamped) - len(kept),
    } | dict.fromkeys(("clamped", "control", "gain"))
    if kept:
        base, own, control = np.array([one[1:4] for one in kept]).T
        row["clamped"] = _mediation(base, own, seed)
        if (with_control := ~np.isnan(control)).any():
            row["control"] = _mediation(base[with_control], control[with_control], seed)
            row["gain"] = bootstrap((control - own)[with_control], seed=seed)
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
