"""An audit as one HTML page that needs nothing but a browser: no script, no request."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from prismlm.explain.support import WORDS, levels_in_words
from prismlm.index.layout import trained_on_words
from prismlm.index.where import UNKNOWN
from prismlm.pages.frame import html_page
from prismlm.pages.trace import CAVEAT
from prismlm.pages.trace_data import safe_link

BARS = 12
HEADINGS = {"source": "By source", "domain": "By domain", "license": "By licence"}
METHODS = {
    "evidence": "positive evidence for each token",
    "contexts": "positive evidence, over kept contexts",
    "source": "A = Σ α μ, PRISM's own measure",
}


def audit_page(summary: dict[str, Any]) -> str:
    """Return the page of an audit's summary (:meth:`prismlm.explain.audit.Audit.to_dict`).

    Everything that comes from texts and corpora is escaped; only http and https addresses become
    links.
    """
    title = "What these texts rely on"
    body = (
        f"<h1>{title}</h1>\n"
        f'<article class="prismlm p-audit">\n{_header(summary)}\n{_figures(summary)}\n'
        f'<section class="p-columns-3 p-block">{"".join(_shares(summary))}</section>\n'
        f"{_documents(summary['documents'])}\n{_texts(summary)}\n"
        f'<p class="p-caveat">{escape(CAVEAT)}</p>\n</article>'
    )
    return html_page(title, body, styles=("trace.css", "audit.css"))


def _header(summary: dict[str, Any]) -> str:
    corpus = summary["corpus"]
    facts = [
        ("model", summary["model"]),
        ("lens", summary["lens"]),
        ("corpus", f"{corpus['tokens']:,} tokens, {corpus['documents']:,} documents"),
        ("trained on it", trained_on_words(corpus["trained_on"], corpus["split"])),
        ("shares of", METHODS[summary["method"]]),
        ("windows", f"{summary['window']} tokens every {summary['stride']}"),
    ]
    for column, values in summary["where"].items():
        facts.append((f"only {column}", " or ".join(values)))
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    return f'<header class="p-head"><dl>{items}</dl></header>'


def _figures(summary: dict[str, Any]) -> str:
    shares = summary["shares"]["source"]
    figures = [
        (f"{summary['texts']:,}", "texts"),
        (f"{summary['predictions']:,}", "predictions"),
        (_number(summary["ce"]), "cross-entropy, nats"),
        (_percent(summary["explained_share"]), "explained share, median"),
        (_percent(shares["unattributed"]), "unattributed"),
    ]
    if summary["support"] is not None:
        figures.append((levels_in_words(summary["support"]["levels"]), "texts by support"))
    if summary["where"]:
        figures.insert(4, (_percent(sum(i["share"] for i in shares["items"])), "matching"))
    cells = "".join(
        f'<div class="p-figure"><b>{escape(value)}</b><span>{label}</span></div>'
        for value, label in figures
    )
    return f'<div class="p-figures p-block">{cells}</div>'


def _shares(summary: dict[str, Any]) -> Iterable[str]:
    for by, heading in HEADINGS.items():
        shares = summary["shares"][by]
        items = [
            (item["key"], item["share"], "", item.get("base_rate")) for item in shares["items"]
        ]
        shown, others = items[:BARS], items[BARS:]
        if others:
            rest = sum(share for _, share, _, _ in others)
            shown.append((f"{len(others)} more", rest, "p-rest", None))
        if summary["where"]:
            shown.append(("elsewhere", shares["elsewhere"], "p-rest", None))
        shown.append(("unattributed", shares["unattributed"], "p-grey", None))
        bars = "".join(_bar(*row) for row in shown)
        yield f'<section><h3>{heading}</h3><ul class="p-bars">{bars}</ul></section>'


def _bar(label: str, share: float, kind: str, base_rate: float | None) -> str:
    name = escape(label)
    width = 100 * min(max(share, 0.0), 1.0)
    mark, lift = "", ""
    if base_rate:
        mark = f'<span class="p-base" style="left:{100 * min(base_rate, 1.0):.2f}%"></span>'
        told = f"{_percent(base_rate)} of the corpus"
        lift = f'<span class="p-lift" title="{told}">× {share / base_rate:.1f}</span>'
    return (
        f'<li class="{kind}"><span class="p-key-name" title="{name}">{name}</span>'
        f'<span class="p-track"><span class="p-fill" style="width:{width:.2f}%"></span>{mark}'
        f'</span><span class="p-number">{_percent(share)}</span>{lift}</li>'
    )


def _documents(documents: list[dict[str, Any]]) -> str:
    rows: list[str] = []
    for document in documents:
        name = escape(document["title"] or document["doc_id"])
        link = safe_link(document["url"])
        if link:
            name = f'<a href="{escape(link)}" rel="noopener noreferrer nofollow">{name}</a>'
        rows.append(
            f"<tr><td class='p-number'>{_percent(document['share'], 2)}</td><td>{name}"
            f"<small>{escape(document['doc_id'])}</small></td>"
            f"<td>{escape(document['source'] or '–')}</td>"
            f"<td>{escape(document['license'] or UNKNOWN)}</td>"
            f"<td class='p-passage'>{escape(document['text'] or '')}</td></tr>"
        )
    head = "<tr><th>share</th><th>document</th><th>source</th><th>licence</th><th>place</th></tr>"
    return _table("Documents these texts rely on most", head, rows, "None stands behind them.")


def _texts(summary: dict[str, Any]) -> str:
    where = summary["where"]
    named = " and ".join(f"{c} {' or '.join(v)}" for c, v in where.items())
    matching = f"Texts that rely most on {named}" if where else "Texts that lean on one source"
    head = "<tr><th>share</th><th>text</th><th>source</th></tr>"
    plain = "<tr><th>share</th><th>text</th></tr>"
    supported = ""
    if summary["support"] is not None:
        supported = _table(
            "Texts with the least support",
            "<tr><th>score</th><th>text</th><th>support</th></tr>",
            [_supported(entry) for entry in summary["least_supported"]],
            "No text was read.",
        )
    return (
        supported
        + _table(
            matching,
            plain if where else head,
            [_text(entry, with_key=not where) for entry in summary["most_matching"]],
            "No text was read.",
        )
        + _table(
            "Texts with the largest unattributed share",
            plain,
            [_text(entry, with_key=False) for entry in summary["least_attributed"]],
            "No text was read.",
        )
    )


def _supported(entry: dict[str, Any]) -> str:
    words = WORDS[entry["level"]]
    level = f"<td>{entry['level']}<small>{words}</small></td>"
    return f"<tr><td class='p-number'>{entry['score']:.2f}</td>{_named(entry)}{level}</tr>"


def _text(entry: dict[str, Any], *, with_key: bool) -> str:
    key = f"<td>{escape(entry.get('key', ''))}</td>" if with_key else ""
    return f"<tr><td class='p-number'>{_percent(entry['share'])}</td>{_named(entry)}{key}</tr>"


def _named(entry: dict[str, Any]) -> str:
    return f"<td>{escape(entry['opening'])}…<small>{escape(entry['text_id'])}</small></td>"


def _table(title: str, head: str, rows: list[str], nothing: str) -> str:
    body = (
        f"<div class='p-scroll'><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
        "</div>"
        if rows
        else f"<p class='p-note'>{nothing}</p>"
    )
    return f"<section class='p-block'><h2>{escape(title)}</h2>{body}</section>"


def _percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{share:.{digits}%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
