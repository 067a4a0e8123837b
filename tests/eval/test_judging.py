"""Judges and their examination; prompts and their continuations, BLEU, ratings, and the study."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.eval import judging
from prismlm.eval.runs import unique_names
from prismlm.files import read_json
from prismlm.lens.labels.endpoint import Endpoint
from prismlm.models.checkpoint import read_checkpoint
from prismlm.progress import SILENT
from tests.helpers.chat_server import ChatServer

CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


@pytest.fixture(scope="module")
def ordinary(tiny_corpus, tmp_path_factory):
    """Two random GPT-2s of the tokenizer of `tiny_corpus`, as anyone would save them."""
    tokenizer = Corpus.open(tiny_corpus).tokenizer
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=1024,
        initializer_range=0.4, bos_token_id=0, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    directories = [tmp_path_factory.mktemp("ordinary") / name for name in "ab"]
    for seed, directory in enumerate(directories):
        torch.manual_seed(seed)
        GPT2LMHeadModel(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return directories


PAIRS = [judging.Pair(f"Text {n} begins", f"good end {n}", f"bad end {n}") for n in range(3)]


def prefer_good(request, number):
    """Prefer the response with "good" in it."""
    text = request["messages"][0]["content"]
    return {"verdict": "A" if text.index("good") < text.index("bad") else "B"}


@pytest.fixture
def open_judge(tmp_path):
    def opened(url):
        endpoint = Endpoint(url, "m", retries=0, timeout=5.0)
        return judging.EndpointJudge(endpoint, tmp_path / "file")

    return opened


def test_the_score_is_the_mean_of_both_orders():
    scores = {
        ("A", "B"): 1, ("B", "A"): 0, ("A", "A"): 0.5, ("Tie", "Tie"): 0.5, ("A", "Tie"): 0.75,
        ("Tie", "A"): 0.25,
    }  # fmt: skip
    assert {orders: judging.score_of(orders) for orders in scores} == scores
    assert np.isnan(judging.score_of(("A", None)))


def test_a_pair_is_asked_about_in_both_orders_and_again_only_without_a_verdict(open_judge):
    def behave(request, number):
        invalid = number < 8 and "Text 0" in request["messages"][0]["content"]
        return {"verdict": "Both"} if invalid else prefer_good(request, number)

    with ChatServer(behave) as server:
        judge = open_judge(server.url)
        assert judging.judge_pairs(judge, PAIRS) == [(None, None), ("A", "B"), ("A", "B")]
        # An invalid answer is requested once more.
        assert len(server.requests) == 2 * 2 + 4
        assert sum(judge.session.usage()["failures"].values()) == 2
        again = open_judge(server.url)
        assert judging.judge_pairs(again, PAIRS) == [("A", "B")] * 3
    assert again.session.usage()["requests"] == 2
    text = server.requests[0]["messages"][0]["content"]
    for word in ("coherence", "relevance", "fluency", "correctness", " begins\n</data-"):
        assert word in text
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["verdict"]["enum"] == ["A", "B", "Tie"]


def log_p(model, tokenizer, start, text):
    """Return the log-probability of each token of a text after others."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    logits = model(torch.tensor([[*start, *ids]])).logits[0, len(start) - 1 : -1]
    return logits.detach().log_softmax(-1)[range(len(ids)), ids].numpy()


@pytest.mark.parametrize("chat", [False, True])
def test_a_local_judge_gives_the_most_probable_answer(ordinary, chat, tmp_path):
    judge = judging.LocalJudge(ordinary[0])
    model, tokenizer = read_checkpoint(ordinary[0])
    if chat:
        judge.tokenizer.chat_template = CHAT
    text = judging.question(PAIRS[0], judging.AS_TOKEN)
    text = f"<|user|>{text}<|assistant|>" if chat else f"{text}\n\nAnswer:"
    start = tokenizer(text, add_special_tokens=False)["input_ids"]
    scores = judge.answers(PAIRS[0])
    for name, score in scores.items():
        answer = name if chat else f" {name}"
        assert score == pytest.approx(log_p(model, tokenizer, start, answer).sum(), abs=1e-4)
    with SILENT.task("") as task:
        assert judge.verdicts([PAIRS[0]], task)[0] == max(scores, key=scores.get)
    with pytest.raises(InputError, match="the model reads 1024: give shorter prompts"):
        judge.answers(judging.Pair("word " * 1000, "a", "b"))
    # Random weights cannot judge.
    if not chat:
        result = judging.run_judging(unique_names(ordinary), PROMPTS[:9], SETTINGS, tmp_path, judge)
        assert (result["judge"]["source"], result["judge"]["usable"]) == ("a", False)
        assert not result["ratings"]["readable"]


# -- the examination

PROMPTS = [
    judging.Prompt(str(n), f"Story {n:02}", " ".join(f"w{n:02}-{i:02}" for i in range(12)))
    for n in range(30)
]


