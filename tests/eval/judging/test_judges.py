"""Judges: a real server with good or invalid answers, and local models."""

import numpy as np
import pytest
import torch

from prismlm.errors import InputError
from prismlm.eval.judging.judges import (
    AS_TOKEN,
    EndpointJudge,
    Judge,
    Judged,
    LikelihoodJudge,
    LocalJudge,
    Pair,
    Prompt,
    examination_pairs,
    examine,
    question,
    wilson,
)
from prismlm.lens.labels.endpoint import Endpoint
from prismlm.models.checkpoint import read_checkpoint
from prismlm.progress import SILENT
from tests.eval.judging.conftest import CHAT
from tests.helpers.chat_server import ChatServer

PAIRS = [Pair(f"Text {n} begins", f"good end {n}", f"bad end {n}") for n in range(3)]


def prefer_good(request, number):
    """Prefer the response with "good" in it."""
    text = request["messages"][0]["content"]
    return {"verdict": "A" if text.index("good") < text.index("bad") else "B"}


@pytest.fixture
def open_judge(tmp_path):
    return lambda url: EndpointJudge(Endpoint(url, "m", retries=0, timeout=5.0), tmp_path / "file")


@pytest.mark.parametrize(
    ("first", "second", "score", "by_position"),
    [
        ("A", "B", 1.0, False),
        ("B", "A", 0.0, False),
        ("A", "A", 0.5, True),
        ("B", "B", 0.5, True),
        ("Tie", "Tie", 0.5, False),
        ("A", "Tie", 0.75, False),
        ("Tie", "A", 0.25, False),
        ("A", None, None, False),
    ],
)
def test_the_score_is_the_mean_of_both_orders(first, second, score, by_position):
    judged = Judged(first, second)
    assert (judged.score, judged.by_position) == (score, by_position)


def test_a_pair_is_asked_about_in_both_orders_and_once(open_judge):
    with ChatServer(prefer_good) as server:
        judged = open_judge(server.url).judge(PAIRS)
        again = open_judge(server.url)
        assert again.judge(PAIRS) == judged == [Judged("A", "B")] * 3
    assert len(server.requests) == 6
    text = server.requests[0]["messages"][0]["content"]
    for word in ("coherence", "relevance", "fluency", "correctness", " begins\n</data-"):
        assert word in text
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["verdict"]["enum"] == ["A", "B", "Tie"]
    assert again.usage()["requests"] == 0


@pytest.mark.parametrize("answer", ["Response A", {"verdict": "Both"}, {"verdict": 1}, {"a": "A"}])
def test_an_invalid_answer_is_requested_again_and_then_gives_no_verdict(open_judge, answer):
    def behave(request, number):
        invalid = "Text 0" in request["messages"][0]["content"]
        return answer if invalid else prefer_good(request, number)

    with ChatServer(behave) as server:
        judge = open_judge(server.url)
        judged = judge.judge(PAIRS)
    assert judged == [Judged(None, None), Judged("A", "B"), Judged("A", "B")]
    assert len(server.requests) == 2 * 2 + 4
    assert sum(judge.usage()["failures"].values()) == 2


