"""All there is to say about a model's channels, as one value.

The command line, the plots and the page show this and compute nothing, so a notebook has the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prismlm.corpus.sequences import CorpusPart
from prismlm.files import finite
from prismlm.instruments.channels.curves import WordedCurves
from prismlm.instruments.channels.lags import LagCorrelation
from prismlm.instruments.channels.layer_metrics import Kind, LayerMetrics
from prismlm.instruments.channels.locality import Quartiles
from prismlm.instruments.channels.top_sequences import ChannelSequence, Passage
from prismlm.statistics import RankCorrelation


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
    metrics: Mapping[Kind, LayerMetrics]
    lags: LagCorrelation | None
    channels: tuple[Channel, ...]


@dataclass(frozen=True)
class Locality:
    """Half-life against repetition, over all channels of the report that have a half-life.

    Attributes:
        correlation: Spearman's, or None.
        no_correlation: why there is none.
        quartiles: repetition by quartile of half-life, or None.
        no_quartiles: why there are none.
    """

    correlation: RankCorrelation | None
    no_correlation: str | None
    quartiles: Quartiles | None
    no_quartiles: str | None


@dataclass(frozen=True)
class ChannelReport:
    """A model's channels, or the value heads of one that has none.

    Attributes:
        model: its name.
        of: whether ``layers`` are of channels or of value heads.
        corpus: what was read, or None.
        layers: those asked for.
        locality: half-life against repetition, or None without a corpus or channels.
        passages: the kept sequences' text, by corpus position of the first token.
        text: a text's curves, if one was given.
    """

    model: str
    of: Literal["channels", "heads"]
    corpus: CorpusPart | None
    layers: tuple[LayerReport, ...]
    locality: Locality | None
    passages: Mapping[int, Passage]
    text: WordedCurves | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; what is not a number is None."""
        value = {
            "model": self.model,
            "of": self.of,
            "corpus": self.corpus and asdict(self.corpus),
            "layers": [_layer(layer, self.passages) for layer in self.layers],
            "locality": self.locality and asdict(self.locality),
            "text": self.text and _text(self.text),
        }
        return finite(value)


def _layer(layer: LayerReport, passages: Mapping[int, Passage]) -> dict[str, Any]:
    metrics = {
        kind: {**asdict(found), "entropy_share": found.entropy_share}
        for kind, found in layer.metrics.items()
    }
    lags = layer.lags and {name: column.tolist() for name, column in vars(layer.lags).items()}
    channels = [
        asdict(channel)
        | {"sequences": [_sequence(s, passages[s.start]) for s in channel.sequences]}
        for channel in layer.channels
    ]
    return vars(layer) | {"metrics": metrics, "lags": lags, "channels": channels}


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
                "half_life": curves.half_life.tolist(),
                "write": curves.write.tolist(),
                "read": curves.read.tolist(),
                "mass": curves.mass.tolist(),
            }
            for curves in worded_curves.curves
        ],
    }
