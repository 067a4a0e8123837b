"""What a page of HTML holds."""

from __future__ import annotations

import json
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Reader(HTMLParser):
    """Collects elements and JSON blocks; fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[dict] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"] and self.elements[-1][1].get("type") == "application/json":
            self.blocks.append(json.loads(data))

    def all(self, tag, **attributes):
        wanted = attributes.items()
        return [a for t, a in self.elements if t == tag and all(a.get(k) == v for k, v in wanted)]
