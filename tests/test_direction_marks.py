from prismlm.direction_marks import marks_shown

# Every character that Unicode gives an effect on the direction of others, and line separators.
MARKS = "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def test_marks_alone_are_replaced_by_their_codes():
    for character in map(chr, range(0x3000)):
        expected = f"‹U+{ord(character):04X}›" if character in MARKS else character
        assert marks_shown(f"a{character}b") == f"a{expected}b"
