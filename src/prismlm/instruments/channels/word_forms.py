"""Where words are in rows of tokens, whatever number of tokens a word is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from prismlm.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class WordForms:
    """The tokens of words after a space, in their own spelling and with a capital.

    Attributes:
        forms: of each word, token sequences of any length.
        continues: which tokens go on with a word: those that begin with a letter or a digit.
    """

    forms: Mapping[str, tuple[tuple[int, ...], ...]]
    continues: Bool[Tensor, " V"]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> WordForms:
        """Look up words; a form that two of them have is the first one's, so that it counts once.

        A word all of whose forms are others', as "Women" after "women", is left out.

        Raises:
            InputError: no words, or one without a token.
        """
        found: dict[str, tuple[tuple[int, ...], ...]] = {}
        taken: set[tuple[int, ...]] = set()
        for word in words:
            bare = word.strip()
            spellings = dict.fromkeys((bare, bare[:1].upper() + bare[1:]))
            encoded = [tokenizer(f" {s}", add_special_tokens=False)["input_ids"] for s in spellings]
            forms = tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))  # pyright: ignore
            if not bare or not forms:
                raise InputError(f"{word!r} is no word: the tokenizer makes no token of it.")
            own = tuple(form for form in forms if form not in taken)
            if own:
                found[bare] = own
                taken.update(own)
        if not found:
            raise InputError("there are no words to look for: give at least one.")
        return cls(found, continuing(tokenizer))

    @property
    def tokens(self) -> frozenset[int]:
        """Every token of every form."""
        return frozenset(t for forms in self.forms.values() for form in forms for t in form)

    def ends(self, ids: Int64[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> dict[str, Tensor]:
        """Return where the last token of each word stands, bool [B, T].

        A word ends where the next token does not go on with it, so that "girl" is not found in
        "girls".
        """
        following = torch.zeros_like(mask)
        following[:, :-1] = self.continues[ids[:, 1:]] & mask[:, 1:]
        found: dict[str, Tensor] = {}
        for word, forms in self.forms.items():
            hits = torch.zeros_like(mask)
            for form in forms:
                hits |= _ends_of(form, ids, mask)
            found[word] = hits & ~following
        return found


def continuing(tokenizer: PreTrainedTokenizerBase) -> Bool[Tensor, " V"]:
    """Return which tokens go on with a word: those whose text begins with a letter or a digit."""
    return torch.tensor([text[:1].isalnum() for text in token_texts(tokenizer)])


def whole_words(tokenizer: PreTrainedTokenizerBase, letters: int = 3) -> Bool[Tensor, " V"]:
    """Return which tokens are a space and then letters alone, at least so many."""
    return torch.tensor(
        [
            text[:1] == " " and len(text) > letters and text[1:].isalpha()
            for text in token_texts(tokenizer)
        ]
    )


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of every token by itself."""
    ids = [[i] for i in range(len(tokenizer))]
    return [str(t) for t in tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False)]


def _ends_of(form: tuple[int, ...], ids: Tensor, mask: Tensor) -> Tensor:
    hits = torch.zeros_like(mask)
    width = ids.shape[1] - len(form) + 1
    if width < 1:
        return hits
    match = mask[:, len(form) - 1 :].clone()
    for offset, token in enumerate(form):
        match &= ids[:, offset : offset + width] == token
    hits[:, len(form) - 1 :] = match
    return hits
