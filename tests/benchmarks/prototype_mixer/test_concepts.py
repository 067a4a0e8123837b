"""Concepts proposed by the gates of a model, and places of a corpus where their words recur."""

import math

import pytest
import torch

from benchmarks.prototype_mixer.heldout_cases import heldout_cases
from benchmarks.prototype_mixer.proposed_concepts import (
    concept_tokens,
    propose_concepts,
    token_gates,
)
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.probes.channels.activations import read_activations
from prismlm.probes.channels.effects import target_probabilities
from tests.helpers.mixer_models import LAYERS, make_corpus, make_model
from tests.helpers.planted_channels import PLACE, planted_model, words_by_tokens

LENGTH = 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def words(corpus):
    return words_by_tokens(corpus)


@pytest.fixture(scope="module")
def model(corpus):
    # In float64: float32 sums differ from processor to processor.
    return make_model(len(corpus.tokenizer)).double()


@pytest.fixture(scope="module")
def planted(corpus, words):
    return planted_model(corpus, words[0][0])


@pytest.fixture(scope="module")
def sequences(corpus):
    return Sequences(corpus, "all", LENGTH)


def test_gates_by_token_are_those_of_all_positions(corpus, model, sequences):
    read = read_activations(model, sequences.batches(), ("write",))
    gates, ids = token_gates(read, model.config.vocab_size), read.tokens
    assert gates.positions == corpus.num_tokens
    token = int(ids[5])
    assert gates.count[token] == (ids == token).sum()
    for layer in range(LAYERS):
        write = read.values["write", layer].double()
        at_token = write[ids == token].sum(0)
        torch.testing.assert_close(gates.sums[layer][token], at_token, rtol=1e-5, atol=0)
        torch.testing.assert_close(gates.mean(layer), write.mean(0), rtol=1e-5, atol=1e-8)


def test_concepts_are_proposed_from_the_gates(corpus, planted, sequences, words):
    read = read_activations(planted, sequences.batches(), ("write",))
    gates = token_gates(read, planted.config.vocab_size)
    tokens = concept_tokens(gates, corpus.tokenizer, *PLACE, count=4, least=5)
    assert tokens[0].text == f" {words[0][0]}"
    ratios = [
        (gates.sums[0][:, PLACE[1]] / gates.count / gates.mean(0)[PLACE[1]])[gates.count >= 5]
    ]
    assert [t.ratio for t in tokens] == pytest.approx(ratios[0].topk(4).values.tolist())
    assert math.isclose(tokens[0].gate / tokens[0].ratio, gates.mean(0)[PLACE[1]])
    found = propose_concepts(gates, corpus.tokenizer, count=3, words=1, least=5, common=0)
    first = found[0]
    assert first.difference > 5 > found[1].difference
    assert (first.layer, first.channel, first.name) == (*PLACE, words[0][0])
    assert first.words == (words[0][0],)
    used = [t.token_id for concept in found for t in concept.tokens]
    assert len(set(used)) == len(used)
    common = propose_concepts(gates, corpus.tokenizer, count=9, words=1, least=5, common=10)
    most = gates.count.topk(10).indices.tolist()
    assert not {t.token_id for c in common for t in c.tokens} & set(most)
    with pytest.raises(InputError, match=r"expected 5\. Read more text"):
        propose_concepts(gates, corpus.tokenizer, least=10**6)
    with pytest.raises(InputError, match="no channel 6 in layer 1"):
        concept_tokens(gates, corpus.tokenizer, 1, 6)
    with pytest.raises(InputError, match="0 concepts"):
        propose_concepts(gates, corpus.tokenizer, count=0)


def test_cases_of_a_corpus(corpus, model, words):
    sequences = Sequences(corpus, "all", LENGTH)
    members = [corpus.tokenizer(f" {w}")["input_ids"][0] for w in words[0][:3]]
    found = heldout_cases(
        model, corpus.tokenizer, {"c": members}, sequences, minimum_probability=1e-9
    )["c"]
    expected = {}
    for number, (start, length) in enumerate(zip(corpus.starts, corpus.lengths, strict=True)):
        for first in range(start, start + length, LENGTH):
            ids = corpus.read_tokens(int(first), int(min(LENGTH, start + length - first))).tolist()
            for place, token in enumerate(ids):
                before = set(ids[: max(0, place - 1)])
                if token in members and before & set(members):
                    expected.setdefault(number, (tuple(ids[:place]), token))
    assert {p.document: (p.ids, p.target_id) for p in found} == expected
    assert len(found) == len(expected) > 10
    assert found[0].context.endswith(corpus.tokenizer.decode(found[0].ids[-3:]))
    # Only those that the model expects.
    likely = target_probabilities(model, found)
    bound = likely.median().item()
    fewer = heldout_cases(
        model, corpus.tokenizer, {"c": members}, sequences, minimum_probability=bound, most=7
    )["c"]
    assert 0 < len(fewer) <= 7
    assert target_probabilities(model, fewer).min() >= bound * (1 - 1e-5)
    many = heldout_cases(
        model,
        corpus.tokenizer,
        {"c": members, "d": members[:1]},
        sequences,
        minimum_probability=1e-9,
        per_document=3,
    )
    assert len(many["c"]) > len(found)
    assert {p.target for p in many["d"]} <= {words[0][0]}
    with pytest.raises(InputError, match="'e' has 0 tokens"):
        heldout_cases(model, corpus.tokenizer, {"e": []}, sequences)
    with pytest.raises(InputError, match="0 concepts"):
        heldout_cases(model, corpus.tokenizer, {}, sequences)
