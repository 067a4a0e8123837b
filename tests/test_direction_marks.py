import pytest

from prismlm.direction_marks import marks_shown

# Every character that Unicode gives an effect on the direction of others.
MARKS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.mark.parametrize("mark", MARKS)
def test_marks_are_replaced_by_their_codes(mark):
    assert marks_shown(f"a{mark}b") == f"a‹U+{ord(mark):04X}›b"


def test_other_characters_are_unchanged():
    others = "".join(set(map(chr, range(0x3000))) - {*MARKS, "\u2028", "\u2029"})
    assert marks_shown(others) == others
