import pytest

from prismlm.eval.perturbations.generate import MiniLM, levenshtein


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("same", "same", 0), ("a b", "a, b", 1),
     ("Doctor", "Dr.", 5), ("flaw", "lawn", 2), ("aa", "a", 1)],
)  # fmt: skip
def test_letters_apart(one, other, distance):
    assert levenshtein(one, other) == levenshtein(other, one) == distance


def test_what_means_the_same_is_more_alike():
    pairs = [
        ("He was happy.", "He was glad."),
        ("He was happy.", "He was happy."),
        ("He was happy.", "The company sold its steel works in March."),
    ]
    near, same, far = MiniLM().similarity(pairs)
    assert same == 1
    assert far < 0.3 < 0.75 < near < 1
    # The model's card gives 0.6 and more for paraphrases; sentences beside it change nothing.
    assert MiniLM().similarity(pairs[:1])[0] == pytest.approx(near, abs=2e-4)
