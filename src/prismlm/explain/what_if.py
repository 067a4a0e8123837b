"""What an answer would be without some documents: two estimates, checked by training again.

An estimate takes from the logit of each token y_t of an answer what documents S brought it:

    ln p′_t = ln p_t − δ_t − ln(1 − p_t + p_t e^{−δ_t})

    evidence     δ_t = c Σ_{n ∈ S} a_tn
    influence    δ_t = c Σ_{n ∈ S, y_n = y_t} (1 − p_n(y_n)) exp((cos(z_t, z_n) − 1) / T)

a_tn is the evidence that the position n carries (:mod:`prismlm.explain.attribution`). The influence
is that of one step of the output layer, whose gradient at n is (1[v = y_n] − p_n(v)) z_n: it adds
to the logit of y_n in proportion to z_n·z_t (representer theorem, Yeh et al. 2018). The sum is
over positions of the active cells after which y_t came next; T = 0.1 did best on the calibrating
half.

c is fitted to models that were trained again without documents, and so are the ends of the 90 %
interval, with m the mean of ln p′_t − ln p_t over an answer's tokens, in nats:

    m + l₀ + l₁ |m|  to  m + h₀ + h₁ |m|

``what_if.json`` has these figures, docs/results/control.md what they are worth. p′_t of another
model, or of other training, may be wrong by more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedModel

from prismlm.corpus.chat import Messages
from prismlm.errors import InputError
from prismlm.explain.audit import check_document
from prismlm.explain.language_model import PrismLM
from prismlm.explain.trace import Trace
from prismlm.files import read_json
from prismlm.lens.cells import neighbours, normalised
from prismlm.lens.layout import GROUP_COLUMNS
from prismlm.lens.opened_model import write_after
from prismlm.models.watch import evaluating

Method = Literal["evidence", "influence"]
METHODS: tuple[Method, ...] = ("evidence", "influence")
TEMPERATURE = 0.1
# Log-probabilities of the tokens of an answer, of the likeliest others, and these: [T] each.
Ends = tuple[np.ndarray, np.ndarray, np.ndarray]
PART = "document to leave out"  # what a model without a lens does not have


@cache
def calibration() -> dict[str, Any]:
    """Return c, (l₀, l₁) and (h₀, h₁) of each estimate, and of which answers they are."""
    return read_json(Path(__file__).with_suffix(".json"))


@dataclass(frozen=True)
class Estimate:
    """How the log-probability of the answer changes, in nats, with the 90 % interval of estimates.

    ``text`` is the answer up to the first token that would be another, with that token, and None
    if none would; of a model that was trained again, what it answers.
    """

    method: Literal["evidence", "influence", "training again"]
    change: float
    low: float | None
    high: float | None
    text: str | None
    tokens: list[float]  # the change of each token


@dataclass(frozen=True)
class WhatIf:
    """An answer, and what it would be without some documents; ``prismlm what-if --json``."""

    answer: str
    log_probability: float  # of the answer, in nats
    tokens: int
    without: tuple[str, ...]
    documents: int  # that are left out
    share: float  # of the text that they are
    estimates: tuple[Estimate, ...]
    # Whether the calibration is of such a removal: from a fine-tuned model, of no larger share,
    # with an answer as likely as those were.
    calibrated: bool
    retrained: Estimate | None


def what_if(
    lm: PrismLM,
    text: str | Messages,
    without: Sequence[str],
    *,
    generate: int = 50,
    retrain: Callable[[list[str]], PreTrainedModel] | None = None,
) -> WhatIf:
    """Estimate an answer, given as the assistant's message or written, without documents.

    ``without`` has ids of documents, or ``source=…``, ``domain=…`` and ``license=…``; ``retrain``
    returns a model that was trained without documents of these ids, such as
    :func:`prismlm.training.tuning.train_without`. InputError: an unknown or held-out document, all
    documents, a model that was not trained on them, or no answer.
    """
    removed, lens, retrained = removed_documents(lm, without), lm.lens_for(PART), None
    answered = not isinstance(text, str) and text[-1].get("role") == "assistant"
    trace = lm.explain(text, generate=0 if answered else generate)
    if not answered and not trace.written:
        raise InputError(
            f"the model wrote nothing: there is no answer to estimate. Generate more than "
            f"{generate} tokens, or ask something else."
        )
    rows = answer_rows(trace)
    ends = read_ends(lm.model, trace.ids, rows)
    given = ends[0]
    share, limits = float(lens.cells.document_rates[removed].sum()), calibration()
    low, high = limits["nats_per_token"]
    alike = low <= given.mean() <= high and share <= limits["largest_share"]
    calibrated = lens.meta.trained_on == "fine-tuned" and alike
    estimates = tuple(_estimate(trace, ends, method, removed) for method in METHODS)
    if retrain is not None:
        ids: list[str] = lens.cells.documents.column("doc_id").filter(pa.array(removed)).to_pylist()
        other, prompt = retrain(ids), trace.ids[: rows[0] + 1]
        change = read_ends(other, trace.ids, rows)[0] - given
        start = torch.tensor([prompt], device=other.device)
        answer = write_after(other, lm.tokenizer, start, len(rows), 0.0, 0)[0, len(prompt) :]
        tokens = change.tolist()
        retrained = Estimate("training again", sum(tokens), None, None, lm.words(answer), tokens)
    total, count, names = float(given.sum()), int(removed.sum()), tuple(without)
    return WhatIf(
        trace.answer, total, len(rows), names, count, share, estimates, calibrated, retrained
    )


def answer_rows(trace: Trace) -> list[int]:
    """Return the positions before the tokens of an answer."""
    return [row for row in trace.rows[trace.first :] if row + 1 < len(trace.ids)]


def removed_documents(lm: PrismLM, without: Sequence[str]) -> np.ndarray:
    """Return which documents of the lens are left out, bool [documents]."""
    lens = lm.lens_for(PART)
    cells, corpus, split = lens.cells, lens.corpus, lens.meta.split
    if lens.meta.trained_on is False or split == "heldout":
        raise InputError(
            f"{lm.path} was not trained on the documents of the lens {lens.name}: without them "
            "it is the same. Choose a lens of its training text with --lens."
        )
    removed, unread = np.zeros((2, len(cells.starts)), dtype=bool)
    if split == "all" and corpus is not None:  # which says what the model was not trained on
        unread = np.isin(corpus.split("all"), corpus.split("heldout"))
    for one in without:
        column, _, value = one.partition("=")
        if value and column in GROUP_COLUMNS:
            removed |= cells.matching(normalised({column: value}))
        else:
            check_document(lens, one, ", or such as source=NAME or license=NAME")
            removed[cells.document_number(one)] = True
    removed &= ~unread
    if not removed.any():
        raise InputError(
            f"{', '.join(without)} is held out: the model was not trained on it, so that without "
            "it nothing changes."
        )
    if (removed | unread).all():
        raise InputError(
            f"{', '.join(without)} is all {int(removed.sum()):,} documents of the lens "
            f"{lens.name} that the model was trained on: expected some that stay."
        )
    return removed


def read_ends(model: PreTrainedModel, ids: list[int], rows: list[int]) -> Ends:
    """Read the tokens after ``rows`` of a text."""
    with evaluating(model):
        output: Any = model(torch.tensor([ids], device=model.device), use_cache=False)
    logits = output.logits[0, rows].double().log_softmax(-1).cpu()
    tokens = torch.tensor(ids)[[row + 1 for row in rows], None]
    of_other, other = logits.scatter(1, tokens, -torch.inf).max(1)
    return logits.gather(1, tokens)[:, 0].numpy(), of_other.numpy(), other.numpy()


def parts(trace: Trace, method: Method) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens of the answer, documents of the lens, and what these brought those: [u] each.

    Sums over documents are δ / c.
    """
    lens, rows = trace.lm.lens_for(PART), answer_rows(trace)
    if method == "evidence":
        carriers = trace.carriers().select(range(len(rows)))
        prediction, place, value = carriers.prediction, carriers.place, carriers.weight
    else:
        split = trace.predictions[rows]
        query, prototype, _ = split.uses(split.evidence)
        targets = split.targets.numpy()[query]
        near = neighbours(lens.cells, query, prototype, targets, split.states)
        prediction, place = query[near.pair], near.position
        kernel = np.exp((near.cosine.astype(np.float64) - 1) / TEMPERATURE)
        value = near.sampling_weight * (1 - near.probability.astype(np.float64)) * kernel
    return prediction, lens.cells.document_of(place), value


def changes(given: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return ln p′ − ln p of tokens with log-probabilities ln p whose logits lose δ, float64."""
    return -delta - np.log1p(np.exp(given) * np.expm1(-delta))


def _estimate(trace: Trace, ends: Ends, method: Method, removed: np.ndarray) -> Estimate:
    given, of_other, other = ends
    fit, count = calibration()["estimates"][method], len(given)
    token, document, value = parts(trace, method)
    gone = removed[document]
    delta = fit["scale"] * np.bincount(token[gone], value[gone], minlength=count)
    change = changes(given, delta)
    mean = float(change.mean())
    low, high = (mean + one + each * abs(mean) for one, each in (fit["low"], fit["high"]))
    interval = count * min(low, mean), count * max(high, mean)
    # A sampled or given answer has tokens that were not the likeliest before, either.
    overtaken = (given - delta < of_other) & (given >= of_other)
    text = None
    if overtaken.any():
        first = int(overtaken.argmax())
        same = [trace.ids[row + 1] for row in answer_rows(trace)[:first]]
        text = trace.lm.words([*same, int(other[first])]) + "…"
    return Estimate(method, count * mean, *interval, text, change.tolist())
