"""The tokens that tell a prototype: by hand, and against the equation written out."""

import numpy as np
import pytest
import torch

from prismlm.corpus.pieces import token_alone
from prismlm.lens.signatures import signatures_of, top_signatures


def signatures(lm, raised, seen=5):
    """Return the signatures of prototypes that raise tokens by so much: W is an identity."""
    vocabulary, width = len(lm.tokenizer), 1 + max(max(values) for values in raised)
    rows = torch.zeros(len(raised), width)
    for row, values in zip(rows, raised, strict=True):
        row[list(values)] = torch.tensor(list(values.values()))
    seen = np.broadcast_to(seen, vocabulary)
    return top_signatures(rows, torch.eye(vocabulary, width), 2.0, lm.tokenizer, seen, 3)


def test_a_signature_has_tokens_that_others_do_not_raise(lm):
    """All raise 10 the most; the third alone raises 30, a little."""
    raised = [{10: 4.0, 20: 3.0}, {10: 4.0, 20: -3.0}, {10: 4.0, 20: 3.0, 30: 0.1}]
    found = signatures(lm, raised)
    ten, twenty, thirty = (lm.tokenizer.decode([token]) for token in (10, 20, 30))
    assert (found.tokens[2][0], found.values[2][0]) == (thirty, pytest.approx(0.2))
    # Of the first two, u of token 20 is 0.6 and −0.6.
    assert (found.tokens[0][0], found.values[0][0]) == (twenty, pytest.approx(6.0))
    assert twenty not in found.tokens[1]
    # Tokens that are rare in the corpus are left out, unless too few remain.
    seen = np.full(len(lm.tokenizer), 5)
    seen[30] = 4
    assert thirty not in signatures(lm, raised, seen).tokens[2]
    assert signatures(lm, raised, 0).tokens == found.tokens
    # A token that is lowered less than by others is not raised.
    lowered = [{10: -0.1, 20: 1.0, 30: 1.0}, {10: -4.0, 20: 1.0}, {10: -4.0, 20: 1.0}]
    assert set(signatures(lm, lowered).tokens[0][:2]) == {thirty, twenty}  # both deviate by √2
    # One prototype has no others.
    assert signatures(lm, raised[:1]).tokens[0][:2] == [ten, twenty]


def test_variants_of_a_word_take_one_place(lm):
    variants = [lm.tokenizer.encode(word)[0] for word in (" the", " The", "The")]
    assert len(set(variants)) == 3
    raised = dict(zip(variants, (4.0, 4.5, 3.5), strict=True))
    found = signatures(lm, [{**raised, 20: 2.0}, {10: 1.0}])
    assert sorted(found.ids[0, :2].tolist()) == sorted([20, variants[1]])


def test_a_lens_has_what_the_equation_says(lm):
    """Loops over the tiny model's prototypes and tokens, in float64."""
    head, weight = lm.head, lm.model.get_output_embeddings().weight.detach().double()
    prototypes = head.prototypes.detach().double()
    unit = prototypes / prototypes.norm(dim=1, keepdim=True)
    logits = unit @ weight.T
    z = (logits - logits.mean(0)) / logits.std(0, correction=0)
    rows, corpus = lm.lens.prototypes.to_pylist(), lm.lens.corpus
    seen = np.bincount(corpus.tokens(0, corpus.num_tokens), minlength=len(weight))
    found = signatures_of(lm.model, head, corpus, seen)
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
