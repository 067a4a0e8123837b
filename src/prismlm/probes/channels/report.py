"""Everything about a model's channels in one value: figures, half-lives, sequences, a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from prismlm.corpus.sequences import CorpusPart, Sequences
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.errors import InputError
from prismlm.models.decoders.mixers import chosen_layers, half_life, has_mixers, mixers_of
from prismlm.probes.channels.activations import (
    Activations,
    Kind,
    Passage,
    TopSequence,
    read_activations,
    read_passages,
)
from prismlm.probes.channels.curves import WordedCurves, read_text
from prismlm.probes.channels.metrics import (
    LagCorrelation,
    lag_correlation,
    measure_layers,
    metrics,
    quartiles,
    repetition,
)
from prismlm.probes.results import Row, Table, as_json
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import spearman

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        layer: from 0.
        shared_gates: whether it reads by its write gate.
        metrics: figures by kind of activation.
        lags: correlation of read and write; None without a corpus or channels.
        channels: a row for each ``channel``, with its ``decay`` and ``half_life`` in positions,
            None where decays depend on the token, and what :func:`channel_row` returns; none of a
            model without prototype mixers.
    """

    layer: int
    shared_gates: bool
    metrics: Mapping[Kind, Row]
    lags: LagCorrelation | None
    channels: tuple[Row, ...]


