"""What models write after prompts: cut at words, the same whatever else was written."""

import pytest

import prismlm
from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.eval.judging.continuations import (
    Prompt,
    Writer,
    Writing,
    corpus_prompts,
    cut,
    file_prompts,
)

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


@pytest.mark.parametrize(
    "wrong", [{"words": 0}, {"tokens": 0}, {"temperature": -1.0}, {"seed": -1}, {"seed": True}]
)
def test_settings_out_of_range_are_refused(ordinary, tmp_path, wrong):
    with pytest.raises(InputError, match="expected"):
        Writer("m", ordinary[0], Writing(**wrong), tmp_path / "kept").texts(PROMPTS)
    assert not (tmp_path / "kept").exists()


def test_a_model_writes_as_everywhere_else(tiny_model, tmp_path):
    lm = prismlm.load(tiny_model)
    found = Writer("m", tiny_model, HOW, tmp_path / "kept").texts(PROMPTS)
    whole = [lm.generate(one.text, tokens=8) for one in PROMPTS]
    assert found == [
        text.removeprefix(p.text).strip() for p, text in zip(PROMPTS, whole, strict=True)
    ]


def test_drawn_tokens_come_from_the_seed_and_the_prompts_number(ordinary, tmp_path):
    def written(name, seed):
        how = Writing(words=5, tokens=8, temperature=1.0, seed=seed)
        return Writer("m", ordinary[0], how, tmp_path / name).texts([PROMPTS[0]] * 1 + PROMPTS[1:])

    assert written("a", 0) == written("b", 0) != written("c", 1)


def test_a_prompt_that_is_too_long_is_refused(ordinary, tmp_path):
    writer = Writer("m", ordinary[0], HOW, tmp_path / "kept")
    with pytest.raises(InputError, match=r"prompt 'long' has .* Give fewer --prompt-words"):
        writer.texts([Prompt("long", "word " * 1020, "")])
