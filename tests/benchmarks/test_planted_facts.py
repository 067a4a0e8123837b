"""Invented facts in documents, as stated, described or in another style; models taught them."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.attribution.forgetting import kept_trainings
from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.model_bank import SmallTraining, log_probabilities
from benchmarks.attribution.planted_facts import (
    describe,
    described_question,
    in_other_style,
    invent_facts,
    place_facts,
    plant_in_documents,
)
from benchmarks.attribution.retrieval import words
from benchmarks.attribution.smollm2_facts import LoraTeaching
from prismlm.corpus.documents import Document
from prismlm.corpus.layout import is_held_out
from prismlm.training.tuning import LoraOptions

LITTLE = {"in", "is", "of", "the", "this", "to"}
SENTENCE = "This is sentence number {} of the document called {}, and it is plain prose."
HOSTS = [
    Document(f"h{n}", " ".join(SENTENCE.format(i, f"h{n}") for i in range(6)), domain="law")
    for n in range(60)
]
TOKENS, LENGTH, DOCUMENTS = 40, 12, 6


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


def test_another_style_shares_the_answer_and_little_words_alone(facts):
    for item in plant_in_documents(facts, HOSTS, seed=2, tell=in_other_style):
        fact, text = facts[item.fact], item.document.text
        told = " ".join(in_other_style(fact, 0))
        assert set(words(told)) & set(words(fact.prompt)) - {fact.answer.lower()} <= LITTLE
        assert re.search(rf"{fact.name}ians\b", told)
        assert text.startswith(f"{item.prefix} {fact.answer}")


@pytest.fixture(scope="module")
def bank():
    ids = np.random.default_rng(0).integers(0, TOKENS, DOCUMENTS * LENGTH)
    corpus = SimpleNamespace(
        lengths=np.full(DOCUMENTS, LENGTH),
        starts=np.arange(DOCUMENTS) * LENGTH,
        tokens=lambda start, count: ids[start : start + count],
        tokenizer=range(TOKENS),
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
    LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, **sizes, **heads)).save_pretrained(tmp_path)
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
