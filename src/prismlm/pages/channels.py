"""A report of channels as the JSON that the explorer and its static page show, and that page.

Gates are whole thousandths of the channel's largest gate on the page.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from prismlm.corpus.pieces import TokenWords, visible
from prismlm.errors import InputError
from prismlm.files import finite
from prismlm.pages.frame import html_page
from prismlm.probes.channels.activations import LayerCurves, read_channels
from prismlm.probes.channels.report import ChannelReport, LayerReport
from prismlm.probes.results import Row, Table, figure_at, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus

TITLE = "What the channels carry"
TOKENS_SHOWN = 24
# Of a channel's largest gate, the unit of its gates.
STEPS = 1000


class Gates(NamedTuple):
    """Gates along a text: those of curves, but for their first positions."""

    curves: LayerCurves
    skipped: int = 0

    def of(self, kind: Literal["write", "read", "decay"], channel: int) -> Tensor:
        """Return one kind of a channel's gates, [T]."""
        gates: Tensor = getattr(self.curves, kind)
        return gates[self.skipped :, channel]


def channel_page(report: ChannelReport, model: PreTrainedModel, corpus: Corpus | None) -> str:
    """Return a complete HTML document of a report of channels, with a corpus or a text.

    Ten sequences of 256 tokens for each of 32 channels take about 0.5 MB per layer.
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
    """Return a table with formatted figures."""
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

    ``gates`` of a channel has, for each of its texts, the write gates of the tokens, the read gates
    unless the layer shares them, and β if it depends on the token. The report's text comes first.
    """
    own_text = report.text
    texts = [] if own_text is None else [_words(own_text.text) | {"doc": None, "at": 0}]
    numbers: dict[int, int] = {}
    documents: dict[str, dict[str, Any]] = {}
    for start, passage in report.passages.items():
        document = passage.document
        names = ("doc_id", "title", "source", "license", "url")
        documents.setdefault(document["doc_id"], {name: document[name] for name in names})
        numbers[start] = len(texts)
        at = {"doc": list(documents).index(document["doc_id"]), "at": passage.offset}
        texts.append(_words(passage.text) | at)
    gates = _passage_gates(model, corpus, report)
    curves = {} if own_text is None else {curve.layer: Gates(curve) for curve in own_text.curves}
    layers: list[dict[str, Any]] = []
    for layer in report.layers:
        channels: list[dict[str, Any]] = []
        first = [curves[layer.layer]] if layer.layer in curves else []
        for channel in layer.channels:
            sequences = channel["sequences"]
            own_gates = first + [gates[row["position"], layer.layer] for row in sequences]
            # The number of each text and its total write, None for the report's own text.
            own_texts = [[0, None]] * len(first)
            own_texts += [[numbers[row["position"]], row["total"]] for row in sequences]
            of_texts = _gates(layer, channel["channel"], own_gates) | {"texts": own_texts}
            channels.append(_channel(layer, channel) | of_texts)
        layers.append({"layer": layer.layer, "shared": layer.shared_gates, "channels": channels})
    return finite(
        {
            "layers": layers,
            "texts": texts,
            "documents": list(documents.values()),
        }
    )


def _words(text: TokenWords) -> dict[str, Any]:
    """Return words, and the number of tokens of those with more or less than one."""
    many = {number: count for number, count in enumerate(text.counts) if count != 1}
    return {"words": list(text.words), "many": many}


def _channel(layer: LayerReport, channel: Row) -> dict[str, Any]:
    number, lags = channel["channel"], layer.lags
    # Lag of the largest correlation, that correlation, and its p.
    lag = lags and [
        float(f[number]) for f in (lags["peak"], lags["correlation"].amax(1), lags["p"])
    ]
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


def _passage_gates(
    model: PreTrainedModel, corpus: Corpus | None, report: ChannelReport
) -> dict[tuple[int, int], Gates]:
    """Return the gates of every passage, by start and layer; each is read once."""
    layers: dict[int, set[int]] = defaultdict(set)
    for layer in report.layers:
        for channel in layer.channels:
            for sequence in channel["sequences"]:
                layers[sequence["position"]].add(layer.layer)
    gates: dict[tuple[int, int], Gates] = {}
    for start in sorted(layers):
        assert corpus is not None
        passage = report.passages[start]
        # As in the report: inside a document, after the tokenizer's prefix of a text.
        prefix = corpus.prefix if passage.offset else []
        ids = [*prefix, *corpus.read_tokens(start, len(passage.text.tokens)).tolist()]
        for curves in read_channels(model, torch.tensor(ids, device=model.device), layers[start]):
            gates[start, curves.layer] = Gates(curves, len(prefix))
    return gates


def _gates(layer: LayerReport, channel: int, texts: list[Gates]) -> dict[str, Any]:
    """Return a channel's gates along its texts, and the largest write and read gate."""
    kinds: tuple[Literal["write", "read"], ...] = ("write", "read")
    largest = [max((float(t.of(kind, channel).max()) for t in texts), default=0) for kind in kinds]
    along: list[dict[str, Any]] = []
    for text in texts:
        kept: dict[str, Any] = {}
        for kind, most in zip(kinds[: 1 if layer.shared_gates else 2], largest, strict=False):
            levels = text.of(kind, channel) * (STEPS / most if most else 0.0)
            kept[kind] = levels.round().int().tolist()
        if text.curves.decay.ndim == 2:
            kept["decay"] = [round(beta, 9) for beta in text.of("decay", channel).tolist()]
        along.append(kept)
    return {"largest": largest, "gates": along}
