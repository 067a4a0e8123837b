"""English words that hedge, and where they begin in a text of tokens."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEDGES = (
    "maybe", "perhaps", "possibly", "probably", "presumably", "supposedly", "apparently",
    "seemingly", "likely", "unlikely", "possible", "probable", "might", "may", "could", "seem",
    "seems", "seemed", "appear", "appears", "appeared", "uncertain", "unclear", "unsure",
    "roughly", "approximately",
)  # fmt: skip
"""Written by us from what grammars list as epistemic adverbs, adjectives, modals and verbs.

They are single words, kept although some have other uses ("May"): what is compared is how often
they follow one kind of step and another, and other uses follow both.
"""


def hedge_starts(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    added: Sequence[int],
    words: Sequence[str] = HEDGES,
) -> list[bool]:
    """Say of each added token whether a hedging word begins in it.

    A word that began in the prompt does not count. Words are whole words, in any case.
    """
    ids = [*prompt, *added]
    # Where the text of each prefix ends; a part of a character may come and go at its end.
    lengths = [len(_decoded(tokenizer, ids[: end + 1])) for end in range(len(ids))]
    ends = list(accumulate(lengths, max))
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b", re.IGNORECASE)
    found = [False] * len(ids)
    for match in pattern.finditer(_decoded(tokenizer, ids)):
        token = bisect_right(ends, match.start())
        if token < len(ids):
            found[token] = True
    return found[len(prompt) :]


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
