"""What the page of a channel report shows, as plain data; each passage is held once.

A gate g is stored in one byte, round(255·√(g / g_max)), g_max being the largest of the channel's on
the page: the error is at most g_max/255, and 2 % of g or less where g is above 0.04·g_max. Decays
that depend on the token are a byte each too, in the logarithm of −ln β, so within 4 % of the
half-life.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from prismlm.corpus.words import WordedText
from prismlm.files import finite
from prismlm.models.decoders.mixers import gates_of, mixers_of
from prismlm.pages.trace_data import safe_link, visible
from prismlm.probes.channels.curves import decays_seen
from prismlm.probes.channels.report import Channel, ChannelReport, LayerReport

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus

ROWS_OF_A_PASS = 16
TOKENS_SHOWN = 24
LEVELS = 255
LEAST_RATE, MOST_RATE = 1e-6, 14.0
"""−ln β of the largest and the smallest decay that a mixer can have, and a little more."""
RATE_RANGE = math.log(MOST_RATE / LEAST_RATE)


class Gates(NamedTuple):
    """Gates of one layer for one sequence.

    Attributes:
        write: float32, on the CPU.
        read: likewise.
        decay: of each position where decays depend on the token, else None.
    """

    write: Float[Tensor, "T R"]
    read: Float[Tensor, "T R"]
    decay: Float[Tensor, "T R"] | None


def quantise_gates(gates: Float[Tensor, "..."], largest: float) -> UInt8[Tensor, "..."]:
    """Return round(255·√(gate / largest)); zeros where the largest is 0."""
    if largest <= 0:
        return torch.zeros(gates.shape, dtype=torch.uint8)
    return ((gates / largest).clamp(0, 1).sqrt() * LEVELS).round().to(torch.uint8)


def quantise_decay(decay: Float[Tensor, "..."]) -> UInt8[Tensor, "..."]:
    """Return round(255·ln(−ln β / 1e-6) / ln(14 / 1e-6)): a step is 6.5 % of the half-life."""
    rates = (-decay.double().log()).clamp(LEAST_RATE, MOST_RATE)
    return ((rates / LEAST_RATE).log() / RATE_RANGE * LEVELS).round().to(torch.uint8)


def kept_gates(
    model: PreTrainedModel, corpus: Corpus | None, report: ChannelReport
) -> dict[int, dict[int, Gates]]:
    """Return the gates of every kept sequence by corpus position, by layer that keeps it.

    Each sequence is read once, together with others of its length.

    Raises:
        FormatError: the corpus is damaged.
    """
    wanted: dict[int, set[int]] = {}
    lengths: dict[int, list[int]] = {}
    for layer in report.layers:
        for channel in layer.channels:
            for sequence in channel.sequences:
                wanted.setdefault(sequence.start, set()).add(layer.layer)
    for start in sorted(wanted):
        lengths.setdefault(len(report.passages[start].text.tokens), []).append(start)
    found: dict[int, dict[int, Gates]] = {start: {} for start in wanted}
    mixers = mixers_of(model)
    for length, starts in lengths.items():
        assert corpus is not None
        for first in range(0, len(starts), ROWS_OF_A_PASS):
            rows = starts[first : first + ROWS_OF_A_PASS]
            ids = [torch.from_numpy(corpus.read_tokens(s, length).astype("int64")) for s in rows]
            with decays_seen(mixers) as decays:
                by_layer = gates_of(model, torch.stack(ids))
            for row, start in enumerate(rows):
                for layer in wanted[start]:
                    write, read = (gate[row].float().cpu() for gate in by_layer[layer])
                    decay = decays[mixers[layer]]
                    by_token = None if decay.ndim == 1 else decay[row].cpu()
                    found[start][layer] = Gates(write, read, by_token)
    return found


@dataclass
class _Pool:
    """Passages, documents and gates, numbered in the order they are met."""

    report: ChannelReport
    gates: Mapping[int, Mapping[int, Gates]]
    texts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    documents: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    stored: bytearray = field(default_factory=bytearray)
    _of_start: dict[int, int] = field(default_factory=dict[int, int])
    _of_document: dict[str, int] = field(default_factory=dict[str, int])

    def passage(self, start: int) -> int:
        """Return the number of a kept sequence's text."""
        if start not in self._of_start:
            self._of_start[start] = len(self.texts)
            passage = self.report.passages[start]
            document = passage.document
            if document.doc_id not in self._of_document:
                self._of_document[document.doc_id] = len(self.documents)
                kept = ("doc_id", "title", "source", "license")
                row = {name: getattr(document, name) for name in kept}
                self.documents.append(row | {"url": safe_link(document.url)})
            number = self._of_document[document.doc_id]
            self.texts.append(worded_data(passage.text) | {"doc": number, "at": passage.offset})
        return self._of_start[start]

    def store(self, values: Tensor) -> None:
        """Put bytes after those that are there."""
        self.stored += values.contiguous().numpy().tobytes()


