"""Reading a model's channels into one report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from prismlm.corpus.sequences import Sequences
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.errors import InputError
from prismlm.instruments.channels.curves import read_text
from prismlm.instruments.channels.lags import LagTally
from prismlm.instruments.channels.layer_metrics import (
    Kind,
    LayerMetrics,
    LayerTally,
    measure_layers,
)
from prismlm.instruments.channels.locality import quartiles, repetition
from prismlm.instruments.channels.report import (
    Channel,
    ChannelReport,
    LayerReport,
    Locality,
    TopToken,
)
from prismlm.instruments.channels.top_sequences import (
    ChannelSequence,
    Passage,
    candidates,
    empty_ranking,
    merge_rankings,
    read_passages,
    sequences_of,
)
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.mixers import (
    check_layer,
    chosen_layers,
    gates_of,
    half_life,
    has_mixers,
    mixers_of,
)
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import spearman

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.windows import WindowBatch


class ReportOptions(NamedTuple):
    """How channels are read.

    Attributes:
        layers: which, or None for all.
        kept: sequences kept of each channel.
        tokens: tokens kept of each sequence.
        max_lag: L of the cross-correlation of read and write.
        shuffles: of its null.
        seed: of the shuffles.
    """

    layers: tuple[int, ...] | None = None
    kept: int = 10
    tokens: int = 10
    max_lag: int = 4
    shuffles: int = 99
    seed: int = 0


DEFAULTS = ReportOptions()


def channel_report(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequences | None = None,
    *,
    text: str | None = None,
    name: str = "",
    options: ReportOptions = DEFAULTS,
    progress: Reporter = SILENT,
) -> ChannelReport:
    """Return all figures of a model's channels over a corpus, and the curves of a text.

    Without a corpus there are half-lives and the text's curves. Where decays depend on the token a
    channel has no half-life of its own, and everything else. A model without prototype mixers
    but with value heads, as LLaMA, has the figures of their norms, and no channels.

    Memory: 128·V·R bytes for each layer, beside what is kept. A corpus is read once; documents of
    kept sequences once more.

    Args:
        model: in evaluation mode.
        tokenizer: its tokenizer.
        sequences: what to read of which corpus, or None.
        text: to be read by itself, or None.
        name: of the model, for the report.
        options: how to read.
        progress: shows the reading.

    Source: ProtoT, §5.1, A.8 and A.9.

    Raises:
        InputError: a model with neither channels nor value heads, an unknown layer, a corpus of
            another tokenizer, no text, an empty text, or a text for a model without channels.
    """
    if sequences is not None:
        check_tokenizer_of(sequences.corpus, tokenizer, name)
    if not has_mixers(model):
        return _of_heads(model, sequences, text, name, options, progress)
    mixers = mixers_of(model)
    chosen = chosen_layers(len(mixers), options.layers)
    worded_curves = None if text is None else read_text(model, tokenizer, text, chosen)
    found = {} if sequences is None else _survey(model, sequences, options, progress)
    ranked = {
        layer: [sequences_of(own.best, k, layer) for k in range(mixers[layer].channels)]
        for layer, own in found.items()
    }
    kept = [s for channels in ranked.values() for channel in channels for s in channel]
    passages = {} if sequences is None else read_passages(sequences.corpus, kept)
    layers = tuple(
        _layer(layer, mixers[layer], found.get(layer), ranked.get(layer), passages)
        for layer in chosen
    )
    part = sequences and sequences.part(found[chosen[0]].write.positions if chosen else 0)
    locality = locality_of(layers) if found else None
    return ChannelReport(name, "channels", part, layers, locality, passages, worded_curves)


def locality_of(layers: Iterable[LayerReport]) -> Locality:
    """Return half-life against repetition over all channels of some layers that have a half-life.

    What cannot be computed, as from half-lives all alike, is None beside the reason.
    """
    channels = [c for layer in layers for c in layer.channels if c.half_life is not None]
    if not channels:
        reason = "decays depend on the token, so no channel has a half-life of its own."
        return Locality(None, reason, None, reason)
    lives = torch.tensor([channel.half_life for channel in channels], dtype=torch.float64)
    scores = torch.tensor([channel.repetition for channel in channels], dtype=torch.float64)
    correlation = groups = no_correlation = no_quartiles = None
    try:
        for name, values in (("half-life", lives), ("repetition", scores)):
            if len(values.unique()) < 2:
                raise InputError(f"the {name} is one figure {len(values)} times: it has no ranks.")
        correlation = spearman(lives.numpy(), scores.numpy())
    except InputError as error:
        no_correlation = str(error)
    try:
        groups = quartiles(lives, scores)
    except InputError as error:
        no_quartiles = str(error)
    return Locality(correlation, no_correlation, groups, no_quartiles)


def _of_heads(
    model: PreTrainedModel,
    sequences: Sequences | None,
    text: str | None,
    name: str,
    options: ReportOptions,
    progress: Reporter,
) -> ChannelReport:
    if text is not None or sequences is None:
        # Says that there are none, and of which model.
        mixers_of(model)
    assert sequences is not None
    metrics = measure_layers(model, sequences, "values", progress=progress)
    for layer in options.layers or ():
        check_layer(len(metrics), layer)
    chosen = [m for m in metrics if options.layers is None or m.layer in options.layers]
    layers = tuple(LayerReport(m.layer, False, {"values": m}, None, ()) for m in chosen)
    part = sequences.part(chosen[0].positions if chosen else 0)
    return ChannelReport(name, "heads", part, layers, None, {}, None)


def _layer(
    layer: int,
    mixer: PrototypeMixer,
    found: _Survey | None,
    ranked: list[tuple[ChannelSequence, ...]] | None,
    passages: Mapping[int, Passage],
) -> LayerReport:
    decay = mixer.decay.detach().cpu() if mixer.decay_map is None else None
    lives = None if decay is None else half_life(decay)
    scores = None if found is None else repetition(found.best).tolist()
    channels = tuple(
        Channel(
            channel=k,
            decay=None if decay is None else decay[k].item(),
            half_life=None if lives is None else lives[k].item(),
            repetition=None if scores is None else scores[k],
            tokens=() if ranked is None else top_tokens(ranked[k], passages),
            sequences=() if ranked is None else ranked[k],
        )
        for k in range(mixer.channels)
    )
    metrics: dict[Kind, LayerMetrics] = {}
    if found is not None:
        metrics = {"write": found.write.metrics(layer), "read": found.read.metrics(layer)}
    lags = None if found is None else found.lags.result()
    return LayerReport(layer, mixer.shared_gates, metrics, lags, channels)


def top_tokens(
    sequences: Iterable[ChannelSequence], passages: Mapping[int, Passage]
) -> tuple[TopToken, ...]:
    """Return the kept tokens of a channel's sequences, those that write most in all first."""
    gates: dict[int, list[float]] = {}
    texts: dict[int, tuple[float, str]] = {}
    for sequence in sequences:
        shown = passages[sequence.start].text.tokens
        for token in sequence.tokens:
            gates.setdefault(token.token_id, []).append(token.gate)
            here = (token.gate, shown[token.position - sequence.start])
            texts[token.token_id] = max(texts.get(token.token_id, here), here)
    order = sorted(gates, key=lambda token: (-sum(gates[token]), token))
    return tuple(
        TopToken(token, texts[token][1], len(gates[token]), sum(gates[token]) / len(gates[token]))
        for token in order
    )


