"""Everything about a model's channels in one value: figures, half-lives, sequences, a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from prismlm.corpus.sequences import CorpusPart, Sequences
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.errors import InputError
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.mixers import chosen_layers, half_life, has_mixers, mixers_of
from prismlm.probes.channels.curves import WordedCurves, read_text
from prismlm.probes.channels.metrics import (
    Kind,
    LagCorrelation,
    LagTally,
    LayerTally,
    measure_layers,
    quartiles,
    repetition,
)
from prismlm.probes.channels.top_sequences import (
    ChannelSequence,
    Passage,
    TopSequences,
    read_passages,
)
from prismlm.probes.reading import gates_along
from prismlm.probes.results import Row, Table, as_json
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import spearman

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class TopToken:
    """A token among those that write most into a channel, over its kept sequences.

    Attributes:
        token_id: which.
        text: the characters it touches, where it writes most.
        count: how often it is among the kept tokens.
        gate: its mean write gate there.
    """

    token_id: int
    text: str
    count: int
    gate: float


@dataclass(frozen=True)
class Channel:
    """One channel.

    Attributes:
        channel: from 0.
        decay, half_life: β, and in positions; None where β depends on the token.
        repetition: 1 − distinct / all over the kept tokens; None without a corpus.
        tokens: the kept tokens, most written in all first.
        sequences: those that write most, best first.
    """

    channel: int
    decay: float | None
    half_life: float | None
    repetition: float | None
    tokens: tuple[TopToken, ...]
    sequences: tuple[ChannelSequence, ...]


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        layer: from 0.
        shared_gates: whether it reads by its write gate.
        metrics: figures by kind of activation.
        lags: correlation of read and write; None without a corpus or channels.
        channels: its channels; none of a model without prototype mixers.
    """

    layer: int
    shared_gates: bool
    metrics: Mapping[Kind, Row]
    lags: LagCorrelation | None
    channels: tuple[Channel, ...]


