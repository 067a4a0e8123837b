"""What a prototype says on its own: its logit signature τ W p over the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

TILE = 256


class Signatures(NamedTuple):
    """The strongest tokens of every prototype.

    Attributes:
        tokens: decoded, [K][count], strongest first.
        values: τ (W p)[v] of those, float32 [K, count].
        names: a short name made of the tokens that set the prototype apart from the others.
    """

    tokens: list[list[str]]
    values: np.ndarray
    names: list[str]


@torch.no_grad()
def top_signatures(
    prototypes: Float[Tensor, "K d"],
    weight: Float[Tensor, "V d"],
    scale: float,
    tokenizer: PreTrainedTokenizerBase,
    count: int = 10,
) -> Signatures:
    """Return the ``count`` largest entries of τ W p for every prototype, a tile at a time.

    Names use W (p − mean p): tokens that every prototype raises say nothing of one of them.
    """
    count = min(count, weight.shape[0])
    mean = prototypes.mean(0)
    tokens: list[list[str]] = []
    names: list[str] = []
    values: list[np.ndarray] = []
    for tile in prototypes.split(TILE):
        top = (scale * (tile @ weight.T)).topk(count, dim=1)
        tokens += [_decode(tokenizer, row) for row in top.indices.tolist()]
        values.append(top.values.float().cpu().numpy())
        distinct = ((tile - mean) @ weight.T).topk(min(6, weight.shape[0]), dim=1)
        names += [_name(_decode(tokenizer, row)) for row in distinct.indices.tolist()]
    return Signatures(tokens, np.concatenate(values), names)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    return [str(tokenizer.decode([i], clean_up_tokenization_spaces=False)) for i in ids]


def _name(tokens: list[str]) -> str:
    words: list[str] = []
    for token in tokens:
        word = token.strip() or repr(token)[1:-1].replace(" ", "␣")
        if word.lower() not in (seen.lower() for seen in words):
            words.append(word)
    return " · ".join(words[:3])
