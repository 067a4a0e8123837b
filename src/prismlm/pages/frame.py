"""The frame of every page, the files that are written into it, and how a page is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from prismlm.direction_marks import marks_shown
from prismlm.outputs import write_text

# What a page may do: its own style and script, and not one request.
STYLE_ONLY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE_AND_SCRIPT = f"{STYLE_ONLY}; script-src 'unsafe-inline'"


def html_page(
    title: str, body: str, *, styles: tuple[str, ...], scripts: Sequence[str] = ()
) -> str:
    """Return a complete HTML document that needs nothing but a browser.

    A content policy forbids every request, and no mark in a text turns the direction of writing.

    Args:
        title: as text.
        body: what stands in ``main``, as HTML.
        styles: names of style sheets among the assets.
        scripts: names of scripts among them, which see what those before them define.
    """
    policy = STYLE_AND_SCRIPT if scripts else STYLE_ONLY
    title, body = marks_shown(title), marks_shown(body)
    style = "".join(map(asset, styles))
    end = f"<script>{joined(scripts)}</script>\n" if scripts else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n"
        f'<body class="prismlm-page">\n<main>\n{body}\n</main>\n{end}</body>\n</html>\n'
    )


def header(facts: Iterable[tuple[str, str]]) -> str:
    """Return the head of an article: facts as names and values."""
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    return f'<header class="p-head"><dl>{items}</dl></header>'


def joined(scripts: Sequence[str]) -> str:
    """Return scripts as one that leaves no name behind.

    What a module exports it defines here, and what it imports must be of one that stands before it.
    """
    text = "".join(map(asset, scripts))
    return "(() => {\n" + re.sub("^(export |import .*\n)", "", text, flags=re.MULTILINE) + "})();"


def asset(name: str) -> str:
    """Return the text of a style sheet or script of the pages."""
    return files("prismlm.pages").joinpath("assets", name).read_text(encoding="utf-8")


def write_page(html: str, path: Path | str) -> None:
    """Write a finished page to a file, whole or not at all."""
    write_text(path, html)