@dataclass(frozen=True)
class ChannelReport:
    """A model's channels, or the value heads of one without any.

    Attributes:
        model: its name.
        of: whether ``layers`` are of channels or of value heads.
        corpus: what was read, or None.
        layers: those asked for.
        locality: :func:`locality_table`, or None without a corpus or channels.
        passages: the text of kept sequences, by start.
        text: a text's curves, if one was given.
    """

    model: str
    of: Literal["channels", "heads"]
    corpus: CorpusPart | None
    layers: tuple[LayerReport, ...]
    locality: Table | None
    passages: Mapping[int, Passage]
    text: WordedCurves | None

    @property
    def metrics(self) -> Table:
        """The figures of each layer and gate, of :func:`measure_layers`."""
        rows = [
            {"gate": kind} | row for layer in self.layers for kind, row in layer.metrics.items()
        ]
        columns = {"layer": "", "gate": "", "sparsity_ratio": ".2f", "width": "", "gini": ".3f",
                   "entropy": ".3f", "entropy_share": ".0%", "mutual_information": ".3f",
                   "mutual_information_corrected": ".3f"}  # fmt: skip
        return Table(f"Figures of the layers of {self.model}", columns, tuple(rows))

    @property
    def lags(self) -> Table:
        """Whether channels are read before they are written, by layer.

        Of ``channels``, those ``clear``, which correlate at some lag with p < 0.05; of these, those
        ``read_first``, ``at_once`` and ``written_first``, and read ``one_before``. Medians over
        channels at lag 1: the correlation, ``at_lag_1``, and mean and deviation of the shuffled.
        Layers with shared gates correlate at lag 0.
        """
        rows = [
            {"layer": layer.layer, "shared_gates": str(layer.shared_gates)} | _lags(layer.lags)
            for layer in self.layers
            if layer.lags is not None
        ]
        columns = {"layer": "", "shared_gates": "", "channels": "", "clear": "", "read_first": "",
                   "one_before": "", "at_once": "", "written_first": "", "at_lag_1": "+.3f",
                   "shuffled": "+.3f", "deviation": ".3f"}  # fmt: skip
        return Table("Is a channel read before it is written?", columns, tuple(rows))

    @property
    def tables(self) -> tuple[Table, ...]:
        """Every table that holds something."""
        tables = (self.metrics, self.locality, self.lags)
        return tuple(table for table in tables if table and (table.rows or table.facts))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; non-finite numbers become None."""
        text = self.text
        curves = ("layer", "half_life", "write", "read", "mass")
        value = {
            "model": self.model,
            "of": self.of,
            "corpus": self.corpus,
            "layers": [self._layer_dict(layer) for layer in self.layers],
            "locality": self.locality and self.locality.to_dict(),
            "text": text
            and {
                "tokens": text.text.tokens,
                "token_ids": text.token_ids,
                "words": text.text.words,
                "tokens_of_words": text.text.counts,
                "layers": [{name: getattr(one, name) for name in curves} for one in text.curves],
            },
        }
        return as_json(value)

    def _layer_dict(self, layer: LayerReport) -> Row:
        def sequence(one: ChannelSequence) -> Row:
            passage = self.passages[one.start]
            shown = passage.text.tokens
            return {
                "total": one.total,
                "position": one.start,
                "length": one.length,
                "doc_id": passage.document.doc_id,
                "text": "".join(passage.text.words),
                "tokens": [vars(t) | {"text": shown[t.position - one.start]} for t in one.tokens],
            }

        channels = [
            vars(channel) | {"sequences": list(map(sequence, channel.sequences))}
            for channel in layer.channels
        ]
        return vars(layer) | {"lags": layer.lags and vars(layer.lags), "channels": channels}


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

    Without a corpus there are half-lives and the text's curves. A model without prototype mixers
    but with value heads, as LLaMA, has the figures of their norms, and no channels. Memory:
    128·V·R bytes a layer. Source: ProtoT, §5.1, A.8 and A.9.

    Raises:
        InputError: a model with neither channels nor value heads, an unknown layer, a corpus of
            another tokenizer, no text, an empty text, or a text for a model without channels.
    """
    if sequences is not None:
        check_tokenizer_of(sequences.corpus, tokenizer, name)
    if not has_mixers(model) and sequences is not None and text is None:
        metrics = measure_layers(model, sequences, "values", progress=progress)
        chosen = chosen_layers(len(metrics), options.layers)
        heads = tuple(LayerReport(i, False, {"values": metrics[i]}, None, ()) for i in chosen)
        part = sequences.part(metrics[0]["positions"])
        return ChannelReport(name, "heads", part, heads, None, {}, None)
    mixers = mixers_of(model)
    chosen = chosen_layers(len(mixers), options.layers)
    curves = None if text is None else read_text(model, tokenizer, text, chosen)
    if sequences is None:
        layers = tuple(_layer(layer, mixers[layer]) for layer in chosen)
        return ChannelReport(name, "channels", None, layers, None, {}, curves)
    surveys = _survey(model, sequences, options, progress)
    kept = (
        s for own in surveys.values() for k in range(len(own.best)) for s in own.best.sequences(k)
    )
    passages = read_passages(sequences.corpus, kept)
    layers = tuple(_layer(layer, mixers[layer], surveys[layer], passages) for layer in chosen)
    part = sequences.part(surveys[chosen[0]].write.positions if chosen else 0)
    return ChannelReport(name, "channels", part, layers, locality_table(layers), passages, curves)


def locality_table(layers: Iterable[LayerReport]) -> Table:
    """Return half-life against repetition over all channels that have a half-life.

    Rows are quartiles of half-life, the shortest first; facts Spearman's ``rho`` with its ``p``,
    and ``cohens_d`` of the first quartile against the last. ``no_rho`` and ``no_quartiles`` say why
    one cannot be computed, as from half-lives all alike.
    """
    columns = {"quartile": "", "half_life_to": ".3g", "channels": "", "repetition": ".3f"}
    title = "Do channels of a short half-life keep to few tokens?"
    channels = [c for layer in layers for c in layer.channels if c.half_life is not None]
    if not channels:
        reason = "decays depend on the token, so no channel has a half-life of its own."
        return Table(title, columns, (), {"no_rho": reason, "no_quartiles": reason})
    lives = torch.tensor([channel.half_life for channel in channels], dtype=torch.float64)
    scores = torch.tensor([channel.repetition for channel in channels], dtype=torch.float64)
    rows: list[Row] = []
    facts: Row = {"channels": len(channels)}
    try:
        for name, values in (("half-life", lives), ("repetition", scores)):
            if len(values.unique()) < 2:
                raise InputError(f"the {name} is one figure {len(values)} times: it has no ranks.")
        correlation = spearman(lives.numpy(), scores.numpy())
        facts |= {"rho": correlation.rho, "p": correlation.p}
    except InputError as error:
        facts["no_rho"] = str(error)
    try:
        groups = quartiles(lives, scores)
        facts["cohens_d"] = groups["cohens_d"]
        ends = [*groups["bounds"], float(lives.max())]
        figures = zip(range(1, 5), ends, groups["counts"], groups["means"], strict=True)
        rows = [dict(zip(columns, row, strict=True)) for row in figures]
    except InputError as error:
        facts["no_quartiles"] = str(error)
    return Table(title, columns, tuple(rows), facts)


