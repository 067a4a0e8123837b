"""Questions and chats explained, against the texts that the template makes of them."""

import pytest
import torch

import prismlm
from prismlm.corpus import Document
from prismlm.corpus.chat import as_chat
from prismlm.errors import InputError
from prismlm.explain.audit import Audit, read_texts
from prismlm.explain.subject import Subject, worth_showing
from prismlm.pages.trace import Pool, trace_data
from tests.explain.conftest import shares_of
from tests.helpers.chats import ANSWER, ANSWERED, ASKED, CHAT, QUESTION, chatting

DOCUMENT = Document("chat", ANSWERED, messages=CHAT)


@pytest.fixture(scope="module")
def lm(small_model, tmp_path_factory):
    return prismlm.load(chatting(small_model, tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture(scope="module")
def before(lm):
    """How many tokens stand before the answer, by its tokens counted from the end."""
    answer = lm.tokenizer(f"{ANSWER}<|endoftext|>\n", add_special_tokens=False)["input_ids"]
    return len(lm.tokenizer(ANSWERED, add_special_tokens=False)["input_ids"]) - len(answer)


def test_a_question_is_what_the_template_makes_of_it(lm):
    own = lm.tokenizer(ASKED, add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert torch.equal(lm.encode(as_chat(QUESTION)), own)
    trace = lm.explain(as_chat(QUESTION), generate=4)
    assert "".join(step.pieces[0].shown for step in trace[: own.shape[1]]) == ASKED
    assert trace.written == 4
    written = lm.write(own, 6, 0.0, 0)[0, own.shape[1] :]
    assert lm.generate(as_chat(QUESTION), tokens=6) == lm.words(written)


def test_of_a_chat_that_was_read_the_answer_counts(lm, before):
    trace = lm.explain(CHAT)
    assert trace.first == before - 1
    assert trace[trace.first].pieces[1].label == "The"
    assert trace.sources("domain") == trace[before - 1 :].sources("domain")
    assert trace.sources("domain") != trace[:].sources("domain")
    assert trace.written == 0
    # A text counts whole, whatever marks it spells; so does a question alone.
    assert lm.explain(ANSWERED).first == lm.explain(as_chat(QUESTION)).first == 0


def test_an_audit_counts_answers(lm, before):
    (chat,) = Audit(lm).read([DOCUMENT])
    # The last step of a trace predicts what follows the text, which an audit leaves out.
    trace = lm.explain(CHAT)[before - 1 : -1]
    assert (chat["tokens"], chat["predictions"]) == (lm.encode(CHAT).shape[1], len(trace))
    assert chat["opening"] == QUESTION
    for by in ("source", "domain", "license"):
        expected = [*shares_of(trace.sources(by)).items()][:20]
        found = [*shares_of(chat[f"by_{by}"]).items()]
        assert found == [(key, pytest.approx(share, abs=1e-5)) for key, share in expected]


def test_windows_leave_no_token_of_an_answer_out(lm, before):
    for window in (8, 16, 64):
        (found,) = read_texts(lm, [DOCUMENT], window)
        assert len(found.losses) == len(found.ids) - before
    assert len(found.ids) < window
    ids = torch.tensor([lm.tokenizer(ANSWERED, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        loss = lm.model(ids, labels=torch.where(torch.arange(ids.shape[1]) < before, -100, ids))
    assert found.losses.mean() == pytest.approx(float(loss.loss), rel=1e-4)


def test_support_asks_whether_documents_name_what_all_of_the_user_asked(lm):
    trace = lm.explain([{"role": "system", "content": "Sums"}, *CHAT, *as_chat("And why?")])
    assert trace.asked == f"{QUESTION}\nAnd why?"
    parts = ({"type": "text", "text": "And "}, {"type": "text", "text": "why?"})
    assert lm.explain([{"role": "user", "content": parts}]).asked == "And why?"
    assert lm.explain(ANSWERED).asked == ""
    with pytest.raises(InputError, match="expected a record with role and content"):
        lm.explain([{"role": "user"}])


def test_an_answer_from_documents_that_name_nothing_of_the_question(lm, monkeypatch):
    corpus = lm.lens.corpus
    answer = {"role": "assistant", "content": corpus.text(3)[:200] + corpus.text(6)[:200]}
    asked = "Does tracking help against cancer?"
    chat = [*as_chat(asked), answer]
    before = lm.explain(chat)
    shown = worth_showing(before.documents(50), 5, before.subject)
    assert (before.support.level, before.support.off_subject) == ("weak", False)
    assert before.citations()
    assert len(shown) > 1
    monkeypatch.setattr(Subject, "_part", lambda self, named: 0.0)
    trace = lm.explain(chat)
    assert trace.support == trace[trace.first :].support == ("none", before.support.score, True)
    assert trace.citations() == []
    assert worth_showing(trace.documents(50), 5, trace.subject) == shown[:1]
    for one, count in ((before, len(shown)), (trace, 1)):
        assert len(trace_data(one, Pool(lm.lens))["whole"]["documents"]) == count
    (text,) = read_texts(lm, [Document("chat", "", messages=chat)])
    assert text.support.off_subject
    assert lm.explain([*as_chat("Why?"), answer]).support.level == "weak"
