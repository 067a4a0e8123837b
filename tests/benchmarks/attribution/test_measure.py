"""The planted facts, asked and counted: the script behind docs/results/attribution.md."""

import math

import numpy as np
import pytest
import torch

import prismlm
from benchmarks.attribution import measure as attribution
from benchmarks.attribution import planted_model
from benchmarks.attribution import render as render_attribution
from benchmarks.attribution.measure import Question
from prismlm.corpus import Corpus, build_corpus, pack, sample_path
from prismlm.corpus.read import read_documents
from prismlm.files import read_json


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


@pytest.fixture(scope="module")
def corpus(tiny_corpus):
    return Corpus.open(tiny_corpus)


@pytest.fixture(scope="module")
def questions(corpus):
    """The own words of six training documents, each asked for the word after its first forty."""
    found = []
    for number in corpus.split("train")[::40][:6].tolist():
        text = corpus.text(number)
        words = text.split(" ")
        before, answer = " ".join(words[:40]), words[40].split("\n")[0].strip(".,;:()")
        found.append(
            Question(before, answer, ("zebra", answer), (corpus.doc_ids[number],), copies=1)
        )
    return found


def test_the_steps_are_those_that_predict_the_answer(lm, questions):
    for question in questions:
        steps = attribution.answer_steps(lm, question)
        assert "".join(step.target for step in steps) == f" {question.answer}"
        assert steps[0].position == len(attribution.token_ids(lm, question.text)) - 1
        known = attribution.knowledge(lm, question)
        product = math.prod(step.probability for step in steps)
        assert known["probability"] == pytest.approx(product, rel=1e-3)
        assert (known["rank"] == 1) == (lm.explain(question.text)[-1].target == steps[0].target)


def test_own_words_are_found_by_state_and_by_words(lm, corpus, questions):
    rows = attribution.ask(lm, lm, corpus, questions)
    for row in rows:
        recall = row["recall"]
        assert recall["nearest_states"] == 1.0
        assert recall["bm25_prompt"] == recall["bm25_answered"] == 1.0
        assert recall["chance"] == pytest.approx(10 / len(corpus.split("train")))
        # The lens cannot show what it does not hold.
        assert recall["attribution"] <= row["within_reach"] <= row["in_index"] <= 1
        # The control here is the model itself.
        assert recall["random_states"] == recall["attribution"]
    summary = attribution.summary(rows)
    assert summary["all"]["recall"]["nearest_states"]["low"] == 1.0


def test_a_shuffled_map_leads_to_the_contexts_of_other_prototypes(lm, questions):
    trace = attribution.answer_steps(lm, questions[0])[:1]
    order = np.roll(np.arange(lm.head.num_prototypes), 1)
    moved = attribution.with_contexts_of(trace, order)
    names, document_of_row = lm.lens.documents
    used = [use.id for use in trace[0].prototypes if use.evidence > 0]
    rows = np.concatenate(
        [np.arange(len(document_of_row))[lm.lens.rows_of(order[i])] for i in used]
    )
    assert set(attribution.documents(moved)) <= {names[n] for n in document_of_row[rows]}
    assert attribution.documents(moved) != attribution.documents(trace)
    same = attribution.with_contexts_of(trace, np.arange(lm.head.num_prototypes))
    assert attribution.documents(same) == attribution.documents(trace)


def test_the_source_measure_by_hand(lm, questions):
    trace = attribution.answer_steps(lm, questions[1])
    names, document_of_row = lm.lens.documents
    mass = dict.fromkeys(names, 0.0)
    for step in trace:
        for use in step.prototypes:
            contexts = document_of_row[lm.lens.rows_of(use.id)].tolist()
            for number in contexts:
                mass[names[number]] += use.activation / len(contexts)
    best = sorted(mass.values(), reverse=True)[:10]
    found = attribution.documents(trace, "source")
    assert len(set(found)) == 10
    np.testing.assert_allclose([mass[name] for name in found], best)


def row(copies, rank, known, attributed, bm25):
    return {
        "copies": copies,
        "rank": rank,
        "probability": 0.5,
        "first_of_candidates": known,
        "explained_share": 0.9,
        "in_index": 1.0,
        "within_reach": 0.5,
        "recall": {"attribution": attributed, "bm25_prompt": bm25},
    }


def test_summary_by_hand():
    rows = [row(1, 3, True, 0.0, 1.0), row(1, 200, False, 0.5, 1.0), row(16, 10, True, 0.75, 1.0)]
    figures = attribution.summary(rows)
    assert set(figures) == {"copies_1", "copies_16", "rank_1_10", "rank_101_on", "known", "all"}
    assert figures["copies_1"]["recall"]["attribution"]["difference"] == 0.25
    assert figures["rank_1_10"]["facts"] == 2
    assert figures["known"]["recall"]["attribution"]["difference"] == 0.375
    assert figures["all"]["attribution_minus"]["bm25_prompt"]["high"] <= -0.25
    assert figures["all"]["first_of_candidates"]["difference"] == pytest.approx(2 / 3)
    assert figures["all"]["median_rank"] == 10


def test_domain_prompts(lm, corpus):
    for figures in attribution.domain_prompts(lm, lm, corpus):
        assert figures["trained"] == figures["random_states"]
        assert figures["trained_minus_random_states"]["own_share"]["high"] == 0
        assert 0 < figures["shuffled_map"]["own_share"] < 1


