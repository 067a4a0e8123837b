import pytest

import prismlm
from prismlm.explain.shares import DocumentShare, Share, Sources
from prismlm.explain.summary import in_words


def shares(unattributed=0.5, by="domain", **items):
    keys = tuple(Share(key, share, None) for key, share in items.items())
    return Sources(by, keys, unattributed)


def document(share, title="Vaccines"):
    return DocumentShare("a/1", share, "a", "law", "CC0", title, None, 0, lambda: None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            shares(law=0.4, art=0.1),
            "The answer relies mostly on law: 80% of what is attributed, 20% one document, "
            "“Vaccines”. 50% of the evidence is attributed.",
        ),
        (
            shares(law=0.3, art=0.2),
            "The answer relies on law before all others: 60% of what is attributed, 20% one "
            "document, “Vaccines”. 50% of the evidence is attributed.",
        ),
        (
            shares(by="source", law=0.2, art=0.15, war=0.15),
            "The answer relies on no one source: law 40%, art 30% of what is attributed, 20% one "
            "document, “Vaccines”. 50% of the evidence is attributed.",
        ),
        (
            shares(unattributed=0.998, law=0.002),
            "None of the evidence is attributed to text of this corpus.",
        ),
    ],
)
def test_in_words(given, said):
    assert in_words("The answer", given, [document(0.1)], None) == said


def test_a_document_without_a_title_has_its_id():
    said = in_words("The text", shares(law=0.5), [document(0.25, None)], None)
    assert "50% one document, “a/1”" in said


def test_what_the_corpus_does_not_hold_is_said_first(tiny_model):
    lm = prismlm.load(tiny_model)
    noise = lm.explain("qzx vvk 9!~ jjw {{ %% kqz ]] xx zzq 0x7 ~~ qj")
    assert noise.support.level == "none"
    assert noise.summary.startswith("Not in this corpus. What comes nearest is ")


def test_it_is_said_of_what_is_summed(tiny_model, monkeypatch):
    lm = prismlm.load(tiny_model)
    monkeypatch.setattr(lm.model.generation_config, "eos_token_id", None)
    trace = lm.explain("The cell is", generate=5)
    subjects = {"The answer": trace, "The text": trace[:], "The prediction": trace[:1]}
    for subject, one in subjects.items():
        assert one.summary == in_words(
            subject, one.sources("domain"), one.documents(1), one.support
        )
        assert one.to_dict()["summary"] == one.summary
    assert trace[:0].summary is None


def test_it_is_not_put_beside_shares_of_another_kind(tiny_model):
    trace = prismlm.load(tiny_model).explain("The cell is")
    license = trace.sources("license").items[0].key
    assert "summary" in trace.to_dict()
    assert "summary" not in trace.to_dict(method="source")
    assert "summary" not in trace.to_dict(where={"license": license})
