"""Everything about a model's channels in one value: figures, half-lives, sequences, a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from prismlm.corpus.sequences import CorpusPart, Sequences
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.errors import InputError
from prismlm.instruments.channels.curves import WordedCurves, read_text
from prismlm.instruments.channels.metrics import (
    Kind,
    LagCorrelation,
    LagTally,
    LayerTally,
    measure_layers,
    quartiles,
    repetition,
)
from prismlm.instruments.channels.top_sequences import (
    ChannelSequence,
    Passage,
    TopSequences,
    read_passages,
)
from prismlm.instruments.reading import gates_along
from prismlm.instruments.results import Row, Table, as_json
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.mixers import (
    check_layer,
    chosen_layers,
    half_life,
    has_mixers,
    mixers_of,
)
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
        return as_json(
            {
                "model": self.model,
                "of": self.of,
                "corpus": self.corpus,
                "layers": [_layer_dict(layer, self.passages) for layer in self.layers],
                "locality": self.locality and self.locality.to_dict(),
                "text": self.text and _text_dict(self.text),
            }
        )


def _layer_dict(layer: LayerReport, passages: Mapping[int, Passage]) -> Row:
    def sequence(one: ChannelSequence) -> Row:
        passage = passages[one.start]
        tokens = [
            asdict(token) | {"text": passage.text.tokens[token.position - one.start]}
            for token in one.tokens
        ]
        return {
            "total": one.total,
            "position": one.start,
            "length": one.length,
            "doc_id": passage.document.doc_id,
            "text": "".join(passage.text.words),
            "tokens": tokens,
        }

    channels = [
        asdict(channel) | {"sequences": list(map(sequence, channel.sequences))}
        for channel in layer.channels
    ]
    return vars(layer) | {"lags": layer.lags and vars(layer.lags), "channels": channels}


def _text_dict(read: WordedCurves) -> Row:
    return {
        "tokens": read.text.tokens,
        "token_ids": read.token_ids,
        "words": read.text.words,
        "tokens_of_words": read.text.counts,
        "layers": [
            {name: getattr(one, name) for name in ("layer", "half_life", "write", "read", "mass")}
            for one in read.curves
        ],
    }


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

    Args:
        model: in evaluation mode.
        tokenizer: its tokenizer.
        sequences: what to read of which corpus, or None.
        text: to be read by itself, or None.
        name: of the model, for the report.
        options: how to read.
        progress: shows the reading.

    Raises:
        InputError: a model with neither channels nor value heads, an unknown layer, a corpus of
            another tokenizer, no text, an empty text, or a text for a model without channels.
    """
    if sequences is not None:
        check_tokenizer_of(sequences.corpus, tokenizer, name)
    if not has_mixers(model) and sequences is not None and text is None:
        return _report_of_heads(model, sequences, name, options, progress)
    mixers = mixers_of(model)
    chosen = chosen_layers(len(mixers), options.layers)
    curves = None if text is None else read_text(model, tokenizer, text, chosen)
    surveys, ranked, passages = dict[int, _Survey](), dict[int, list[Any]](), dict[int, Passage]()
    if sequences is not None:
        surveys = _survey(model, sequences, options, progress)
        ranked = {
            layer: [own.best.sequences(k) for k in range(len(own.best))]
            for layer, own in surveys.items()
        }
        kept = [s for channels in ranked.values() for channel in channels for s in channel]
        passages = read_passages(sequences.corpus, kept)
    layers = tuple(
        _layer(layer, mixers[layer], surveys.get(layer), ranked.get(layer), passages)
        for layer in chosen
    )
    part = sequences and sequences.part(surveys[chosen[0]].write.positions if chosen else 0)
    locality = locality_table(layers) if surveys else None
    return ChannelReport(name, "channels", part, layers, locality, passages, curves)


def _report_of_heads(
    model: PreTrainedModel,
    sequences: Sequences,
    name: str,
    options: ReportOptions,
    progress: Reporter,
) -> ChannelReport:
    metrics = measure_layers(model, sequences, "values", progress=progress)
    for layer in options.layers or ():
        check_layer(len(metrics), layer)
    chosen = [m for m in metrics if options.layers is None or m["layer"] in options.layers]
    layers = tuple(LayerReport(m["layer"], False, {"values": m}, None, ()) for m in chosen)
    part = sequences.part(chosen[0]["positions"] if chosen else 0)
    return ChannelReport(name, "heads", part, layers, None, {}, None)


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
        found = spearman(lives.numpy(), scores.numpy())
        facts |= {"rho": found.rho, "p": found.p}
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
    place = int((lags.lags == 1).nonzero()[0])
    columns = (lags.correlation, lags.null_mean, lags.null_deviation)
    for name, column in zip(("at_lag_1", "shuffled", "deviation"), columns, strict=True):
        row[name] = torch.median(column[known, place]).item() if known.any() else None
    return row


def _layer(
    layer: int,
    mixer: PrototypeMixer,
    survey: _Survey | None,
    ranked: list[tuple[ChannelSequence, ...]] | None,
    passages: Mapping[int, Passage],
) -> LayerReport:
    count, nothing = mixer.channels, [None] * mixer.channels
    decays, lives = nothing, nothing
    if mixer.decay_map is None:
        decay = mixer.decay.detach().cpu()
        decays, lives = decay.tolist(), half_life(decay).tolist()
    scores = nothing if survey is None else repetition(survey.best.tokens).tolist()
    kept = [()] * count if ranked is None else ranked
    channels = tuple(
        Channel(k, decays[k], lives[k], scores[k], top_tokens(kept[k], passages), kept[k])
        for k in range(count)
    )
    metrics: dict[Kind, Row] = {}
    if survey is not None:
        metrics = {"write": survey.write.metrics(layer), "read": survey.read.metrics(layer)}
    lags = None if survey is None else survey.lags.result()
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


class _Survey(NamedTuple):
    """What is collected of one layer: figures of both gates, sequences, and lags."""

    write: LayerTally
    read: LayerTally
    best: TopSequences
    lags: LagTally


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
