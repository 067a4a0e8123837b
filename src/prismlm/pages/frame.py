"""The frame of every page: scripts and styles of the explorer in one file, with their data."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from prismlm.direction_marks import marks_shown
from prismlm.files import json_text
from prismlm.outputs import write_text

ASSETS = Path(__file__).parent / "assets"
STYLES = ("trace.css", "explorer.css", "views.css")
# What a page may do: its own style and script, and not one request.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
NO_SCRIPT = "<noscript><p class='p-note'>This page needs JavaScript.</p></noscript>"
NOTICE = (
    "/* With lit-html, copyright Google LLC (BSD-3-Clause), and @preact/signals-core, copyright "
    "Preact (MIT); prismlm carries both licences. */\n"
)
IMPORT = re.compile(r'\bimport ?(\{[^}]*\}|\* as \w+) ?from ?"(\.[^"]+)";?')
EXPORTED = re.compile(r"\bexport ?\{([^}]*)\};?")
DECLARED = re.compile(r"^export const (\w+)", re.MULTILINE)


def html_page(
    title: str,
    entry: str,
    data: dict[str, Any],
    *,
    styles: Sequence[str] = STYLES,
    without_script: str = NO_SCRIPT,
) -> str:
    """Return a complete HTML document that needs nothing but a browser.

    A content policy forbids every request, text from corpora and models is data of the script, and
    no mark in it turns the direction of writing.

    Args:
        title: as text.
        entry: the script among the assets that shows the data in ``.p-root``.
        data: JSON values.
        styles: style sheets among the assets.
        without_script: HTML for browsers that run none.
    """
    shown = escape(marks_shown(title))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{shown}</title>\n<style>{''.join(map(asset, styles))}</style>\n</head>\n"
        f'<body class="prismlm-page x-page">\n<main>\n<h1>{shown}</h1>\n'
        f"{embedded(data)}\n{without_script}\n</main>\n"
        f"<script>{bundle(entry)}</script>\n</body>\n</html>\n"
    )


def embedded(data: dict[str, Any]) -> str:
    """Return the element that a script fills with what its data show."""
    text = json_for_script(data)
    return f'<div class="p-root"><script type="application/json">{text}</script></div>'


def json_for_script(value: dict[str, Any]) -> str:
    """Return JSON, escaped so that no text in it can end a script element or start a comment."""
    text = marks_shown(json_text(value, separators=(",", ":"), default=str))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def bundle(entry: str) -> str:
    """Return a script of the assets and all that it imports, as one that leaves no name behind.

    Each module becomes a function that is called once and returns what it exports.
    """
    names: dict[str, str] = {}
    parts: list[str] = []

    def add(module: str) -> str:
        if module not in names:
            folder = posixpath.dirname(module)

            def imported(found: re.Match[str]) -> str:
                own = found[1].replace(" as ", ": ").removeprefix("* : ").removeprefix("*: ")
                path = posixpath.normpath(posixpath.join(folder, found[2]))
                return f"const {own} = {add(path)};"

            text = IMPORT.sub(imported, asset(module))
            exported = DECLARED.findall(text)
            for group in EXPORTED.findall(text):
                exported += [re.sub(r"(\S+) as (\S+)", r"\2: \1", one) for one in group.split(",")]
            text = DECLARED.sub(r"const \1", EXPORTED.sub("", text))
            text = re.sub("//# sourceMappingURL.*", "", text)
            names[module] = f"module{len(names)}"
            returned = f"return {{ {', '.join(exported)} }};"
            parts.append(f"const {names[module]} = (() => {{\n{text}\n{returned}\n}})();\n")
        return names[module]

    add(entry)
    return NOTICE + "(() => {\n" + "".join(parts) + "})();"


def asset(name: str) -> str:
    """Return the text of a style sheet or script of the pages."""
    return (ASSETS / name).read_text(encoding="utf-8")


def rounded(value: Any) -> Any:
    """Return JSON values with six digits of each figure: of float32, more is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def called(name: str | None, prototype: int) -> str:
    """Return what a prototype is called: by its number where it has no name."""
    return name or f"prototype {prototype}"


def write_page(html: str, path: Path | str) -> None:
    """Write a finished page to a file, whole or not at all."""
    write_text(path, html)
