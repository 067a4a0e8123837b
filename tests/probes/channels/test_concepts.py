"""Channels of concepts: definitions against every position at once, and channels made to order."""

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from benchmarks.prototype_mixer.heldout_cases import heldout_cases
from benchmarks.prototype_mixer.proposed_concepts import (
    concept_tokens,
    propose_concepts,
    token_gates,
)
from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError
from prismlm.probes.channels import find_channels
from prismlm.probes.channels.activations import Activations, read_activations
from prismlm.probes.channels.concepts import (
    continuing,
    rank_channels,
    whole_words,
    word_ends,
    word_forms,
)
from prismlm.probes.channels.effects import target_probabilities
from tests.helpers.metaspace import metaspace
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_model

LENGTH = 24
PLACE = (0, 4)


@pytest.fixture(scope="module")
def words(corpus):
    """Words of the corpus, by whether they are one token."""
    texts = {w for i in range(len(corpus)) for w in corpus.text(i).replace(".", "").split()[1:]}
    encoded = {w: corpus.tokenizer(f" {w}")["input_ids"] for w in sorted(texts)}
    single = [w for w, ids in encoded.items() if len(ids) == 1 and w.isalpha() and len(w) > 2]
    several = [w for w, ids in encoded.items() if len(ids) > 1 and w.islower()]
    assert len(single) > 3
    assert several
    return single, several


@pytest.fixture(scope="module")
def model(corpus):
    # In float64: float32 sums differ from processor to processor.
    return make_model(len(corpus.tokenizer)).double()


@pytest.fixture(scope="module")
def planted(corpus, words):
    """A model whose channel 4 of layer 0 is written at one word above all; others write evenly."""
    model = make_model(len(corpus.tokenizer))
    for block in model.model.layers:
        block.mixer.prototypes.zero_()
    token = corpus.tokenizer(f" {words[0][0]}")["input_ids"][0]
    embeddings = model.model.embed_tokens.weight
    embeddings[:, 0] = 0
    embeddings[token] = torch.eye(embeddings.shape[1])[0]
    model.model.layers[PLACE[0]].mixer.prototypes[PLACE[1], 0] = 5.0
    return model


@pytest.fixture(scope="module")
def sequences(corpus):
    return Sequences(corpus, "all", LENGTH)


def read_alone(corpus, model):
    """Yield every sequence by itself: ids, and write gates of each layer."""
    # Each text is there four times.
    read = {}
    for start, length in zip(corpus.starts, corpus.lengths, strict=True):
        for first in range(start, start + length, LENGTH):
            span = min(LENGTH, start + length - first)
            ids = torch.from_numpy(corpus.read_tokens(int(first), int(span)).astype("int64"))
            if (text := tuple(ids.tolist())) not in read:
                by_layer = model(ids[None], output_gates=True).gates
                read[text] = [gates.write[0].double() for gates in by_layer]
            yield ids, read[text]


def read_of(*rows):
    """A text of these rows of tokens, of which nothing was read."""
    lengths = torch.tensor([len(row) for row in rows])
    return Activations(
        torch.tensor([token for row in rows for token in row]), lengths, lengths, lengths, {}
    )


def test_gates_by_token_are_those_of_all_positions(corpus, model, sequences):
    alone = list(read_alone(corpus, model))
    gates = token_gates(
        read_activations(model, sequences.batches(), ("write",)), model.config.vocab_size
    )
    ids = torch.cat([row for row, _ in alone])
    assert gates.positions == corpus.num_tokens
    token = int(ids[5])
    assert gates.count[token] == (ids == token).sum()
    for layer in range(LAYERS):
        write = torch.cat([layers[layer] for _, layers in alone])
        at_token = write[ids == token].sum(0)
        torch.testing.assert_close(gates.sums[layer][token], at_token, rtol=1e-5, atol=0)
        torch.testing.assert_close(gates.mean(layer), write.mean(0), rtol=1e-5, atol=1e-8)


def test_a_word_of_several_tokens_counts_at_the_last(corpus, model, sequences, words):
    word, read = words[1][0], read_activations(model, sequences.batches(), ("write",))
    forms = word_forms(corpus.tokenizer, [word])
    found = word_ends(forms, continuing(corpus.tokenizer), read)[word].tolist()
    expected, first = [], 0
    for length in read.lengths.tolist():
        texts = [corpus.tokenizer.decode([i]) for i in read.tokens[first : first + length].tolist()]
        for i in range(length):
            for j in range(i + 1, length + 1):
                follows = texts[j] if j < length else ""
                if "".join(texts[i:j]).lower() == f" {word.lower()}" and not follows[:1].isalnum():
                    expected.append(first + j - 1)
        first += length
    assert found == expected != []


