import pytest

from prismlm.direction_marks import marks_shown

# Every character that Unicode gives an effect on the direction of others.
MARKS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.mark.parametrize("mark", MARKS)
def test_each_mark_is_told_by_its_code(mark):
    assert marks_shown(f"a{mark}b") == f"a‹U+{ord(mark):04X}›b"


def test_all_else_stays():
    kept = "".join(map(chr, range(0x3000)))
    kept = "".join(letter for letter in kept if letter not in MARKS + "\u2028\u2029")
    assert marks_shown(kept) == kept
