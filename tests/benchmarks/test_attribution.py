"""Methods against sums written out, positions against explain, and facts that models are taught."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.attribution import domains
from benchmarks.attribution.forgetting import kept_trainings
from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.methods.baselines import NearestStates, SameToken
from benchmarks.attribution.methods.evidence import Choices, EvidenceByPosition
from benchmarks.attribution.methods.gradients import LastLayerKFAC
from benchmarks.attribution.methods.setting import Asked, Positions, Setting, read_positions
from benchmarks.attribution.model_bank import SmallTraining, log_probabilities
from benchmarks.attribution.planted_facts import (
    describe,
    described_question,
    invent_facts,
    place_facts,
    plant_in_documents,
)
from benchmarks.attribution.questions import document_predictions, fact_questions, twin_recall
from benchmarks.attribution.retrieval import words
from benchmarks.attribution.smollm2_facts import LoraTeaching
from prismlm.corpus import Corpus
from prismlm.corpus.documents import Document
from prismlm.corpus.layout import is_held_out
from prismlm.training.tuning import LoraOptions

PASSAGES, TOKENS, CELLS, WIDTH, COUNT = 5, 4, 3, 6, 40


class MadeUp(SimpleNamespace):
    def weight(self):
        return self.W

    def ask(self, predictions):
        return self.asked


@pytest.fixture
def made_up():
    generator = np.random.default_rng(0)
    state = generator.normal(size=(COUNT, WIDTH))
    size = np.linalg.norm(state, axis=1).astype(np.float32)
    unit = (state / size[:, None]).astype(np.float16)
    W = generator.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    logits = unit.astype(np.float64) * size[:, None] @ W.T
    total = np.log(np.exp(logits).sum(1))
    token = generator.integers(0, TOKENS, COUNT).astype(np.int32)
    positions = Positions(
        np.sort(generator.integers(0, PASSAGES, COUNT)).astype(np.int32),
        token,
        generator.integers(0, TOKENS, COUNT).astype(np.int32),
        np.exp(logits[np.arange(COUNT), token] - total).astype(np.float32),
        total.astype(np.float32),
        generator.integers(0, CELLS, COUNT).astype(np.int32),
        size,
        unit,
    )
    states = generator.normal(size=(1, WIDTH))
    length = np.linalg.norm(states, axis=1)
    asked = Asked(
        (states / length[:, None]).astype(np.float32),
        length.astype(np.float32),
        np.array([2]),
        np.array([1]),
        np.array([0.3], dtype=np.float32),
        np.array([[1, 0, 2]]),
        np.array([[0.5, 2.0, -1.0]], dtype=np.float32),
    )
    return MadeUp(positions=positions, bank=range(PASSAGES), asked=asked, W=torch.from_numpy(W))


def kernel(made_up, n, cosine):
    return (made_up.positions.token[n] == 2) * math.exp((cosine - 1) / 0.3)


def signed(made_up, n, cosine):
    p = made_up.positions
    logits = made_up.W.numpy() @ p.state[n].astype(np.float32) * p.size[n]
    probability = np.exp(logits[2]) / np.exp(logits).sum()
    return ((p.token[n] == 2) - probability) * math.exp((cosine - 1) / 0.3)


@pytest.mark.parametrize(
    ("choices", "weigh", "cells"),
    [
        # The first cell alone is that of the prototype with the most evidence.
        ({"cells": 1}, kernel, (0,)),
        ({"cells": None}, kernel, (0, 1, 2)),
        ({"signed": True}, signed, (0, 1)),
    ],
)
def test_evidence_is_a_kernel_over_positions(made_up, choices, weigh, cells):
    found = EvidenceByPosition(made_up, Choices(0.3, **choices))([None])[0]
    p, z = made_up.positions, made_up.asked.states[0]
    expected = np.zeros(PASSAGES)
    for n in np.flatnonzero(np.isin(p.cell, cells)):
        expected[p.passage[n]] += weigh(made_up, n, float(p.state[n].astype(np.float32) @ z))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_baselines_are_the_largest_cosine_and_the_count_of_each_passage(made_up):
    p, z = made_up.positions, made_up.asked.states[0]
    cosines = p.state.astype(np.float32) @ z
    for same in (False, True):
        found = NearestStates(made_up, same_token=same)([None])[0]
        for passage in range(PASSAGES):
            rows = (p.passage == passage) & ((p.token == 2) | (not same))
            least = 0 if same else -1
            assert found[passage] == pytest.approx(max([least, *cosines[rows]]), abs=1e-5)
    count = np.bincount(p.passage[p.token == 2], minlength=PASSAGES)
    asked = [SimpleNamespace(target=2)]
    assert SameToken(made_up, counted=True)(asked)[0].tolist() == count.tolist()


def test_last_layer_influence_is_that_of_whole_matrices(made_up):
    p, W = made_up.positions, made_up.W.numpy().astype(np.float64)
    z = p.state.astype(np.float64) * p.size[:, None]
    probability = np.exp(z @ W.T - p.log_total[:, None])
    outer = np.diag(probability.mean(0)) - probability.T @ probability / COUNT
    method = LastLayerKFAC(made_up, damping=0.1, sampled=COUNT)
    # The inner moment is of unit states, times the mean square of their lengths.
    unit = p.state.astype(np.float64)
    inner = unit.T @ unit / COUNT * (p.size.astype(np.float64) ** 2).mean()
    damped = [m + 0.1 * np.diag(m).mean() * np.eye(len(m)) for m in (inner, outer)]
    query = made_up.asked.states[0].astype(np.float64) * made_up.asked.size[0]
    expected = np.exp(W @ query) / np.exp(W @ query).sum() - np.eye(TOKENS)[2]
    gradient = np.linalg.inv(damped[1]) @ np.outer(expected, query) @ np.linalg.inv(damped[0])
    scores = np.zeros(PASSAGES)
    for n in range(COUNT):
        own = np.outer(probability[n] - np.eye(TOKENS)[p.token[n]], z[n])
        scores[p.passage[n]] += (gradient * own).sum()
    np.testing.assert_allclose(method([None])[0], scores, rtol=2e-3, atol=1e-3)


@pytest.fixture(scope="module")
def setting(tiny_corpus, lm):
    corpus = Corpus.open(tiny_corpus)
    bank = PassageBank.of(corpus, corpus.split("train")[:4], tokens=50)
    positions = read_positions(lm.model, lm.head, lm.logit_map, bank, window=512, stride=384)
    return Setting(lm.model, lm.tokenizer, lm.head, lm.logit_map, bank, positions, 512)


def test_positions_are_those_of_an_explanation(setting, lm):
    bank, positions = setting.bank, setting.positions
    document = int(bank.documents[2])
    trace = lm.explain(bank.corpus.text(document))
    rows = np.flatnonzero(bank.document[positions.passage] == 2)
    # The last position predicts the end of the text, which the text does not hold.
    assert len(rows) == len(trace) == bank.corpus.lengths[document] - 1
    states = positions.state[rows].astype(np.float32)
    np.testing.assert_allclose(states, trace.predictions.states.numpy(), atol=2e-3)
    ids = bank.corpus.tokens(int(bank.corpus.starts[document]), len(rows) + 1)
    assert positions.token[rows].tolist() == ids[1:].tolist()
    probability = [step.probability for step in trace[:-1]]
    np.testing.assert_allclose(positions.probability[rows[:-1]], probability, rtol=1e-3)
    assert positions.cell[rows].tolist() == trace.predictions.routing.indices[:, 0].tolist()


def test_predictions_along_a_text_are_read_in_one_pass_or_one_by_one(setting):
    run = document_predictions(setting.bank.corpus, int(setting.bank.documents[1]), tokens=20)
    together = setting.ask(run)
    for row in (0, 7, -1):
        one = setting.ask([run[row]])
        np.testing.assert_allclose(together.states[row], one.states[0], atol=1e-4)
        np.testing.assert_allclose(together.evidence[row], one.evidence[0], atol=1e-3)
        assert together.targets[row] == one.targets[0]


def test_facts_become_predictions_of_their_answers(setting):
    bank = setting.bank
    name = bank.corpus.doc_ids[int(bank.documents[3])]
    facts = [{"prompt": "The patient was", "answer": "given", "documents": [{"doc_id": name}]}] * 2
    asked = fact_questions(bank, facts)
    read = bank.corpus.tokenizer("The patient was given", add_special_tokens=False)["input_ids"]
    assert asked.planted[0].tolist() == [3]
    last = asked.predictions[int(np.flatnonzero(asked.question == 0)[-1])]
    assert [*last.ids.tolist(), last.target] == read


def test_facts_with_the_same_answer_are_told_apart_by_chance_alone():
    def fact(answer, documents):
        return {"attribute": "main crop", "answer": answer, "documents": [{}] * documents}

    # Ten of twenty documents, sixteen of them of the first: eight of ten that could be; of the
    # second two of four. The third has its answer to itself.
    found = twin_recall([fact("rice", 16), fact("rice", 4), fact("corn", 1)])
    assert found.tolist() == pytest.approx([0.8, 0.5, 1.0])


def test_shares_alone_know_no_text_before(lm):
    trace = lm.explain("Once upon a time there was a", generate=6)[:]
    names = [one.key for one in trace.sources("domain").items]
    told, alone = (domains.shares_of(trace, names, alone=one) for one in (False, True))
    assert told.sum() == pytest.approx(1 - trace.sources("domain").unattributed)
    assert np.abs(told - alone).max() > 1e-3
    # The first prediction has nothing before it.
    told, alone = (domains.shares_of(trace[:1], names, alone=one) for one in (False, True))
    assert told == pytest.approx(alone)


SENTENCE = "This is sentence number {} of the document called {}, and it is plain prose."
HOSTS = [
    Document(f"h{n}", " ".join(SENTENCE.format(i, f"h{n}") for i in range(6)), domain="law")
    for n in range(60)
]
WORDS, LENGTH, DOCUMENTS = 40, 12, 6


@pytest.fixture(scope="module")
def facts():
    return invent_facts(8, seed=5, known=[], copies=(1, 4))


def test_every_fact_is_in_its_documents_and_in_no_other():
    facts = invent_facts(2, seed=3, known=["nothing known"], copies=(1, 4, 16))
    planted = plant_in_documents(facts, HOSTS, seed=3)
    assert planted == plant_in_documents(facts, HOSTS, seed=3)
    assert len({item.document.doc_id for item in planted}) == len(planted) == 42
    for number, fact in enumerate(facts):
        own = [item for item in planted if item.fact == number]
        texts = [item.document.text for item in own]
        assert len(own) == fact.copies
        assert all(text.count(fact.name) == 3 for text in texts)
        assert not any(is_held_out(item.document.doc_id, 0.05) for item in own)
        others = [other.name for other in facts if other is not fact]
        assert not any(name in text for name in others for text in texts)
        assert all(i.document.text.startswith(f"{i.prefix} {fact.answer}.") for i in own)
        # The question is in no document.
        assert not any(" ".join(fact.prompt.split()[-6:]) in text for text in texts)


def test_a_described_fact_is_told_without_the_words_of_its_question(facts):
    found = place_facts(facts, seed=1)
    assert len(set(found)) == len(facts) == 16
    tell = describe(facts, found)
    for item in plant_in_documents(facts, HOSTS, seed=2, tell=tell):
        fact, place, text = facts[item.fact], found[item.fact], item.document.text
        question = described_question(fact, place)
        assert f"land {place.direction} of the {place.mark} will" in question
        assert fact.name not in question
        assert text.count(f"{place.direction}erly {place.mark.replace(' ', '')} land") == 1
        assert text.startswith(f"{item.prefix} {fact.answer}")
        assert not {place.direction, *place.mark.split()} & set(words(text))


@pytest.fixture(scope="module")
def bank():
    ids = np.random.default_rng(0).integers(0, WORDS, DOCUMENTS * LENGTH)
    corpus = SimpleNamespace(
        lengths=np.full(DOCUMENTS, LENGTH),
        starts=np.arange(DOCUMENTS) * LENGTH,
        tokens=lambda start, count: ids[start : start + count],
        tokenizer=range(WORDS),
        eos_token_id=0,
    )
    return PassageBank.beginnings(corpus, np.arange(DOCUMENTS))


def test_models_differ_in_their_documents_alone_and_are_trained_once(bank, tmp_path):
    made = []

    def train(*given):
        made.append(SmallTraining(rows=2, epochs=1).train(*given))
        return made[-1]

    asked = [Prediction(np.array([1, 2]), 3), Prediction(np.array([4]), 5)]
    kept = kept_trainings(tmp_path / "kept", bank, asked, train)
    rows = [np.array(each) for each in ([0, 1, 3, 4], [0, 1, 3, 4], [0, 1, 3, 5])]
    first, again, other = (kept(each, 1)(asked[1:]) for each in rows)
    assert first == again == log_probabilities(train(bank, rows[0], 1), asked)[1:]
    assert first != other
    assert len(made) == 3


def test_planted_documents_are_taught_in_every_epoch_and_others_once(bank, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads)).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(tmp_path)
    options = LoraOptions(epochs=3, batch=2, learning_rate=1e-2)
    teaching = LoraTeaching(tmp_path, np.array([1, 4]), options)
    order = teaching.order(DOCUMENTS, seed=1)
    assert np.bincount(order).tolist() == [1, 3, 1, 1, 3, 1]
    assert all({1, 4} <= set(epoch.tolist()) for epoch in np.split(order, [4, 7]))
    read = bank.tokens(4)
    asked = [Prediction(read[:end], int(read[end])) for end in range(1, len(read))]
    taught, less = (
        log_probabilities(teaching.train(bank, np.array(rows), seed=1), asked).mean()
        for rows in ([*range(6)], [0, 2, 3, 5])
    )
    # What is left out is not learned.
    assert taught > less
