"""Themes by words, by hand and planted; and by a server that answers well, or rubbish."""

import math

import numpy as np
import pytest

from prismlm.lens.labels.endpoint import Endpoint
from prismlm.probes.theme_judges import (
    EXPLANATION_LENGTH,
    EndpointJudge,
    Judgement,
    Passage,
    WordJudge,
    clusters,
    rarities,
    theme_question,
)
from tests.helpers.chat_server import ChatServer

GOOD = {"theme": "tides", "disentanglement": 9, "coverage": 10, "themes": 1, "explanation": "Sea."}


def passage(text, *marked):
    words = text.split()
    places = [i for i, word in enumerate(words) if word.strip("*") in marked]
    return Passage(tuple(f" {word}" for word in words), tuple(places))


# No word of one is in another, so that whatever is shared is more than chance.
STRANGERS = [passage(f"left{i} mark{i} right{i}", f"mark{i}") for i in range(20)]


@pytest.fixture
def judge():
    return WordJudge(STRANGERS)


def others(count):
    return [passage(f"here{i} at{i} there{i}", f"at{i}") for i in range(count)]


def test_similarities_by_hand():
    # In these every pair shares one of two words: cos = ½ each, and ½ it is that θ becomes.
    common = [passage(f"tide own{i} mark{i}", f"mark{i}") for i in range(20)]
    rarity = rarities(common)
    assert rarity["tide"] == pytest.approx(math.log(21 / 20.5))
    assert rarity["own3"] == rarity["mark0"] == pytest.approx(math.log(21 / 1.5))
    judge = WordJudge(common)
    cosine = rarity["tide"] ** 2 / (rarity["tide"] ** 2 + rarity["own3"] ** 2)
    assert judge.text == pytest.approx(cosine)
    assert judge.marks == 0.5
    assert judge.chance == pytest.approx(1.0)
    # Of words that were not seen all are as rare; a word that comes twice counts 1 + ln 2.
    first, second = passage("sea sea salt x", "x"), passage("sea sand y", "y")
    twice = 1 + math.log(2)
    shared = twice / math.sqrt((twice**2 + 1) * 2)
    assert judge.cosine([["sea", "sea", "salt"], ["sea", "sand"]])[0, 1] == pytest.approx(shared)
    assert judge.similarities([first, second])[0, 1] == 2.0
    # Marks: one of two is shared, 1/√2 of a threshold of ½.
    pair = [passage("a x y", "x", "y"), passage("b x z", "x")]
    assert judge.similarities(pair)[0, 1] == pytest.approx(math.sqrt(2))


def test_a_theme_of_three_among_strangers_by_hand(judge):
    alike = [passage(f"wind{i} high tide{i} rises", "high") for i in range(3)]
    (found,) = judge.judge([[*others(7), *alike]])
    # Within C the similarity is 2, to the rest 0: 1 + 9 · 3/10, rounded.
    assert (found.themes, found.coverage, found.disentanglement) == (8, 3, 4)
    assert found.theme == "“high” · rises"


def test_ten_alike_and_ten_strangers(judge):
    same = [passage(f"wind{i} high tide", "high") for i in range(10)]
    pure, mixed = judge.judge([same, others(10)])
    assert (pure.themes, pure.coverage, pure.disentanglement) == (1, 10, 10)
    assert (mixed.themes, mixed.coverage, mixed.disentanglement) == (10, 1, 1)
    assert mixed.theme.startswith("“at0”")


def test_what_is_marked_alone_and_what_surrounds_it_alone_are_themes(judge):
    marked = [passage(f"one{i} , two{i}", ",") for i in range(5)]
    about = [passage(f"harbour ships{i} mark{i}", f"mark{i}") for i in range(5)]
    (found,) = judge.judge([[*marked, *about]])
    assert (found.themes, found.coverage) == (2, 5)
    assert clusters(judge.similarities([*marked, *about])).tolist() == [0] * 5 + [1] * 5
    (signs,) = judge.judge([[*marked, *marked]])
    assert signs.theme == "“,”"


def test_what_is_marked_in_one_of_two_is_no_theme(judge):
    pair = [passage("left0 harbour gulls", "left0"), passage("harbour gulls right0", "right0")]
    (found,) = judge.judge([[*pair, *others(8)]])
    assert (found.coverage, found.theme) == (2, "gulls · harbour")


