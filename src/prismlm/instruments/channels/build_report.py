"""Reading a model's channels into one report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from prismlm.corpus.sequences import CorpusPart, Sequences
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.corpus.words import encode, worded
from prismlm.errors import InputError
from prismlm.instruments.channels.activations import Kind
from prismlm.instruments.channels.channel_survey import LayerSurvey, survey_channels
from prismlm.instruments.channels.curves import read_channels
from prismlm.instruments.channels.layer_metrics import LayerMetrics, measure_layers
from prismlm.instruments.channels.locality import quartiles, repetition, spearman
from prismlm.instruments.channels.passages import Passage, read_passages
from prismlm.instruments.channels.report import (
    Channel,
    ChannelReport,
    LayerReport,
    Locality,
    TopToken,
    WordedCurves,
)
from prismlm.instruments.channels.top_sequences import ChannelSequence, sequences_of
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.mixers import check_layer, chosen_layers, half_life, mixers_of
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class ReportOptions(NamedTuple):
    """How channels are read.

    Attributes:
        layers: which, or None for all.
        kept: sequences kept of each channel.
        tokens: tokens kept of each sequence.
        max_lag: L of the cross-correlation of read and write.
        shuffles: of its null.
        seed: of the shuffles, and of the permutations where p is from them.
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

    Memory: see :func:`survey_channels`. A corpus is read once; documents of kept sequences
    once more.

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
    if not any(isinstance(module, PrototypeMixer) for module in model.modules()):
        return _of_heads(model, sequences, text, name, options, progress)
    mixers = mixers_of(model)
    chosen = chosen_layers(len(mixers), options.layers)
    worded_curves = None if text is None else _read(model, tokenizer, text, chosen)
    found: Mapping[int, LayerSurvey] = {}
    if sequences is not None:
        found = survey_channels(model, sequences, **options._asdict(), progress=progress)
    ranked = {layer: _ranked(found[layer], layer, mixers[layer].channels) for layer in found}
    passages = _passages(sequences, ranked)
    layers = tuple(
        _layer(layer, mixers[layer], found.get(layer), ranked.get(layer), passages)
        for layer in chosen
    )
    return ChannelReport(
        model=name,
        of="channels",
        corpus=_corpus_part(sequences, [found[layer].write for layer in found]),
        layers=layers,
        locality=locality_of(layers, seed=options.seed) if found else None,
        passages=passages,
        text=worded_curves,
    )


def _ranked(found: LayerSurvey, layer: int, channels: int) -> list[tuple[ChannelSequence, ...]]:
    return [sequences_of(found.best, k, layer) for k in range(channels)]


def _passages(
    sequences: Sequences | None, ranked: Mapping[int, list[tuple[ChannelSequence, ...]]]
) -> dict[int, Passage]:
    if sequences is None:
        return {}
    kept = (s for channels in ranked.values() for channel in channels for s in channel)
    return read_passages(sequences.corpus, kept)


def locality_of(layers: Iterable[LayerReport], *, seed: int = 0) -> Locality:
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
        correlation = spearman(lives, scores, seed=seed)
    except InputError as error:
        no_correlation = (
            str(error).replace("x is", "the half-life is").replace("y is", "the repetition is")
        )
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
    return ChannelReport(name, "heads", _corpus_part(sequences, chosen), layers, None, {}, None)


def _corpus_part(sequences: Sequences | None, metrics: list[LayerMetrics]) -> CorpusPart | None:
    if sequences is None:
        return None
    return sequences.part(metrics[0].positions if metrics else 0)


def _read(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, layers: Iterable[int]
) -> WordedCurves:
    ids, spans = encode(tokenizer, text)
    curves = read_channels(model, torch.tensor(ids, device=model.device), layers)
    return WordedCurves(worded(text, spans), tuple(ids), curves)


def _layer(
    layer: int,
    mixer: PrototypeMixer,
    found: LayerSurvey | None,
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
        metrics = {"write": found.write, "read": found.read}
    lags = None if found is None else found.lags
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
