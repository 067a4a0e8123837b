"""A report of channels as the JSON that the explorer and its static page show, and that page.

Gates are whole thousandths of the channel's largest gate on the page.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prismlm.corpus.pieces import TokenWords, visible
from prismlm.errors import InputError
from prismlm.files import finite
from prismlm.pages.frame import html_page
from prismlm.probes.channels.activations import LayerCurves, read_channels
from prismlm.probes.channels.report import ChannelReport, LayerReport
from prismlm.probes.results import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus

TITLE = "What the channels carry"
TOKENS_SHOWN = 24
FIELDS = ("doc_id", "title", "source", "license", "url")
# Of a channel's largest gate, the unit of its gates.
STEPS = 1000


def channel_page(report: ChannelReport, model: PreTrainedModel, corpus: Corpus | None) -> str:
    """Return a complete HTML document of a report of channels, with a corpus or a text.

    Ten sequences of 256 tokens for each of 32 channels take about 0.5 MB per layer.
    """
    if report.of != "channels":
        raise InputError(f"{report.model or 'the model'} has no channels, so no page of them.")
    counts = sorted({len(layer.channels) for layer in report.layers})
    facts = [
        ("model", report.model or "–"),
        ("layers", ", ".join(str(layer.layer) for layer in report.layers)),
        ("channels in each", " or ".join(map(str, counts))),
    ]
    if report.corpus is not None:
        read = report.corpus
        facts.append(("corpus", f"{read['name']}, {read['split']}"))
        facts.append(("read", f"{read['positions']:,} tokens in sequences of {read['length']}"))
    data = channels_data(model, corpus, report) | {"facts": facts}
    title = f"{TITLE}: {report.model}" if report.model else TITLE
    return html_page(title, "channels_page.js", data, styles=("trace.css", "channels.css"))


def channels_data(
    model: PreTrainedModel, corpus: Corpus | None, report: ChannelReport
) -> dict[str, Any]:
    """Return layers, channels, texts and gates as the scripts read them.

    ``gates`` of a channel has, for each of its texts, the write gates of the tokens, the read gates
    unless the layer shares them, and β if it depends on the token. The report's text comes first.
    """
    gates = _passage_gates(model, corpus, report)
    # Documents by id, and texts by their start in the corpus; the report's own has none.
    documents: dict[str, dict[str, Any]] = {}
    texts: dict[int | None, dict[str, Any]] = {}
    if report.text is not None:
        texts[None] = _words(report.text.text) | {"doc": None, "at": 0}
        gates |= {(None, curves.layer): _gates_of(curves) for curves in report.text.curves}
    for start, passage in report.passages.items():
        document = {name: passage.document[name] for name in FIELDS}
        documents.setdefault(document["doc_id"], document)
        at = {"doc": list(documents).index(document["doc_id"]), "at": passage.offset}
        texts[start] = _words(passage.text) | at
    numbers = {start: number for number, start in enumerate(texts)}
    layers: list[dict[str, Any]] = []
    for layer in report.layers:
        channels: list[dict[str, Any]] = []
        for channel in layer.channels:
            totals: dict[int | None, float | None] = {} if report.text is None else {None: None}
            totals |= {row["position"]: row["total"] for row in channel["sequences"]}
            along = [gates[start, layer.layer] for start in totals]
            shown = _along(along, channel["channel"], layer.shared_gates)
            shown["texts"] = [[numbers[start], total] for start, total in totals.items()]
            channels.append(_channel(layer, channel) | shown)
        layers.append({"layer": layer.layer, "shared": layer.shared_gates, "channels": channels})
    value = {"layers": layers, "texts": list(texts.values())}
    return finite(value | {"documents": list(documents.values())})


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
    tokens = [
        [visible(token["text"]), token["count"], token["gate"]]
        for token in channel["tokens"][:TOKENS_SHOWN]
    ]
    figures = {"halfLife": channel["half_life"], "repetition": channel["repetition"]}
    return {"id": number, "decay": channel["decay"], **figures, "tokens": tokens, "lag": lag}


def _gates_of(curves: LayerCurves, skipped: int = 0) -> dict[str, Tensor]:
    """Return gates [T, R] along a text by kind, and β if it depends on the token."""
    kinds = ("write", "read", "decay") if curves.decay.ndim == 2 else ("write", "read")
    return {kind: getattr(curves, kind)[skipped:] for kind in kinds}


def _passage_gates(
    model: PreTrainedModel, corpus: Corpus | None, report: ChannelReport
) -> dict[tuple[int | None, int], dict[str, Tensor]]:
    """Return the gates of every passage, by start and layer; each is read once."""
    layers: dict[int, set[int]] = defaultdict(set)
    for layer in report.layers:
        for channel in layer.channels:
            for sequence in channel["sequences"]:
                layers[sequence["position"]].add(layer.layer)
    gates: dict[tuple[int | None, int], dict[str, Tensor]] = {}
    for start in sorted(layers):
        assert corpus is not None
        passage = report.passages[start]
        # As in the report: inside a document, after the tokenizer's prefix of a text.
        prefix = corpus.prefix if passage.offset else []
        ids = [*prefix, *corpus.read_tokens(start, len(passage.text.tokens)).tolist()]
        for curves in read_channels(model, torch.tensor(ids, device=model.device), layers[start]):
            gates[start, curves.layer] = _gates_of(curves, len(prefix))
    return gates


def _along(texts: list[dict[str, Tensor]], channel: int, shared: bool) -> dict[str, Any]:
    """Return a channel's gates along its texts, and the largest write and read gate."""
    own = [{kind: gates[:, channel] for kind, gates in text.items()} for text in texts]
    largest = {
        kind: max((float(text[kind].max()) for text in own), default=0.0)
        for kind in ("write", "read")
    }
    gates: list[dict[str, Any]] = []
    for text in own:
        kept: dict[str, Any] = {}
        for kind in ("write",) if shared else ("write", "read"):
            levels = text[kind] * (STEPS / largest[kind] if largest[kind] else 0.0)
            kept[kind] = levels.round().int().tolist()
        if "decay" in text:
            kept["decay"] = [round(beta, 9) for beta in text["decay"].tolist()]
        gates.append(kept)
    return {"largest": list(largest.values()), "gates": gates}
