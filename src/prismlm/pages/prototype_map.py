"""All prototypes of a lens: the columns of the explorer's map, and a page with the cards."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from prismlm.lens.labels.catalogue import Catalogue
from prismlm.lens.labels.map import regions
from prismlm.lens.lens import Lens
from prismlm.pages.frame import called, colour, html_page, labelled, rounded

# Digits of coordinates: a map is some tens wide, and a screen some thousand pixels.
DIGITS = 3
CONTEXTS, TOKENS = 3, 8


def prototype_map_page(lens: Lens, title: str = "Prototypes") -> str:
    """Return a page with every prototype of a lens that has a map."""
    catalogue = Catalogue(lens)
    cards = [card_data(catalogue.card(number)) for number in range(lens.num_prototypes)]
    for card in cards:
        card["contexts"] = card["contexts"][:CONTEXTS]
        card["tokens"] = card["tokens"][:TOKENS]
    data = {"map": map_data(lens), "cards": rounded(cards)}
    return html_page(title, "map_page.js", data)


def map_data(lens: Lens) -> dict[str, Any]:
    """Return columns with an entry for each prototype; its category is a number, −1 for none."""
    table, names = lens.prototypes, sorted({name for name in lens.categories if name is not None})
    counts = Counter(lens.categories)
    return {
        "x": table["x"].to_numpy().astype(np.float64).round(DIGITS).tolist(),
        "y": table["y"].to_numpy().astype(np.float64).round(DIGITS).tolist(),
        "category": [-1 if name is None else names.index(name) for name in lens.categories],
        "names": [called(name, number) for number, name in enumerate(lens.names)],
        "leading": lens.by_size.tolist(),
        "listed": lens.listed.tolist(),
        "categories": [
            {"name": name, "colour": colour(name), "prototypes": counts[name]} for name in names
        ],
        "regions": regions(lens),
    }


def card_data(card: dict[str, Any]) -> dict[str, Any]:
    """Return a catalogue entry with its displayed name and the colour of its category."""
    return card | labelled(card["id"], card["name"], card["category"])