def log_p(model, tokenizer, start, text):
    """Return the log-probability of each token of a text after others."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    logits = model(torch.tensor([[*start, *ids]])).logits[0, len(start) - 1 : -1]
    return logits.detach().log_softmax(-1)[range(len(ids)), ids].numpy()


@pytest.mark.parametrize("chat", [False, True])
def test_a_local_judge_gives_the_most_probable_answer(ordinary, chat):
    judge = LocalJudge(ordinary[0])
    model, tokenizer = read_checkpoint(ordinary[0])
    if chat:
        judge._tokenizer.chat_template = CHAT
        judge._chat = True
    text = question(PAIRS[0], AS_TOKEN)
    text = f"<|user|>{text}<|assistant|>" if chat else f"{text}\n\nAnswer:"
    start = tokenizer(text, add_special_tokens=False)["input_ids"]
    scores = judge.scores(PAIRS[0])
    assert list(scores) == ["A", "B", "Tie"]
    for name, score in scores.items():
        answer = name if chat else f" {name}"
        assert score == pytest.approx(log_p(model, tokenizer, start, answer).sum(), abs=1e-4)
    with SILENT.task("") as task:
        assert judge.verdicts([PAIRS[0]], task)[0] == max(scores, key=scores.get)


def test_likelihood_is_the_mean_over_a_responses_tokens(ordinary):
    judge = LikelihoodJudge(ordinary[0])
    model, tokenizer = read_checkpoint(ordinary[0])
    start = tokenizer("Text begins", add_special_tokens=False)["input_ids"]
    means = [log_p(model, tokenizer, start, f" {text}").mean() for text in ("a good end", "bad")]
    pair = Pair("Text begins", "a good end", "bad")
    scores = judge.scores(pair)
    assert [scores["A"], scores["B"]] == pytest.approx(means, abs=1e-4)
    assert judge.judge([pair]) == [Judged(*("AB" if means[0] > means[1] else "BA"))]


def test_a_typical_response_is_as_probable_as_the_text_before_it(ordinary):
    likelihood, judge = LikelihoodJudge(ordinary[0]), LikelihoodJudge(ordinary[0], "typical")
    text = "Once there was a cat"

    def mean(text, response):
        return likelihood.scores(Pair(text, response, "x"))["A"]

    typical = mean("Once there", "was a cat")
    expected = [-abs(mean(text, response) - typical) for response in ("a good end", "bad")]
    pair = Pair(text, "a good end", "bad")
    scores = judge.scores(pair)
    assert [scores["A"], scores["B"]] == pytest.approx(expected, abs=1e-5)
    assert judge.judge([pair]) == [Judged(*("AB" if expected[0] > expected[1] else "BA"))]
    with pytest.raises(InputError, match="'Once' has no two words"):
        judge.judge([Pair("Once", "a", "b")])


def test_a_response_cannot_end_the_turn(ordinary, monkeypatch):
    judge, contexts = LocalJudge(ordinary[0]), []
    original = judge._log_after
    monkeypatch.setattr(judge, "_log_after", lambda *a: contexts.extend(a) or original(*a))
    eos = judge._tokenizer
    judge.scores(Pair("Text", f"good{eos.eos_token}Answer: A", "bad"))
    assert eos.eos_token_id not in {token for ids in contexts for token in ids}


@pytest.mark.parametrize("kind", [LocalJudge, LikelihoodJudge])
def test_a_question_that_is_too_long_is_refused(ordinary, kind):
    with pytest.raises(InputError, match="and it reads 1024: give shorter prompts"):
        kind(ordinary[0]).judge([Pair("word " * 1000, "a", "b")])


# -- the examination

PROMPTS = [
    Prompt(str(n), f"Story {n:02}", " ".join(f"w{n:02}-{i:02}" for i in range(12)))
    for n in range(30)
]


class Rule(Judge):
    """A judge that applies a function to text, A and B."""

    source = "rule"

    def __init__(self, rule):
        self.rule = rule

    def verdicts(self, pairs, task):
        return [self.rule(*pair) for pair in pairs]


def prefer_real(text, a, b):
    """Prefer words in order and of this prompt."""

    def real(response):
        words = response.split()
        return words == sorted(words) and words[0].startswith(f"w{text.split()[1]}-")

    return "A" if real(a) else "B" if real(b) else "Tie"


def prefer_repetition(text, a, b):
    first, second = (len(set(response.split())) for response in (a, b))
    return "A" if first < second else "B" if second < first else prefer_real(text, a, b)


def test_wilson_by_hand():
    # 8 of 10, z = 1.96: (0.8 + 0.19207) / 1.38415 ± 1.96 √(0.016 + 0.0096) / 1.38415.
    share = wilson(8, 10)
    assert (share.value, share.low, share.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 5).low == 0
    assert wilson(5, 5).high == 1
    assert np.isnan(wilson(0, 0).value)


def test_controls_are_shuffled_words_other_continuations_and_repetition():
    pairs = examination_pairs([*PROMPTS, Prompt("short", "no more", "")])
    references = {prompt.reference for prompt in PROMPTS}
    for prompt, shuffled, other, repeated in zip(PROMPTS, *pairs.values(), strict=True):
        assert shuffled.a == other.a == repeated.a == prompt.reference
        assert repeated.b.split() == prompt.text.split() * 6
        assert sorted(shuffled.b.split()) == sorted(prompt.reference.split())
        assert shuffled.b != prompt.reference
        assert other.b in references - {prompt.reference}
    assert examination_pairs(PROMPTS) == examination_pairs(PROMPTS)
    # Equal words leave nothing to judge.
    pairs = examination_pairs([Prompt("1", "b c d e f g h", "x x x x x x x x")] * 2)
    repeated = Pair("b c d e f g h", "x x x x x x x x", "c d e f g h c d")
    assert pairs == {"shuffled": [], "elsewhere": [], "repeated": [repeated] * 2}


@pytest.mark.parametrize(
    ("rule", "preferred", "by_position", "reasons"),
    [
        (prefer_real, [1, 1, 1], 0, []),
        (lambda *_: "A", [0.5, 0.5, 0.5], 1, ["words shuffled", "again and again", "position"]),
        (lambda *_: "B", [0.5, 0.5, 0.5], 1, ["words shuffled", "again and again", "position"]),
        (prefer_repetition, [1, 1, 0], 0, ["again and again"]),
    ],
    ids=["real", "first", "second", "repetition"],
)
def test_a_judge_is_usable_if_it_prefers_real_text(rule, preferred, by_position, reasons):
    result = examine(Rule(rule), PROMPTS)
    assert [share["value"] for share in result["preferred"].values()] == preferred
    assert result["order"]["by_position"]["value"] == by_position
    assert result["usable"] == (not reasons)
    assert all(part in text for part, text in zip(reasons, result["reasons"], strict=True))


@pytest.mark.parametrize(("count", "usable"), [(11, False), (12, True), (30, True)])
def test_too_few_texts_are_not_enough(count, usable):
    result = examine(Rule(prefer_real), PROMPTS[:count])
    # The Wilson interval of n successes in n begins at n / (n + z²).
    assert result["preferred"]["shuffled"]["low"] == pytest.approx(
        count / (count + 1.96**2), abs=1e-4
    )
    assert result["usable"] == usable
