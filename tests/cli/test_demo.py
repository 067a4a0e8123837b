"""What the demo prints."""

import pytest
from rich.console import Console

from prismlm.cli.demo import _print_passage


@pytest.mark.parametrize("width", [24, 60, 200])
@pytest.mark.parametrize("turned", [False, True])
def test_a_passage_is_cut_between_words(width, turned, capsys):
    """Around the token that is marked, from whichever side there is more of."""
    many, few = " ".join(f"word{n}" for n in range(100)), "It began"
    before, after = (f"{few} ", f" {many}.") if turned else (f"{many} ", f" {few}.")
    _print_passage(Console(width=width), "a/source", before, "token", after)
    *words, source = (line[12:].strip() for line in capsys.readouterr().out.splitlines())
    assert source == "a/source"
    shown = " ".join(words)
    assert "token" in shown
    assert shown.strip("…").strip() in f"{before}token{after}"
    for word in shown.strip("…").split():
        assert word in f"{before}token{after}".split()
    assert shown.startswith("…") != (turned and width > 24)
    assert width == 24 or len(words) <= 3