class Rule:
    """A judge that applies a function to text, A and B."""

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
    share = judging.wilson(8, 10)
    assert (share.value, share.low, share.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert judging.wilson(0, 5).low == 0
    assert judging.wilson(5, 5).high == 1
    assert np.isnan(judging.wilson(0, 0).value)


def test_controls_are_shuffled_words_other_continuations_and_repetition():
    pairs = judging.examination_pairs([*PROMPTS, judging.Prompt("short", "no more", "")])
    references = {prompt.reference for prompt in PROMPTS}
    for prompt, shuffled, other, repeated in zip(PROMPTS, *pairs.values(), strict=True):
        assert shuffled.a == other.a == repeated.a == prompt.reference
        assert repeated.b.split() == prompt.text.split() * 6
        assert sorted(shuffled.b.split()) == sorted(prompt.reference.split())
        assert shuffled.b != prompt.reference
        assert other.b in references - {prompt.reference}


@pytest.mark.parametrize(
    ("rule", "preferred", "by_position", "reasons"),
    [
        (prefer_real, [1, 1, 1], 0, []),
        (lambda *_: "A", [0.5, 0.5, 0.5], 1, ["words shuffled", "again and again", "position"]),
        (prefer_repetition, [1, 1, 0], 0, ["again and again"]),
    ],
    ids=["real", "first", "repetition"],
)
def test_a_judge_is_usable_if_it_prefers_real_text(rule, preferred, by_position, reasons):
    result = judging.examine(Rule(rule), PROMPTS)
    assert [share["value"] for share in result["preferred"].values()] == preferred
    assert result["order"]["by_position"]["value"] == by_position
    assert result["usable"] == (not reasons)
    assert all(part in text for part, text in zip(reasons, result["reasons"], strict=True))


SETTINGS = judging.Writing(words=5, tokens=8)
REFERENCE = " ".join(f"word{i:02}" for i in range(6))
STORIES = [judging.Prompt(str(n), f"Story {n} begins so", f"{REFERENCE} {n}") for n in range(12)]

# -- prompts and continuations


def test_a_text_is_cut_after_whole_words():
    for text, prompt, reference in (
        (
            " one two\nthree  four five six seven eight nine ten eleven twelve",
            *("one two\nthree  four five", "six seven eight nine ten eleven"),
        ),
        # One word fewer than prompt and reference need.
        ("one two three four five six seven eight nine ten", "one two three four five", ""),
        ("one two", "one two", ""),
        (" \n", "", ""),
    ):
        assert judging.cut("d", text, SETTINGS) == judging.Prompt("d", prompt, reference)


def test_prompts_are_the_beginnings_of_held_out_documents(tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    prompts = judging.corpus_prompts(corpus, 6, SETTINGS)
    held_out = {corpus.doc_ids[number] for number in corpus.split("heldout")}
    assert len({prompt.id for prompt in prompts} & held_out) == 6
    for id, text, reference in prompts:
        assert corpus.text(corpus.find(id)).lstrip().startswith(text)
        assert (len(text.split()), len(reference.split())) == (5, 6)
    assert judging.corpus_prompts(corpus, 6, SETTINGS) == prompts
    assert judging.corpus_prompts(corpus, 6, judging.Writing(words=5, tokens=8, seed=1)) != prompts


def test_prompts_are_the_lines_of_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("One line.\n\n" + "word " * 11 + "\nThe third\n")
    prompts = judging.file_prompts(file, 2, SETTINGS)
    assert [(p.id, len(p.reference.split())) for p in prompts] == [("1", 0), ("3", 6)]
    assert len(judging.file_prompts(file, 99, SETTINGS)) == 3
    file.write_text("alone\n")
    with pytest.raises(InputError, match="has 1 texts to continue"):
        judging.file_prompts(file, 2, SETTINGS)


def test_continuations_are_those_of_generate(lm):
    prompts = [judging.Prompt(text, text, "") for text in ("Once upon a time", "The court")]
    expected = [lm.generate(p.text, tokens=8).removeprefix(p.text).strip() for p in prompts]
    assert judging.continue_prompts("m", lm.model, lm.tokenizer, prompts, SETTINGS) == expected


def test_sampled_tokens_depend_on_the_seed_and_the_prompts_number(ordinary):
    def continuations(seed):
        settings = judging.Writing(words=5, tokens=8, temperature=1.0, seed=seed)
        same = STORIES[:1] * 2
        return judging.continue_prompts("m", *read_checkpoint(ordinary[0]), same, settings)

    first, second = continuations(0)
    assert continuations(0) == [first, second] != continuations(1)
    assert first != second


# -- BLEU


def test_bleu_by_hand_beside_that_of_other_prompts():
    scores = {
        # Of seven words six match, of six pairs five, and so on: (6/7 · 5/6 · 4/5 · 3/4)^(1/4).
        "the cat sat on the mat today": 100 * (3 / 7) ** 0.25,
        # All match, and four words in place of six cost exp(1 − 6/4).
        "the cat sat on": 60.653,
        "the cat sat on the mat": 100,
        "": 0,
    }
    prompts = [judging.Prompt(str(n), "p", "the cat sat on the mat") for n in range(2)]
    models = judging.bleu_figures(prompts, {text: [text] * 2 for text in scores})["models"]
    means = {text: figures["mean"]["value"] for text, figures in models.items()}
    assert means == pytest.approx(scores, abs=1e-3)
    # It needs two references.
    assert judging.bleu_figures([judging.Prompt("2", "p", "")], {"m": ["a b"]}) is None
    words = ["one two three four five", "red blue green white black", "hill lake wood sea road"]
    prompts = [judging.Prompt(str(n), f"p{n}", text) for n, text in enumerate(words)]
    prompts.insert(1, judging.Prompt("short", "p", ""))
    texts = {"copies": [words[0], "x", *words[1:]], "moves": [words[1], "x", words[2], words[2]]}
    result = judging.bleu_figures(prompts, texts)
    assert result["prompts"] == 3
    copies, moves = result["models"]["copies"], result["models"]["moves"]
    assert (copies["mean"]["value"], copies["other_prompt"]["value"]) == pytest.approx((100, 0))
    assert copies["difference"]["low"] == copies["corpus"] == pytest.approx(100)
    # Two of its three texts are the next prompt's reference.
    assert moves["mean"]["value"] == pytest.approx(100 / 3)
    assert moves["other_prompt"]["value"] == pytest.approx(200 / 3)


# -- ratings


def test_bradley_terry_by_hand_and_recovered():
    # Two of three points are odds of 2 to 1, which is a difference of 400 log10(2) = 120.412.
    wins = judging.total_wins(np.array([1, 0.5, 0.5])[:, None], 2)
    assert wins.tolist() == [[0, 2], [1, 0]]
    assert judging.bradley_terry(wins).tolist() == pytest.approx([1060.206, 939.794], abs=1e-3)
    ratings = np.array([800.0, 950.0, 1050.0, 1200.0])
    expected = 1 / (1 + 10 ** ((ratings[None] - ratings[:, None]) / 400))
    np.fill_diagonal(expected, 0)
    games = np.arange(4) + 1 + np.arange(4)[:, None]
    assert judging.bradley_terry(expected * games) == pytest.approx(ratings, abs=1e-6)


def test_a_player_that_never_loses_ends_at_the_bound_and_one_without_games_at_the_start():
    best, worst = judging.rate(np.ones((4, 1)), 2)
    assert best.value == pytest.approx(1000 + judging.MAX_DISTANCE)
    assert worst.value == pytest.approx(1000 - judging.MAX_DISTANCE)
    ratings = judging.rate(np.array([[0.5, np.nan, np.nan]] * 3), 3)
    assert [row.value for row in ratings] == pytest.approx([1000] * 3)


# -- the study


def prefer_reference(request, number):
    """Prefer the reference, otherwise the response that is first in the alphabet."""
    lines = request["messages"][0]["content"].split("\n")
    _, a, b = [lines[i + 1] for i, line in enumerate(lines) if line.startswith("<data-")]
    a_wins = (not a.startswith(REFERENCE), a) < (not b.startswith(REFERENCE), b)
    return {"verdict": "A" if a_wins else "B"}


def test_an_interrupted_study_resumes_and_takes_another_model(ordinary, tiny_model, tmp_path):
    out, models = tmp_path / "out", unique_names(ordinary)

    def fail_after_40(request, number):
        return prefer_reference(request, number) if number < 40 else (500, "")

    def run(models, url):
        judge = judging.EndpointJudge(Endpoint(url, "m", retries=0), out / judging.VERDICTS)
        return judging.run_judging(models, STORIES, SETTINGS, out, judge)

    with ChatServer(fail_after_40) as server, pytest.raises(InputError, match="kept in"):
        run(models, server.url)
    assert not (out / judging.RESULT_FILE).exists()
    with ChatServer(prefer_reference) as server:
        result = run(models, server.url)
        # Of 72 questions of the examination and 24 about the models, 40 were answered before.
        assert len(server.requests) == 56
        assert result == read_json(out / judging.RESULT_FILE)
        server.requests.clear()
        assert run(models, server.url)["ratings"] == result["ratings"]
        assert server.requests == []
        more = run(unique_names([*ordinary, tiny_model]), server.url)
        # Two more pairs, unless two models write the same.
        assert 0 < len(server.requests) <= 48
    assert result["judge"]["usable"]
    assert result["ratings"]["readable"]
    (pair,) = result["ratings"]["pairs"]
    rows = pq.read_table(out / judging.VERDICTS_TABLE).to_pylist()
    rows = [row for row in rows if row["b"] == "b"]
    assert (pair["games"], len(rows)) == (12, 12)
    assert pair["score"]["value"] == pytest.approx(sum(row["score_a"] for row in rows) / 12)
    best = max(result["ratings"]["models"], key=lambda row: row["rating"]["value"])
    assert best["model"] == ("a" if pair["score"]["value"] >= 0.5 else "b")
    assert len(more["ratings"]["pairs"]) == 3
    assert more["ratings"]["pairs"][0] == result["ratings"]["pairs"][0]
    texts = pq.read_table(out / judging.CONTINUATIONS_TABLE)
    assert texts.num_rows == 36
    assert set(texts["model"].to_pylist()) == {"a", "b", tiny_model.name}
