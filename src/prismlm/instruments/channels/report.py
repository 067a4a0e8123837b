"""All there is to say about a model's channels, as one value."""

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
    candidates,
    empty_ranking,
    merge_rankings,
    read_passages,
    sequences_of,
)
from prismlm.instruments.results import Row, Table, as_json
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
        decay: β; None where it depends on the token.
        half_life: in positions; None where β depends on the token, and over a text it is in the
            text's curves.
        repetition: 1 − distinct / all over the kept tokens; None where no corpus was read.
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
        lags: cross-correlation of read and write; None without a corpus or channels.
        channels: its channels; none of a model without prototype mixers.
    """

    layer: int
    shared_gates: bool
    metrics: Mapping[Kind, Row]
    lags: LagCorrelation | None
    channels: tuple[Channel, ...]


@dataclass(frozen=True)
class ChannelReport:
    """A model's channels, or the value heads of one that has none.

    Attributes:
        model: its name.
        of: whether ``layers`` are of channels or of value heads.
        corpus: what was read, or None.
        layers: those asked for.
        locality: :func:`locality_table`, or None without a corpus or channels.
        passages: the kept sequences' text, by corpus position of the first token.
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

        Of ``channels``, how many correlate at some lag with p < 0.05, ``clear``; of these, how many
        are ``read_first``, ``at_once`` and ``written_first``, and read ``one_before``. At lag 1,
        medians over channels: the correlation, ``at_lag_1``, and of the shuffled its mean and
        deviation. Layers that read by their write gate go together at lag 0.
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
        """Every table of what was read."""
        found = (self.metrics, self.locality, self.lags)
        return tuple(table for table in found if table and (table.rows or table.facts))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; what is not a number is None."""
        value = {
            "model": self.model,
            "of": self.of,
            "corpus": self.corpus and asdict(self.corpus),
            "layers": [_layer_dict(layer, self.passages) for layer in self.layers],
            "locality": self.locality and self.locality.to_dict(),
            "text": self.text and _text(self.text),
        }
        return as_json(value)


def _layer_dict(layer: LayerReport, passages: Mapping[int, Passage]) -> dict[str, Any]:
    lags = layer.lags and vars(layer.lags)
    channels = [
        asdict(channel)
        | {"sequences": [_sequence(s, passages[s.start]) for s in channel.sequences]}
        for channel in layer.channels
    ]
    return vars(layer) | {"lags": lags, "channels": channels}


def _sequence(sequence: ChannelSequence, passage: Passage) -> dict[str, Any]:
    tokens = [
        {
            "position": token.position,
            "token_id": token.token_id,
            "text": passage.text.tokens[token.position - sequence.start],
            "gate": token.gate,
        }
        for token in sequence.tokens
    ]
    return {
        "total": sequence.total,
        "position": sequence.start,
        "length": sequence.length,
        "doc_id": passage.document.doc_id,
        "text": "".join(passage.text.words),
        "tokens": tokens,
    }


def _text(worded_curves: WordedCurves) -> dict[str, Any]:
    return {
        "tokens": list(worded_curves.text.tokens),
        "token_ids": list(worded_curves.token_ids),
        "words": list(worded_curves.text.words),
        "tokens_of_words": list(worded_curves.text.counts),
        "layers": [
            {
                "layer": curves.layer,
                "half_life": curves.half_life,
                "write": curves.write,
                "read": curves.read,
                "mass": curves.mass,
            }
            for curves in worded_curves.curves
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
    locality = locality_table(layers) if found else None
    return ChannelReport(name, "channels", part, layers, locality, passages, worded_curves)


def locality_table(layers: Iterable[LayerReport]) -> Table:
    """Return half-life against repetition over all channels of some layers that have a half-life.

    Rows are quartiles of half-life, the shortest first; facts Spearman's ``rho`` with its ``p``
    from Student's t, and ``cohens_d`` of the first quartile against the last. What cannot be
    computed, as from half-lives all alike, is not there, and why in ``no_rho`` or ``no_quartiles``.
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
        for number, (end, count, mean) in enumerate(
            zip(ends, groups["counts"], groups["means"], strict=True), 1
        ):
            row = {"quartile": number, "half_life_to": end, "channels": count, "repetition": mean}
            rows.append(row)
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
    names = ("at_lag_1", "shuffled", "deviation")
    if not known.any():
        return row | dict.fromkeys(names)
    place = int((lags.lags == 1).nonzero()[0])
    columns = (lags.correlation, lags.null_mean, lags.null_deviation)
    medians = (torch.median(column[known, place]).item() for column in columns)
    return row | dict(zip(names, medians, strict=True))


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
    chosen = [m for m in metrics if options.layers is None or m["layer"] in options.layers]
    layers = tuple(LayerReport(m["layer"], False, {"values": m}, None, ()) for m in chosen)
    part = sequences.part(chosen[0]["positions"] if chosen else 0)
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
    metrics: dict[Kind, Row] = {}
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
    """Read a corpus once for the figures, sequences and lags of each layer."""
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