def test_one_pair_that_is_far_beyond_chance_does_not_draw_others_in(judge):
    # a is like b and b like c, a and c share nothing: average linkage keeps c out of no theme.
    chain = [passage(f"l{i} r{i} x{i} x{i + 1} m{i}", f"m{i}") for i in range(10)]
    sizes = np.bincount(clusters(judge.similarities(chain)))
    assert sizes.max() == sizes[0] <= 4


@pytest.mark.parametrize("themes", [1, 2, 4, 7, 10])
def test_planted_themes_are_found(themes):
    draw = np.random.default_rng(themes)
    # Words by Zipf's law, as in text.
    chances = 1 / np.arange(1, 3001)

    def drawn(word=None):
        around = draw.choice(3000, 40, p=chances / chances.sum())
        text = [f" w{number}" for number in around]
        text[20] = f" theme{word}" if word is not None else text[20]
        return Passage(tuple(text), (20,))

    judge = WordJudge([drawn() for _ in range(200)])
    units = [[drawn(i % themes) for i in range(10)] for _ in range(8)]
    found = [one for one in judge.judge(units) if one is not None]
    largest = -(-10 // themes)
    # One in twenty random pairs counts as alike: of ten strangers two are.
    assert np.mean([one.themes for one in found]) == pytest.approx(themes, abs=0.3 * themes)
    assert np.mean([one.coverage for one in found]) == pytest.approx(largest, abs=1.3)
    assert (np.mean([one.disentanglement for one in found]) > 7) == (themes == 1)


def unit(number):
    words = ("The", f" tide{number}", " <<is", ">>", " high", "\n")
    return [Passage((*words, f" {i}"), (1, 4)) for i in range(10)]


@pytest.fixture
def opened(tmp_path):
    def judge(url):
        endpoint = Endpoint(url, "m", retries=0, timeout=5.0)
        return EndpointJudge(endpoint, tmp_path / ".themes.answers.jsonl")

    return judge


def test_a_unit_is_asked_about_once_with_its_marks(opened):
    with ChatServer(lambda request, number: GOOD) as server:
        first = opened(server.url)
        found = first.judge([unit(0), unit(1)])
        second = opened(server.url)
        assert second.judge([unit(0), unit(1)]) == found
        assert first.judge([unit(0)]) == [Judgement("tides", 9, 10, 1, "Sea.")]
    assert len(server.requests) == 2
    assert first.source == "endpoint:m"
    assert (first.session.usage()["requests"], second.session.usage()["requests"]) == (2, 0)
    text = server.requests[0]["messages"][0]["content"]
    # Marks of the text itself cannot be taken for ours.
    assert text.count("<< tide") == 10
    assert "‹‹is››<< high>>" in text
    assert text.count('{"passage": ') == 10
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["coverage"] == {"type": "integer"}
    assert list(schema["required"]) == list(GOOD)


@pytest.mark.parametrize(
    "wrong",
    [
        {"coverage": 11}, {"themes": 0}, {"disentanglement": True}, {"coverage": 9.5},
        {"theme": " \n"}, {"theme": 3}, {"themes": "one"}, {"more": 1},
    ],
)  # fmt: skip
def test_rubbish_is_asked_for_again_and_then_is_no_answer(opened, wrong):
    def behave(request, number):
        return GOOD | wrong if "tide0" in request["messages"][0]["content"] else GOOD

    with ChatServer(behave) as server:
        asking = opened(server.url)
        found = asking.judge([unit(0), unit(1), unit(2)])
    assert found[0] is None
    assert [one.theme for one in found[1:]] == ["tides", "tides"]
    assert len(server.requests) == 4
    assert sum(asking.session.usage()["failures"].values()) == 1


def test_what_it_says_is_one_line_that_drives_no_terminal(opened):
    said = GOOD | {"theme": "a\x1b[31m\nb", "explanation": "x\ty" * 400}
    with ChatServer(lambda request, number: said) as server:
        (found,) = opened(server.url).judge([unit(0)])
    assert found.theme == "a [31m b"
    assert found.explanation.isprintable()
    assert len(found.explanation) <= EXPLANATION_LENGTH


def test_text_cannot_close_the_fence_that_it_stands_in():
    (message,) = theme_question(unit(0)).messages
    assert message["content"].count("</data-") == 2
