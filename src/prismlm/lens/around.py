"""The text around a place of the corpus."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

# Of a sentence that does not end, so many characters are kept on either side.
MOST_CHARACTERS = 240
# Marks of chats and texts end one too, and are in none.
_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|\n+|<\|[^|<>\s]*\|>|</?s>")


class Around(NamedTuple):
    """The text at a place of the corpus: what comes before it, the token there, what follows."""

    before: str
    token: str
    after: str

    def __str__(self) -> str:
        return f"{self.before}{self.token}{self.after}"


def sentence_around(text: str, left: int, right: int) -> Around:
    """Return the sentence that the characters from ``left`` to ``right`` of a text lie in.

    It is cut to 240 characters on either side.
    """
    begin = max(0, left - MOST_CHARACTERS)
    # A token may begin with the space that ends the sentence before.
    first = next((i for i in range(left, right) if not text[i].isspace()), left)
    ends = [match.end() for match in _END.finditer(text, begin, first)]
    begin = min(ends[-1], left) if ends else begin
    end = min(len(text), right + MOST_CHARACTERS)
    found = _END.search(text, right, end)
    return Around(text[begin:left], text[left:right], text[right : found.start() if found else end])


def sentences(text: str) -> list[tuple[int, int]]:
    """Return where the sentences of a text begin and end, without the blanks between them."""
    edges = [0, *(one.end() for one in _END.finditer(text)), len(text)]
    found: list[tuple[int, int]] = []
    for begin, end in pairwise(edges):
        words = text[begin:end]
        begin += len(words) - len(words.lstrip())
        if words.strip():
            found.append((begin, begin + len(words.strip())))
    return found


def joined(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return stretches of a text without blanks at their begin; with only blanks between, as one.

    Args:
        text: what they are stretches of.
        spans: begin and end, ascending; of those that overlap, the later adds what is new.
    """
    found: list[tuple[int, int]] = []
    for begin, end in spans:
        word = text[begin:end]
        begin += len(word) - len(word.lstrip())
        if begin == end:
            continue
        if found and not text[found[-1][1] : begin].strip():
            begin = found.pop()[0]
        found.append((begin, end))
    return found