@dataclass(frozen=True)
class ChannelReport:
    """A model's channels, or the value heads of one without any.

    Attributes:
        model: its name.
        of: whether ``layers`` are of channels or of value heads.
        corpus: what was read, or None.
        layers: those asked for.
        passages: the text of kept sequences, by start.
        text: a text's curves, if one was given.
    """

    model: str
    of: Literal["channels", "heads"]
    corpus: CorpusPart | None
    layers: tuple[LayerReport, ...]
    passages: Mapping[int, Passage]
    text: WordedCurves | None = None

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
    def locality(self) -> Table | None:
        """Half-life against repetition of all channels; None without a corpus or channels."""
        if self.of == "heads" or self.corpus is None:
            return None
        return locality_table([channel for layer in self.layers for channel in layer.channels])

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
        locality, text = self.locality, None
        if self.text is not None:
            curves = ("layer", "half_life", "write", "read", "mass")
            text = {
                "tokens": self.text.text.tokens,
                "token_ids": self.text.token_ids,
                "words": self.text.text.words,
                "tokens_of_words": self.text.text.counts,
                "layers": [
                    {name: getattr(one, name) for name in curves} for one in self.text.curves
                ],
            }
        value = {"model": self.model, "of": self.of, "corpus": self.corpus, "layers": self.layers}
        return as_json(value | {"locality": locality and locality.to_dict(), "text": text})


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
    but with value heads, as LLaMA, has the figures of their norms, and no channels. Memory: 8 bytes
    for each token of the corpus that is read and each channel. Source: ProtoT, §5.1, A.8 and A.9.

    Raises:
        InputError: a model with neither channels nor value heads, an unknown layer, a corpus of
            another tokenizer, no text, an empty text, or a text for a model without channels.
    """
    if sequences is not None:
        check_tokenizer_of(sequences.corpus, tokenizer, name)
    if not has_mixers(model) and sequences is not None and text is None:
        rows = measure_layers(model, sequences, "values", progress=progress)
        chosen = chosen_layers(len(rows), options.layers)
        heads = tuple(LayerReport(i, False, {"values": rows[i]}, None, ()) for i in chosen)
        return ChannelReport(name, "heads", sequences.part(rows[0]["positions"]), heads, {})
    mixers = mixers_of(model)
    chosen = chosen_layers(len(mixers), options.layers)
    curves = None if text is None else read_text(model, tokenizer, text, chosen)
    if sequences is None:
        bare = tuple(
            LayerReport(layer, mixers[layer].shared_gates, {}, None, _channels(model, layer))
            for layer in chosen
        )
        return ChannelReport(name, "channels", None, bare, {}, curves)
    kinds: tuple[Kind, ...] = ("write", "read")
    reading = {"total": sequences.tokens, "progress": progress}
    read = read_activations(model, sequences.batches(), kinds, chosen, **reading)
    kept = {
        layer: read.top_sequences("write", layer, kept=options.kept, tokens=options.tokens)
        for layer in chosen
    }
    every = (sequence for layer in kept.values() for own in layer for sequence in own)
    passages = read_passages(sequences.corpus, every)
    layers = tuple(
        LayerReport(
            layer,
            mixers[layer].shared_gates,
            {kind: metrics(model, read, kind, layer) for kind in kinds},
            _lags_of(read, layer, options),
            _channels(model, layer, kept[layer], passages),
        )
        for layer in chosen
    )
    part = sequences.part(len(read.tokens))
    return ChannelReport(name, "channels", part, layers, passages, curves)


def _lags_of(read: Activations, layer: int, options: ReportOptions) -> LagCorrelation:
    return lag_correlation(
        read.values["write", layer],
        read.values["read", layer],
        read.lengths.tolist(),
        max_lag=options.max_lag,
        shuffles=options.shuffles,
        seed=options.seed,
    )


def _channels(
    model: PreTrainedModel,
    layer: int,
    kept: Sequence[tuple[TopSequence, ...]] | None = None,
    passages: Mapping[int, Passage] | None = None,
) -> tuple[Row, ...]:
    mixer = mixers_of(model)[layer]
    decays = lives = [None] * mixer.channels
    if mixer.decay_map is None:
        decay = mixer.decay.detach().cpu()
        decays, lives = decay.tolist(), half_life(decay).tolist()
    best = kept or [()] * mixer.channels
    return tuple(
        {"channel": number, "decay": decays[number], "half_life": lives[number]}
        | channel_row(own, passages or {})
        for number, own in enumerate(best)
    )


def channel_row(sequences: Iterable[TopSequence], passages: Mapping[int, Passage]) -> Row:
    """Return what a channel holds.

    Returns:
        ``sequences``, those that write most, best first, each with its ``text`` and ``tokens``; the
        ``tokens`` among all of these, those that write most in all first: ``token_id``; ``text``,
        the characters it touches, where it writes most; ``count``, how often it is there; and
        ``gate``, its mean write gate; and ``repetition``, 1 − distinct / all over them, None
        without a corpus.
    """
    rows: list[Row] = []
    uses: dict[int, list[Row]] = {}
    for sequence in sequences:
        passage = passages[sequence.start]
        shown = passage.text.tokens
        tokens: list[Row] = [
            vars(token) | {"text": shown[token.position - sequence.start]}
            for token in sequence.tokens
        ]
        for token in tokens:
            uses.setdefault(token["token_id"], []).append(token)
        row: Row = {"total": sequence.total, "position": sequence.start, "length": sequence.length}
        row |= {"doc_id": passage.document.doc_id, "text": "".join(passage.text.words)}
        rows.append(row | {"tokens": tokens})
    written: list[Row] = []
    for number, own in uses.items():
        text = max(own, key=lambda token: token["gate"])["text"]
        gate = sum(token["gate"] for token in own) / len(own)
        written.append({"token_id": number, "text": text, "count": len(own), "gate": gate})
    written.sort(key=lambda one: (-one["gate"] * one["count"], one["token_id"]))
    ids = [token["token_id"] for row in rows for token in row["tokens"]]
    return {"repetition": repetition(ids) if ids else None, "tokens": written, "sequences": rows}


def locality_table(channels: Iterable[Row]) -> Table:
    """Return half-life against repetition over all channels that have a half-life.

    Rows are quartiles of half-life, the shortest first; facts Spearman's ``rho`` with its ``p``,
    and ``cohens_d`` of the first quartile against the last. ``no_rho`` and ``no_quartiles`` say why
    one cannot be computed, as from half-lives all alike.
    """
    columns = {"quartile": "", "half_life_to": ".3g", "channels": "", "repetition": ".3f"}
    title = "Do channels of a short half-life keep to few tokens?"
    pairs = [(c["half_life"], c["repetition"]) for c in channels if c["half_life"] is not None]
    if not pairs:
        reason = "decays depend on the token, so no channel has a half-life of its own."
        return Table(title, columns, (), {"no_rho": reason, "no_quartiles": reason})
    lives, scores = np.array(pairs, dtype=np.float64).T
    rows: list[Row] = []
    facts: Row = {"channels": len(lives)}
    try:
        for name, values in (("half-life", lives), ("repetition", scores)):
            if not np.ptp(values):
                raise InputError(f"the {name} is one figure {len(values)} times: it has no ranks.")
        correlation = spearman(lives, scores)
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
