"""One value at a time: what is taken, as what, and in which words the rest is refused."""

import math
from decimal import Decimal
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


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_whole_numbers_of_every_kind(value):
    found = check_whole("the count", value, 1, 3)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize(
    "value", [True, 1.0, "1", None, [1], torch.ones(2), math.nan, 0, 4, 10**30]
)
def test_what_is_no_whole_number_in_range(value):
    with pytest.raises(InputError, match=r"the count is .*: expected a whole number from 1 to 3"):
        check_whole("the count", value, 1, 3)


def test_without_bounds_any_whole_number_is_taken():
    assert check_whole("the place", -5, None) == -5
    with pytest.raises(InputError, match=r"expected a whole number\.$"):
        check_whole("the place", 1.5, None)


@pytest.mark.parametrize(
    "value", [1, 1.0, np.float32(1), np.array(1.0), torch.tensor(1.0), Decimal(1)]
)
def test_numbers_of_every_kind(value):
    found = check_number("the share", value, "a share", lambda number: number <= 1)
    assert found == 1
    assert type(found) is float


@pytest.mark.parametrize(
    "value", [True, "1", None, math.nan, math.inf, -math.inf, 10**400, [1], np.ones(2), 2]
)
def test_what_is_no_number_in_range(value):
    with pytest.raises(InputError, match=r"the share is .*: expected a share"):
        check_number("the share", value, "a share", lambda number: number <= 1)


def test_texts():
    assert check_text("the text", "é🙂") == "é🙂"
    with pytest.raises(
        InputError, match=r"\['a', 'b'\]: expected one text; give several one after"
    ):
        check_text("the text", ["a", "b"])
    with pytest.raises(InputError, match="surrogate pair at character 1"):
        check_text("the text", "a\udcff")


@pytest.mark.parametrize("value", ["", "a\0b", b"x", None, 1, ["x"]])
def test_what_is_no_path(value):
    with pytest.raises(InputError, match=r"the model is .*: expected .*path"):
        check_path("the model", value)


def test_paths():
    assert check_path("the model", "x/y") == check_path("the model", Path("x/y")) == Path("x/y")


@pytest.mark.parametrize("value", ["sauce", 1, None, {}, ["source"]])
def test_choices(value):
    with pytest.raises(InputError, match="expected 'source' or 'domain'"):
        check_choice("by", value, ("source", "domain"))


def test_long_values_are_cut():
    assert shown("x" * 1000).endswith("xxx …")
    assert len(shown("x" * 1000)) == MAX_SHOWN


@pytest.mark.parametrize(
    "path", ["a/\ud800" * 900, "a/" + "x" * 256, "ä" * 128, "a/" * 2500, "a\0b"]
)
def test_a_path_that_no_file_can_have(path):
    with pytest.raises(InputError, match="the model is '"):
        check_path("the model", path)


def test_a_number_of_more_digits_than_python_writes():
    with pytest.raises(InputError, match=r"the count is a number of [\d,]+ bits: expected"):
        check_whole("the count", 10**5000, most=2**31)
