"""Prompts and their continuations, BLEU, ratings, and the study that resumes."""

import re

import numpy as np
import pyarrow.parquet as pq
import pytest

import prismlm
from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.eval.judging.judges import EndpointJudge, LocalJudge, Prompt
from prismlm.eval.judging.study import (
    CONTINUATIONS_TABLE,
    MAX_DISTANCE,
    RESULT_FILE,
    VERDICTS_TABLE,
    Writing,
    bleu_figures,
    bradley_terry,
    continue_prompts,
    corpus_prompts,
    cut,
    file_prompts,
    online_elo,
    rate,
    run_judging,
    total_wins,
    unique_names,
)
from prismlm.files import read_json
from prismlm.lens.labels.endpoint import Endpoint
from prismlm.models.checkpoint import read_checkpoint
from tests.helpers.chat_server import ChatServer

SETTINGS = Writing(words=5, tokens=8)
REFERENCE = " ".join(f"word{i:02}" for i in range(6))
PROMPTS = [Prompt(str(n), f"Story {n} begins so", f"{REFERENCE} {n}") for n in range(12)]

# -- prompts and continuations


@pytest.mark.parametrize(
    ("text", "prompt", "reference"),
    [
        (" one two\nthree  four five six seven eight nine ten eleven twelve",
         "one two\nthree  four five", "six seven eight nine ten eleven"),
        # One word fewer than prompt and reference need.
        ("one two three four five six seven eight nine ten", "one two three four five", ""),
        ("one two", "one two", ""),
        (" \n", "", ""),
    ],
)  # fmt: skip
def test_a_text_is_cut_after_whole_words(text, prompt, reference):
    assert cut("d", text, SETTINGS) == Prompt("d", prompt, reference)
    assert cut("d", text, Writing(words=10**20)).text == text.strip()


