"""Changes of sentences, by hand."""

import random

import pytest

from prismlm.eval.perturbations.changes import (
    abbreviation,
    contraction,
    gender,
    morphology,
    negation,
    neighbours,
    number,
    punctuation,
    spelling,
    synonym,
    typo,
    words,
)


def all_of(perturb, sentence):
    """Return every sentence that a slice may make of one."""
    found = (perturb(sentence, random.Random(seed)) for seed in range(40))
    return {None if change is None else change.text for change in found}


CASES = {
    synonym: [
        ("The movie was fine.", {"The film was fine."}),
        ("Perhaps the doctor knows.", {
            "Maybe the doctor knows.", "Possibly the doctor knows.", "Perhaps the physician knows.",
            "Maybe the physician knows.", "Possibly the physician knows.",
        }),
        # The article would be wrong.
        ("It was an error.", {None}),
        # Names are no words, nor are parts of others.
        ("We went to Rock Island by-error.", {None}),
        ("They began it.", {"They started it."}),
    ],
    spelling: [
        ("I like this color.", {"I like this colour."}),
        ("I like this colour.", {"I like this color."}),
        ("Theaters organize it.", {"Theatres organize it.", "Theaters organise it."}),
        # What is spelled otherwise depends on the meaning, or belongs to a name.
        ("Check the tire story on the Labor Day program.", {None}),
    ],
    morphology: [
        ("She lives in the city.", {"She lives in the cities.", "She lived in the city."}),
        ("They came with their children.", {
            "They came with their child.", "They come with their children.",
        }),
        ("The teachers say so.", {"The teachers said so."}),
        # The noun is a part of another, the verb is another's, or the time is said.
        ("Go to the city council.", {None}),
        ("What did they make?", {None}),
        ("Didn't you know?", {None}),
        ("He wanted it yesterday.", {None}),
        ("I hope he can.", {None}),
        ("You know, that is so.", {None}),
    ],
    contraction: [
        ("I do not know.", {"I don't know."}),
        ("Don't worry about it.", {"Do not worry about it."}),
        ("It's not here.", {"It is not here."}),
        ("I cannot go.", {"I can't go."}),
        ("I have seen it.", {"I've seen it."}),
        ("Let us go home.", {"Let's go home."}),
        ("There is a dog.", {"There's a dog."}),
        # It has been; he had or would; an end that is stressed; a question; a noun before it.
        ("It's been long.", {None}),
        ("He'd go.", {None}),
        ("I know what it is.", {None}),
        ("I have a dog.", {None}),
        ("Don't you know?", {None}),
        ("Ask how he is doing.", {None}),
        ("The food there is good.", {None}),
    ],
    abbreviation: [
        ("Doctor Smith arrived.", {"Dr. Smith arrived."}),
        ("Dr. Smith arrived.", {"Doctor Smith arrived."}),
        ("A doctor arrived.", {None}),
        ("General Motors met Attorney General Smith.", {None}),
        ("He lives in the United States.", {"He lives in the U.S.", "He lives in the US."}),
        ("It fell in the U.S.", {"It fell in the United States."}),
        ("They left US 2 there.", {None}),
        ("It rose 5 percent in January 2004.", {
            "It rose 5% in January 2004.", "It rose 5 percent in Jan. 2004.",
        }),
        ("He came on Monday.", {"He came on Mon."}),
        ("The Monday Club met Jan.", {None}),
        ("It is 5 km long.", {"It is 5 kilometers long."}),
        ("Television is dull.", {None}),
        ("TV is dull.", {"Television is dull."}),
        ("An advertisement was shown.", {"An ad was shown."}),
        ("See Volume 2 of it.", {"See Vol. 2 of it."}),
        ("Acme Corporation grew.", {"Acme Corp. grew."}),
    ],
    gender: [
        ("He lost his hat.", {"She lost her hat."}),
        ("Her brother saw her in the garden.", {"His sister saw him in the garden."}),
        ("The book is his.", {"The book is hers."}),
        ("The book is hers, not mine.", {"The book is his, not mine."}),
        ("We saw him.", {"We saw her."}),
        ("She met her family there.", {"He met his family there."}),
        ("Thank you, Mrs. Hill.", {"Thank you, Mr. Hill."}),
        ("The women thanked the waiter.", {"The men thanked the waitress."}),
        # A name would say the opposite, "her" may be either, and nothing would be another.
        ("Then Mary lost her hat.", {None}),
        ("They told her stories.", {None}),
        ("The sons and daughters came.", {None}),
        ("It rained.", {None}),
    ],
    negation: [
        ("It is cold here.", {"It is not cold here."}),
        ("We can see it.", {"We cannot see it."}),
        ("They had left it, and have seen it.", {"They had left it, and have not seen it."}),
        ("I don't like it.", {"I do like it."}),
        ("It won't rain.", {"It will rain."}),
        ("He cannot swim.", {"He can swim."}),
        ("They were not here.", {"They were here."}),
        ("It would have rained.", {"It would not have rained."}),
        # Negative already, a question, and "have to", which is no auxiliary.
        ("It is never cold.", {None}),
        ("He isn't seeing anyone.", {None}),
        ("Is it cold?", {None}),
        ("We have a dog.", {None}),
        ("They are to have it.", {None}),
    ],
    number: [
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
}  # fmt: skip


@pytest.mark.parametrize(
    ("perturb", "sentence", "texts"),
    [(perturb, *case) for perturb, cases in CASES.items() for case in cases],
)
def test_every_sentence_that_a_slice_may_make(perturb, sentence, texts):
    assert all_of(perturb, sentence) == texts


def test_one_to_three_synonyms_are_put_in():
    sentence = "The movie was almost entirely shot by a kid from that shop."
    words = sentence.split()
    counts = {
        sum(a != b for a, b in zip(words, text.split(), strict=True))
        for text in all_of(synonym, sentence)
    }
    assert counts == {1, 3}


def test_a_typo_is_one_neighbour_inside_one_word():
    sentence = "The formal garden was form and it's Never well-kept."
    for seed in range(200):
        change = typo(sentence, random.Random(seed))
        # What came out was a word, such as firm.
        if change is None:
            continue
        text = change.text
        ((place, new),) = [(i, c) for i, c in enumerate(text) if c != sentence[i]]
        assert new in neighbours()[sentence[place]]
        slipped = text[: place + 1].split()[-1] + text[place + 1 :].split(" ")[0]
        assert slipped not in words().common
        # Neither the first nor the last letter, and no word with a sign or a capital.
        assert sentence[place - 1].isalpha()
        assert sentence[place + 1].isalpha()
        assert sentence[:place].count(" ") in (1, 2, 4)
    assert typo("It is as he said, Mother.", random.Random(0)).text[:8] == "It is as"
    assert typo("It is so, Mother.", random.Random(0)) is None


def test_punctuation_leaves_the_words_in_order():
    assert all_of(punctuation, "However, we came and saw.") == {
        "However, we came and saw",
        "However we came and saw.",
        "however, we came and saw.",
        "However, we came, and saw.",
        "However, we Came and saw.",
    }
    assert all_of(punctuation, "He is in.") == {"He is in", "he is in."}


def test_counts_change_within_their_kind():
    texts = all_of(number, "They have three dogs.")
    assert "They have three dogs." not in texts
    assert "They have five dogs." in texts
    assert all(len(text.split()[2]) == 2 for text in all_of(number, "They ran 26 miles."))
    assert all_of(number, "It cost $3 millions in 3.5 days.") == {None}
