"""All figures of the channels from one reading of a corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prismlm.corpus.sequences import Sequences
from prismlm.instruments.channels.lags import LagCorrelation, LagTally
from prismlm.instruments.channels.layer_metrics import LayerMetrics, LayerTally
from prismlm.instruments.channels.top_sequences import (
    TopSequences,
    candidates,
    empty_ranking,
    merge_rankings,
)
from prismlm.models.decoders.mixers import chosen_layers, gates_of, mixers_of
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch
    from prismlm.layers import PrototypeMixer


class LayerSurvey(NamedTuple):
    """What was found of one layer.

    Attributes:
        write: figures of its write gates.
        read: figures of its read gates.
        best: the sequences that write most into each channel.
        lags: cross-correlation of read and write.
    """

    write: LayerMetrics
    read: LayerMetrics
    best: TopSequences
    lags: LagCorrelation


class _Tallies:
    def __init__(
        self, vocabulary: int, mixer: PrototypeMixer, kept: int, tokens: int, lags: LagTally
    ) -> None:
        self.write, self.read = (LayerTally(vocabulary, groups=mixer.groups) for _ in range(2))
        self.best, self.tokens = empty_ranking(mixer.channels, kept, tokens), tokens
        self.lags = lags

    def add(self, batch: WindowBatch, write: Tensor, read: Tensor) -> None:
        ids = batch.input_ids[batch.owned]
        self.write.add(ids, write[batch.owned])
        self.read.add(ids, read[batch.owned])
        self.best = merge_rankings(self.best, candidates(write, batch, self.tokens))
        for row, owned in enumerate(batch.owned):
            self.lags.add(write[row, owned], read[row, owned])


def survey_channels(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    layers: Iterable[int] | None = None,
    kept: int = 10,
    tokens: int = 10,
    max_lag: int = 4,
    shuffles: int = 99,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> dict[int, LayerSurvey]:
    """Return figures, sequences and lags of each layer, from one reading.

    They are those of :func:`measure_layers`, :func:`rank_sequences` and :func:`read_write_lags`.

    Memory: 128·V·R bytes for each layer, beside what is kept.

    Raises:
        InputError: no prototype mixer, an unknown layer, nothing to keep, no text, lags below 1
            or fewer than two shuffles.
    """
    mixers = mixers_of(model)
    tallies: dict[int, _Tallies] = {}
    for layer in chosen_layers(len(mixers), layers):
        lags = LagTally(mixers[layer].channels, max_lag, shuffles, seed)
        tallies[layer] = _Tallies(model.config.vocab_size, mixers[layer], kept, tokens, lags)
    with progress.task("Reading channels", sequences.tokens) as task:
        for batch in sequences.batches():
            ids, mask = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
            by_layer = gates_of(model, ids, mask)
            for layer, tally in tallies.items():
                write, read = (gate.float().cpu() for gate in by_layer[layer])
                tally.add(batch, write, read)
            task.advance(int(batch.owned.sum()))
    return {
        layer: LayerSurvey(
            tally.write.metrics(layer), tally.read.metrics(layer), tally.best, tally.lags.result()
        )
        for layer, tally in tallies.items()
    }
