"""An audit as one HTML page that needs nothing but a browser: no script, no request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from prismlm.explain.support import WORDS, levels_in_words
from prismlm.lens.layout import trained_on_words
from prismlm.lens.where import UNKNOWN
from prismlm.pages.frame import header, html_page
from prismlm.pages.trace import CAVEAT
from prismlm.pages.trace_data import safe_link

BARS = 12
# The shortest beginning that is left out, and the characters of a text that are shown.
LEAST_CUT, OPENING_SHOWN = 16, 120
HEADINGS = {"source": "By source", "domain": "By domain", "license": "By licence"}
METHODS = {
    "evidence": "positive evidence for each token",
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
    return header(facts)


def _figures(summary: dict[str, Any]) -> str:
    shares = summary["shares"]["source"]
    figures = [
        (f"{summary['texts']:,}", "texts"),
        (f"{summary['predictions']:,}", "predictions"),
        ("–" if summary["ce"] is None else f"{summary['ce']:.3f}", "cross-entropy, nats"),
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
    notes = "".join(f'<p class="p-caveat">{escape(note)}</p>' for note in summary["notes"])
    return f'<div class="p-figures p-block">{cells}</div>{notes}'


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
    width = 100 * min(max(share, 0.0), 1.0)
    mark, lift = "", ""
    if base_rate:
        mark = f'<span class="p-base" style="left:{100 * min(base_rate, 1.0):.2f}%"></span>'
        told = f"{_percent(base_rate)} of the corpus"
        lift = f'<span class="p-lift" title="{told}">× {share / base_rate:.1f}</span>'
    name = escape(label)
    return (
        f'<li class="{kind}"><span class="p-key-name" title="{name}">{name}</span>'
        f'<span class="p-track"><span class="p-fill" style="width:{width:.2f}%"></span>{mark}'
        f'</span><span class="p-number">{_percent(share)}</span>{lift}</li>'
    )


def _documents(documents: list[dict[str, Any]]) -> str:
    rows = [
        (
            _percent(document["share"], 2),
            _linked(document),
            escape(document["source"] or UNKNOWN),
            escape(document["license"] or UNKNOWN),
            _place(document),
        )
        for document in documents
    ]
    columns = ("share", "document", "source", "licence", "place")
    return _table("Documents these texts rely on most", columns, rows, "None stands behind them.")


def _linked(document: dict[str, Any]) -> str:
    name, link = escape(document["title"] or document["doc_id"]), safe_link(document["url"])
    if link is None:
        return f"<b>{name}</b>"
    return f'<a href="{escape(link)}" rel="noopener noreferrer nofollow">{name}</a>'


def _place(document: dict[str, Any]) -> str:
    """Return a place with its token marked, as it is on a terminal."""
    if document["around"] is None:
        return ""
    before, token, after = (escape(part) for part in document["around"])
    word = token.lstrip()
    space = token[: len(token) - len(word)]
    return f"…{before}{space}<mark>{word or '␣'}</mark>{after}…"


def _texts(summary: dict[str, Any]) -> str:
    where = summary["where"]
    named = " and ".join(f"{c} {' or '.join(v)}" for c, v in where.items())
    matching = f"Texts that rely most on {named}" if where else "Texts that lean on one source"
    tables: list[tuple[str, str, Sequence[str]]] = [
        ("Texts with the least support", "least_supported", ("score", "text", "support")),
        (matching, "most_matching", ("share", "text") if where else ("share", "text", "source")),
        ("Texts with the largest unattributed share", "least_attributed", ("share", "text")),
    ]
    cell: dict[str, Callable[[dict[str, Any]], str]] = {
        "score": lambda entry: f"{entry['score']:.2f}",
        "share": lambda entry: _percent(entry["share"]),
        "source": lambda entry: escape(entry["key"]),
        "support": lambda entry: f"{entry['level']}<small>{WORDS[entry['level']]}</small>",
    }
    return "".join(
        _table(
            title,
            columns,
            [
                [name if column == "text" else cell[column](entry) for column in columns]
                for entry, name in zip(summary[key], _named(summary[key]), strict=True)
            ],
            "No text was read.",
        )
        for title, key, columns in tables[summary["support"] is None :]
    )


def _named(entries: list[dict[str, Any]]) -> list[str]:
    """Return the beginning of each text with its id; what most of them begin with is left out."""
    openings = told_apart([" ".join(entry["opening"].split()) for entry in entries])
    ids = told_apart([entry["text_id"] for entry in entries])
    return [
        f"{escape(opening[:OPENING_SHOWN])}…{_small(name, entry['text_id'])}"
        for entry, opening, name in zip(entries, openings, ids, strict=True)
    ]


def _small(name: str, whole: str) -> str:
    title = "" if name == whole else f' title="{escape(whole)}"'
    return f"<small{title}>{escape(name)}</small>"


def told_apart(texts: Sequence[str]) -> list[str]:
    """Return texts without the beginning that at least half of them share, where it is long."""
    longest, shared = max(map(len, texts), default=0), ""
    for length in range(LEAST_CUT, longest):
        start, times = Counter(text[:length] for text in texts).most_common(1)[0]
        if times < max(2, len(texts) / 2) or len(start) < length:
            break
        shared = start
    # Cut where a word or the name of a folder begins.
    shared = shared[: max(shared.rfind(mark) for mark in " /") + 1]
    return [
        f"…{text[len(shared) :]}" if shared and text.startswith(shared) else text for text in texts
    ]


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> str:
    """Return rows under a heading; on a phone each is a card, so cells name their columns."""
    if not rows:
        return f"<section class='p-block'><h2>{escape(title)}</h2><p>{nothing}</p></section>"
    head = "".join(f"<th>{column}</th>" for column in columns)
    cells = (
        "".join(f'<td data-label="{c}">{cell}</td>' for c, cell in zip(columns, row, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return (
        f"<section class='p-block'><h2>{escape(title)}</h2><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></section>"
    )


def _percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{share:.{digits}%}"
