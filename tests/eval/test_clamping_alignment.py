"""Counterparts of tokens, by hand."""

from prismlm.eval.clamping import align


def test_texts_of_one_length_go_position_by_position():
    assert align([1, 2, 3], [1, 9, 3]) == [0, 1, 2]
    assert align([5], [6]) == [0]


def test_an_inserted_token_has_no_counterpart():
    assert align([1, 2, 3], [1, 7, 2, 3]) == [0, -1, 1, 2]


def test_a_removed_token_is_passed_over():
    assert align([1, 2, 3, 4], [1, 3, 4]) == [0, 2, 3]


def test_a_word_of_more_pieces_ends_where_it_ended():
    assert align([1, 2, 3], [1, 7, 8, 3]) == [0, -1, 1, 2]
    assert align([1, 7, 8, 3], [1, 2, 3]) == [0, 2, 3]


def test_what_cannot_be_aligned():
    # Nothing is the same.
    assert align([1, 2], [3, 4, 5]) is None
    # Two of five have a counterpart.
    assert align([1, 2], [1, 7, 8, 9, 2]) is None
    assert align([1, 2], [1, 7, 8, 2]) == [0, -1, -1, 1]
