"""BLEU by hand, and the control."""

import pytest

from prismlm.eval.judging.continuations import Prompt, bleu_figures, sentence_bleu


def test_bleu_by_hand():
    reference = "the cat sat on the mat"
    # Of seven words six match, of six pairs five, and so on: (6/7 · 5/6 · 4/5 · 3/4)^(1/4).
    assert sentence_bleu(f"{reference} today", reference) == pytest.approx(100 * (3 / 7) ** 0.25)
    # All match, and four words in place of six cost exp(1 − 6/4).
    assert sentence_bleu("the cat sat on", reference) == pytest.approx(60.653, abs=1e-3)
    assert sentence_bleu(reference, reference) == pytest.approx(100)
    assert sentence_bleu("", reference) == 0


def test_unsmoothed_it_is_nothing_where_no_four_words_match():
    text, reference = "the cat sat under a mat", "the cat sat on the mat"
    assert sentence_bleu(text, reference, smooth=False) == 0 < sentence_bleu(text, reference)
    whole = "the cat sat on the roof"
    assert sentence_bleu(whole, reference, smooth=False) == sentence_bleu(whole, reference)


def test_means_stand_beside_other_prompts_and_every_model_has_its_best():
    words = ["one two three four five", "red blue green white black", "hill lake wood sea road"]
    prompts = [Prompt(str(n), f"p{n}", text) for n, text in enumerate(words)]
    prompts.insert(1, Prompt("short", "p", ""))
    texts = {"copies": [words[0], "x", *words[1:]], "moves": [words[1], "x", words[2], words[2]]}
    found = bleu_figures(prompts, texts)
    assert found["prompts"] == 3
    copies, moves = found["models"]["copies"], found["models"]["moves"]
    assert (copies["mean"]["value"], copies["other_prompt"]["value"]) == pytest.approx((100, 0))
    assert copies["difference"]["low"] == pytest.approx(100)
    assert copies["corpus"] == pytest.approx(100)
    assert moves["mean"]["value"] == pytest.approx(100 / 3)
    # Two of its three texts are what the next prompt goes on with.
    assert moves["other_prompt"]["value"] == pytest.approx(200 / 3)
    assert [(one["best"], one["id"]) for one in found["samples"]] == [
        ("copies", "0"),
        ("moves", "2"),
    ]
    assert [one["model"] for one in found["samples"][0]["texts"]] == ["copies", "moves"]


@pytest.mark.parametrize("references", [[], ["a b"]])
def test_without_references_there_is_none(references):
    prompts = [Prompt("1", "p", one) for one in references] + [Prompt("2", "p", "")]
    assert bleu_figures(prompts, {"m": ["a b"] * len(prompts)}) is None
