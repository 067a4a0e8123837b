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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm import fingerprints
from prismlm.corpus.encode import around_text, encode_text
from prismlm.errors import InputError, check_finite
from prismlm.eval.pairs import Pair
from prismlm.files import check_room
from prismlm.models.device import learned_positions
from prismlm.models.seam import output_embedding
from prismlm.models.watch import Hook, evaluating, watch
from prismlm.probes.results import Row
from prismlm.probes.texts import equal_length_batches
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import mean_intervals, spearman

TOP, RANKED = 10, 50
"""Tokens of the overlap, and of either distribution for the rank correlation."""
TOKENS_PER_BATCH, ROWS_PER_CHUNK = 1024, 64
# Temperatures are searched between e⁻⁷ and e⁷.
MAX_LOG_TEMPERATURE = 7.0


def encode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[list[int]]:
    """Return each text's tokens with the tokenizer's prefix, such as BOS, but without its suffix.

    A text without tokens, or with more than the model has positions, gives an empty list.
    """
    prefix, limit = len(around_text(tokenizer)[0]), learned_positions(model) or math.inf
    rows = [encode_text(tokenizer, text, end=False) for text in texts]
    return [row if prefix < len(row) <= limit else [] for row in rows]


@torch.no_grad()
def last_logits(model: PreTrainedModel, ids: Tensor) -> Float[Tensor, "B V"]:
    """Return the logits of the last position of each row of ``ids`` [B, T], float32."""

    def last(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args[0][..., -1:, :], *args[1:]), kwargs

    # Only the last position goes through the output embedding, the largest part of a small model.
    with evaluating(model), watch([Hook(output_embedding(model), last)]):
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits[:, -1].float().cpu()
    check_finite(f"logits of {type(model).__name__}", logits)
    return logits


def logits_on_disk(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], advance: Callable[[int], None]
) -> Float[np.ndarray, "N V"]:
    """Return the logits after each text, in a temporary file that is deleted with the array.

    Batches hold texts of one length, without padding. A row without tokens stays zero.
    """
    # The vocabulary may be padded, so its size is that of the logits.
    width = last_logits(model, torch.zeros(1, 1, dtype=torch.int64)).shape[1]
    check_room("logits of the texts", Path(tempfile.gettempdir()), 4 * width * len(rows))
    with tempfile.TemporaryFile() as file:
        logits = np.memmap(file, np.float32, "w+", shape=(len(rows), width))
    numbers = [number for number, row in enumerate(rows) if row]
    for indices in equal_length_batches([rows[n] for n in numbers], TOKENS_PER_BATCH):
        batch = [numbers[index] for index in indices]
        logits[batch] = last_logits(model, torch.tensor([rows[n] for n in batch])).numpy()
        advance(len(batch))
    return logits


def log_probabilities(
    logits: np.ndarray | Tensor, temperature: float = 1.0
) -> Float[Tensor, "N V"]:
    """Return log softmax(logits / temperature), in float64."""
    return (torch.as_tensor(np.asarray(logits)).double() / temperature).log_softmax(-1)


def row_entropy(log_p: Float[Tensor, "N V"]) -> Tensor:
    """Return −Σ_v p_v ln p_v of each row in nats."""
    return torch.special.entr(log_p.exp()).sum(-1)


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
        spearman(p[tokens].numpy(), q[tokens].numpy()).rho
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
    return float(in_chunks(row_entropy, logits, rows, temperature=temperature).mean())


def matching_temperature(logits: np.ndarray, rows: np.ndarray, target: float) -> float:
    """Return the temperature at which the mean entropy over rows of logits is ``target`` nats."""

    def excess(log_temperature: float) -> float:
        return mean_entropy(logits, rows, math.exp(log_temperature)) - target

    if abs(excess(0.0)) < 1e-9:
        return 1.0
    low, high = (excess(bound) + target for bound in (-MAX_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE))
    if not low < target < high:
        raise InputError(
            f"no temperature gives these predictions a mean entropy of {target:g} nats: expected "
            f"between {low:.3g} and {high:.3g}."
        )
    root: Any = brentq(excess, -MAX_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE, xtol=1e-6)
    return math.exp(root)


FIGURES = {
    "overlap": top_overlap,
    "spearman": rank_correlation,
    "same_top": same_top,
}
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
    entropy: float | None = None,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Row:
    """Compare what models predict after each text with what they predict after its variant.

    Pairs are ``left_out`` if a model cannot read one of the texts. ``target`` is the mean entropy
    in nats at which JS is matched, by default the lowest of the models'; each model has its own
    mean ``entropy`` over the originals, and the ``temperature`` at which it is the target. JS is
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
    target = min(entropies.values()) if entropy is None else float(entropy)
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
    return {
        "target": target,
        "left_out": int((~usable).sum()),
        "seed": seed,
        "models": rows_of_models,
        "slices": [
            _slice(name, {model: x[slices == name] for model, x in values.items()}, seed)
            for name in dict.fromkeys(slices.tolist())
        ],
        "comparable": len(set(vocabularies.values())) == 1,
        "unit": "bits",
    }


def _read(
    models: Iterable[OpenedModel], texts: list[str], rows: np.ndarray, progress: Reporter
) -> tuple[dict[str, np.ndarray], dict[str, str], np.ndarray]:
    """Return the logits and vocabulary of each model, and a mask of pairs that all can read."""
    logits: dict[str, np.ndarray] = {}
    vocabularies: dict[str, str] = {}
    usable = np.ones(len(rows), dtype=bool)
    for name, model, tokenizer in models:
        if name in logits:
            raise InputError(f"two models are called {name}: give each a different name.")
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