@pytest.mark.parametrize("legacy", [False, True])
def test_words_are_found_where_a_decoder_drops_the_space_before_them(legacy):
    text = "the girl and the girls saw a girl"
    tokenizer = metaspace([text], legacy=legacy)
    ids = tokenizer(text)["input_ids"]
    forms, goes_on = word_forms(tokenizer, ["girl"]), continuing(tokenizer)
    ends = word_ends(forms, goes_on, read_of(ids))["girl"].tolist()
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert ends == [
        i for i, token in enumerate(tokens) if token == "▁girl" and tokens[i + 1 : i + 2] != ["s"]
    ]
    assert len(ends) == 2
    whole = whole_words(tokenizer)
    for token, number in tokenizer.get_vocab().items():
        assert whole[number] == (token[:1] == "▁" and token[1:].isalpha() and len(token) > 3)
        assert goes_on[number] == token[:1].isalnum()


def test_a_word_ends_where_no_letter_follows():
    pieces = (" girl", "s", " Girl", "a b", ".", " x")
    known = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(known, [], ignore_merges=True))
    backend.decoder = decoders.Fuse()
    letters = PreTrainedTokenizerFast(tokenizer_object=backend)
    forms = word_forms(letters, ["girl"])
    assert forms == {"girl": ((0,), (2,))}
    # What two words have in common is the first one's.
    assert word_forms(letters, ["girl", "Girl"]) == forms
    assert word_forms(letters, ["Girl", "girl"]) == {"Girl": ((2,),), "girl": ((0,),)}
    goes_on = continuing(letters)
    assert goes_on.tolist() == [False, True, False, True, False, False]
    assert whole_words(letters).tolist() == [True, False, True, False, False, False]
    # After the end of a sequence another begins, whatever token that is.
    read = read_of([0, 1, 0, 4, 2], [0, 5, 2], [1, 0])
    assert word_ends(forms, goes_on, read)["girl"].tolist() == [2, 4, 5, 7, 9]
    with pytest.raises(InputError, match="'boy' is no word"):
        word_forms(letters, ["boy"])


def test_the_channel_of_a_word_is_found(corpus, planted, sequences, words):
    word, other = words[0][0], words[0][1]
    found = find_channels(planted, corpus.tokenizer, [word], sequences, shuffles=99, least=5)
    best = found.rows[0]
    assert (best["layer"], best["channel"]) == PLACE
    token = corpus.tokenizer(f" {word}")["input_ids"][0]
    rows = list(read_alone(corpus, planted))
    ids = torch.cat([row for row, _ in rows])
    write = torch.cat([layers[0] for _, layers in rows])[:, PLACE[1]]
    # All of these words stand after a space and before another word.
    expected = (write[ids == token].mean() - write.mean()) / write.std(correction=0)
    assert best["difference"] == pytest.approx(expected.item(), rel=1e-4)
    assert best["at_words"] == pytest.approx(write[ids == token].mean().item(), rel=1e-4)
    assert best["mean"] == pytest.approx(write.mean().item(), rel=1e-4)
    assert found["words"] == {word: int((ids == token).sum())}
    rest = torch.tensor(found["difference"], dtype=torch.float64).flatten().sort().values[:-1]
    assert found["others_mean"] == pytest.approx(rest.mean().item())
    assert found["others_deviation"] == pytest.approx(rest.std().item())
    ranked = [row["difference"] for row in found.rows]
    assert ranked == sorted(ranked, reverse=True)
    assert found["p"] == 0.01
    assert found["shuffled_mean"] < best["difference"]
    # A gate that never varies does not stand out at any word.
    assert found["difference"][1] == [0] * CHANNELS
    # A word that no channel was made for does not stand out among words.
    weak = find_channels(planted, corpus.tokenizer, [other], sequences, shuffles=99, least=5)
    assert weak["p"] > 0.01
    with pytest.raises(InputError, match=r"occur \d+ times in .* expected at least 100000"):
        find_channels(planted, corpus.tokenizer, [word], sequences, least=100000)
    with pytest.raises(InputError, match="the number of shuffles is 0"):
        find_channels(planted, corpus.tokenizer, [word], sequences, shuffles=0)
    read = read_activations(planted, sequences.batches(), ("write",))
    assert rank_channels(read, corpus.tokenizer, [word], shuffles=99).rows == found.rows


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
