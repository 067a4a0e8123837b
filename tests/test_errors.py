"""Checks of single values: what they accept and return, and the errors for the rest."""

import math
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from prismlm.errors import (
    MAX_SHOWN,
    InputError,
    check_choice,
    check_number,
    check_path,
    check_text,
    check_whole,
    shown,
)

whole = partial(check_whole, "the input", least=1, most=3)
any_whole = partial(check_whole, "the input", least=None)
share = partial(check_number, "the input", expected="a share", holds=lambda number: number <= 1)
text, path = partial(check_text, "the input"), partial(check_path, "the input")
choice = partial(check_choice, "the input", choices=("source", "domain"))


@pytest.mark.parametrize(
    ("check", "values", "expected"),
    [
        (whole, [3, np.int64(3), np.uint8(3), torch.tensor(3)], 3),
        (any_whole, [-5], -5),
        (share, [1, 1.0, np.float32(1), np.array(1.0), torch.tensor(1.0), Decimal(1)], 1.0),
        (text, ["é🙂"], "é🙂"),
        (path, ["x/y", Path("x/y")], Path("x/y")),
        (choice, ["source"], None),
    ],
)
def test_valid_values_are_returned_as_plain_ones(check, values, expected):
    for value in values:
        result = check(value)
        assert result == expected
        assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("check", "values", "error"),
    [
        (
            whole,
            [True, 1.0, "1", None, [1], torch.ones(2), math.nan, 0, 4, 10**30],
            "expected a whole number from 1 to 3",
        ),
        (
            share,
            [True, "1", None, math.nan, math.inf, -math.inf, 10**400, [1], np.ones(2), 2],
            "expected a share",
        ),
        (text, [["a", "b"]], r"\['a', 'b'\]: expected one text; give several one after"),
        (text, ["a\udcff"], "surrogate pair at character 1"),
        (path, ["", "a\0b", b"x", None, 1, ["x"]], "expected .*path"),
        (path, ["a/" + "x" * 256], "longer than a name"),
        (choice, ["sauce", 1, None, ["source"]], "expected 'source' or 'domain'"),
        (choice, ["sorce"], "Did you mean 'source'"),
    ],
)
def test_invalid_values_are_refused(check, values, error):
    for value in values:
        with pytest.raises(InputError, match=f"^the input .*{error}"):
            check(value)


def test_long_values_are_truncated():
    assert shown("x" * 1000).endswith("xxx …")
    assert len(shown("x" * 1000)) == MAX_SHOWN
