"""Self-contained HTML pages: the explorer's scripts and styles in one file, with their data."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from prismlm.direction_marks import marks_shown
from prismlm.files import json_text

ASSETS = Path(__file__).parent / "assets"
STYLES = ("trace.css", "explorer.css", "views.css")
# Inline styles and scripts, and no requests.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
NO_SCRIPT = "<noscript><p class='p-note'>This page needs JavaScript.</p></noscript>"
NOTICE = (
    "/* With lit-html, copyright Google LLC (BSD-3-Clause), and @preact/signals-core, copyright "
    "Preact (MIT); prismlm carries both licences. */\n"
)
IMPORT = re.compile(r'\bimport ?(\{[^}]*\}|\* as \w+) ?from ?"(\.[^"]+)";?')
EXPORTED = re.compile(r"\bexport ?\{([^}]*)\};?")
DECLARED = re.compile(r"^export const (\w+)", re.MULTILINE)
# Any two of these and NONE are 0.1 apart in OKLab, and 0.07 in simulated dichromacy.
COLOURS = {
    "Grammar / Scaffold": "#77bcbf",
    "Misc / Other": "#8a6a91",
    "Morphology": "#ccb1fe",
    "Named Entities": "#f3b539",
    "Medical / Biology": "#b01003",
    "Finance / Econ": "#33dfb2",
    "Environment / Climate": "#3a9ec8",
    "Institutions / Civic / Academic": "#4f45c4",
    "Numbers / Time": "#fc8a61",
    "Science / Tech": "#7173d7",
    "Social / Demographic / Family": "#c97dfc",
    "UX / Meta": "#e35413",
    "Boilerplate / Artifact": "#af5c50",
    "URLs / IDs": "#94228f",
}
NONE = "#94918a"


def html_page(
    title: str, entry: str, data: dict[str, Any], *, styles: Sequence[str] = STYLES
) -> str:
    """Return a complete HTML document that needs nothing but a browser.

    The asset script ``entry`` shows the data in ``.p-root``. A content policy forbids every
    request, text from corpora and models is only data of the script, and direction marks in it are
    made visible.
    """
    shown = escape(marks_shown(title))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{shown}</title>\n<style>{''.join(map(asset, styles))}</style>\n</head>\n"
        f'<body class="prismlm-page x-page">\n<main>\n<h1>{shown}</h1>\n'
        f"{embedded(data)}\n{NO_SCRIPT}\n</main>\n"
        f"<script>{bundle(entry)}</script>\n</body>\n</html>\n"
    )


def html_fragment(entry: str, data: dict[str, Any]) -> str:
    """Return the same content for a notebook, without a document around it."""
    style = "".join(map(asset, STYLES))
    body = f'<div class="x-page">{embedded(data)}</div>'
    return f"<style>{style}</style>\n{body}\n<script>{bundle(entry)}</script>"


def embedded(data: dict[str, Any]) -> str:
    """Return the element that contains the data and is filled by the script.

    The JSON is escaped, so that no text in it can end the script element or start a comment.
    """
    text = marks_shown(json_text(data, separators=(",", ":"), default=str))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<div class="p-root"><script type="application/json">{text}</script></div>'


def bundle(entry: str) -> str:
    """Return an asset script with all its imports as one script without global names.

    Each module becomes a function that is called once and returns its exports.
    """
    names: dict[str, str] = {}
    parts: list[str] = []

    def add(module: str) -> str:
        if module not in names:
            folder = posixpath.dirname(module)

            def imported(match: re.Match[str]) -> str:
                binding = match[1].replace(" as ", ": ").removeprefix("* : ").removeprefix("*: ")
                path = posixpath.normpath(posixpath.join(folder, match[2]))
                return f"const {binding} = {add(path)};"

            text = IMPORT.sub(imported, asset(module))
            exported = DECLARED.findall(text)
            for group in EXPORTED.findall(text):
                exported += [re.sub(r"(\S+) as (\S+)", r"\2: \1", n) for n in group.split(",")]
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
    """Return JSON values with floats rounded to six digits, about the precision of float32."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def largest_shares(group: dict[str, Any], count: int = 5) -> dict[str, Any]:
    """Return shares with the largest ``items`` alone, and number and sum of all others."""
    items, rest = group["items"][:count], group["items"][count:]
    return group | {"items": items, "others": [len(rest), sum(item["share"] for item in rest)]}


def labelled(prototype: int, name: str | None, category: str | None) -> dict[str, Any]:
    """Return a prototype's id, displayed name, category and colour."""
    shown = {"id": prototype, "name": called(name, prototype)}
    return shown | {"category": category, "colour": colour(category)}


def called(name: str | None, prototype: int) -> str:
    """Return the name of a prototype, or its number if it has none."""
    return name or f"prototype {prototype}"


def colour(category: str | None) -> str:
    """Return the colour of a category as ``#rrggbb``; categories not in PRISM's list reuse one."""
    if not category:
        return NONE
    number = sum(ord(letter) * position for position, letter in enumerate(category, 1))
    return COLOURS.get(category) or list(COLOURS.values())[number % len(COLOURS)]
