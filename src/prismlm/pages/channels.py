"""A page to read channels on: what writes into each, and what a position finds there.

It needs nothing but a browser: one file, no requests, no fonts, no libraries.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from prismlm.errors import InputError
from prismlm.pages.channels_data import page_data
from prismlm.pages.frame import header, html_page
from prismlm.pages.trace import json_for_script
from prismlm.probes.channels.report import ChannelReport
from prismlm.probes.results import Table, figure_at, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus

TITLE = "What the channels carry"
CAVEAT = (
    "Sequences are those that write most into a channel; they show what it holds, and are no proof "
    "of what the model uses it for. Masking a channel is the test of that."
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
    findings = "".join(map(_table, report.tables))
    if findings:
        findings = f'<section class="c-findings">{findings}</section>'
    body = (
        f'<h1>{TITLE}</h1>\n<article class="prismlm p-channels">\n{_header(report)}\n'
        '<div class="c-layers" role="group" aria-label="Layer"></div>\n'
        '<div class="c-body">\n<div class="c-list" role="listbox" aria-label="Channels of the '
        'layer; arrow keys move"></div>\n<section class="c-main"></section>\n'
        "</div>\n<noscript><p class='p-note'>Choosing channels needs JavaScript; the figures "
        f"below do not.</p></noscript>\n{findings}\n"
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


def _table(table: Table) -> str:
    """Return a table with its facts under it."""
    head = "".join(f'<th scope="col">{_words(name)}</th>' for name in table.columns)
    rows = "".join(
        "".join(
            f'<td class="p-number">{escape(text_of(figure_at(row, name), form))}</td>'
            for name, form in table.columns.items()
        ).join(("<tr>", "</tr>"))
        for row in table.rows
    )
    facts = "".join(
        f"<li>{_words(name)} {escape(text_of(value, '' if isinstance(value, int) else '.3g'))}</li>"
        for name, value in table.facts.items()
    )
    return (
        f'<div><h2>{escape(table.title)}</h2><div class="c-scroll"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div><ul>{facts}</ul></div>"
    )


def _words(name: str) -> str:
    return escape(name.replace("_", " "))
