"""Changes of sentences, by hand."""

import random

import pytest

from prismlm.eval.perturbations import changes


def all_changes(name, sentence):
    """Return every sentence that a slice may make of one."""
    change = getattr(changes, name)
    return {change(sentence, random.Random(seed)) for seed in range(40)}


CASES = {
    "synonym": {
        "The movie was fine.": {"The film was fine."},
        "Perhaps the doctor knows.": {
            "Maybe the doctor knows.", "Possibly the doctor knows.", "Perhaps the physician knows.",
            "Maybe the physician knows.", "Possibly the physician knows.",
        },
    },
    "spelling": {
        "I like this color.": {"I like this colour."},
        "Theaters organize it.": {"Theatres organize it.", "Theaters organise it."},
    },
    "morphology": {
        "She lives in the city.": {"She lives in the cities."},
        "They came with their children.": {"They came with their child."},
    },
    "contraction": {
        "I do not know.": {"I don't know."},
        "Don't worry about it.": {"Do not worry about it."},
        "I cannot go.": {"I can't go."},
    },
    "abbreviation": {
        "Doctor Smith arrived.": {"Dr. Smith arrived."},
        "Dr. Smith arrived.": {"Doctor Smith arrived."},
        "He lives in the United States.": {"He lives in the U.S.", "He lives in the US."},
        "It rose 5 percent in January 2004.": {
            "It rose 5% in January 2004.", "It rose 5 percent in Jan. 2004.",
        },
        "It is 5 km long.": {"It is 5 kilometers long."},
        "An advertisement was shown.": {"An ad was shown."},
        "See Volume 2 of it.": {"See Vol. 2 of it."},
        "TV is dull.": {"Television is dull."},
        "Acme Corporation grew.": {"Acme Corp. grew."},
    },
    "gender": {
        "He lost his hat.": {"She lost her hat."},
        "Her brother saw her in the garden.": {"His sister saw him in the garden."},
        "The book is his.": {"The book is hers."},
        "She met her family there.": {"He met his family there."},
        "Thank you, Mrs. Hill.": {"Thank you, Mr. Hill."},
    },
    "negation": {
        "It is cold here.": {"It is not cold here."},
        "We can see it.": {"We cannot see it."},
        "They had left it, and have seen it.": {"They had left it, and have not seen it."},
        "I don't like it.": {"I do like it."},
        "It won't rain.": {"It will rain."},
        "He cannot swim.": {"He can swim."},
    },
    "number": {
        "This book is old.": {"These books are old."},
        "These children were late.": {"This child was late."},
        "We read several books.": {"We read one book."},
        "He wrote a song for it.": {"He wrote two songs for it."},
        "It cost $3 millions in 3.5 days.": {None},
    },
}  # fmt: skip
UNCHANGED = {
    # The article would be wrong; names and parts of other words are not replaced.
    "synonym": ["It was an error.", "We went to Rock Island by-error."],
    # The spelling depends on the meaning, or belongs to a name.
    "spelling": ["Check the tire story on the Labor Day program."],
    # The noun is part of another, or is a subject.
    "morphology": ["Go to the city council.", "The city is old."],
    # It has been or is; he had or would; a question; a stressed end.
    "contraction": ["It's been long.", "He'd go.", "I know what it is.", "I have a dog.",
                  "Don't you know?", "We know who they are."],
    "abbreviation": ["A doctor arrived.", "General Motors met Attorney General Smith.",
                   "They left US 2 there.", "The Monday Club met Jan.", "Television is dull."],
    # A name would contradict it, "her" is ambiguous, or nothing would change.
    "gender": ["Then Mary lost her hat.", "They told her stories.", "The sons and daughters came.",
             "It rained."],
    # Negative already, a question, and "have to", which is not an auxiliary.
    "negation": ["It is never cold.", "He isn't seeing anyone.", "Is it cold?", "We have a dog.",
               "They are to have it."],
    # A predicate, a subject whose verb is elsewhere, part of another noun, a set phrase.
    "number": ["He is a teacher.", "The color of this book is red.", "Several men, tired, left.",
             "We saw a stone wall.", "It took a while."],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sentence", "texts"),
    [(name, *case) for name, cases in CASES.items() for case in cases.items()]
    + [(name, text, {None}) for name, texts in UNCHANGED.items() for text in texts],
)
def test_every_sentence_that_a_slice_may_make(name, sentence, texts):
    assert all_changes(name, sentence) == texts


def test_one_or_three_synonyms_are_inserted():
    sentence = "The movie was almost entirely shot by a kid from that shop."
    counts = {
        sum(a != b for a, b in zip(sentence.split(), text.split(), strict=True))
        for text in all_changes("synonym", sentence)
    }
    assert counts == {1, 3}


def test_a_typo_is_a_neighbouring_key_inside_a_word():
    sentence = "The formal garden was form and it's Never well-kept."
    # None where the result is a word, such as firm.
    for text in all_changes("typo", sentence) - {None}:
        ((place, letter),) = [(i, c) for i, c in enumerate(text) if c != sentence[i]]
        assert letter in changes.keyboard_neighbours(sentence[place])
        misspelled = text[: place + 1].split()[-1] + text[place + 1 :].split(" ")[0]
        assert misspelled not in changes.word_list("common")
        # Neither the first nor the last letter, and no word with a mark or a capital.
        assert sentence[place - 1].isalpha()
        assert sentence[place + 1].isalpha()
        assert sentence[:place].count(" ") in (1, 2, 4)
    assert all_changes("typo", "It is so, Mother.") == {None}


def test_punctuation_keeps_the_words():
    assert all_changes("punctuation", "However, we came and saw.") == {
        "However, we came and saw",
        "However we came and saw.",
        "however, we came and saw.",
        "However, we came, and saw.",
        "However, we Came and saw.",
    }
    assert all_changes("punctuation", "He is in.") == {"He is in", "he is in."}


def test_counts_stay_words_or_digits():
    texts = all_changes("number", "They have three dogs.")
    assert "They have three dogs." not in texts
    assert "They have five dogs." in texts
    assert all(len(text.split()[2]) == 2 for text in all_changes("number", "They ran 26 miles."))
