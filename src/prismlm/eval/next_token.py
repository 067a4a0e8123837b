"""What a model says after a text: its next-token distribution, and how far apart two are.

Source: ProtoT, §5.2, which says neither the base of its logarithm nor over which tokens ranks are
correlated. Here divergences are in bits, and ranks over the most probable tokens of either.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.corpus.encode import around_text, encode_text
from prismlm.errors import InputError, check_finite
from prismlm.files import check_room
from prismlm.models.evaluating import evaluating
from prismlm.models.positions import learned_positions
from prismlm.models.seam import output_embedding
from prismlm.models.watch import Hook, watch
from prismlm.probes.reading import of_one_length
from prismlm.statistics import spearman

TOP, RANKED = 10, 50
"""Tokens of the overlap, and those of either distribution whose ranks are correlated."""
TOKENS_AT_ONCE = 1024
ROWS_AT_ONCE = 64
# A temperature between e⁻⁷ and e⁷ is looked for.
STEEPEST = 7.0


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return each text's tokens after what the tokenizer itself puts before a text.

    What it would put after one is left out: the next token of an end is not that of the text.
    """
    bare = around_text(tokenizer)[0]
    rows = [encode_text(tokenizer, text, end=False) for text in texts]
    return [row if len(row) > len(bare) else [] for row in rows]


def readable(model: PreTrainedModel, row: Sequence[int]) -> bool:
    """Say whether a text has tokens, and no more than the model has positions for."""
    bound = learned_positions(model)
    return bool(row) and (bound is None or len(row) <= bound)


@torch.no_grad()
def logits_after(model: PreTrainedModel, ids: Tensor) -> Float[Tensor, "B V"]:
    """Return the logits of the last position of each row of ``ids`` [B, T], float32."""

    def last(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args[0][..., -1:, :], *args[1:]), kwargs

    # The vocabulary is the larger part of a small model: only the last position meets it.
    with evaluating(model), watch([Hook(output_embedding(model), last)]):
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits
    found = logits[:, -1].float().cpu()
    check_finite(f"logits of {type(model).__name__}", found)
    return found


def kept_logits(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], advance: Callable[[int], None]
) -> Float[np.ndarray, "N V"]:
    """Return the logits after each text, in a temporary file that is gone with the array.

    Texts of one length are read together, so that no decoder sees padding. A row that is not
    :func:`readable` stays zero.
    """
    # With a soft-cap or padding of the vocabulary, the logits alone say how many there are.
    width = logits_after(model, torch.zeros(1, 1, dtype=torch.int64)).shape[1]
    size = 4 * width * len(rows)
    check_room("logits of the texts", Path(tempfile.gettempdir()), size)
    with tempfile.TemporaryFile() as file:
        kept = np.memmap(file, np.float32, "w+", shape=(len(rows), width))
    readables = [number for number, row in enumerate(rows) if readable(model, row)]
    for some in of_one_length([rows[number] for number in readables], TOKENS_AT_ONCE):
        numbers = [readables[place] for place in some]
        ids = torch.tensor([rows[number] for number in numbers])
        kept[numbers] = logits_after(model, ids).numpy()
        advance(len(numbers))
    return kept


def log_probabilities(
    logits: np.ndarray | Tensor, temperature: float = 1.0
) -> Float[Tensor, "N V"]:
    """Return log softmax(logits / temperature), in float64."""
    return (torch.as_tensor(np.asarray(logits)).double() / temperature).log_softmax(-1)


def entropies(log_p: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """Return −Σ_v p_v ln p_v of each row, in nats."""
    return torch.special.entr(log_p.exp()).sum(-1)


def jensen_shannon(log_p: Float[Tensor, "N V"], log_q: Float[Tensor, "N V"]) -> Tensor:
    """Return JS = H(½p + ½q) − ½H(p) − ½H(q) of each row in bits: 0, the same, to 1, disjoint."""
    p, q = log_p.exp(), log_q.exp()
    mixed = torch.special.entr((p + q) / 2).sum(-1)
    nats = mixed - (torch.special.entr(p).sum(-1) + torch.special.entr(q).sum(-1)) / 2
    return nats.clamp(min=0) / math.log(2)


def top_overlap(log_p: Tensor, log_q: Tensor, top: int = TOP) -> Tensor:
    """Return the share of the ``top`` most probable tokens of p that are such of q, row by row."""
    count = min(top, log_p.shape[-1])
    first, second = (x.topk(count).indices for x in (log_p, log_q))
    return (first[:, :, None] == second[:, None]).any(-1).double().mean(-1)


def rank_correlation(log_p: Tensor, log_q: Tensor, ranked: int = RANKED) -> Tensor:
    """Return Spearman's ρ of p and q, row by row, over the ``ranked`` most probable of either."""
    count = min(ranked, log_p.shape[-1])
    found = [
        spearman(p[tokens].numpy(), q[tokens].numpy()).rho
        for p, q in zip(log_p, log_q, strict=True)
        for tokens in [torch.cat([p.topk(count).indices, q.topk(count).indices]).unique()]
    ]
    return torch.tensor(found, dtype=torch.float64)


def same_top(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return 1 for each row whose most probable token is the same in both, else 0."""
    return (log_p.argmax(-1) == log_q.argmax(-1)).double()


def in_parts(
    figure: Callable[..., Tensor],
    logits: np.ndarray,
    rows: Sequence[np.ndarray],
    temperature: float = 1.0,
) -> np.ndarray:
    """Return a figure of log-distributions, one or two, for rows of kept logits."""
    ends = range(ROWS_AT_ONCE, len(rows[0]), ROWS_AT_ONCE)
    found = [
        figure(*(log_probabilities(logits[some], temperature) for some in part))
        for part in zip(*(np.split(side, ends) for side in rows), strict=True)
    ]
    return torch.cat(found).numpy()


def mean_entropy(logits: np.ndarray, rows: np.ndarray, temperature: float = 1.0) -> float:
    """Return the mean entropy in nats over rows of kept logits, at a temperature."""
    return float(in_parts(entropies, logits, [rows], temperature).mean())


def matching_temperature(logits: np.ndarray, rows: np.ndarray, target: float) -> float:
    """Return the temperature at which the mean entropy over rows of logits is ``target`` nats."""

    def too_much(log_temperature: float) -> float:
        return mean_entropy(logits, rows, math.exp(log_temperature)) - target

    if abs(too_much(0.0)) < 1e-9:
        return 1.0
    least, most = (too_much(bound) + target for bound in (-STEEPEST, STEEPEST))
    if not least < target < most:
        raise InputError(
            f"no temperature gives these predictions a mean entropy of {target:g} nats: expected "
            f"between {least:.3g} and {most:.3g}."
        )
    return math.exp(float(brentq(too_much, -STEEPEST, STEEPEST, xtol=1e-6)))  # pyright: ignore