def test_prompts_are_the_beginnings_of_held_out_documents(tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    prompts = corpus_prompts(corpus, 6, SETTINGS)
    assert len({prompt.id for prompt in prompts}) == 6
    held_out = {corpus.doc_ids[number] for number in corpus.split("heldout")}
    for id, text, reference in prompts:
        assert id in held_out
        assert corpus.text(corpus.find(id)).lstrip().startswith(text)
        assert (len(text.split()), len(reference.split())) == (5, 6)
    assert corpus_prompts(corpus, 6, SETTINGS) == prompts
    assert corpus_prompts(corpus, 6, Writing(words=5, tokens=8, seed=1)) != prompts
    with pytest.raises(InputError, match="has 0 texts to continue"):
        corpus_prompts(corpus, 6, Writing(words=9000))


def test_prompts_are_the_lines_of_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("One line.\n\n" + "word " * 11 + "\nThe third\n")
    prompts = file_prompts(file, 2, SETTINGS)
    assert [(p.id, len(p.reference.split())) for p in prompts] == [("1", 0), ("3", 6)]
    assert len(file_prompts(file, 10**20, SETTINGS)) == 3
    for content, message in (
        ("caf\xe9\n".encode("latin-1"), "is not UTF-8"),
        (b"alone\n", "has 1 texts to continue"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputError, match=message):
            file_prompts(file, 2, SETTINGS)
    with pytest.raises(InputError, match="there is no file"):
        file_prompts(tmp_path / "none", 2, SETTINGS)


def test_continuations_are_those_of_generate(tiny_model):
    prompts = [Prompt(text, text, "") for text in ("Once upon a time", "The court")]
    lm = prismlm.load(tiny_model)
    expected = [lm.generate(p.text, tokens=8).removeprefix(p.text).strip() for p in prompts]
    assert continue_prompts("m", *read_checkpoint(tiny_model), prompts, SETTINGS) == expected


def test_sampled_tokens_depend_on_the_seed_and_the_prompts_number(ordinary):
    def continuations(seed):
        settings = Writing(words=5, tokens=8, temperature=1.0, seed=seed)
        return continue_prompts("m", *read_checkpoint(ordinary[0]), PROMPTS[:1] * 2, settings)

    first, second = continuations(0)
    assert continuations(0) == [first, second] != continuations(1)
    assert first != second


# -- BLEU


@pytest.mark.parametrize(
    ("text", "score"),
    [
        # Of seven words six match, of six pairs five, and so on: (6/7 · 5/6 · 4/5 · 3/4)^(1/4).
        ("the cat sat on the mat today", 100 * (3 / 7) ** 0.25),
        # All match, and four words in place of six cost exp(1 − 6/4).
        ("the cat sat on", 60.653),
        ("the cat sat on the mat", 100),
        ("", 0),
    ],
)
def test_bleu_by_hand(text, score):
    prompts = [Prompt(str(n), "p", "the cat sat on the mat") for n in range(2)]
    figures = bleu_figures(prompts, {"m": [text] * 2})
    assert figures["models"]["m"]["mean"]["value"] == pytest.approx(score, abs=1e-3)


def test_means_have_the_bleu_of_other_prompts_as_control():
    words = ["one two three four five", "red blue green white black", "hill lake wood sea road"]
    prompts = [Prompt(str(n), f"p{n}", text) for n, text in enumerate(words)]
    prompts.insert(1, Prompt("short", "p", ""))
    texts = {"copies": [words[0], "x", *words[1:]], "moves": [words[1], "x", words[2], words[2]]}
    result = bleu_figures(prompts, texts)
    assert result["prompts"] == 3
    copies, moves = result["models"]["copies"], result["models"]["moves"]
    assert (copies["mean"]["value"], copies["other_prompt"]["value"]) == pytest.approx((100, 0))
    assert copies["difference"]["low"] == copies["corpus"] == pytest.approx(100)
    # Two of its three texts are the next prompt's reference.
    assert moves["mean"]["value"] == pytest.approx(100 / 3)
    assert moves["other_prompt"]["value"] == pytest.approx(200 / 3)


@pytest.mark.parametrize("references", [[], ["a b"]])
def test_bleu_needs_two_references(references):
    prompts = [Prompt("1", "p", text) for text in references] + [Prompt("2", "p", "")]
    assert bleu_figures(prompts, {"m": ["a b"] * len(prompts)}) is None


# -- ratings


def test_online_elo_of_three_games_by_hand():
    # A wins: expected 1/2, so that it gets 2. Then B wins: expected of A is 1 / (1 + 10^(−4/400)),
    # 0.5057562, which it loses four times. Then a tie: A, a little behind, gains a little.
    score = np.array([[1.0, 0.0, 0.5]])
    first, second = np.zeros((1, 3), int), np.ones((1, 3), int)
    after = [online_elo(first[:, :n], second[:, :n], score[:, :n], 2)[0] for n in (1, 2, 3)]
    expected = 1002, 1002 - 4 * 0.5057562, 999.976975 + 4 * (0.5 - 0.4999337)
    assert [ratings[0] for ratings in after] == pytest.approx(expected, abs=1e-6)
    assert after[2].sum() == 2000


@pytest.mark.parametrize("scores", [[1, 1, 0], [1, 0.5, 0.5]], ids=["wins", "ties"])
def test_bradley_terry_of_three_games_by_hand(scores):
    # Two of three points are odds of 2 to 1, which is a difference of 400 log10(2) = 120.412.
    wins = total_wins(np.array(scores, float)[:, None], 2)
    assert wins.tolist() == [[0, 2], [1, 0]]
    assert bradley_terry(wins).tolist() == pytest.approx([1060.206, 939.794], abs=1e-3)


@pytest.mark.parametrize("games", [np.full((4, 4), 7), np.arange(4) + 1 + np.arange(4)[:, None]])
def test_ratings_of_four_players_are_recovered(games):
    ratings = np.array([800.0, 950.0, 1050.0, 1200.0])
    expected = 1 / (1 + 10 ** ((ratings[None] - ratings[:, None]) / 400))
    np.fill_diagonal(expected, 0)
    assert bradley_terry(expected * games) == pytest.approx(ratings, abs=1e-6)


def test_a_player_that_never_loses_ends_at_the_bound_and_one_without_games_at_the_start():
    best, worst = rate(np.ones((4, 1)), 2)
    assert best["bradley_terry"].value == pytest.approx(1000 + MAX_DISTANCE)
    assert worst["bradley_terry"].value == pytest.approx(1000 - MAX_DISTANCE)
    ratings = rate(np.array([[0.5, np.nan, np.nan]] * 3), 3)
    assert [row["bradley_terry"].value for row in ratings] == pytest.approx([1000] * 3)


# -- the study


def prefer_reference(request, number):
    """Prefer the reference, otherwise the response that is first in the alphabet."""
    lines = request["messages"][0]["content"].split("\n")
    _, a, b = [lines[i + 1] for i, line in enumerate(lines) if line.startswith("<data-")]
    a_wins = (not a.startswith(REFERENCE), a) < (not b.startswith(REFERENCE), b)
    return {"verdict": "A" if a_wins else "B"}


def endpoint_judge(url):
    return lambda file: EndpointJudge(Endpoint(url, "m", retries=0), file)


def test_an_interrupted_study_resumes_and_takes_another_model(ordinary, tiny_model, tmp_path):
    out, models = tmp_path / "out", unique_names(ordinary)

    def fail_after_40(request, number):
        return prefer_reference(request, number) if number < 40 else (500, "")

    with ChatServer(fail_after_40) as server, pytest.raises(InputError, match="kept in"):
        run_judging(models, PROMPTS, SETTINGS, out, endpoint_judge(server.url))
    assert not (out / RESULT_FILE).exists()
    with ChatServer(prefer_reference) as server:
        study = (PROMPTS, SETTINGS, out, endpoint_judge(server.url))
        result = run_judging(models, *study)
        # Of 72 questions of the examination and 24 about the models, 40 were answered before.
        assert len(server.requests) == 56
        assert result == read_json(out / RESULT_FILE)
        server.requests.clear()
        assert run_judging(models, *study)["ratings"] == result["ratings"]
        assert server.requests == []
        more = run_judging(unique_names([*ordinary, tiny_model]), *study)
        # Two more pairs, unless two models write the same.
        assert 0 < len(server.requests) <= 48
    assert result["judge"]["usable"]
    assert result["ratings"]["readable"]
    assert len(more["ratings"]["pairs"]) == 3
    assert more["ratings"]["pairs"][0] == result["ratings"]["pairs"][0]
    texts = pq.read_table(out / CONTINUATIONS_TABLE)
    assert texts.num_rows == 36
    assert set(texts["model"].to_pylist()) == {"a", "b", tiny_model.name}


def test_ratings_follow_from_the_stored_verdicts(ordinary, tmp_path):
    out, judge = tmp_path / "out", LocalJudge(ordinary[0])
    result = run_judging(unique_names(ordinary), PROMPTS, SETTINGS, out, lambda file: judge)
    rows = pq.read_table(out / VERDICTS_TABLE).to_pylist()
    (pair,) = result["ratings"]["pairs"]
    assert pair["score"]["value"] == pytest.approx(sum(row["score_a"] for row in rows) / 12)
    assert pair["won"] + pair["lost"] <= pair["games"] == 12
    best = max(result["ratings"]["models"], key=lambda row: row["bradley_terry"]["value"])
    assert best["model"] == ("a" if pair["score"]["value"] >= 0.5 else "b")
    # Random weights cannot judge.
    assert not result["judge"]["usable"]
    assert not result["ratings"]["readable"]


def test_other_settings_and_prompts_are_refused(ordinary, tmp_path):
    out, models = tmp_path / "out", unique_names(ordinary[:1])
    run_judging(models, PROMPTS, SETTINGS, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=re.escape("(tokens: 8 → 9)")):
        run_judging(models, PROMPTS, Writing(words=5, tokens=9), out)
    with pytest.raises(InputError, match="prompts: "):
        run_judging(models, PROMPTS[:5], SETTINGS, out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
