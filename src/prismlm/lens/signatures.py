"""Which tokens a prototype stands for: the one ranking of lists, names, cards and clamps.

A prototype adds its signature τ W p to the logits where its cosine is 1. Its tokens are those that
this raises more than the signatures of the other prototypes do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
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
# The least count in a corpus of the tokens listed; rarer ones are hardly ever read.
SEEN = 5
TOKENS_AT_ONCE = 2**20
# Tokens looked at for each one wanted: a word may be there with a space, a capital.
WAYS = 4
LISTED = 10
# Tokens that stand for a group of prototypes.
MAX_OF_GROUP = 128
MOST_WORDS = 3
LINE, BLANK = "↵", "␣"


class Signatures(NamedTuple):
    """The tokens that distinguish every prototype from the others.

    Attributes:
        ids: of the tokens, the most telling first, int64 [K, count].
        tokens: the same decoded, [K][count].
        values: τ (W p)[v] of those, float32 [K, count].
        names: a short name made of the first ones.
    """

    ids: Tensor
    tokens: list[list[str]]
    values: np.ndarray
    names: list[str]


def signatures_of(model: nn.Module, head: PrototypeHead, corpus: Corpus) -> Signatures:
    """Return the tokens that tell the prototypes of a model's head, of those a corpus has."""
    weight = weight_of(model).detach().float()
    return top_signatures(
        head.prototypes.detach().float(),
        weight,
        float(head.scale.detach()),
        corpus.tokenizer,
        tokens_seen(corpus, len(weight)),
    )


def signature_ids(lm: OpenedModel, prototypes: Sequence[int]) -> list[list[int]]:
    """Return the tokens that the cards of some prototypes list, the first ones first.

    They are read from the lens; without one they are of the whole vocabulary.
    """
    weight, bank = weight_of(lm.model).detach().float(), lm.head.prototypes.detach().float()
    if lm.lens is None:
        seen = np.full(len(weight), SEEN)
        return top_signatures(bank, weight, 1.0, lm.tokenizer, seen, chosen=prototypes).ids.tolist()
    listed: list[list[str]] = lm.lens.prototypes["top_tokens"].take(prototypes).to_pylist()
    ids = _by_text(lm.tokenizer, len(weight))
    # Of several tokens with one text, the one with the largest logit, as where they were listed.
    return [
        [max(ids[text], key=lambda token: float(weight[token] @ bank[i])) for text in texts]
        for i, texts in zip(prototypes, listed, strict=True)
    ]


