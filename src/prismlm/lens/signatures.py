"""The tokens that a prototype raises most compared with others: for lists, names, cards and clamps.

A prototype with cosine 1 adds its signature τ W p to the logits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from prismlm.corpus.pieces import token_alone
from prismlm.layers import PrototypeHead
from prismlm.models.sidecar import weight_of
from prismlm.ops.prototype_head.routing import inverse_norms

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.lens.opened_model import OpenedModel

TILE = 256
# Tokens with fewer occurrences in the corpus are not listed.
SEEN = 5
# Candidates for each token listed, since a word has variants with a space or a capital.
WAYS = 4
LISTED = 10
MAX_OF_GROUP = 128
MOST_WORDS = 3
LINE, BLANK = "↵", "␣"


class Signatures(NamedTuple):
    """The most distinctive tokens of every prototype, best first."""

    ids: Tensor  # int64 [K, count]
    tokens: list[list[str]]  # their texts
    values: np.ndarray  # their logits τ (W p)[v], float32 [K, count]
    names: list[str]  # made of the first words


def signatures_of(
    model: nn.Module, head: PrototypeHead, corpus: Corpus, seen: np.ndarray
) -> Signatures:
    """Return the signatures of a model's prototypes; ``seen`` are occurrences of each token."""
    weight, scale = weight_of(model).float(), float(head.scale.detach())
    return top_signatures(head.prototypes.detach().float(), weight, scale, corpus.tokenizer, seen)


def signature_ids(lm: OpenedModel, prototypes: Sequence[int]) -> list[list[int]]:
    """Return the tokens listed on the cards of some prototypes, in order.

    They are read from the lens; without one they are computed over the whole vocabulary.
    """
    weight, bank = weight_of(lm.model).float(), lm.head.prototypes.detach().float()
    if lm.lens is None:
        seen = np.full(len(weight), SEEN)
        return top_signatures(bank, weight, 1.0, lm.tokenizer, seen, subset=prototypes).ids.tolist()
    listed: list[list[str]] = lm.lens.prototypes["top_tokens"].take(prototypes).to_pylist()
    ids = _by_text(lm.tokenizer, len(weight))
    # Of several tokens with one text, the one with the largest logit.
    return [
        [max(ids[text], key=lambda token: float(weight[token] @ bank[i])) for text in texts]
        for i, texts in zip(prototypes, listed, strict=True)
    ]


def tokens_of_group(lm: OpenedModel, prototypes: Sequence[int]) -> list[int]:
    """Return the tokens that distinguish a group of prototypes from the others, best first.

        n_G(v) ln(n_G(v) K / n(v) |G|)

    with n cards listing v overall, and n_G in the group; only positive ones, at most 128 and half
    the width, since moving as many tokens as there are dimensions moves all others too. Without a
    lens, the tokens listed most often are returned.
    """
    scores = Counter(v for tokens in signature_ids(lm, prototypes) for v in tokens)
    if lm.lens is not None:
        cards = lm.lens.prototypes["top_tokens"]
        total = Counter(cards.combine_chunks().flatten().to_pylist())
        expected = len(prototypes) / len(cards)
        texts = {v: token_alone(lm.tokenizer, v) for v in scores}
        gains = {v: n * math.log(n / expected / total[texts[v]]) for v, n in scores.items()}
        scores = Counter({v: gain for v, gain in gains.items() if gain > 0}) or scores
    most = min(MAX_OF_GROUP, max(1, lm.head.width // 2))
    return [v for v, _ in scores.most_common(most)]


@lru_cache(maxsize=1)
def _by_text(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> dict[str, list[int]]:
    ids: dict[str, list[int]] = {}
    for token in range(vocabulary):
        ids.setdefault(token_alone(tokenizer, token), []).append(token)
    return ids


@torch.no_grad()
def top_signatures(
    prototypes: Float[Tensor, "K d"],
    weight: Float[Tensor, "V d"],
    scale: float,
    tokenizer: PreTrainedTokenizerBase,
    seen: Int64[np.ndarray, " V"],
    count: int = LISTED,
    subset: Sequence[int] | None = None,
) -> Signatures:
    """Return the tokens that prototypes raise more than other prototypes do.

        z_iv = w_v·(u_i − ū) / σ_v,   u = p / ‖p‖, ū and σ_v their mean and the standard
                                         deviation of w_v·u over the prototypes

    Raised tokens, (W p)[v] > 0, come first, by z: the largest (W p)[v] themselves are mostly of the
    same few tokens with long rows of W, common or hardly trained. ``seen`` has the occurrences of
    each token in the corpus; rare ones are left out unless too few remain, and so are variants of
    one word. ``subset`` are the prototypes, by default all.
    """
    count = min(count, len(weight))
    rare = torch.from_numpy(seen < SEEN).to(weight.device)
    if int((~rare).sum()) < count:
        rare = torch.zeros_like(rare)
    candidates = min(WAYS * count, int((~rare).sum()))
    text = cache(partial(token_alone, tokenizer))
    unit = prototypes * inverse_norms(prototypes)
    mean = unit.mean(0) if len(unit) > 1 else torch.zeros_like(unit[0])
    apart, common = unit - mean, weight @ mean
    spread = ((weight @ (apart.T @ apart / len(apart))) * weight).sum(1).clamp_min(0).sqrt()
    listed: list[dict[int, float]] = []
    rows = slice(None) if subset is None else list(subset)
    for tile, raw in zip(apart[rows].split(TILE), prototypes[rows].split(TILE), strict=True):
        distinct = tile @ weight.T
        lowered = distinct <= -common
        # No z-score of K values exceeds √(K − 1): this puts lowered tokens after raised ones.
        distinct.div_(spread.clamp_min(torch.finfo(spread.dtype).tiny))
        distinct.add_(lowered, alpha=-1 - len(unit))
        first = distinct.masked_fill_(rare, -torch.inf).topk(candidates, dim=1).indices
        logits = scale * (raw[:, None] @ weight[first].transpose(1, 2)).squeeze(1)
        for row in zip(first.tolist(), logits.tolist(), strict=True):
            raised = dict(zip(*row, strict=True))
            listed.append({t: raised[t] for t in _different(raised, text, count)})
    tokens = [[text(token) for token in row] for row in listed]
    return Signatures(
        torch.tensor([list(row) for row in listed]),
        tokens,
        np.array([list(row.values()) for row in listed], np.float32),
        [" · ".join(different_words(row)) for row in tokens],
    )


def _different(raised: dict[int, float], text: Callable[[int], str], count: int) -> list[int]:
    """Return the first tokens of different words, then others if these are too few.

    Of several variants of a word, the one with the largest logit stays.
    """
    words: dict[str, int] = {}
    for token in raised:
        word = text(token).strip().lower() or text(token)
        words[word] = max(words.get(word, token), token, key=raised.__getitem__)
    return list(dict.fromkeys([*words.values(), *raised]))[:count]


def different_words(tokens: Sequence[str]) -> list[str]:
    """Return the first three distinct words of a list as shown in a name."""
    words: dict[str, str] = {}
    for word in map(shown_word, tokens):
        words.setdefault(word.lower(), word)
    return list(words.values())[:MOST_WORDS]


def shown_word(word: str) -> str:
    """Return a word as shown in a name: signs in quotes, whitespace visible."""
    bare = word.strip()
    if not bare:
        return LINE if "\n" in word else BLANK
    return bare if any(character.isalnum() for character in bare) else f"“{bare}”"
