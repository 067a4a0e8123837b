"""How much predictions change with a text, under perturbations and under changes of meaning.

    JS(p(·|x), p(·|x′)),   overlap of the top 10,   Spearman's ρ,   the same top token

A model with flatter predictions has a smaller JS on any text, so JS is also measured with each
model at the temperature that gives all models the same mean entropy over the originals.

Source: ProtoT, §5.2, Tables 3 and 5, which leaves the base of the logarithm and the tokens of the
rank correlation open. Here JS is in bits, and ranks are over the most probable tokens of either.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm import fingerprints
from prismlm.corpus.encode import around_text, encode_text
from prismlm.corpus.layout import strings
from prismlm.errors import FormatError, InputError, shown
from prismlm.eval.runs import read_columns, sample_rows
from prismlm.interventions.attention import clamp_attention, record_attention
from prismlm.interventions.channels import OWN, ClampGates, intervene, record_gates
from prismlm.models.attention import attention_layers
from prismlm.models.decoders.protot import has_mixers
from prismlm.models.device import learned_positions
from prismlm.models.seam import last_logits
from prismlm.probes.results import Row
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap, mean_intervals, spearman

# Changes that keep the meaning, and changes of it.
SLICES = (
    "synonym", "typo", "spelling", "morphology", "contraction", "punctuation", "abbreviation",
)  # fmt: skip
INTERVENTIONS = ("gender", "negation", "number")
TEXTS = strings("id", "slice", "original", "perturbed", "source")
COLUMNS = pa.schema([*TEXTS, ("similarity", pa.float32())])
WAY_OUT = "Write the pairs again with `prismlm eval pairs`."


class Pair(NamedTuple):
    """A text and its changed form."""

    id: str
    slice: str
    original: str
    perturbed: str


def read_pairs(path: Path, limit: int | None = None, seed: int = 0) -> list[Pair]:
    """Return the pairs of a Parquet file, or ``limit`` of each slice drawn by ``seed``.

    They come slice by slice, in the order of ``SLICES`` and ``INTERVENTIONS``.
    """
    table = read_columns(path, Pair._fields, WAY_OUT)
    rows = [Pair(**row) for row in table.to_pylist()]
    by_slice: dict[str, list[Pair]] = {name: [] for name in (*SLICES, *INTERVENTIONS)}
    for number, row in enumerate(rows):
        if not all(isinstance(value, str) for value in row) or row.slice not in by_slice:
            raise FormatError(
                f"row {number} of {path} is {shown(tuple(row))}: expected texts, and one of the "
                f"slices {', '.join(by_slice)}. {WAY_OUT}"
            )
        by_slice[row.slice].append(row)
    return [
        members[number]
        for members in by_slice.values()
        for number in sample_rows(len(members), limit, seed)
    ]


TOP, RANKED = 10, 50
"""Tokens of the overlap, and of either distribution for the rank correlation."""
TOKENS_PER_BATCH, ROWS_PER_CHUNK = 1024, 64
# Temperatures are searched from e⁻⁷.
MIN_LOG_TEMPERATURE = -7.0


def encode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[list[int]]:
    """Return each text's tokens with the tokenizer's prefix, such as BOS, but without its suffix.

    A text without tokens, or with more than the model has positions, gives an empty list.
    """
    prefix, limit = len(around_text(tokenizer)[0]), learned_positions(model) or math.inf
    rows = [encode_text(tokenizer, text, end=False) for text in texts]
    return [row if prefix < len(row) <= limit else [] for row in rows]


def logits_on_disk(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], advance: Callable[[int], None]
) -> Float[np.ndarray, "N V"]:
    """Return the logits after each text, in a temporary file that is deleted with the array.

    A row without tokens stays zero.
    """
    # The vocabulary may be padded, so its size is that of the logits.
    width = last_logits(model, [[0]]).shape[1]
    with tempfile.TemporaryFile() as file:
        logits = np.memmap(file, np.float32, "w+", shape=(len(rows), width))
    order = sorted((n for n, row in enumerate(rows) if row), key=lambda n: -len(rows[n]))
    while order:
        size = max(1, TOKENS_PER_BATCH // len(rows[order[0]]))
        batch, order = order[:size], order[size:]
        logits[batch] = last_logits(model, [rows[n] for n in batch]).numpy()
        advance(len(batch))
    return logits


def log_probabilities(
    logits: np.ndarray | Tensor, temperature: float = 1.0
) -> Float[Tensor, "N V"]:
    """Return log softmax(logits / temperature), in float64."""
    return (torch.as_tensor(np.asarray(logits)).double() / temperature).log_softmax(-1)


def jensen_shannon(log_p: Float[Tensor, "N V"], log_q: Float[Tensor, "N V"]) -> Tensor:
    """Return JS = H(½p + ½q) − ½H(p) − ½H(q) of each row in bits: 0, the same, to 1, disjoint."""
    p, q = log_p.exp(), log_q.exp()
    of_mean, of_p, of_q = (torch.special.entr(x).sum(-1) for x in ((p + q) / 2, p, q))
    return (of_mean - (of_p + of_q) / 2).clamp(min=0) / math.log(2)


def top_overlap(log_p: Tensor, log_q: Tensor, top: int = TOP) -> Tensor:
    """Return the share of the ``top`` tokens of p that are among those of q, row by row."""
    count = min(top, log_p.shape[-1])
    first, second = (x.topk(count).indices for x in (log_p, log_q))
    return (first[:, :, None] == second[:, None]).any(-1).double().mean(-1)


def rank_correlation(log_p: Tensor, log_q: Tensor, ranked: int = RANKED) -> Tensor:
    """Return Spearman's ρ of p and q, row by row, over the ``ranked`` most probable of either."""
    count = min(ranked, log_p.shape[-1])
    rho = [
        spearman(p[tokens].numpy(), q[tokens].numpy())[0]
        for p, q in zip(log_p, log_q, strict=True)
        for tokens in [torch.cat([p.topk(count).indices, q.topk(count).indices]).unique()]
    ]
    return torch.tensor(rho, dtype=torch.float64)