class _Survey:
    """What is found of one layer, batch by batch: figures of both gates, sequences, and lags."""

    def __init__(self, vocabulary: int, mixer: PrototypeMixer, options: ReportOptions) -> None:
        self.lags = LagTally(mixer.channels, options.max_lag, options.shuffles, options.seed)
        self.write, self.read = (LayerTally(vocabulary, groups=mixer.groups) for _ in range(2))
        self.best = empty_ranking(mixer.channels, options.kept, options.tokens)

    def add(self, batch: WindowBatch, write: Tensor, read: Tensor) -> None:
        ids = batch.input_ids[batch.owned]
        self.write.add(ids, write[batch.owned])
        self.read.add(ids, read[batch.owned])
        found = candidates(write, batch, self.best.gate.shape[2])
        self.best = merge_rankings(self.best, found)
        for row, owned in enumerate(batch.owned):
            self.lags.add(write[row, owned], read[row, owned])


def _survey(
    model: PreTrainedModel, sequences: Sequences, options: ReportOptions, progress: Reporter
) -> dict[int, _Survey]:
    """Read a corpus once for the figures, sequences and lags of each layer.

    They are those of :func:`measure_layers`, :func:`rank_sequences` and :class:`LagTally`.
    """
    mixers = mixers_of(model)
    found = {
        layer: _Survey(model.config.vocab_size, mixers[layer], options)
        for layer in chosen_layers(len(mixers), options.layers)
    }
    with progress.task("Reading channels", sequences.tokens) as task:
        for batch in sequences.batches():
            by_layer = gates_of(model, batch.input_ids, batch.attention_mask)
            for layer, own in found.items():
                write, read = (gate.float().cpu() for gate in by_layer[layer])
                own.add(batch, write, read)
            task.advance(int(batch.owned.sum()))
    return found
