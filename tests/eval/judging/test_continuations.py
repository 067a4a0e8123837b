"""What models write after prompts: cut at words, the same whatever else was written."""

import pytest

import prismlm
from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.eval.judging.continuations import (
    Prompt,
    Writing,
    bleu_figures,
    continue_prompts,
    corpus_prompts,
    cut,
    file_prompts,
    sentence_bleu,
)
from prismlm.models.checkpoint import read_checkpoint

HOW = Writing(words=5, tokens=8)
PROMPTS = [Prompt(str(n), text, "") for n, text in enumerate(["Once upon a time", "The court"])]


def test_a_text_is_cut_after_whole_words():
    found = cut("d", " one two\nthree  four five six seven eight nine ten eleven twelve", HOW)
    assert found == Prompt("d", "one two\nthree  four five", "six seven eight nine ten eleven")
    assert Writing(tokens=50).following == 38
    # One word less than prompt and reference take.
    assert cut("d", "one two three four five six seven eight nine ten", HOW).reference == ""
    assert cut("d", "one two", HOW).text == "one two"
    assert cut("d", " \n", HOW).text == ""
    assert cut("d", "one two", Writing(words=10**20)).text == "one two"


def test_prompts_are_the_beginnings_of_held_out_documents(tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    found = corpus_prompts(corpus, 6, HOW)
    assert len(found) == 6 == len({one.id for one in found})
    held_out = {corpus.doc_ids[number] for number in corpus.split("heldout")}
    for one in found:
        assert one.id in held_out
        assert corpus.text(corpus.find(one.id)).lstrip().startswith(one.text)
        assert (len(one.text.split()), len(one.reference.split())) == (5, 6)
    assert corpus_prompts(corpus, 6, HOW) == found
    assert corpus_prompts(corpus, 6, Writing(words=5, tokens=8, seed=1)) != found
    with pytest.raises(InputError, match="has 0 texts to continue"):
        corpus_prompts(corpus, 6, Writing(words=9000))


def test_prompts_are_the_lines_of_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("One line.\n\n" + "word " * 11 + "\nThe third\n")
    found = file_prompts(file, 2, HOW)
    assert [one.id for one in found] == ["1", "3"]
    assert len(file_prompts(file, 10**20, HOW)) == 3
    assert [len(one.reference.split()) for one in found] == [0, 6]
    file.write_bytes("caf\xe9\n".encode("latin-1"))
    with pytest.raises(InputError, match="is not UTF-8"):
        file_prompts(file, 2, HOW)
    file.write_text("alone\n")
    with pytest.raises(InputError, match="has 1 texts to continue"):
        file_prompts(file, 2, HOW)
    with pytest.raises(InputError, match="there is no file"):
        file_prompts(tmp_path / "none", 2, HOW)


def test_a_model_writes_as_everywhere_else(tiny_model):
    lm = prismlm.load(tiny_model)
    found = continue_prompts("m", *read_checkpoint(tiny_model), PROMPTS, HOW)
    whole = [lm.generate(one.text, tokens=8) for one in PROMPTS]
    assert found == [
        text.removeprefix(p.text).strip() for p, text in zip(PROMPTS, whole, strict=True)
    ]


def test_drawn_tokens_come_from_the_seed_and_the_prompts_number(ordinary):
    def written(seed):
        how = Writing(words=5, tokens=8, temperature=1.0, seed=seed)
        return continue_prompts("m", *read_checkpoint(ordinary[0]), [PROMPTS[0]] * 2, how)

    first, second = written(0)
    assert written(0) == [first, second] != written(1)
    assert first != second


def test_bleu_by_hand():
    reference = "the cat sat on the mat"
    # Of seven words six match, of six pairs five, and so on: (6/7 · 5/6 · 4/5 · 3/4)^(1/4).
    assert sentence_bleu(f"{reference} today", reference) == pytest.approx(100 * (3 / 7) ** 0.25)
    # All match, and four words in place of six cost exp(1 − 6/4).
    assert sentence_bleu("the cat sat on", reference) == pytest.approx(60.653, abs=1e-3)
    assert sentence_bleu(reference, reference) == pytest.approx(100)
    assert sentence_bleu("", reference) == 0


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
