"""Marks that turn the direction of writing, shown: text from outside moves nothing beside it."""

from __future__ import annotations

# ALM, LRM and RLM, separators of lines, embeddings and overrides, isolates, and what ends them.
_SHOWN = {
    code: f"‹U+{code:04X}›"
    for code in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}


def marks_shown(text: str) -> str:
    """Return a text in which each mark stands as its code, ``‹U+202E›``, and turns nothing."""
    return text.translate(_SHOWN)