def worded_data(text: WordedText) -> dict[str, Any]:
    """Return words, and how many tokens each has where it is not one."""
    many = {number: count for number, count in enumerate(text.counts) if count != 1}
    return {"words": list(text.words), "many": many}


def page_data(
    model: PreTrainedModel, corpus: Corpus | None, report: ChannelReport
) -> dict[str, Any]:
    """Return layers, channels, texts and gates as the page's script reads them.

    ``gates`` holds, for each channel in turn and each of its texts, the write gates of the tokens
    and then the read gates; a layer with shared gates has the write gates only. Decays come last,
    where they depend on the token and ``decay`` is None. A text that was given comes first in every
    channel.

    Args:
        model: the report's.
        corpus: the report's, or None if it has none.
        report: of channels.

    Raises:
        FormatError: the corpus is damaged.
    """
    pool = _Pool(report, kept_gates(model, corpus, report))
    if report.text is not None:
        pool.texts.append(worded_data(report.text.text) | {"doc": None, "at": 0})
    layers = [_layer(layer, pool) for layer in report.layers]
    value = {
        "layers": layers,
        "texts": pool.texts,
        "documents": pool.documents,
        "rates": [LEAST_RATE, MOST_RATE],
        "gates": base64.b64encode(bytes(pool.stored)).decode("ascii"),
    }
    return finite(value)


def _layer(layer: LayerReport, pool: _Pool) -> dict[str, Any]:
    own = _own_gates(layer, pool.report)
    return {
        "layer": layer.layer,
        "shared": layer.shared_gates,
        "channels": [_channel(layer, channel, own, pool) for channel in layer.channels],
    }


def _own_gates(layer: LayerReport, report: ChannelReport) -> Gates | None:
    for curves in () if report.text is None else report.text.curves:
        if curves.layer == layer.layer:
            decay = curves.decay if curves.decay.ndim == 2 else None
            return Gates(curves.write, curves.read, decay)
    return None


def _channel(
    layer: LayerReport, channel: Channel, own: Gates | None, pool: _Pool
) -> dict[str, Any]:
    offset, number = len(pool.stored), channel.channel
    gates = [] if own is None else [own]
    gates += [pool.gates[sequence.start][layer.layer] for sequence in channel.sequences]
    # The number of each text, and what it writes in all: None of the text given.
    texts: list[list[Any]] = [] if own is None else [[0, None]]
    texts += [[pool.passage(sequence.start), sequence.total] for sequence in channel.sequences]
    largest = [
        max((float(getattr(g, kind)[:, number].max()) for g in gates), default=0.0)
        for kind in ("write", "read")
    ]
    for one in gates:
        pool.store(quantise_gates(one.write[:, number], largest[0]))
        if not layer.shared_gates:
            pool.store(quantise_gates(one.read[:, number], largest[1]))
        if one.decay is not None:
            pool.store(quantise_decay(one.decay[:, number]))
    return {
        "id": number,
        "decay": channel.decay,
        "halfLife": channel.half_life,
        "repetition": channel.repetition,
        "tokens": [[visible(t.text), t.count, t.gate] for t in channel.tokens[:TOKENS_SHOWN]],
        "lag": _lag(layer, number),
        "largest": largest,
        "at": offset,
        "texts": texts,
    }


def _lag(layer: LayerReport, channel: int) -> list[float] | None:
    """Return the lag of the largest correlation, the correlation, and its p."""
    if layer.lags is None:
        return None
    lags = layer.lags
    return [lags.peak[channel].item(), lags.correlation[channel].max().item(),
            lags.p[channel].item()]  # fmt: skip
