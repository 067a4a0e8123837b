"""The study of channels on small models: proposed concepts, their cases, what is written."""

import pytest
import torch

from benchmarks.prototype_mixer import channels
from benchmarks.prototype_mixer.channels import (
    TokenGates,
    heldout_cases,
    propose_concepts,
    top_tokens,
)
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.files import read_json
from prismlm.probes.channels.activations import read_activations
from prismlm.probes.channels.effects import target_probabilities
from tests.benchmarks.scripts import run
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


def gates_of(model, corpus):
    read = read_activations(model, Sequences(corpus, "all", LENGTH), ("write",))
    return TokenGates.from_activations(read, model.config.vocab_size), read


def test_gates_by_token_are_those_of_all_positions(corpus, model):
    gates, read = gates_of(model, corpus)
    token = int(read.tokens[5])
    assert gates.count.sum() == corpus.num_tokens
    assert gates.count[token] == (read.tokens == token).sum()
    for layer in range(LAYERS):
        write = read.values["write", layer].double()
        at_token = write[read.tokens == token]
        torch.testing.assert_close(gates.sums[layer][token], at_token.sum(0), rtol=1e-5, atol=0)
        difference = (at_token.mean(0) - write.mean(0)) / write.std(0, correction=0)
        torch.testing.assert_close(gates.difference(layer, [token]), difference, rtol=1e-4, atol=0)


def test_concepts_are_proposed_from_the_gates(corpus, words):
    gates, _ = gates_of(planted_model(corpus, words[0][0]), corpus)
    often = gates.count >= 5
    texts = [corpus.tokenizer.decode([i]) for i in range(len(gates.count))]
    tokens = top_tokens(gates, texts, PLACE, often, 4)
    assert tokens[0].text == f" {words[0][0]}"
    ratios = (gates.sums[0][:, PLACE[1]] / gates.count / gates.mean(0)[PLACE[1]])[often]
    assert [t.ratio for t in tokens] == pytest.approx(ratios.topk(4).values.tolist())
    proposed = propose_concepts(gates, corpus.tokenizer, count=3, words=1, least=5, common=0)
    first = proposed[0]
    assert first.difference > 5 > proposed[1].difference
    assert (first.layer, first.channel, first.name) == (*PLACE, words[0][0])
    used = [t.token_id for concept in proposed for t in concept.tokens]
    assert len(set(used)) == len(used)
    rarer = propose_concepts(gates, corpus.tokenizer, count=9, words=1, least=5, common=10)
    common = gates.count.topk(10).indices.tolist()
    assert not {t.token_id for c in rarer for t in c.tokens} & set(common)
    with pytest.raises(InputError, match=r"expected 5\. Read more text"):
        propose_concepts(gates, corpus.tokenizer, count=1, words=5, least=10**6)


def test_cases_are_the_first_of_each_document_where_a_word_recurs(corpus, model, words):
    sequences = Sequences(corpus, "all", LENGTH)
    members = [corpus.tokenizer(f" {w}")["input_ids"][0] for w in words[0][:3]]

    def cases(minimum):
        concepts = {"c": members, "d": members[:1]}
        return heldout_cases(
            model, corpus.tokenizer, concepts, sequences, minimum_probability=minimum
        )

    found = cases(1e-9)["c"]
    expected = {}
    for number, (start, length) in enumerate(zip(corpus.starts, corpus.lengths, strict=True)):
        for first in range(start, start + length, LENGTH):
            ids = corpus.read_tokens(int(first), int(min(LENGTH, start + length - first))).tolist()
            for end, token in enumerate(ids):
                if token in members and set(ids[: max(0, end - 1)]) & set(members):
                    expected.setdefault(number, (tuple(ids[:end]), token))
    assert {p.document: (p.ids, p.target_id) for p in found} == expected
    assert len(found) == len(expected) > 10
    assert found[0].context.endswith(corpus.tokenizer.decode(found[0].ids[-3:]))
    assert {p.target for p in cases(1e-9)["d"]} <= {words[0][0]}
    # Only those that the model expects.
    bound = target_probabilities(model, found).median().item()
    likely = cases(bound)["c"]
    assert len(likely) > 0
    assert target_probabilities(model, likely).min() >= bound * (1 - 1e-5)


def test_what_is_written(corpus, tmp_path, monkeypatch):
    models = [tmp_path / f"seed{seed}" for seed in (0, 1)]
    for seed, directory in enumerate(models):
        model = make_model(len(corpus.tokenizer))
        torch.manual_seed(seed)
        for block in model.model.layers:
            block.mixer.prototypes.copy_(torch.randn_like(block.mixer.prototypes))
        model.save_pretrained(directory)
        corpus.tokenizer.save_pretrained(directory)
    options = "--concepts 2 --words 1 --controls 2 --least 5 --common 0 --minimum-cases 2"
    options += " --minimum-probability 1e-6 --lag-tokens 500 --out"
    out = tmp_path / "channels.json"
    run(channels, monkeypatch, *models, "--corpus", corpus.path, *options.split(), out)
    value = read_json(out)
    assert len({(row["layer"], row["channel"]) for row in value["channels"]}) == 5
    for row in value["channels"]:
        assert row["tokens"][0]["ratio"] >= row["tokens"][-1]["ratio"]
    assert [model["model"] for model in value["models"]] == ["seed0", "seed1"]
    # The page shows all three.
    assert set(value["locality"]["spearman"]) == {"rho", "p", "count"}
    assert value["concepts"]
    for concept in value["concepts"]:
        (effect,) = concept["effects"]
        assert (effect["intervention"], len(effect["control_sizes"])) == (channels.TESTED, 2)
    assert len(value["lags"]) == 3
    assert value["lags"][0]["peaks"]["0"] == 6


def test_the_chance_of_the_ranks_by_hand():
    good = [{"effects": [{"rank": rank}]} for rank in (1, 1, 2)]
    # Ranks from the top: 0, 0 and 1 of 5: 1 way for all at the top, 3 with one second, of 216.
    assert channels.overall(good, 5) == pytest.approx(4 / 216)
    assert channels.overall([], 5) is None
