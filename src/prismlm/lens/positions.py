"""What an index notes of a position: cell, its token and the next, how likely that was, state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from prismlm.lens.cells import record_type as kept_record_type
from prismlm.lens.codes import Int8Codes
from prismlm.models.seam import LogitMap, output_embedding
from prismlm.ops.prototype_head.routing import inverse_norms

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.corpus.windows import WindowBatch

# How many logits are formed at once: 2 MB, which stay in a processor's cache.
LOGITS_AT_ONCE = 2**19
# Fewer rows would fetch a large vocabulary's weights more often than they are worth.
ROWS_AT_LEAST = 192


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
    """Code unit states [N, d] in int8, each with a scale of its own: z ≈ scale · code / 127.

    Scales are float16 [N], the largest magnitude of each row; codes int8 [N, d].
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
    model: PreTrainedModel,
    z: Tensor,
    cell: Tensor,
    tokens: tuple[Tensor, Tensor],
    positions: Tensor,
    *,
    share: float,
    bf16: bool,
) -> np.ndarray:
    """Return the records of the share of N positions that is kept.

    They have states z [N, d], nearest prototypes ``cell``, and the ``tokens`` there and next.
    """
    chosen = torch.from_numpy(drawn(positions.numpy(), share))
    on_device = chosen.to(z.device)
    z, read, following = z[on_device], *(of[chosen] for of in tokens)
    unit = z.float() * inverse_norms(z.float())
    records = np.empty(len(z), record_type(z.shape[1]))
    records["cell"] = cell[on_device].cpu().numpy()
    records["token"], records["read"] = following.numpy(), read.numpy()
    records["position"] = positions[chosen].numpy()
    likely = probabilities(model, z, following.to(z.device), bf16=bf16)
    records["probability"] = likely.cpu().numpy()
    records["scale"], records["code"] = quantise(unit.cpu().numpy())
    return records


def probabilities(
    model: PreTrainedModel, z: Tensor, tokens: Tensor, *, bf16: bool = False
) -> Tensor:
    """Return the probability that a model gives one token after each state, float32 [N].

    In bfloat16 it is off by some hundredths of itself: good enough to pick places that are then
    read again.
    """
    embedding, logit_map = output_embedding(model), LogitMap.of(model)
    weight, bias = embedding.weight, getattr(embedding, "bias", None)
    assert isinstance(weight, Tensor)
    if bf16:
        weight, bias = weight.bfloat16(), None if bias is None else bias.bfloat16()
    found = torch.empty(len(z), device=z.device)
    rows = max(ROWS_AT_LEAST, LOGITS_AT_ONCE // len(weight))
    for first in range(0, len(z), rows):
        part = slice(first, first + rows)
        # States that were kept on disk come in float32, whatever the model computes in.
        logits = functional.linear(z[part].to(weight.dtype), weight, bias).float()
        found[part] = logit_map(logits).softmax(-1).gather(1, tokens[part, None])[:, 0]
    return found