def test_what_is_planted_is_trained_on(tmp_path):
    planted_model.thin_out(sample_path(), tmp_path / "real.parquet", 40)
    assert len(list(read_documents(tmp_path / "real.parquet"))) == math.ceil(5315 / 40)
    planted_model.plant_facts(tmp_path, tmp_path / "real.parquet", 1, 0, copies=(1, 3))
    corpus = build_corpus(tmp_path / "planted.parquet", tmp_path / "corpus", vocab_size=300)
    facts = read_json(tmp_path / "facts.json")["facts"]
    ids = [place["doc_id"] for fact in facts for place in fact["documents"]]
    assert sorted(ids) == sorted(corpus.doc_ids)
    assert len(corpus.split("train")) == len(ids) == 4
    for questions in attribution.wordings(facts).values():
        assert [question.copies for question in questions] == [1, 3]
    new, own = (
        attribution.wordings(facts)["held_out"][1],
        attribution.wordings(facts)["verbatim"][1],
    )
    assert len(new.documents) == 3
    texts = [corpus.text(number) for number in range(4)]
    assert not any(new.answered in text for text in texts)
    assert corpus.text(corpus.find(own.documents[0])).startswith(own.answered)
    recipe = planted_model.planted_recipe(tmp_path, epochs=3, seed=0)
    rows = pack(corpus, np.arange(4), recipe.data.length, 0)
    assert recipe.steps == 3 * math.ceil(len(rows) / recipe.batch_size)


def interval(low, high):
    return {"difference": (low + high) / 2, "low": low, "high": high}


def page(attributed, rivals, own_share):
    """Render a made-up result: one recall for attribution, one for everything else."""
    rows = []
    for number in range(30):
        entry = row((1, 4, 16)[number % 3], 1 + 10 * number, number % 2 == 0, attributed, rivals)
        entry["recall"] = dict.fromkeys(render_attribution.METHODS, rivals)
        entry["recall"]["attribution"] = attributed
        rows.append(entry)
    asked = {"summary": attribution.summary(rows), "questions": rows}
    share = {"documents": 9, "own_share": 0.2, "chance": 0.1, "accuracy": 0.5}
    share["chance_accuracy"] = 0.25
    differences = {"own_share": own_share, "accuracy": interval(-0.1, 0.1)}
    prompts = {"tokens": 8, "shuffles": 20}
    for key in ("trained", "random_states", "shuffled_map"):
        prompts |= {key: share, f"trained_minus_{key}": differences}
    names = ("date", "commit", "machine", "python", "torch", "transformers")
    result = {
        "environment": dict.fromkeys(names, "x"),
        "setting": {
            "recipe": {"head": {"prototypes": 2048, "prototypes_per_token": 16}},
            "corpus": {"tokens": 100, "heldout": {"tokens": 5}},
            "lens": {"contexts": 64},
            "options": {"every": 2},
            "example": {"prompt": "a_b", "answer": "c", "document": "d *e*"},
            **dict.fromkeys(("facts", "planted_documents", "training_documents"), 30),
            **dict.fromkeys(("parameters", "training_tokens", "steps"), 7),
        },
        "wordings": {"held_out": asked, "verbatim": asked},
        "domain_prompts": [prompts],
    }
    return render_attribution.render(result, edits=None)


def test_the_page_says_what_does_not_work():
    lost = page(0.1, 0.3, interval(-0.02, 0.01))
    assert "benchmarks.attribution.planted_model planted --every 2" in lost
    assert lost.count("**does not work**: not better than random states, a") == 2
    assert "BM25 (prompt and answer) and ten documents at random. Recall@10 0.100;" in lost
    assert "**does not work**: not better than random states and one shuffled map." in lost
    assert "- nearest hidden states: -0.200 (-0.200 to -0.200), **worse**" in lost
    assert "| attribution | 0.100 | 0.100 | 0.100 | 0.100 |" in lost
    assert "## Edits" not in lost
    won = page(0.3, 0.1, interval(0.01, 0.02))
    assert "does not work" not in won
    assert won.count("new words: works: better than random states, a shuffled map, nearest") == 1
    assert "own share against random states: +0.015 (+0.010 to +0.020), better" in won
    assert "accuracy against random states: +0.000 (-0.100 to +0.100), **no difference" in won
    assert "d \\*e\\*" in won


def test_the_control_is_drawn_once_and_indexed_once(lm, corpus, tmp_path):
    first = attribution.random_states_model(lm, corpus, tmp_path / "control")
    built = (tmp_path / "control" / "index.parquet").stat().st_mtime_ns
    again = attribution.random_states_model(lm, corpus, tmp_path / "control")
    assert (tmp_path / "control" / "index.parquet").stat().st_mtime_ns == built
    assert torch.equal(first.head.prototypes, again.head.prototypes)
    assert not torch.equal(first.head.prototypes, lm.head.prototypes)
    # Each prototype is a training state, and most are read in the same window by the index.
    nearest = first.lens.prototypes["nearest_cosine"].to_numpy()
    assert np.median(nearest) > 0.999
    assert first.lens.meta.tokens == lm.lens.meta.tokens


def test_edits_count_for_prototypes_that_go_beyond_their_control():
    def entry(edit, low, high):
        measure = {
            "edit": edit,
            "control": 0.0,
            "difference": (low + high) / 2,
            "difference_interval": [low, high],
        }
        return {"ablate": {"effects": {"prompts": {"measures": {"signature": measure}}}}}

    # The second goes the wrong way, the third is no different from its control.
    measured = [entry(-1.0, -2.0, -1.0), entry(-1.0, 1.0, 2.0), entry(-1.0, -2.0, 1.0)]
    lines = render_attribution.edits_section({"prototypes": [{"edits": edit} for edit in measured]})
    assert "| ablate | 1 of 3 | -1.000 | +0.000 | -0.167 |" in lines
