import random

import pytest

from prismlm.eval.perturbations.changes import gender, negation, number
from tests.eval.perturbations.test_changes_lexical import all_of


@pytest.mark.parametrize(
    ("sentence", "flipped"),
    [
        ("He lost his hat.", "She lost her hat."),
        ("Her brother saw her in the garden.", "His sister saw him in the garden."),
        ("The book is his.", "The book is hers."),
        ("The book is hers, not mine.", "The book is his, not mine."),
        ("We saw him.", "We saw her."),
        ("She met her family there.", "He met his family there."),
        ("Thank you, Mrs. Hill.", "Thank you, Mr. Hill."),
        ("The women thanked the waiter.", "The men thanked the waitress."),
        # A name would say the opposite, "her" may be either, and nothing would be another.
        ("Then Mary lost her hat.", None),
        ("They told her stories.", None),
        ("The sons and daughters came.", None),
        ("It rained.", None),
    ],
)
def test_gender(sentence, flipped):
    change = gender(sentence, random.Random(0))
    assert (change and change.text) == flipped


@pytest.mark.parametrize(
    ("sentence", "flipped"),
    [
        ("It is cold here.", "It is not cold here."),
        ("We can see it.", "We cannot see it."),
        ("They had left it, and have seen it.", "They had left it, and have not seen it."),
        ("I don't like it.", "I do like it."),
        ("It won't rain.", "It will rain."),
        ("He cannot swim.", "He can swim."),
        ("They were not here.", "They were here."),
        ("It would have rained.", "It would not have rained."),
        # Negative already, a question, and "have to", which is no auxiliary.
        ("It is never cold.", None),
        ("He isn't seeing anyone.", None),
        ("Is it cold?", None),
        ("We have a dog.", None),
        ("They are to have it.", None),
    ],
)
def test_negation(sentence, flipped):
    change = negation(sentence, random.Random(0))
    assert (change and change.text) == flipped


@pytest.mark.parametrize(
    ("sentence", "texts"),
    [
        ("This book is old.", {"These books are old."}),
        ("These children were late.", {"This child was late."}),
        ("We read several books.", {"We read one book."}),
        ("He wrote a song for it.", {"He wrote two songs for it."}),
        # A predicate, a subject whose verb is elsewhere, a part of another noun, a set phrase.
        ("He is a teacher.", {None}),
        ("The color of this book is red.", {None}),
        ("Several men, tired, left.", {None}),
        ("We saw a stone wall.", {None}),
        ("It took a while.", {None}),
    ],
)
def test_number(sentence, texts):
    assert all_of(number, sentence) == texts


def test_counts_change_within_their_kind():
    texts = all_of(number, "They have three dogs.")
    assert "They have three dogs." not in texts
    assert "They have five dogs." in texts
    assert all(len(text.split()[2]) == 2 for text in all_of(number, "They ran 26 miles."))
    assert all_of(number, "It cost $3 millions in 3.5 days.") == {None}
