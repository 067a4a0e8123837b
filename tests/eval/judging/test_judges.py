"""Judges: a real server that answers well or rubbish, and a model that can answer nothing else."""

import numpy as np
import pytest
import torch

from prismlm.errors import InputError
from prismlm.eval.judging.continuations import Prompt
from prismlm.eval.judging.judges import (
    AS_TOKEN,
    EndpointJudge,
    Judge,
    Judged,
    LikelihoodJudge,
    LocalJudge,
    Pair,
    asked_text,
    examination_pairs,
    examine,
    wilson,
)
from prismlm.lens.labels.endpoint import Endpoint
from prismlm.models.checkpoint import read_checkpoint
from prismlm.progress import SILENT
from tests.eval.judging.conftest import CHAT
from tests.helpers.chat_server import ChatServer

PAIRS = [Pair(f"Text {n} begins", f"good end {n}", f"bad end {n}") for n in range(3)]


def by_words(request, number):
    """Prefer what says good, wherever it stands."""
    text = request["messages"][0]["content"]
    return {"verdict": "A" if text.index("good") < text.index("bad") else "B"}


@pytest.fixture
def judge(tmp_path):
    def opened(url):
        return EndpointJudge(Endpoint(url, "m", retries=0, timeout=5.0), tmp_path / "kept")

    return opened


@pytest.mark.parametrize(
    ("first", "second", "score", "changed", "by_position"),
    [
        ("A", "B", 1.0, False, False),
        ("B", "A", 0.0, False, False),
        ("A", "A", 0.5, True, True),
        ("B", "B", 0.5, True, True),
        ("Tie", "Tie", 0.5, False, False),
        ("A", "Tie", 0.75, True, False),
        ("Tie", "A", 0.25, True, False),
        ("A", None, None, False, False),
    ],
)
def test_verdicts_of_both_orders_are_mapped_back(first, second, score, changed, by_position):
    found = Judged(first, second)
    assert (found.score, found.changed, found.by_position) == (score, changed, by_position)


def test_a_pair_is_asked_about_in_both_orders_and_once(judge):
    with ChatServer(by_words) as server:
        found = judge(server.url).judge(PAIRS)
        again = judge(server.url)
        assert again.judge(PAIRS) == found == [Judged("A", "B")] * 3
    assert len(server.requests) == 6
    text = server.requests[0]["messages"][0]["content"]
    for word in ("coherence", "relevance", "fluency", "correctness", " begins\n</data-"):
        assert word in text
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["verdict"]["enum"] == ["A", "B", "Tie"]
    assert again.asked()["requests"] == 0


@pytest.mark.parametrize("said", ["Response A", {"verdict": "Both"}, {"verdict": 1}, {"a": "A"}])
def test_something_else_is_asked_for_again_and_then_no_verdict(judge, said):
    def behave(request, number):
        return said if "Text 0" in request["messages"][0]["content"] else by_words(request, number)

    with ChatServer(behave) as server:
        asking = judge(server.url)
        found = asking.judge(PAIRS)
    assert found == [Judged(None, None), Judged("A", "B"), Judged("A", "B")]
    assert found[0].score is None
    assert len(server.requests) == 2 * 2 + 4
    assert sum(asking.asked()["failures"].values()) == 2


@pytest.mark.parametrize("chat", [False, True])
def test_a_local_judge_says_what_is_most_probable(ordinary, chat):
    judge = LocalJudge(ordinary[0])
    model, tokenizer = read_checkpoint(ordinary[0])
    if chat:
        judge._tokenizer.chat_template = CHAT
        judge._chat = True
    text = asked_text(PAIRS[0], AS_TOKEN)
    text = f"<|user|>{text}<|assistant|>" if chat else f"{text}\n\nAnswer:"
    start = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = judge.scores(PAIRS[0])
    assert list(found) == ["A", "B", "Tie"]
    for name, value in found.items():
        spelled = name if chat else f" {name}"
        assert value == pytest.approx(log_p(model, tokenizer, start, spelled).sum(), abs=1e-4)
    with SILENT.task("") as task:
        assert judge.verdicts([PAIRS[0]], task)[0] == max(found, key=found.get)


def log_p(model, tokenizer, start, text):
    """The log-probability of each token of a text after others."""
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    logits = model(torch.tensor([[*start, *own]])).logits[0, len(start) - 1 : -1]
    return logits.detach().log_softmax(-1)[range(len(own)), own].numpy()


