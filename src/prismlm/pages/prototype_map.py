"""All prototypes of a lens on one page: a map to look around, names to search, a card for each."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any

import numpy as np

from prismlm.lens.labels.map import regions, worth_seeing
from prismlm.lens.lens import Lens
from prismlm.pages.colours import colour
from prismlm.pages.frame import html_page
from prismlm.pages.trace import json_for_script

SCRIPTS = ("parts.js", "plane.js", "map.js")
CONTEXTS, BEFORE, AFTER, TOKENS = 3, 90, 40, 8
NO_CATEGORY = "no category"


def prototype_map_page(lens: Lens, title: str = "Prototypes") -> str:
    """Return a page with every prototype of a lens that has a map.

    Everything that comes from texts, corpora and labels is data of the script, which writes it as
    text alone.

    Args:
        lens: whose table has ``x`` and ``y``.
        title: as text.
    """
    place = np.argsort(lens.leading).tolist()
    rows = [
        _row(lens, row, place[number]) for number, row in enumerate(lens.prototypes.to_pylist())
    ]
    seen = Counter(lens.categories)
    categories = [name for name, _ in seen.most_common()]
    for row in rows:
        row["category"] = categories.index(row["category"])
    data = json_for_script(
        {
            "categories": [[name or NO_CATEGORY, colour(name)] for name in categories],
            "prototypes": rows,
            "regions": regions(lens),
            "opening": worth_seeing(lens),
        }
    )
    body = (
        f"<h1>{escape(title)}</h1>\n"
        '<article class="prismlm m-map">\n'
        f'<header class="p-head"><p class="p-note">{len(rows):,} prototypes. Neighbours on the map '
        "point in similar directions. Names without words of their own read: last words read → "
        "words that come next (words of the text around).</p></header>\n"
        '<div class="m-tools"><input type="search" class="m-search" placeholder="search names, '
        'tokens, texts" aria-label="Search names, tokens and texts"><span class="m-count" '
        'aria-live="polite"></span></div>\n'
        '<div class="m-legend" role="group" aria-label="Categories"></div>\n'
        '<div class="m-body"><canvas class="m-canvas" tabindex="0" aria-label="Map of prototypes; '
        'arrow keys move to the next one"></canvas>'
        '<section class="m-card" aria-live="polite"></section></div>\n'
        "<noscript><p class='p-note'>The map needs JavaScript.</p></noscript>\n"
        f'<script type="application/json" class="p-data">{data}</script>\n</article>'
    )
    return html_page(title, body, styles=("trace.css", "map.css"), scripts=SCRIPTS)


def _row(lens: Lens, row: dict[str, Any], place: int) -> dict[str, Any]:
    places = lens.rows_of(row["prototype"])
    contexts = lens.index.slice(places.start, min(CONTEXTS, places.stop - places.start))
    return {
        "x": round(row["x"], 3),
        "y": round(row["y"], 3),
        "name": row["name"],
        "category": row["category"],
        "about": row["description"] or "",
        "role": row["role"] or "",
        "tags": row["tags"] or [],
        "usage": row["usage"],
        "place": place,
        "listed": bool(lens.listed[row["prototype"]]),
        "score": row["label_score"],
        "tokens": [
            [token, round(value, 2)]
            for token, value in zip(row["top_tokens"], row["top_values"], strict=True)
        ][:TOKENS],
        "contexts": [
            [
                (one["before"] or "")[-BEFORE:],
                one["token"] or "",
                (one["after"] or "")[:AFTER],
                one["title"] or one["doc_id"],
            ]
            for one in contexts.to_pylist()
        ],
    }
