"""What methods read is what ``explain`` says of the same texts."""

import numpy as np
import pytest

import prismlm
from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.methods.setting import Setting, read_positions
from benchmarks.attribution.questions import (
    document_predictions,
    fact_questions,
    twin_recall,
)
from prismlm.corpus import Corpus


@pytest.fixture(scope="module")
def setting(tiny_model, tiny_corpus):
    lm = prismlm.load(tiny_model)
    corpus = Corpus.open(tiny_corpus)
    documents = corpus.split("train")[:4]
    bank = PassageBank.of(corpus, documents, tokens=50)
    positions = read_positions(lm.model, lm.head, lm.logit_map, bank, window=512, stride=384)
    return Setting(lm.model, lm.tokenizer, lm.head, lm.logit_map, bank, positions, 512), lm


def test_positions_are_those_of_an_explanation(setting):
    found, lm = setting
    bank, positions = found.bank, found.positions
    document = int(bank.documents[2])
    assert bank.corpus.lengths[document] <= 512
    trace = lm.explain(bank.corpus.text(document))
    rows = np.flatnonzero(bank.document[positions.passage] == 2)
    # The last position predicts the end of the text, which the text does not hold.
    assert len(rows) == len(trace) == bank.corpus.lengths[document] - 1
    states = positions.state[rows].astype(np.float32)
    np.testing.assert_allclose(states, trace.predictions.states.numpy(), atol=2e-3)
    ids = bank.corpus.tokens(int(bank.corpus.starts[document]), len(rows) + 1)
    assert positions.token[rows].tolist() == ids[1:].tolist()
    probability = [step.probability for step in trace[:-1]]
    np.testing.assert_allclose(positions.probability[rows[:-1]], probability, rtol=1e-3)
    assert positions.cell[rows].tolist() == trace.predictions.routing.indices[:, 0].tolist()


def test_predictions_along_a_text_are_read_in_one_pass_or_one_by_one(setting):
    found, _ = setting
    document = int(found.bank.documents[1])
    run = document_predictions(found.bank.corpus, document, tokens=20)
    assert len(run) == 19
    together = found.ask(run)
    alone = [found.ask([prediction]) for prediction in (run[0], run[7], run[-1])]
    for row, one in zip((0, 7, -1), alone, strict=True):
        np.testing.assert_allclose(together.states[row], one.states[0], atol=1e-4)
        np.testing.assert_allclose(together.probability[row], one.probability[0], rtol=1e-3)
        np.testing.assert_allclose(together.evidence[row], one.evidence[0], atol=1e-3)
        assert together.targets[row] == one.targets[0]


def test_facts_become_predictions_of_their_answers(setting):
    found, _ = setting
    bank = found.bank
    name = bank.corpus.doc_ids[int(bank.documents[3])]
    facts = [{"prompt": "The patient was", "answer": "given", "documents": [{"doc_id": name}]}] * 2
    asked = fact_questions(bank, facts)
    read = bank.corpus.tokenizer("The patient was given", add_special_tokens=False)["input_ids"]
    assert asked.planted[0].tolist() == [3]
    of_first = [p for p, q in zip(asked.predictions, asked.question, strict=True) if q == 0]
    last = of_first[-1]
    assert [*last.ids.tolist(), last.target] == read
    assert isinstance(last, Prediction)


def test_facts_with_the_same_answer_are_told_apart_by_chance_alone():
    def fact(answer, documents):
        return {"attribute": "main crop", "answer": answer, "documents": [{}] * documents}

    # Ten of twenty documents, sixteen of them of the first: eight of ten that could be; of the
    # second two of four. The third has its answer to itself.
    found = twin_recall([fact("rice", 16), fact("rice", 4), fact("corn", 1)])
    assert found.tolist() == pytest.approx([0.8, 0.5, 1.0])
