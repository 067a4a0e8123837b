"""The tokens that tell a prototype: by hand, and against the equation written out."""

from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from prismlm.corpus import Corpus
from prismlm.corpus.pieces import token_alone
from prismlm.lens import layout
from prismlm.lens.signatures import signatures_of, top_signatures


@pytest.fixture(scope="module")
def corpus(tiny_corpus):
    return Corpus.open(tiny_corpus)


def told(lm, raised, seen=None):
    """Return what tells prototypes that raise the given tokens by so much: W is the identity."""
    vocabulary = len(lm.tokenizer)
    rows = torch.zeros(len(raised), vocabulary)
    for row, values in zip(rows, raised, strict=True):
        for token, value in values.items():
            row[token] = value
    seen = np.full(vocabulary, 5) if seen is None else seen
    return top_signatures(rows, torch.eye(vocabulary), 2.0, lm.tokenizer, seen, 3)


def test_what_tells_a_prototype_is_what_others_do_not_raise(lm):
    """All raise 10 the most; the third alone raises 30, a little."""
    raised = [{10: 4.0, 20: 3.0}, {10: 4.0, 20: -3.0}, {10: 4.0, 20: 3.0, 30: 0.1}]
    found = told(lm, raised)
    decoded = [lm.tokenizer.decode([token]) for token in (10, 20, 30)]
    assert found.tokens[2][0] == decoded[2]
    assert found.values[2][0] == pytest.approx(0.2)
    # Of the first two, u of token 20 is 0.6 and −0.6.
    assert found.tokens[0][0] == decoded[1]
    assert found.values[0][0] == pytest.approx(6.0)
    assert decoded[1] not in found.tokens[1]
    # What the corpus hardly has tells nothing.
    seen = np.full(len(lm.tokenizer), 5)
    seen[30] = 4
    assert decoded[2] not in told(lm, raised, seen).tokens[2]
    # Unless that leaves too few.
    assert told(lm, raised, seen * 0).tokens == found.tokens
    # What is lowered less than by others is not raised.
    lowered = [{10: -0.1, 20: 1.0, 30: 1.0}, {10: -4.0, 20: 1.0}, {10: -4.0, 20: 1.0}]
    assert told(lm, lowered).tokens[0][:2] == [decoded[2], decoded[1]]
    # One prototype has no others.
    assert told(lm, raised[:1]).tokens[0][:2] == decoded[:2]


def test_a_word_that_is_written_in_several_ways_takes_one_place(lm):
    ways = [lm.tokenizer.encode(word)[0] for word in (" the", " The", "The")]
    assert len(set(ways)) == 3
    raised = dict(zip(ways, (4.0, 4.5, 3.5), strict=True))
    found = told(lm, [{**raised, 20: 2.0}, {10: 1.0}])
    assert sorted(found.ids[0, :2].tolist()) == sorted([20, ways[1]])


def test_a_lens_has_what_the_equation_says(lm, tiny_model, corpus):
    """Loops over the tiny model's prototypes and tokens, in float64."""
    head, weight = lm.head, lm.model.get_output_embeddings().weight.detach().double()
    prototypes = head.prototypes.detach().double()
    unit = prototypes / prototypes.norm(dim=1, keepdim=True)
    logits = unit @ weight.T
    seen = Counter(corpus.tokens(0, corpus.num_tokens).tolist())
    z = (logits - logits.mean(0)) / logits.std(0, correction=0)
    rows = pq.read_table(tiny_model / "lens" / "sample" / layout.PROTOTYPES_FILE).to_pylist()
    found = signatures_of(lm.model, head, corpus)
    for number in range(0, len(rows), 7):
        raised = (float(head.scale.detach()) * weight @ prototypes[number]).tolist()
        deviates = z[number].tolist()
        order = sorted(range(len(raised)), key=lambda t: (raised[t] <= 0, -deviates[t]))
        often = [t for t in order if seen[t] >= 5][:40]
        ways: dict[str, list[int]] = {}
        for token in often:
            text = token_alone(lm.tokenizer, token)
            ways.setdefault(text.strip().lower() or text, []).append(token)
        expected = [max(tokens, key=lambda t: raised[t]) for tokens in ways.values()][:10]
        assert found.ids[number].tolist() == expected
        texts = [token_alone(lm.tokenizer, token) for token in expected]
        assert rows[number]["top_tokens"] == texts
        assert rows[number]["top_values"] == pytest.approx([raised[t] for t in expected], rel=1e-3)
