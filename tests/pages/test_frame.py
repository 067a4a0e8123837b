"""A page in one file: scripts and styles of the explorer, and its data."""

import re

from prismlm.direction_marks import marks_shown
from prismlm.lens.labels.contexts import CATEGORIES
from prismlm.pages.frame import COLOURS, NONE, colour, html_page
from tests.helpers.html_reader import Reader

EVIL = "</script><script>document.title='hurt'</script><!-- \u2028 \u202egnp"


def test_text_is_data_and_nothing_is_requested():
    html = html_page(EVIL, "trace_page.js", {"answers": [], "shared": [], "text": EVIL})
    reader = Reader(html)
    assert [block["text"] for block in reader.blocks] == [marks_shown(EVIL)]
    assert html.count("<script") == html.count("</script") == 2
    assert not set(html) & set("\u2028\u202e")
    (policy,) = reader.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert (policy["content"] or "").startswith("default-src 'none'")
    assert not [a for _, a in reader.elements if "src" in a or "href" in a]
    style = html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"url\(|@import", style)
    # Each module is there once, and nothing of its own file.
    assert html.count("const signed = ") == 1
    assert not re.search(r"^(import|export)\b|<!--|sourceMappingURL", html, re.MULTILINE)


def test_every_category_has_a_colour():
    assert set(COLOURS) == set(CATEGORIES)
    assert colour(None) == colour("") == NONE
    # One that is not of the fourteen has the same each time.
    assert colour("Cooking") == colour("Cooking") in COLOURS.values()
