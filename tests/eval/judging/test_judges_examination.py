"""The judge judged first: judges that read, that follow positions, that answer by chance."""

import numpy as np
import pytest

from prismlm.eval.judging.continuations import Prompt
from prismlm.eval.judging.judges import Judge, Pair, examination_pairs, examine, wilson
from prismlm.labels.answers import Answers

PROMPTS = [
    Prompt(str(n), f"Story {n:02}", " ".join(f"w{n:02}-{i:02}" for i in range(12)))
    for n in range(30)
]


class Rule(Judge):
    """Says what a rule makes of text, A and B."""

    source, how = "rule", ""

    def __init__(self, rule, path):
        self.rule, self.answers = rule, Answers(path, "rule")

    def verdicts(self, questions, what, progress):
        def parts(question):
            lines = question.messages[0]["content"].split("\n")
            return [lines[i + 1] for i, line in enumerate(lines) if line.startswith("<data-")]

        return [self.rule(*parts(question)) for question in questions]

    def asked(self):
        return {}


def reads(text, a, b):
    """In order and of this prompt."""

    def good(response):
        words = response.split()
        return words == sorted(words) and words[0].startswith(f"w{text.split()[1]}-")

    return "A" if good(a) else "B" if good(b) else "Tie"


def by_words(text, a, b):
    first, second = (len(response.split()) for response in (a, b))
    return "A" if first > second else "B" if second > first else "Tie"


def examined(rule, tmp_path, prompts=PROMPTS):
    return examine(Rule(rule, tmp_path / "kept"), prompts)


def test_wilson_by_hand():
    # 8 of 10, z = 1.96: (0.8 + 0.19207) / 1.38415 ± 1.96 √(0.016 + 0.0096) / 1.38415.
    found = wilson(8, 10)
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 5).low == 0
    assert wilson(5, 5).high == 1
    assert np.isnan(wilson(0, 0).value)


def test_pairs_are_the_same_words_and_those_of_another_prompt():
    pairs = examination_pairs([*PROMPTS, Prompt("short", "no more", "")])
    for prompt, shuffled, other, again in zip(PROMPTS, *pairs.values(), strict=True):
        assert shuffled.a == other.a == again.a == prompt.reference
        assert again.b.split() == prompt.text.split() * 6
        assert sorted(shuffled.b.split()) == sorted(prompt.reference.split())
        assert shuffled.b != prompt.reference
        assert other.b in {one.reference for one in PROMPTS} - {prompt.reference}
    assert examination_pairs(PROMPTS) == examination_pairs(PROMPTS)
    # Nothing can be told where all words are alike.
    alike = examination_pairs([Prompt("1", "b c d e f g h", "x x x x x x x x")] * 2)
    again = Pair("b c d e f g h", "x x x x x x x x", "c d e f g h c d")
    assert alike == {"shuffled": [], "elsewhere": [], "repeated": [again] * 2}


def test_a_judge_that_reads_is_usable(tmp_path):
    found = examined(reads, tmp_path)
    assert found["usable"]
    assert found["reasons"] == []
    shares = found["preferred"]
    assert [shares[name]["value"] for name in ("shuffled", "elsewhere", "repeated")] == [1, 1, 1]
    # z² / (n + z²) is missing of 1.
    assert shares["shuffled"]["low"] == pytest.approx(30 / (30 + 1.96**2), abs=1e-4)
    assert found["order"]["changed"]["value"] == 0
    assert found["order"]["first"]["value"] == 0.5


@pytest.mark.parametrize("place", ["A", "B"])
def test_a_judge_that_follows_positions_is_unusable(tmp_path, place):
    found = examined(lambda text, a, b: place, tmp_path)
    assert not found["usable"]
    assert found["preferred"]["shuffled"]["value"] == 0.5
    assert found["order"]["by_position"]["value"] == found["order"]["changed"]["value"] == 1
    assert found["order"]["first"]["value"] == (place == "A")
    words = ("words shuffled", "again and again", "position")
    assert all(word in said for word, said in zip(words, found["reasons"], strict=True))


def test_a_judge_that_likes_repetition_is_unusable(tmp_path):
    def rule(text, a, b):
        first, second = (len(set(response.split())) for response in (a, b))
        return "A" if first < second else "B" if second < first else reads(text, a, b)

    found = examined(rule, tmp_path)
    assert [found["preferred"][name]["value"] for name in ("shuffled", "repeated")] == [1, 0]
    assert ["again and again" in reason for reason in found["reasons"]] == [True]


def test_a_judge_by_length_or_by_chance_is_unusable_for_what_it_prefers(tmp_path):
    tied = examined(by_words, tmp_path)
    assert tied["order"]["ties"] == 1
    draw = np.random.default_rng(0).choice
    by_chance = examined(lambda text, a, b: str(draw(["A", "B"])), tmp_path)
    for found in (tied, by_chance):
        assert "real text" in found["reasons"][0]
        low, high = (found["preferred"]["shuffled"][end] for end in ("low", "high"))
        assert low < 0.5 < high


def test_few_texts_are_too_few_to_pass(tmp_path):
    found = examined(reads, tmp_path, PROMPTS[:11])
    assert found["preferred"]["shuffled"]["value"] == 1
    assert not found["usable"]
    assert examined(reads, tmp_path, PROMPTS[:12])["usable"]


def test_pairs_without_an_answer_count_for_nothing(tmp_path):
    def sometimes(text, a, b):
        return None if text == "Story 03" else reads(text, a, b)

    found = examined(sometimes, tmp_path)
    assert found["preferred"]["shuffled"]["count"] == 29
    assert (found["order"]["pairs"], found["order"]["failed"]) == (87, 3)


def test_without_references_nothing_is_judged_and_the_judge_is_unusable(tmp_path):
    found = examined(reads, tmp_path, [Prompt("1", "a", "")] * 3)
    assert not found["usable"]
    assert "nothing was judged" in found["reasons"][0]
