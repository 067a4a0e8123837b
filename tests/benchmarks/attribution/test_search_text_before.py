"""What a choice is chosen by, by hand."""

import pytest

from benchmarks.attribution import search_text_before as search


def test_a_choice_is_as_good_as_its_worst_judge():
    figures = [(0.5, 0.4, 0.3), (1.0, 0.1, 0.6)]
    tried = [
        {"search": dict(zip(("recall", "gain", "own share"), row, strict=True))} for row in figures
    ]
    # 0.5 / 1, 0.4 / 0.4, 0.3 / 0.6; and 1, 0.1 / 0.4, 1.
    assert search.least(tried).tolist() == pytest.approx([0.5, 0.25])
