"""The study of channels on small models: proposed concepts, their cases, what is written."""

import pytest
import torch

from benchmarks.prototype_mixer.channels import TokenGates, heldout_cases, propose_concepts
from prismlm.corpus.windows import Sequences
from prismlm.probes.channels.activations import read_activations
from prismlm.probes.channels.effects import target_probabilities
from tests.helpers import mixer_models

LENGTH = 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return mixer_models.make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def words(corpus):
    return mixer_models.words_by_tokens(corpus)


@pytest.fixture(scope="module")
def model(corpus):
    # In float64: float32 sums differ from processor to processor.
    return mixer_models.make_model(len(corpus.tokenizer)).double()


def gates_of(model, corpus):
    read = read_activations(model, Sequences(corpus, "all", LENGTH), ("write",))
    return TokenGates.from_activations(read, model.config.vocab_size), read


def test_gates_by_token_are_those_of_all_positions(corpus, model):
    gates, read = gates_of(model, corpus)
    token = int(read.tokens[5])
    assert gates.count[token] == (read.tokens == token).sum()
    for layer in range(mixer_models.LAYERS):
        write = read.values["write", layer].double()
        at_token = write[read.tokens == token]
        torch.testing.assert_close(gates.sums[layer][token], at_token.sum(0), rtol=1e-5, atol=0)
        difference = (at_token.mean(0) - write.mean(0)) / write.std(0, correction=0)
        torch.testing.assert_close(gates.difference(layer, [token]), difference, rtol=1e-4, atol=0)


def test_concepts_are_proposed_from_the_gates(corpus, words):
    gates, _ = gates_of(mixer_models.planted_model(corpus, words[0][0]), corpus)
    proposed = propose_concepts(gates, corpus.tokenizer, count=3, words=1, least=5, common=0)
    first = proposed[0]
    assert first.difference > 5 > proposed[1].difference
    assert (first.layer, first.channel, first.name) == (*mixer_models.PLACE, words[0][0])
    used = [t.token_id for concept in proposed for t in concept.tokens]
    assert len(set(used)) == len(used)
    rarer = propose_concepts(gates, corpus.tokenizer, count=9, words=1, least=5, common=10)
    common = gates.count.topk(10).indices.tolist()
    assert not {t.token_id for c in rarer for t in c.tokens} & set(common)


def test_cases_are_the_first_of_each_document_where_a_word_recurs(corpus, model, words):
    sequences = Sequences(corpus, "all", LENGTH)
    members = [corpus.tokenizer(f" {w}")["input_ids"][0] for w in words[0][:3]]

    def cases(least):
        of = {"c": members}
        found = heldout_cases(model, corpus.tokenizer, of, sequences, minimum_probability=least)
        return found["c"]

    found = cases(1e-9)
    expected = {}
    for number, (start, length) in enumerate(zip(corpus.starts, corpus.lengths, strict=True)):
        for first in range(start, start + length, LENGTH):
            ids = corpus.read_tokens(int(first), int(min(LENGTH, start + length - first))).tolist()
            for end, token in enumerate(ids):
                if token in members and set(ids[: max(0, end - 1)]) & set(members):
                    expected.setdefault(number, (tuple(ids[:end]), token))
    assert {p.document: (p.ids, p.target_id) for p in found} == expected
    assert len(found) == len(expected) > 10
    # Only those that the model expects.
    bound = target_probabilities(model, found).median().item()
    likely = cases(bound)
    assert len(likely) > 0
    assert target_probabilities(model, likely).min() >= bound * (1 - 1e-5)