def test_likelihood_is_the_mean_over_a_responses_tokens_whatever_the_order(ordinary):
    judge = LikelihoodJudge(ordinary[0])
    model, tokenizer = read_checkpoint(ordinary[0])
    start = tokenizer("Text begins", add_special_tokens=False)["input_ids"]
    means = [log_p(model, tokenizer, start, f" {text}").mean() for text in ("a good end", "bad")]
    pair = Pair("Text begins", "a good end", "bad")
    found = judge.scores(pair)
    assert [found["A"], found["B"]] == pytest.approx(means, abs=1e-4)
    expected = Judged("A", "B") if means[0] > means[1] else Judged("B", "A")
    assert judge.judge([pair]) == [expected]


def test_what_is_typical_is_as_probable_as_the_text_before_it(ordinary):
    likely, judge = LikelihoodJudge(ordinary[0]), LikelihoodJudge(ordinary[0], "typical")
    text = "Once there was a cat"

    def mean(text: str, response: str) -> float:
        return likely.scores(Pair(text, response, "x"))["A"]

    usual = mean("Once there", "was a cat")
    expected = [-abs(mean(text, response) - usual) for response in ("a good end", "bad")]
    pair = Pair(text, "a good end", "bad")
    found = judge.scores(pair)
    assert [found["A"], found["B"]] == pytest.approx(expected, abs=1e-5)
    assert judge.judge([pair]) == [Judged(*("AB" if expected[0] > expected[1] else "BA"))]
    with pytest.raises(InputError, match="'Once' has no two words"):
        judge.judge([Pair("Once", "a", "b")])


def test_a_response_cannot_end_the_turn(ordinary, monkeypatch):
    judge, read = LocalJudge(ordinary[0]), []
    after = judge._log_after
    monkeypatch.setattr(judge, "_log_after", lambda *given: read.extend(given) or after(*given))
    end = judge._tokenizer.eos_token
    judge.scores(Pair("Text", f"good{end}Answer: A", "bad"))
    assert judge._tokenizer.eos_token_id not in {token for ids in read for token in ids}


@pytest.mark.parametrize("kind", [LocalJudge, LikelihoodJudge])
def test_a_question_that_is_too_long_is_refused(ordinary, kind):
    with pytest.raises(InputError, match="and it reads 1024: give shorter prompts"):
        kind(ordinary[0]).judge([Pair("word " * 1000, "a", "b")])


PROMPTS = [
    Prompt(str(n), f"Story {n:02}", " ".join(f"w{n:02}-{i:02}" for i in range(12)))
    for n in range(30)
]


class Rule(Judge):
    """Says what a rule makes of text, A and B."""

    source = "rule"

    def __init__(self, rule):
        self.rule = rule

    def verdicts(self, orders, task):
        return [self.rule(*pair) for pair in orders]


def reads(text, a, b):
    """In order and of this prompt."""

    def good(response):
        words = response.split()
        return words == sorted(words) and words[0].startswith(f"w{text.split()[1]}-")

    return "A" if good(a) else "B" if good(b) else "Tie"


def examined(rule, prompts=PROMPTS):
    return examine(Rule(rule), prompts)


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


def test_a_judge_that_reads_is_usable():
    found = examined(reads)
    assert found["usable"]
    assert found["reasons"] == []
    shares = found["preferred"]
    assert [shares[name]["value"] for name in ("shuffled", "elsewhere", "repeated")] == [1, 1, 1]
    # z² / (n + z²) is missing of 1.
    assert shares["shuffled"]["low"] == pytest.approx(30 / (30 + 1.96**2), abs=1e-4)
    assert found["order"]["changed"]["value"] == 0
    assert found["order"]["first"]["value"] == 0.5


@pytest.mark.parametrize("place", ["A", "B"])
def test_a_judge_that_follows_positions_is_unusable(place):
    found = examined(lambda text, a, b: place)
    assert not found["usable"]
    assert found["preferred"]["shuffled"]["value"] == 0.5
    assert found["order"]["by_position"]["value"] == found["order"]["changed"]["value"] == 1
    assert found["order"]["first"]["value"] == (place == "A")
    words = ("words shuffled", "again and again", "position")
    assert all(word in said for word, said in zip(words, found["reasons"], strict=True))


def test_a_judge_that_likes_repetition_is_unusable():
    def rule(text, a, b):
        first, second = (len(set(response.split())) for response in (a, b))
        return "A" if first < second else "B" if second < first else reads(text, a, b)

    found = examined(rule)
    assert [found["preferred"][name]["value"] for name in ("shuffled", "repeated")] == [1, 0]
    assert ["again and again" in reason for reason in found["reasons"]] == [True]


def test_few_texts_are_too_few_to_pass():
    found = examined(reads, PROMPTS[:11])
    assert found["preferred"]["shuffled"]["value"] == 1
    assert not found["usable"]
    assert examined(reads, PROMPTS[:12])["usable"]