def _lags(lags: LagCorrelation) -> Row:
    known, clear = ~lags.p.isnan(), lags.p < SIGNIFICANT
    peaks = lags.peak[clear]
    row: Row = {
        "channels": len(lags.p),
        "clear": int(clear.sum()),
        "read_first": int((peaks > 0).sum()),
        "one_before": int((peaks == 1).sum()),
        "at_once": int((peaks == 0).sum()),
        "written_first": int((peaks < 0).sum()),
    }
    columns = {"at_lag_1": lags.correlation, "shuffled": lags.null_mean}
    for name, column in (columns | {"deviation": lags.null_deviation}).items():
        at_one = column[known][:, lags.lags == 1]
        row[name] = torch.median(at_one).item() if len(at_one) else None
    return row


class _Survey(NamedTuple):
    """What is collected of one layer: figures of both gates, sequences, and lags."""

    write: LayerTally
    read: LayerTally
    best: TopSequences
    lags: LagTally


def _layer(
    layer: int,
    mixer: PrototypeMixer,
    survey: _Survey | None = None,
    passages: Mapping[int, Passage] | None = None,
) -> LayerReport:
    count = mixer.channels
    decays = lives = scores = [None] * count
    if mixer.decay_map is None:
        decay = mixer.decay.detach().cpu()
        decays, lives = decay.tolist(), half_life(decay).tolist()
    kept: list[tuple[ChannelSequence, ...]] = [()] * count
    metrics: dict[Kind, Row] = {}
    if survey is not None:
        kept = [survey.best.sequences(k) for k in range(count)]
        scores = repetition(survey.best.tokens).tolist()
        metrics = {"write": survey.write.metrics(layer), "read": survey.read.metrics(layer)}
    tokens = [top_tokens(own, passages or {}) for own in kept]
    columns = zip(range(count), decays, lives, scores, tokens, kept, strict=True)
    channels = tuple(Channel(*row) for row in columns)
    return LayerReport(
        layer, mixer.shared_gates, metrics, survey and survey.lags.result(), channels
    )


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


def _survey(
    model: PreTrainedModel, sequences: Sequences, options: ReportOptions, progress: Reporter
) -> dict[int, _Survey]:
    """Read a corpus once for the figures, sequences and lags of each layer."""
    mixers, vocabulary = mixers_of(model), model.config.vocab_size
    surveys = {
        layer: _Survey(
            LayerTally(vocabulary, groups=mixers[layer].groups),
            LayerTally(vocabulary, groups=mixers[layer].groups),
            TopSequences(options.kept, options.tokens),
            LagTally(mixers[layer].channels, options.max_lag, options.shuffles, options.seed),
        )
        for layer in chosen_layers(len(mixers), options.layers)
    }
    reading = {"title": "Reading channels", "total": sequences.tokens, "progress": progress}
    for batch, gates in gates_along(model, sequences.batches(), surveys, **reading):
        ids, owned = batch.input_ids[batch.owned], batch.owned
        for layer, own in surveys.items():
            write, read = (gate.float() for gate in gates[layer])
            own.write.add(ids, write[owned])
            own.read.add(ids, read[owned])
            own.best.add(write, batch)
            for row, mask in enumerate(owned):
                own.lags.add(write[row, mask], read[row, mask])
    return surveys
