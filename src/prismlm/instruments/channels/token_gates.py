"""Write gates by token and by word, summed over a corpus batch by batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from prismlm.corpus.blocks import split_counts
from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError
from prismlm.instruments.channels.word_forms import WordForms
from prismlm.models.decoders.mixers import gates_of, mixers_of
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch


@dataclass(frozen=True, eq=False)
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
        {},
    )
    found = dict.fromkeys(() if words is None else words.forms, 0)
    sums = {word: [torch.zeros(r, dtype=torch.float64) for r in channels] for word in found}
    there = split_counts(sequences.corpus, sequences.split)[1]
    with progress.task("Reading write gates", min(there, sequences.max_tokens or there)) as task:
        for batch in sequences.batches():
            layers = _write_gates(model, batch)
            tokens = batch.input_ids[batch.owned]
            gates.count.index_add_(0, tokens, torch.ones_like(tokens))
            for layer, write in enumerate(layers):
                gates.sums[layer].index_add_(0, tokens, write)
                gates.squares[layer].add_(write.square().sum(0))
            ends = {} if words is None else words.ends(batch.input_ids, batch.attention_mask)
            for word, hits in ends.items():
                here = hits[batch.owned]
                found[word] += int(here.sum())
                for layer, write in enumerate(layers):
                    sums[word][layer] += write[here].sum(0)
            task.advance(len(tokens))
    for word, count in found.items():
        gates.words[word] = WordSums(count, tuple(sums[word]))
    return gates


def _write_gates(model: PreTrainedModel, batch: WindowBatch) -> list[Tensor]:
    """Return each layer's write gates at the owned positions, float64 [N, R] on the CPU."""
    ids, mask = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
    owned = batch.owned.to(model.device)
    layers = [gates.write[owned].double().cpu() for gates in gates_of(model, ids, mask)]
    if not all(bool(torch.isfinite(write).all()) for write in layers):
        raise InputError("a gate is not finite: the model's weights hold NaN or infinity.")
    return layers
