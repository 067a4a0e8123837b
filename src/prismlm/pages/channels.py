"""A report of channels as the JSON that the explorer and its static page show, and that page.

A gate g is stored in one byte, round(255·√(g / g_max)), g_max being the largest of the channel's on
the page: the error is at most g_max/255, and 2 % of g or less where g is above 0.04·g_max. Decays
that depend on the token are a byte each too, in the logarithm of −ln β, so within 4 % of the
half-life.
"""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from prismlm.corpus.pieces import TokenWords, visible
from prismlm.errors import InputError
from prismlm.files import finite
from prismlm.models.decoders.protot import gates_of, mixers_of
from prismlm.pages.frame import html_page
from prismlm.probes.channels.activations import recording_decays
from prismlm.probes.channels.report import ChannelReport, LayerReport
from prismlm.probes.results import Row, Table, figure_at, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus

TITLE = "What the channels carry"
ROWS_OF_A_PASS = 16
TOKENS_SHOWN = 24
LEVELS = 255
# −ln β of the largest and the smallest decay that a mixer can have, and a little more.
MIN_RATE, MAX_RATE = 1e-6, 14.0


class Gates(NamedTuple):
    """Gates of one layer for one sequence; decays only where they depend on the token."""

    write: Float[Tensor, "T R"]
    read: Float[Tensor, "T R"]
    decay: Float[Tensor, "T R"] | None


def channel_page(report: ChannelReport, model: PreTrainedModel, corpus: Corpus | None) -> str:
    """Return a complete HTML document of a report of channels.

    A byte for each token and gate of every kept sequence, a third more in base64, beside the texts:
    10 sequences of 256 tokens of 32 channels take 0.22 MB for each layer.

    Args:
        report: of :func:`channel_report`, with a corpus or a text.
        model: the report's.
        corpus: the report's, or None if it has none.

    Raises:
        InputError: the report has no channels, or neither a corpus nor a text.
        FormatError: the corpus is damaged.
    """
    if report.of != "channels":
        raise InputError(f"{report.model or 'the model'} has no channels, so no page of them.")
    if report.text is None and not report.passages:
        raise InputError("a page of channels needs a corpus or a text: read one into the report.")
    counts = sorted({len(layer.channels) for layer in report.layers})
    facts = [
        ("model", report.model or "–"),
        ("layers", ", ".join(str(layer.layer) for layer in report.layers)),
        ("channels in each", " or ".join(map(str, counts))),
    ]
    if report.corpus is not None:
        read = report.corpus
        facts.append(("corpus", f"{read.name}, {read.split}"))
        facts.append(("read", f"{read.positions:,} tokens in sequences of {read.length}"))
    tables = [_table(table) for table in report.tables]
    data = channels_data(model, corpus, report) | {"facts": facts, "tables": tables}
    title = f"{TITLE}: {report.model}" if report.model else TITLE
    return html_page(title, "channels_page.js", data, styles=("trace.css", "channels.css"))


def _table(table: Table) -> dict[str, Any]:
    """Return a table with its figures as they are read."""
    return {
        "title": table.title,
        "columns": [name.replace("_", " ") for name in table.columns],
        "rows": [
            [text_of(figure_at(row, name), form) for name, form in table.columns.items()]
            for row in table.rows
        ],
        "facts": [
            f"{name.replace('_', ' ')} {text_of(value, '' if isinstance(value, int) else '.3g')}"
            for name, value in table.facts.items()
        ],
    }


def channels_data(
    model: PreTrainedModel, corpus: Corpus | None, report: ChannelReport
) -> dict[str, Any]:
    """Return layers, channels, texts and gates as the scripts read them.

    ``gates`` holds, for each channel in turn and each of its texts, the write gates of the tokens
    and then the read gates; a layer with shared gates has the write gates only. Decays come last,
    where they depend on the token and ``decay`` is None. A text that was given comes first in every
    channel; each passage and each document is held once.

    Args:
        model: the report's.
        corpus: the report's, or None if it has none.
        report: of channels.

    Raises:
        FormatError: the corpus is damaged.
    """
    given = report.text
    texts = [] if given is None else [_words(given.text) | {"doc": None, "at": 0}]
    numbers: dict[int, int] = {}
    documents: dict[str, dict[str, Any]] = {}
    for start, passage in report.passages.items():
        own = passage.document
        names = ("doc_id", "title", "source", "license", "url")
        documents.setdefault(own["doc_id"], {name: own[name] for name in names})
        numbers[start] = len(texts)
        at = {"doc": list(documents).index(own["doc_id"]), "at": passage.offset}
        texts.append(_words(passage.text) | at)
    gates, stored = _gates_of_passages(model, corpus, report), bytearray()
    curves = {} if given is None else {one.layer: one for one in given.curves}
    layers: list[dict[str, Any]] = []
    for layer in report.layers:
        own = curves.get(layer.layer)
        first = []
        if own is not None:
            first = [Gates(own.write, own.read, own.decay if own.decay.ndim == 2 else None)]
        channels: list[dict[str, Any]] = []
        for channel in layer.channels:
            sequences = channel["sequences"]
            kept = [gates[layer.layer][one["position"]] for one in sequences]
            # The number of each text, and what it writes in all: None of the text given.
            of_texts = [[0, None]] * len(first)
            of_texts += [[numbers[one["position"]], one["total"]] for one in sequences]
            at = len(stored)
            largest = _store(layer, channel["channel"], first + kept, stored)
            of_channel = {"at": at, "largest": largest, "texts": of_texts}
            channels.append(_channel(layer, channel) | of_channel)
        own_facts = {"layer": layer.layer, "shared": layer.shared_gates}
        layers.append(own_facts | {"channels": channels})
    return finite(
        {
            "layers": layers,
            "texts": texts,
            "documents": list(documents.values()),
            "rates": [MIN_RATE, MAX_RATE],
            "gates": base64.b64encode(bytes(stored)).decode("ascii"),
        }
    )


