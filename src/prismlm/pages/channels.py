"""A page to read channels on: what writes into each, and what a position finds there.

It needs nothing but a browser: one file, no requests, no fonts, no libraries.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from prismlm.errors import InputError
from prismlm.instruments.channels.layer_metrics import Kind, LayerMetrics
from prismlm.instruments.channels.report import ChannelReport, Locality
from prismlm.instruments.channels.wording import lag_words, locality_words
from prismlm.pages.channels_data import page_data
from prismlm.pages.frame import header, html_page
from prismlm.pages.trace import json_for_script

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus

TITLE = "What the channels carry"
CAVEAT = (
    "Sequences are those that write most into a channel; they show what it holds, and are no proof "
    "of what the model uses it for. Masking a channel is the test of that."
)
HEADINGS = (
    ("layer", "from 0, the first"),
    ("gate", "which one"),
    ("L1 sparsity", "largest over mean, 1 to R"),
    ("Gini", "0 if all are equal, 1 − 1/R if there is one alone"),
    ("entropy", "nats"),
    ("of ln R", "entropy as a share of its most"),
    ("information", "mutual information with the token, nats"),
    ("corrected", "after Miller and Madow"),
)


def channel_page(report: ChannelReport, model: PreTrainedModel, corpus: Corpus | None) -> str:
    """Return a complete HTML document of a report of channels.

    Everything that comes from texts and corpora is escaped; only http and https addresses become
    links, and a content policy forbids every request. Size: a byte for each token and gate of
    every kept sequence, a third more in base64, beside the texts; 10 sequences of 256 tokens of 32
    channels take 0.22 MB for each layer.

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
    data = json_for_script(page_data(model, corpus, report))
    title = f"{TITLE}: {report.model}" if report.model else TITLE
    body = (
        f'<h1>{TITLE}</h1>\n<article class="prismlm p-channels">\n{_header(report)}\n'
        '<div class="c-layers" role="group" aria-label="Layer"></div>\n'
        '<div class="c-body">\n<div class="c-list" role="listbox" aria-label="Channels of the '
        'layer; arrow keys move"></div>\n<section class="c-main"></section>\n'
        "</div>\n<noscript><p class='p-note'>Choosing channels needs JavaScript; the figures "
        f"below do not.</p></noscript>\n{_findings(report)}\n"
        f'<p class="p-caveat">{escape(CAVEAT)}</p>\n'
        f'<script type="application/json">{data}</script>\n</article>'
    )
    scripts = ("parts.js", "gates.js", "channel_texts.js", "channels.js", "channels_page.js")
    return html_page(title, body, styles=("trace.css", "channels.css"), scripts=scripts)


def _header(report: ChannelReport) -> str:
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
    return header(facts)


def _findings(report: ChannelReport) -> str:
    if report.corpus is None:
        return ""
    head = "".join(f'<th scope="col" title="{title}">{name}</th>' for name, title in HEADINGS)
    rows = "".join(
        _row(layer.layer, kind, metrics)
        for layer in report.layers
        for kind, metrics in layer.metrics.items()
    )
    lags = "".join(
        f"<li><b>layer {layer.layer}</b> {escape(lag_words(layer))}</li>" for layer in report.layers
    )
    return (
        '<section class="c-findings">\n<div><h2>Figures of the layers</h2>'
        f'<div class="c-scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        f"</div></div>\n<div>{_locality(report.locality)}"
        f"<h2>Is a channel read before it is written?</h2><ul>{lags}</ul></div>\n</section>"
    )


def _row(layer: int, kind: Kind, found: LayerMetrics) -> str:
    figures = (
        f"{found.sparsity_ratio:.2f}",
        f"{found.gini:.3f}",
        f"{found.entropy:.3f}",
        f"{found.entropy_share:.0%}",
        f"{found.mutual_information:.3f}",
        f"{found.mutual_information_corrected:.3f}".replace("-", "−"),
    )
    cells = "".join(f'<td class="p-number">{figure}</td>' for figure in figures)
    return f'<tr><td class="p-number">{layer}</td><td>{kind}</td>{cells}</tr>'


def _locality(found: Locality | None) -> str:
    if found is None:
        return ""
    lines = list(locality_words(found))
    if found.quartiles is not None:
        means = ", ".join(f"{mean:.3f}" for mean in found.quartiles.means)
        bounds = ", ".join(f"{bound:.3g}" for bound in found.quartiles.bounds)
        lines.append(f"mean repetition by quartile of half-life: {means}; bounds {bounds}")
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>Do channels of a short half-life keep to few tokens?</h2><ul>{items}</ul>"
