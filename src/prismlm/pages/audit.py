"""An audit as a self-contained HTML page."""

from __future__ import annotations

from typing import Any

from prismlm.lens.layout import trained_on_words
from prismlm.pages.frame import STYLES, html_page, rounded


def audit_page(summary: dict[str, Any]) -> str:
    """Return the page of an audit's summary (:meth:`prismlm.explain.audit.Audit.to_dict`)."""
    data = {"summary": audit_data(summary)}
    styles = (*STYLES, "reading.css", "audit.css")
    return html_page("What these texts rely on", "audit_page.js", data, styles=styles)


def audit_data(summary: dict[str, Any]) -> dict[str, Any]:
    """Return an audit's summary as the scripts read it."""
    corpus = summary["corpus"]
    trained_on = trained_on_words(corpus["trained_on"], corpus["split"])
    return rounded(summary | {"corpus": corpus | {"trained_on": trained_on}})