def tokens_of_group(lm: OpenedModel, prototypes: Sequence[int]) -> list[int]:
    """Return the tokens that tell a group of prototypes from the others, the most telling first.

        n_G(v) ln(n_G(v) K / n(v) |G|)

    with n the number of cards that list v, of all and of the group; of those that the group's cards
    list more often than all do at most 128, and half the width: what moves as many tokens as there
    are dimensions moves all others too. Without a lens there are no other cards, and those listed
    most are returned.
    """
    ids = [one for own in signature_ids(lm, prototypes) for one in own]
    own = Counter(ids)
    if lm.lens is not None:
        cards = lm.lens.prototypes["top_tokens"]
        everywhere = Counter(cards.combine_chunks().flatten().to_pylist())
        expected = len(prototypes) / len(cards)
        texts = {v: token_alone(lm.tokenizer, v) for v in own}
        gains = {v: n * math.log(n / expected / everywhere[texts[v]]) for v, n in own.items()}
        own = Counter({v: gain for v, gain in gains.items() if gain > 0}) or own
    most = min(MAX_OF_GROUP, max(1, lm.head.width // 2))
    return [v for v, _ in own.most_common(most)]


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
    chosen: Sequence[int] | None = None,
) -> Signatures:
    """Return the tokens that prototypes raise more than the others do, a tile at a time.

        z_iv = w_v·(u_i − ū) / σ_v,   u = p / ‖p‖, ū and σ_v their mean and the standard
                                         deviation of w_v·u over the prototypes

    Those that they raise come first, (W p)[v] > 0, by z. The largest (W p)[v] themselves are of few
    tokens with long rows of W, again and again: common ones, and beginnings of words that are
    hardly ever read and that W was hardly trained for. ``seen`` is how often the corpus has each
    token; those it has less than ``SEEN`` times are left out, unless too few remain, and of those
    that write one word in several ways one stays.
    ``chosen`` are the prototypes to tell, all where it is None.
    """
    count = min(count, len(weight))
    rare = torch.from_numpy(seen < SEEN).to(weight.device)
    if int((~rare).sum()) < count:
        rare = torch.zeros_like(rare)
    wide = min(WAYS * count, int((~rare).sum()))
    texts: dict[int, str] = {}
    unit = prototypes * inverse_norms(prototypes)
    mean = unit.mean(0) if len(unit) > 1 else torch.zeros_like(unit[0])
    apart, common = unit - mean, weight @ mean
    spread = ((weight @ (apart.T @ apart / len(apart))) * weight).sum(1).clamp_min(0).sqrt()
    kept: list[list[tuple[int, float]]] = []
    rows = slice(None) if chosen is None else list(chosen)
    for tile, raw in zip(apart[rows].split(TILE), prototypes[rows].split(TILE), strict=True):
        distinct = tile @ weight.T
        lowered = distinct <= -common
        # No z-score of K values is above √(K − 1): what is not raised comes after what is.
        distinct.div_(spread.clamp_min(torch.finfo(spread.dtype).tiny))
        distinct.add_(lowered, alpha=-1 - len(unit))
        first = distinct.masked_fill_(rare, -torch.inf).topk(wide, dim=1).indices
        logits = scale * (raw[:, None] @ weight[first].transpose(1, 2)).squeeze(1)
        for token in set(first.flatten().tolist()) - texts.keys():
            texts[token] = token_alone(tokenizer, token)
        rows_of_tile = zip(first.tolist(), logits.tolist(), strict=True)
        kept += [_different(list(zip(*row, strict=True)), texts, count) for row in rows_of_tile]
    tokens = [[texts[token] for token, _ in row] for row in kept]
    return Signatures(
        torch.tensor([[token for token, _ in row] for row in kept]),
        tokens,
        np.array([[value for _, value in row] for row in kept], np.float32),
        [" · ".join(different_words(row)) for row in tokens],
    )


def _different(
    pairs: list[tuple[int, float]], texts: dict[int, str], count: int
) -> list[tuple[int, float]]:
    """Return the first tokens that write different words, and more where these are too few.

    Of several that write one word it is the one with the largest logit.
    """
    words: dict[str, tuple[int, float]] = {}
    for token, value in pairs:
        word = texts[token].strip().lower() or texts[token]
        words[word] = max(words.get(word, (token, value)), (token, value), key=lambda pair: pair[1])
    kept = list(words.values())
    return [*kept, *(pair for pair in pairs if pair not in kept)][:count]


def tokens_seen(corpus: Corpus, vocabulary: int) -> Int64[np.ndarray, " V"]:
    """Return how often a corpus has each token."""
    found = np.zeros(vocabulary, np.int64)
    for start in range(0, corpus.num_tokens, TOKENS_AT_ONCE):
        part = corpus.tokens(start, min(TOKENS_AT_ONCE, corpus.num_tokens - start))
        found += np.bincount(part, minlength=vocabulary)
    return found


def different_words(tokens: Sequence[str]) -> list[str]:
    """Return the first three words of a list as a name shows them, each once."""
    words: dict[str, str] = {}
    for word in map(shown_word, tokens):
        words.setdefault(word.lower(), word)
    return list(words.values())[:MOST_WORDS]


def shown_word(word: str) -> str:
    """Return a word as a name has it: signs in quotes, blanks and ends of lines visible."""
    bare = word.strip()
    if not bare:
        return LINE if "\n" in word else BLANK
    return bare if any(character.isalnum() for character in bare) else f"“{bare}”"
