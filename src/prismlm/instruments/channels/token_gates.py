"""Write gates by token and by word, summed over a corpus batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from prismlm.corpus.encode import encode_text
from prismlm.corpus.pieces import decode_token
from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError, check_finite
from prismlm.labels.vocabulary import Vocabulary
from prismlm.models.decoders.mixers import gates_of, mixers_of
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.windows import WindowBatch


@dataclass(eq=False)
class WordSums:
    """Write gates at the last tokens of one word.

    Attributes:
        count: occurrences.
        sums: Σ write over them, of each layer.
    """

    count: int
    sums: tuple[Float64[Tensor, " R"], ...]


@dataclass(frozen=True, eq=False)
class TokenGates:
    """Write gates by token.

    Attributes:
        count: how often each token was read.
        sums: Σ write over the positions of each token, of each layer.
        squares: Σ write² over all positions, of each layer.
        words: those that were looked for.
    """

    count: Int64[Tensor, " V"]
    sums: tuple[Float64[Tensor, "V R"], ...]
    squares: tuple[Float64[Tensor, " R"], ...]
    words: dict[str, WordSums]

    @property
    def positions(self) -> int:
        """How many tokens were read."""
        return int(self.count.sum())

    def mean(self, layer: int) -> Float64[Tensor, " R"]:
        """Return each channel's mean write gate."""
        return self.sums[layer].sum(0) / self.positions

    def deviation(self, layer: int) -> Float64[Tensor, " R"]:
        """Return the standard deviation of each channel's write gate over positions."""
        variance = self.squares[layer] / self.positions - self.mean(layer).square()
        return variance.clamp(min=0).sqrt()

    def difference(
        self, layer: int, sums: Float64[Tensor, "... R"], count: int | Tensor
    ) -> Float64[Tensor, "... R"]:
        """Return the standardised difference of each channel.

            d_k = (mean of write_k over these positions − mean of write_k) / deviation of write_k

        0 for a channel whose gate never varies.
        """
        mean, deviation = self.mean(layer), self.deviation(layer)
        shift = sums / count - mean
        return torch.where(deviation > 1e-12, shift / deviation.clamp(min=1e-12), 0.0)


def token_gates(
    model: PreTrainedModel,
    sequences: Sequences,
    words: WordForms | None = None,
    *,
    progress: Reporter = SILENT,
) -> TokenGates:
    """Sum write gates over a corpus: memory is 8·V·R bytes for each layer, whatever its size.

    Raises:
        InputError: no prototype mixer, no text, or a gate that is not finite.
    """
    channels = [mixer.channels for mixer in mixers_of(model)]
    size: int = model.config.vocab_size
    gates = TokenGates(
        torch.zeros(size, dtype=torch.int64),
        tuple(torch.zeros(size, r, dtype=torch.float64) for r in channels),
        tuple(torch.zeros(r, dtype=torch.float64) for r in channels),
        {
            word: WordSums(0, tuple(torch.zeros(r, dtype=torch.float64) for r in channels))
            for word in (() if words is None else words.forms)
        },
    )
    with progress.task("Reading write gates", sequences.tokens) as task:
        for batch in sequences.batches():
            layers = _write_gates(model, batch)
            tokens = batch.input_ids[batch.owned]
            gates.count.index_add_(0, tokens, torch.ones_like(tokens))
            for layer, write in enumerate(layers):
                gates.sums[layer].index_add_(0, tokens, write)
                gates.squares[layer].add_(write.square().sum(0))
            ends = {} if words is None else words.ends(batch.input_ids, batch.attention_mask)
            for word, hits in ends.items():
                here, found = hits[batch.owned], gates.words[word]
                found.count += int(here.sum())
                for sums, write in zip(found.sums, layers, strict=True):
                    sums.add_(write[here].sum(0))
            task.advance(len(tokens))
    return gates


def _write_gates(model: PreTrainedModel, batch: WindowBatch) -> list[Tensor]:
    """Return each layer's write gates at the owned positions, float64 [N, R] on the CPU."""
    found, owned = gates_of(model, batch.input_ids, batch.attention_mask), batch.owned
    layers = [gates.write[owned.to(gates.write.device)].double().cpu() for gates in found]
    check_finite("gates", *layers)
    return layers


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
            encoded = [_after_a_space(tokenizer, spelling) for spelling in spellings]
            forms = tuple(dict.fromkeys(ids for ids in encoded if ids))
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


def _after_a_space(tokenizer: PreTrainedTokenizerBase, word: str) -> tuple[int, ...]:
    """Return the tokens of a word that a space stands before.

    Some tokenizers put one before every text by themselves: with another there would be two.
    """
    alone, after = (
        tuple(encode_text(tokenizer, text, start=False, end=False)) for text in (word, f" {word}")
    )
    return alone if alone and decode_token(tokenizer, alone[0])[:1] == " " else after


def continuing(tokenizer: PreTrainedTokenizerBase) -> Bool[Tensor, " V"]:
    """Return which tokens go on with a word: those whose text begins with a letter or a digit."""
    texts = Vocabulary(tokenizer, len(tokenizer)).texts
    return torch.tensor([text[:1].isalnum() for text in texts])


def whole_words(tokenizer: PreTrainedTokenizerBase) -> Bool[Tensor, " V"]:
    """Return which tokens are a space and then letters alone, at least three."""
    texts = Vocabulary(tokenizer, len(tokenizer)).texts
    return torch.tensor([t[:1] == " " and len(t) > 3 and t[1:].isalpha() for t in texts])


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
