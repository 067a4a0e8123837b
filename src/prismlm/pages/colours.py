"""The colour of each category, on pages and in a terminal."""

from __future__ import annotations

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


def colour(category: str | None) -> str:
    """Return the colour of a category as ``#rrggbb``; categories not in PRISM's list reuse one."""
    if not category:
        return NONE
    number = sum(ord(letter) * position for position, letter in enumerate(category, 1))
    return COLOURS.get(category) or list(COLOURS.values())[number % len(COLOURS)]
