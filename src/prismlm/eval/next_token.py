"""Next-token distributions after a text, and divergences of two.

Source: ProtoT, §5.2, which leaves the base of the logarithm and the tokens of the rank correlation
open. Here divergences are in bits, and ranks over the most probable tokens of either.
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
from prismlm.models.device import learned_positions
from prismlm.models.seam import output_embedding
from prismlm.models.watch import Hook, evaluating, watch
from prismlm.probes.texts import equal_length_batches
from prismlm.statistics import spearman

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


def entropy(log_p: Float[Tensor, "N V"]) -> Tensor:
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
    return float(in_chunks(entropy, logits, rows, temperature=temperature).mean())


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
