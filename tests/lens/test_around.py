"""The sentence around a token."""

import pytest

from prismlm.lens.around import MOST_CHARACTERS, joined, sentence_around


@pytest.mark.parametrize(
    ("text", "token", "expected"),
    [
        ("One. Two is here. Three.", "is", "Two is here."),
        ("One. Two is here. Three.", "One", "One."),
        ("One. Two is here. Three.", "Three", "Three."),
        ("One line\nTwo is here\nThree", "is", "Two is here"),
        ('He said "no." Then he left! So', "left", "Then he left!"),
        ("no end at all", "end", "no end at all"),
        ("One. Two is here.", " Two", " Two is here."),
        ("a\n\nb c\n\nd", "c", "b c"),
        ("<|im_start|>It is so.<|im_end|>\n", "is", "It is so."),
        ("<s>It is so</s>", "is", "It is so"),
    ],
)
def test_sentences(text, token, expected):
    left = text.index(token)
    found = sentence_around(text, left, left + len(token))
    assert found.token == token
    assert str(found).strip() == expected.strip()
    assert text[left - len(found.before) : left] == found.before


def test_a_sentence_without_end_is_cut():
    text = "x" * 1000
    found = sentence_around(text, 500, 501)
    assert (len(found.before), len(found.after)) == (MOST_CHARACTERS, MOST_CHARACTERS)


@pytest.mark.parametrize(
    ("words", "marked"),
    [
        ([" went", " to", " war"], ["went to war"]),
        ([" They", " to", " 17", "63"], ["They", "to", "1763"]),
        ([" ", " in"], ["in"]),
        ([], []),
    ],
)
def test_tokens_next_to_one_another_are_one_stretch(words, marked):
    text = " They went to war in 1763."
    spans = [(text.index(word), text.index(word) + len(word)) for word in words]
    assert [text[slice(*one)] for one in joined(text, spans)] == marked
