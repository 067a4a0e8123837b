"""Comparisons against whole signatures, losses of transformers and single explanations."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import prismlm
from prismlm.corpus import Document
from prismlm.errors import InputError
from prismlm.explain.compare import compare_prototypes, compare_texts, signature_matches

TEXTS = [
    Document("one", "The court ruled that the contract was void and the appeal was dismissed."),
    Document("two", "Once upon a time there was a little girl who lived in the woods."),
]


def test_signatures_match_as_whole_vectors_do():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(13, 6, generator=generator), torch.randn(9, 4, generator=generator)
    w_a, w_b = torch.randn(31, 6, generator=generator), torch.randn(31, 4, generator=generator)
    found = signature_matches(a, w_a, b, w_b)
    signatures = [(w @ p.T).T.double() for w, p in ((w_a, a), (w_b, b))]
    left, right = (
        torch.nn.functional.normalize(s - s.mean(1, keepdim=True), dim=1) for s in signatures
    )
    cosines = left @ right.T
    assert found.best.tolist() == cosines.argmax(1).tolist()
    np.testing.assert_allclose(found.similarity, cosines.max(1).values.numpy(), atol=1e-5)
    back = cosines.argmax(0)
    assert found.mutual.tolist() == [int(back[j]) == i for i, j in enumerate(found.best)]
    assert 0 < found.mutual.sum() < 13


def test_a_model_beside_itself(lm):
    result = compare_prototypes(lm, lm)
    found = result["by_signature"]
    assert (found["median"], found["mutual"]) == (pytest.approx(1), 1)
    assert max(found["chance"].values()) < 0.9
    assert all(pair["a"] == pair["b"] for pair in result["pairs"])
    texts = compare_texts(lm, lm, TEXTS)
    assert texts["ce"]["difference"] == 0
    domains = texts["shares"]["domain"]
    assert all(item["difference"] == 0 for item in domains["items"])
    total = sum(item["a"] for item in domains["items"]) + domains["unattributed"]["a"]
    assert total == pytest.approx(1)
    supports = [lm.explain(text.text)[:-1].support for text in TEXTS]
    assert texts["support"]["a"] == texts["support"]["b"]
    levels = {n: sum(one.level == n for one in supports) for n in ("strong", "weak", "none")}
    assert texts["support"]["a"]["levels"] == levels
    score = texts["support"]["a"]["score"]
    assert score == pytest.approx(np.mean([one.score for one in supports]), rel=1e-3)


def test_another_model_on_the_same_texts(lm, tiny_model):
    other = replace(prismlm.load(tiny_model), lens=None)
    with torch.no_grad():
        for weight in other.model.model.layers[0].parameters():
            weight.mul_(0.5)
    # A text without predictions is no difference.
    found = compare_texts(lm, other, [*TEXTS, Document("three", "a")])
    expected = compare_texts(lm, other, TEXTS)
    assert found["texts"] == 3
    assert found["ce_difference_per_text"] == expected["ce_difference_per_text"]
    texts = [torch.tensor([lm.tokenizer(text.text)["input_ids"]]) for text in TEXTS]
    sizes = [ids.numel() - 1 for ids in texts]
    with torch.no_grad():
        each = [[m(ids, labels=ids).loss.item() for ids in texts] for m in (lm.model, other.model)]
    losses = np.average(each, axis=1, weights=sizes)
    assert found["ce"]["a"] == pytest.approx(losses[0], rel=1e-4)
    assert found["ce"]["difference"] == pytest.approx(losses[1] - losses[0], abs=1e-3)
    assert found["shares"] is found["support"] is None
    assert compare_prototypes(lm, other)["pairs"][0]["b_name"] is None


def test_models_that_cannot_be_compared(lm, small_model):
    other = prismlm.load(small_model)
    other.tokenizer.add_tokens(["something new"])
    for call in (lambda: compare_texts(lm, other, TEXTS), lambda: compare_prototypes(lm, other)):
        with pytest.raises(InputError, match="different tokenizers"):
            call()