def same_top(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return 1 for each row whose most probable token is the same in both, else 0."""
    return (log_p.argmax(-1) == log_q.argmax(-1)).double()


def in_chunks(
    figure: Callable[..., Tensor], logits: np.ndarray, *rows: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Return a figure of one or two log-distributions, computed for rows of logits."""
    parts = [
        figure(*(log_probabilities(logits[r[i : i + ROWS_PER_CHUNK]], temperature) for r in rows))
        for i in range(0, len(rows[0]), ROWS_PER_CHUNK)
    ]
    return torch.cat(parts).numpy()


def mean_entropy(logits: np.ndarray, rows: np.ndarray, temperature: float = 1.0) -> float:
    """Return the mean entropy in nats over rows of logits."""

    def entropy(log_p: Tensor) -> Tensor:
        return torch.special.entr(log_p.exp()).sum(-1)

    return float(in_chunks(entropy, logits, rows, temperature=temperature).mean())


def matching_temperature(logits: np.ndarray, rows: np.ndarray, target: float) -> float:
    """Return the temperature, at most 1, at which the mean entropy of rows is ``target`` nats."""

    def excess(log_temperature: float) -> float:
        return mean_entropy(logits, rows, math.exp(log_temperature)) - target

    if excess(0.0) < 1e-9:
        return 1.0
    root: Any = brentq(excess, MIN_LOG_TEMPERATURE, 0.0, xtol=1e-6)
    return math.exp(root)


FIGURES = {"overlap": top_overlap, "spearman": rank_correlation, "same_top": same_top}
MEASURES = ("js", "js_matched", *FIGURES)


class OpenedModel(NamedTuple):
    """A model and its name in the results."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def index_texts(pairs: Sequence[Pair]) -> dict[str, int]:
    """Return the row of each different text, originals first."""
    texts = [p.original for p in pairs] + [p.perturbed for p in pairs]
    return {text: row for row, text in enumerate(dict.fromkeys(texts))}


def measure_robustness(
    models: Iterable[OpenedModel],
    pairs: Sequence[Pair],
    *,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Row:
    """Compare what models predict after each text with what they predict after its variant.

    Pairs are ``left_out`` if a model cannot read one of the texts. ``target`` is the mean entropy
    in nats at which JS is matched, the lowest of the models'; each model has its own mean
    ``entropy`` over the originals, and the ``temperature`` at which it is the target. JS is
    ``comparable`` over one vocabulary only. Each slice has each of :data:`MEASURES` for each
    model, and paired ``differences`` ``of`` each two models.
    """
    texts = index_texts(pairs)
    rows = np.array([(texts[pair.original], texts[pair.perturbed]) for pair in pairs])
    logits, vocabularies, usable = _read(models, list(texts), rows, progress)
    if not logits or not usable.any():
        raise InputError("nothing to compare: expected a model, and a pair that all models read.")
    before, after = rows[usable].T
    entropies = {name: mean_entropy(x, before) for name, x in logits.items()}
    target = min(entropies.values())
    rows_of_models: list[Row] = []
    values: dict[str, np.ndarray] = {}
    for name, x in logits.items():
        temperature = matching_temperature(x, before, target)
        row = {"name": name, "entropy": entropies[name], "temperature": temperature}
        rows_of_models.append(row | {"vocabulary": vocabularies[name]})
        columns = [
            in_chunks(jensen_shannon, x, before, after, temperature=t) for t in (1.0, temperature)
        ]
        columns += [in_chunks(f, x, before, after) for f in FIGURES.values()]
        values[name] = np.stack(columns, 1)
    slices = np.array([pair.slice for pair in pairs])[usable]
    figures = [
        _slice(name, {model: x[slices == name] for model, x in values.items()}, seed)
        for name in dict.fromkeys(slices.tolist())
    ]
    facts = {"target": target, "left_out": int((~usable).sum()), "seed": seed}
    facts["comparable"] = len(set(vocabularies.values())) == 1
    return facts | {"models": rows_of_models, "slices": figures}


def _read(
    models: Iterable[OpenedModel], texts: list[str], rows: np.ndarray, progress: Reporter
) -> tuple[dict[str, np.ndarray], dict[str, str], np.ndarray]:
    """Return the logits and vocabulary of each model, and a mask of pairs that all can read."""
    logits: dict[str, np.ndarray] = {}
    vocabularies: dict[str, str] = {}
    usable = np.ones(len(rows), dtype=bool)
    for name, model, tokenizer in models:
        tokens = encode(model, tokenizer, texts)
        usable &= np.array([bool(row) for row in tokens])[rows].all(1)
        with progress.task(name, sum(map(bool, tokens)), "texts") as task:
            logits[name] = logits_on_disk(model, tokens, task.advance)
        vocabularies[name] = fingerprints.of_json(sorted(tokenizer.get_vocab().items()))
    return logits, vocabularies, usable


def _slice(name: str, values: dict[str, np.ndarray], seed: int) -> Row:
    """Return the mean figures of each model, and differences of each two, with intervals."""
    couples = list(itertools.combinations(values, 2))
    differences = [values[first] - values[second] for first, second in couples]
    columns = np.concatenate([*values.values(), *differences], 1)
    intervals = iter(mean_intervals(columns, seed=seed))
    return {
        "name": name,
        "pairs": len(columns),
        "models": {model: {key: next(intervals) for key in MEASURES} for model in values},
        "differences": [
            {"of": list(couple)} | {key: next(intervals) for key in MEASURES} for couple in couples
        ],
    }


FLOOR = 1e-4
"""Minimum JS_base in bits of a pair with a PMR."""
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


def routing_of(model: PreTrainedModel) -> tuple[str, Clamp]:
    """Return the kind of routing, channels if there are any, otherwise attention, and its clamp."""
    if has_mixers(model):
        return "channels", lambda ids, alignment: intervene(
            model, ClampGates(record_gates(model, torch.tensor(ids)), alignment)
        )
    attention_layers(model)  # refuses models without
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
                    after.append(last_logits(model, [changed])[0].numpy())
            before = log_probabilities(logits[first][None])
            js = jensen_shannon(before, log_probabilities(np.stack(after)))
            results.append(Divergences(pair.slice, *[*js.tolist(), math.nan][:3]))
    return {
        "name": name,
        "routing": kind,
        "seed": seed,
        "slices": tuple(
            slice_mediation(part, [r for r in results if r.slice == part], unaligned, seed)
            for part in dict.fromkeys(pair.slice for pair in pairs)
        ),
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

    ``clamped`` is with the original's routing, ``control`` with a random text's: the ``mean`` PMR;
    ``pooled`` 1 − Σ JS_clamped / Σ JS_base, which no pair with a small JS_base dominates; mean
    JS_base, ``base``, and JS_clamped, ``js``. ``gain`` is the mean of JS_control − JS_clamped over
    the same pairs. None without pairs.
    """
    usable = [pair for pair in results if pair.base >= FLOOR]
    row: Row = {
        "name": name,
        "pairs": len(usable),
        "unaligned": unaligned.count(name),
        "below_floor": len(results) - len(usable),
    } | dict.fromkeys(("clamped", "control", "gain"))
    if usable:
        base, js, control = np.array([pair[1:] for pair in usable]).T
        row["clamped"] = _mediation(base, js, seed)
        if (with_control := ~np.isnan(control)).any():
            row["control"] = _mediation(base[with_control], control[with_control], seed)
            row["gain"] = bootstrap((control - js)[with_control], seed=seed)
    return row


def _mediation(base: np.ndarray, clamped: np.ndarray, seed: int) -> Row:
    columns = np.stack([(base - clamped) / base, base, clamped], 1)
    means = zip(("mean", "base", "js"), mean_intervals(columns, seed=seed), strict=True)
    pooled = bootstrap(base - clamped, base, seed=seed)
    return {"pairs": len(base), "pooled": pooled} | dict(means)
