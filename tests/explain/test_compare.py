"""Two models on the same texts, against losses of transformers and single explanations."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import prismlm
from prismlm.corpus import Document
from prismlm.errors import InputError
from prismlm.explain.compare import compare_texts

TEXTS = [
    Document("one", "The court ruled that the contract was void and the appeal was dismissed."),
    Document("two", "Once upon a time there was a little girl who lived in the woods."),
]


def test_a_model_beside_itself(lm):
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
    losses = []
    for model in (lm.model, other.model):
        sums = count = 0
        for text in TEXTS:
            ids = torch.tensor([lm.tokenizer(text.text)["input_ids"]])
            with torch.no_grad():
                sums += model(input_ids=ids, labels=ids).loss.item() * (ids.numel() - 1)
            count += ids.numel() - 1
        losses.append(sums / count)
    assert found["ce"]["a"] == pytest.approx(losses[0], rel=1e-4)
    assert found["ce"]["difference"] == pytest.approx(losses[1] - losses[0], abs=1e-3)
    assert found["shares"] is found["support"] is None


def test_models_that_cannot_be_compared(lm, tiny_model):
    other = prismlm.load(tiny_model)
    other.tokenizer.add_tokens(["something new"])
    with pytest.raises(InputError, match="different tokenizers"):
        compare_texts(lm, other, TEXTS)
