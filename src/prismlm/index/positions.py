"""What an index notes of a position: cell, its token and the next, how likely that was, state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from prismlm.index.cells import record_type as kept_record_type
from prismlm.index.codes import Int8Codes
from prismlm.models.seam import LogitMap, output_embedding
from prismlm.ops.prototype_head.fast import has_fast_product, largest, product
from prismlm.ops.prototype_head.routing import inverse_norms

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.corpus.windows import WindowBatch

# How many logits are formed at once: 2 MB, which stay in a processor's cache.
LOGITS_AT_ONCE = 2**19
# Fewer rows would fetch a large vocabulary's weights more often than they are worth.
ROWS_AT_LEAST = 192
# Logits of a state that are computed again where they were formed in bfloat16.
LARGEST = 8


def drawn(positions: np.ndarray, share: float) -> np.ndarray:
    """Return which global positions a share keeps, the same in every run: bool [N]."""
    if share == 1:
        return np.ones(len(positions), dtype=bool)
    return hashed(positions) < np.uint64(int(share * 2**63) * 2)


def hashed(numbers: np.ndarray) -> np.ndarray:
    """Return a well-mixed hash of integers (the finaliser of SplitMix64): uint64."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def record_type(width: int) -> np.dtype:
    """Return the record of a position while the index is made.

    ``cell`` is the nearest prototype, ``token`` the next token, ``position`` a global offset,
    ``read`` the token there, ``probability`` what the model gave the next one, and
    scale · code / 127 the unit hidden state. Records are sorted by the first three.
    """
    return np.dtype([("cell", "<i4"), ("token", "<i4"), *kept_record_type(Int8Codes(width)).descr])


def quantise(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Code unit states in int8, each with a scale of its own: z ≈ scale · code / 127.

    Args:
        states: float32 [N, d].

    Returns:
        scales float16 [N], the largest magnitude of each row, and codes int8 [N, d].
    """
    scales = np.abs(states).max(1).astype(np.float16)
    factor = np.divide(127, scales, out=np.zeros(len(scales), np.float32), where=scales > 0)
    codes = np.rint(states * factor[:, None]).clip(-127, 127).astype(np.int8)
    return scales, codes


def next_tokens(batch: WindowBatch, corpus: Corpus) -> Tensor:
    """Return the token that follows each position of its document, int64 [B, T].

    What follows the last token of a window is read from the corpus where the window owns that
    token and does not end its document; elsewhere it is the padding's, and means nothing.
    """
    following = torch.roll(batch.input_ids, -1, 1)
    lengths = (batch.positions >= 0).sum(1)
    for row, length in enumerate(lengths.tolist()):
        last = length - 1
        ends = last < 0 or int(batch.input_ids[row, last]) == corpus.eos_token_id
        if not ends and bool(batch.owned[row, last]):
            start = int(batch.positions[row, last]) + 1
            following[row, last] = int(corpus.read_tokens(start, 1)[0])
    return following


def position_records(
    share: float,
    model: PreTrainedModel,
    z: Tensor,
    cell: Tensor,
    tokens: tuple[Tensor, Tensor],
    positions: Tensor,
    low: Tensor | None = None,
) -> np.ndarray:
    """Return the records of the positions that are kept.

    Args:
        share: of positions that are kept.
        model: gives the probability of each next token.
        z: hidden states, [N, d].
        cell: the nearest prototype of each, int64 [N].
        tokens: those at the positions and those that come next, int64 [N].
        positions: global, int64 [N].
        low: the model's :func:`screening_weight`.
    """
    chosen = torch.from_numpy(drawn(positions.numpy(), share))
    on_device = chosen.to(z.device)
    z, read, following = z[on_device], *(of[chosen] for of in tokens)
    unit = z.float() * inverse_norms(z.float())
    records = np.empty(len(z), record_type(z.shape[1]))
    records["cell"] = cell[on_device].cpu().numpy()
    records["token"], records["read"] = following.numpy(), read.numpy()
    records["position"] = positions[chosen].numpy()
    likely = probabilities(model, z, following.to(z.device), low)
    records["probability"] = likely.cpu().numpy()
    records["scale"], records["code"] = quantise(unit.cpu().numpy())
    return records


def screening_weight(model: PreTrainedModel) -> Tensor | None:
    """Return the output embedding in bfloat16, where a product with it is the faster one."""
    weight = output_embedding(model).weight
    assert isinstance(weight, Tensor)
    faster = weight.device.type == "cpu" and weight.dtype == torch.float32 and has_fast_product()
    return weight.detach().bfloat16() if faster else None


def probabilities(
    model: PreTrainedModel, z: Tensor, tokens: Tensor, low: Tensor | None = None
) -> Tensor:
    """Return the probability that a model gives one token after each state, float32 [N].

    As precise as the model's logits. In an index they only pick places that are then read again:
    there :func:`_screened_logits` do, with ``low``, the :func:`screening_weight`.
    """
    embedding, logit_map = output_embedding(model), LogitMap.of(model)
    weight, bias = embedding.weight, getattr(embedding, "bias", None)
    assert isinstance(weight, Tensor)
    found = torch.empty(len(z), device=z.device)
    rows = max(ROWS_AT_LEAST, LOGITS_AT_ONCE // len(weight))
    for first in range(0, len(z), rows):
        part = slice(first, first + rows)
        # States that were kept on disk come in float32, whatever the model computes in.
        states, wanted = z[part].to(weight.dtype), tokens[part, None]
        if low is None:
            logits = functional.linear(states, weight, bias).float()
        else:
            logits = _screened_logits(states, weight, low, bias, wanted)
        found[part] = logit_map(logits).softmax(-1).gather(1, wanted)[:, 0]
    return found


def _screened_logits(
    z: Tensor, weight: Tensor, low: Tensor, bias: Tensor | None, wanted: Tensor
) -> Tensor:
    """Return logits in bfloat16, the largest and the wanted ones in float32.

    More than twice as fast; the rounding of the others, up to 2⁻⁸ of a logit, is averaged over them
    in the sum that normalises the probability.
    """
    logits = product(z.bfloat16(), low).float()
    if bias is not None:
        logits += bias
    some = min(LARGEST, logits.shape[1])
    again = torch.cat([largest(logits, some)[1], wanted], dim=1)
    rows = weight.index_select(0, again.flatten()).view(*again.shape, -1)
    exact = (z[:, None] @ rows.transpose(1, 2)).squeeze(1)
    return logits.scatter_(1, again, exact if bias is None else exact + bias[again])