def _words(text: TokenWords) -> dict[str, Any]:
    """Return words, and how many tokens each has where it is not one."""
    many = {number: count for number, count in enumerate(text.counts) if count != 1}
    return {"words": list(text.words), "many": many}


def _channel(layer: LayerReport, channel: Row) -> dict[str, Any]:
    number, lags = channel["channel"], layer.lags
    # The lag of the largest correlation, the correlation, and its p.
    lag = lags and [float(one[number]) for one in (lags.peak, lags.correlation.amax(1), lags.p)]
    return {
        "id": number,
        "decay": channel["decay"],
        "halfLife": channel["half_life"],
        "repetition": channel["repetition"],
        "tokens": [
            [visible(token["text"]), token["count"], token["gate"]]
            for token in channel["tokens"][:TOKENS_SHOWN]
        ],
        "lag": lag,
    }


def _gates_of_passages(
    model: PreTrainedModel, corpus: Corpus | None, report: ChannelReport
) -> dict[int, dict[int, Gates]]:
    """Return the gates of every kept sequence, by layer and start; each is read once."""
    wanted: dict[int, set[int]] = defaultdict(set)
    for layer in report.layers:
        for channel in layer.channels:
            for sequence in channel["sequences"]:
                wanted[sequence["position"]].add(layer.layer)
    alike: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for start in sorted(wanted):
        passage = report.passages[start]
        alike[len(passage.text.tokens), passage.offset > 0].append(start)
    found: dict[int, dict[int, Gates]] = defaultdict(dict)
    mixers = mixers_of(model)
    for (length, inside), starts in alike.items():
        assert corpus is not None
        # As they were read: inside a document, after what the tokenizer puts before a text.
        before = torch.tensor(corpus.prefix if inside else [], dtype=torch.int64)
        for first in range(0, len(starts), ROWS_OF_A_PASS):
            part = starts[first : first + ROWS_OF_A_PASS]
            ids = [torch.from_numpy(corpus.read_tokens(s, length).astype("int64")) for s in part]
            with recording_decays(mixers) as decays:
                by_layer = gates_of(model, torch.stack([torch.cat([before, own]) for own in ids]))
            for row, start in enumerate(part):
                for layer in wanted[start]:
                    columns = (gate[row, len(before) :] for gate in by_layer[layer])
                    write, read = (gate.float().cpu() for gate in columns)
                    decay = decays[mixers[layer]]
                    by_token = None if decay.ndim == 1 else decay[row, len(before) :].cpu()
                    found[layer][start] = Gates(write, read, by_token)
    return found


def _store(layer: LayerReport, channel: int, gates: list[Gates], stored: bytearray) -> list[float]:
    """Append a channel's gates along its texts; return the largest write and read gate."""
    largest = [
        max((float(getattr(one, kind)[:, channel].max()) for one in gates), default=0.0)
        for kind in ("write", "read")
    ]
    for one in gates:
        parts = [quantise_gates(one.write[:, channel], largest[0])]
        if not layer.shared_gates:
            parts.append(quantise_gates(one.read[:, channel], largest[1]))
        if one.decay is not None:
            parts.append(quantise_decay(one.decay[:, channel]))
        for part in parts:
            stored += part.contiguous().numpy().tobytes()
    return largest


def quantise_gates(gates: Float[Tensor, "..."], largest: float) -> UInt8[Tensor, "..."]:
    """Return round(255·√(gate / largest)); zeros where the largest is 0."""
    if largest <= 0:
        return torch.zeros(gates.shape, dtype=torch.uint8)
    return ((gates / largest).clamp(0, 1).sqrt() * LEVELS).round().to(torch.uint8)


def quantise_decay(decay: Float[Tensor, "..."]) -> UInt8[Tensor, "..."]:
    """Return round(255·ln(−ln β / 1e-6) / ln(14 / 1e-6)): a step is 6.5 % of the half-life."""
    rates = (-decay.double().log()).clamp(MIN_RATE, MAX_RATE)
    scale = LEVELS / math.log(MAX_RATE / MIN_RATE)
    return ((rates / MIN_RATE).log() * scale).round().to(torch.uint8)
