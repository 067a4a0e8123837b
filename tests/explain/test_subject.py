"""What a question is about, and which documents and passages are worth showing."""

import math
from dataclasses import replace

import pytest

import prismlm
from prismlm.explain.attribution import Passage
from prismlm.explain.subject import Subject, worth_showing


class Known:
    """A subject of which each document is about a known part."""

    def __init__(self, **parts):
        self.parts = parts

    def about(self, passage, *, read):
        assert read
        return self.parts[passage.doc_id]


def test_documents_that_carry_far_less_than_others_are_not_worth_showing():
    # By hand: at least 3 %, or half of the first where that has under 6 %.
    for shares, shown in (((), 0), ((0.5, 0.04, 0.03, 0.029), 3), ((0.04, 0.021, 0.02, 0.0199), 3)):
        documents = [Passage(str(i), share, *[None] * 5, 0) for i, share in enumerate(shares)]
        assert worth_showing(documents, 5) == documents[:shown]
    # Where it is known how much of the answer they carry: the first, and those with 15 % of it.
    carried = (0.01, 0.2, 0.04, 0.05, 0.15)
    documents = [Passage(f"d{i}", 0.2, *[None] * 5, 0, carried=c) for i, c in enumerate(carried)]

    def shown(limit, subject=None, fill=False):
        return "".join(one.doc_id for one in worth_showing(documents, limit, subject, fill=fill))

    assert shown(5) == "d0d1d4"
    # With a question, those with 5 % of it that are half as much about it as the first.
    about = Known(d0=0.4, d1=0.1, d2=0.5, d3=0.2, d4=1)
    assert shown(5, about) == "d0d3d4"
    # The text of one that carries too little is not read.
    assert shown(5, Known(d0=0.4, d1=0.1, d3=0.2, d4=1)) == "d0d3d4"
    # If the first is not about it, those that are at all.
    assert shown(5, Known(**about.parts | {"d0": 0, "d3": 0})) == "d0d1d4"
    # Of the others, those first that are about more of the question.
    assert [shown(limit, about, fill=True) for limit in (4, 5)] == ["d0d3d4d2", "d0d3d4d2d1"]


def test_a_document_names_something_of_a_question_in_any_case_but_not_its_common_words(lm):
    lens, tokenizer = lm.lens, lm.tokenizer
    corpus, cells = lens.corpus, lens.cells
    count, threshold = len(cells.starts), min(7.5, 2 / 3 * math.log(len(cells)))
    places = zip(cells.starts.tolist(), cells.lengths.tolist(), strict=True)
    held = [set(corpus.tokens(*place)) for place in places]

    def weights(question):
        for word in question.split():
            rare, most = [], []
            for way in (word, word.lower(), word.upper(), word.capitalize()):
                for tokens in (tokenizer.encode(way), tokenizer.encode(" " + way)):
                    rates = {
                        token: cells.token_rates[token] or 0.5 / len(cells) for token in tokens
                    }
                    rare.append({t for t in rates if -math.log(rates[t]) > threshold})
                    most.append(-math.log(min(rates.values())))
            yield word, (0.01 + max(0, min(most) - 5) ** 2) * all(rare), rare

    found = []
    for question in ("sUgar", "quIz", "why Jinx", "sugar quiz"):
        subject, telling = Subject(question, lens), [*weights(question)]
        total = sum(weight for _, weight, _ in telling)
        found.append([subject.in_text(document) for document in range(count)])
        naive = [
            sum(w for _, w, spelt in telling if any(one <= tokens for one in spelt)) / total
            for tokens in held
        ]
        assert found[-1] == pytest.approx(naive)
        title = "A SUGAR quiz, or quizzes"
        named = sum(w for word, w, _ in telling if word.lower() in ("sugar", "quiz"))
        assert subject.in_title(title) == pytest.approx(named / total)
        # A title counts ten times what a text does, which is read on request.
        one = replace(lm.explain("The cell is").documents(1)[0], title=title)
        parts = [subject.about(one, read=read) for read in (False, True)]
        in_text = found[-1][cells.document_number(one.doc_id)]
        assert parts == pytest.approx([named / total, named / total + 0.1 * in_text])
    assert {any(row) and not all(row) for row in found} == {True}
    # "The" is common, though "THE" is not.
    assert not Subject("the of and", lens)
    assert not Subject("", lens)


def test_a_question_may_have_an_added_token_of_which_the_lens_has_no_rate(small_model):
    lm = prismlm.load(small_model)
    lm.tokenizer.add_tokens(["qqzygote"])
    assert len(lm.tokenizer) > len(lm.lens.cells.token_rates)
    assert Subject("Qqzygote", lm.lens).in_text(0) == 0
