"""Audits against explanations of the same texts, one at a time; two models side by side."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import prismlm
from prismlm.corpus import Document
from prismlm.errors import InputError
from prismlm.explain.audit import Audit, document_sources, read_texts, texts_that_rely
from prismlm.explain.compare import compare_prototypes, compare_texts, signature_matches
from tests.explain.conftest import shares_of

TEXTS = [
    Document("one", "The court ruled that the contract was void and the appeal was dismissed."),
    Document("two", "Once upon a time there was a little girl who lived in the woods."),
    Document("token", "a"),
    Document("long", "The patient was given a dose of the drug, and then another one. " * 12),
]


@pytest.fixture(scope="module")
def audited(lm):
    audit = Audit(lm)
    return audit, list(audit.read(TEXTS))


@pytest.fixture(scope="module")
def traces(lm):
    """Texts with predictions; the last step predicts what follows, which an audit leaves out."""
    return {d.doc_id: lm.explain(d.text)[:-1] for d in TEXTS if d.doc_id != "token"}


def test_of_a_head_that_does_not_fit_an_audit_says_so_and_gives_no_support(lm, audited):
    assert audited[0].to_dict()["notes"] == []
    wrong = prismlm.load(lm.path)
    with torch.no_grad():
        wrong.head.prototypes.mul_(50)
    audit = Audit(wrong)
    rows = list(audit.read(TEXTS[:2]))
    assert min(row["explained_share"] for row in rows) > 1.5
    assert [row["support"] for row in rows] == [None, None]
    assert "The prototype head does not fit this model" in audit.to_dict()["notes"][0]
    assert compare_texts(lm, wrong, TEXTS[:2])["support"] is None


def test_a_row_is_what_explain_says(lm, audited, traces):
    for document, row in zip(TEXTS, audited[1], strict=True):
        assert row["text_id"] == document.doc_id
        if document.doc_id == "token":
            assert (row["predictions"], row["ce"], row["unattributed"]) == (0, None, None)
            continue
        trace = traces[document.doc_id]
        assert row["predictions"] == len(trace) == row["tokens"] - 1
        for by in ("source", "domain", "license"):
            expected, kept = shares_of(trace.sources(by)), shares_of(row[f"by_{by}"])
            largest = {key: expected[key] for key in kept}
            assert kept == pytest.approx(largest, rel=1e-3, abs=1e-7)
            assert len(kept) == min(20, len(expected))
            rest = sum(expected.values()) - sum(largest.values())
            assert row[f"other_{by}"] == pytest.approx(rest, rel=1e-2, abs=1e-6)
        found = {d.doc_id: d.share for d in trace.documents(50)}
        for place in row["documents"]:
            assert place["share"] == pytest.approx(found[place["doc_id"]], rel=1e-3)
        with torch.no_grad():
            ids = torch.tensor([lm.tokenizer(document.text)["input_ids"]])
            loss = lm.model(input_ids=ids, labels=ids).loss.item()
        assert row["ce"] == pytest.approx(loss, rel=1e-4)


def support_of(supports):
    levels = {n: sum(one.level == n for one in supports) for n in ("strong", "weak", "none")}
    mean = np.mean([one.score for one in supports])
    return {"levels": levels, "score": pytest.approx(mean, rel=1e-3)}


def test_the_summary_is_the_sum_of_the_rows(lm, audited, traces):
    audit, rows = audited
    summary = audit.to_dict()
    assert summary["texts"] == 4
    assert summary["predictions"] == sum(row["predictions"] for row in rows)
    found = [trace.attribution() for trace in traces.values()]
    total = sum(one.total for one in found)
    for by in ("source", "domain", "license"):
        expected = Counter()
        for one in found:
            parts = shares_of(one.sources(by)).items()
            expected.update({key: share * one.total / total for key, share in parts})
        got = shares_of(summary["shares"][by]["items"])
        assert got == pytest.approx(expected, rel=1e-3)
        assert sum(got.values()) + summary["shares"][by]["unattributed"] == pytest.approx(1)
    explained = np.concatenate([r.explained for r in read_texts(lm, TEXTS)])
    assert summary["explained_share"] == pytest.approx(np.median(explained), abs=2e-3)
    order = sorted((r for r in rows if r["predictions"]), key=lambda row: -row["unattributed"])
    assert [e["text_id"] for e in summary["least_attributed"]] == [row["text_id"] for row in order]
    assert summary["support"] == support_of([trace.support for trace in traces.values()])
    scores = {doc_id: trace.support.score for doc_id, trace in traces.items()}
    least = summary["least_supported"]
    assert [e["text_id"] for e in least] == sorted(scores, key=lambda doc_id: scores[doc_id])
    assert {e["text_id"]: e["score"] for e in least} == pytest.approx(scores, rel=1e-3)


def test_every_prediction_of_a_long_text_counts_once(lm):
    document = TEXTS[3]
    ids = lm.tokenizer(document.text)["input_ids"]
    (whole,) = read_texts(lm, [document])
    for window in (16, 32, len(ids)):
        (of_text,) = read_texts(lm, [document], window)
        assert len(of_text.losses) == len(ids) - 1
        # The first window starts where the text does, so its losses are those of the whole.
        first = min(window, len(ids) - 1)
        np.testing.assert_allclose(of_text.losses[:first], whole.losses[:first], atol=1e-4)
    # A later window's losses are those of the stretch of text that it sees.
    (of_text,) = read_texts(lm, [document], 16)
    with torch.no_grad():
        logits = lm.model(input_ids=torch.tensor([ids[12:28]])).logits[0]
    targets = torch.tensor(ids[13:29])
    alone = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    np.testing.assert_allclose(of_text.losses[16:28], alone.numpy()[4:], atol=1e-4)


def test_a_filter(lm, traces):
    domain = lm.lens.cells.keys("domain").names[0]
    audit = Audit(lm, where={"domain": domain})
    found = {}
    for row in [row for row in audit.read(TEXTS) if row["predictions"]]:
        assert {item["key"] for item in row["by_domain"]} <= {domain}
        matching = sum(shares_of(row["by_source"]).values())
        assert matching + row["elsewhere"] + row["unattributed"] == pytest.approx(1)
        found[row["text_id"]] = shares_of(traces[row["text_id"]].sources("domain"))[domain]
        assert matching == pytest.approx(found[row["text_id"]], rel=1e-3)
    assert audit.to_dict()["most_matching"][0]["text_id"] == max(found, key=found.get)


def test_where_a_document_shows_up(lm, traces):
    doc_id = lm.lens.index["doc_id"][5].as_py()
    found = document_sources(lm.lens, doc_id)
    cells = lm.lens.cells
    document, usage = cells.document_number(doc_id), lm.lens.prototypes["usage"].to_numpy()
    positions = [cells.records(cells.rows_of(i))["position"] for i in range(192)]
    counts = np.array([(cells.document_of(one) == document).sum() for one in positions])
    parts = counts / np.array([max(1, len(one)) for one in positions])
    own = {c["prototype"]: (c["positions"], c["share"]) for c in found.cells}
    assert own == {i: (n, pytest.approx(parts[i])) for i, n in enumerate(counts) if n}
    assert list(own.values()) == sorted(own.values(), reverse=True)
    mine = (usage * parts).sum() / usage.sum()
    assert found.neighbourhood == pytest.approx(mine)
    uses = texts_that_rely(lm, doc_id, TEXTS)
    texts = {text["text_id"]: text["share"] for text in uses["texts"]}
    # One of them is of one token, which predicts nothing.
    assert uses["texts_read"] == len(TEXTS) - 1
    assert uses["share"] == pytest.approx(sum(texts.values()) / uses["texts_read"])
    # What is behind these texts is compared with an even spread of what was traced alone.
    assert 0 < uses["traced"] < 1
    even = {**uses, "share": found.base_rate * uses["traced"]}
    assert "about as often as usual" in found.sentence(even)
    assert "3.0 times as much" in found.sentence({**even, "share": 3 * even["share"]})
    assert found.sentence({**even, "share": 0.0}).startswith("None of these texts relies on")
    ids = cells.documents.column("doc_id").to_pylist()
    tokens = dict(zip(ids, (cells.lengths - 1).tolist(), strict=True))
    assert found.base_rate == pytest.approx(tokens[doc_id] / sum(tokens.values()))
    for text_id, share in texts.items():
        expected = shares_of(traces[text_id].sources("document"))[doc_id]
        assert share == pytest.approx(expected, rel=1e-3)
    assert [*texts.values()] == sorted(texts.values(), reverse=True)


def test_what_cannot_be_audited_or_compared_is_refused(lm, small_model):
    corpus, other = lm.lens.corpus, prismlm.load(small_model)
    held_out = corpus.doc_ids[int(corpus.split("heldout")[0])]
    other.tokenizer.add_tokens(["something new"])
    for message, refused in (
        ("domain=nonsense", lambda: Audit(lm, where={"domain": "nonsense"})),
        ("of 1 tokens does not fit: expected at least 2", lambda: Audit(lm, window=1)),
        ("has no document 'x'", lambda: document_sources(lm.lens, "x")),
        (
            "is held out, and .*: it was never indexed",
            lambda: document_sources(lm.lens, held_out),
        ),
        ("different tokenizers", lambda: compare_texts(lm, other, TEXTS)),
    ):
        with pytest.raises(InputError, match=message):
            refused()


# -- two models


def test_signatures_match_as_whole_vectors_do():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(13, 6, generator=generator), torch.randn(9, 4, generator=generator)
    w_a, w_b = torch.randn(31, 6, generator=generator), torch.randn(31, 4, generator=generator)
    found = signature_matches(a, w_a, b, w_b)
    signatures = ((p @ w.T).double() for w, p in ((w_a, a), (w_b, b)))
    left, right = (s - s.mean(1, keepdim=True) for s in signatures)
    cosines = torch.nn.functional.cosine_similarity(left[:, None], right[None], dim=-1)
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
    texts = compare_texts(lm, lm, TEXTS[:2])
    assert texts["ce"]["difference"] == 0
    items, rest = (texts["shares"]["domain"][name] for name in ("items", "unattributed"))
    assert {item["difference"] for item in items} == {0}
    assert sum(item["a"] for item in items) + rest["a"] == pytest.approx(1)
    expected = support_of([lm.explain(text.text)[:-1].support for text in TEXTS[:2]])
    assert texts["support"]["a"] == texts["support"]["b"] == expected


def test_another_model_on_the_same_texts(lm, tiny_model):
    other = replace(prismlm.load(tiny_model), lens=None)
    with torch.no_grad():
        for weight in other.model.model.layers[0].parameters():
            weight.mul_(0.5)
    # A text without predictions is no difference.
    found = compare_texts(lm, other, TEXTS[:3])
    expected = compare_texts(lm, other, TEXTS[:2])
    assert found["texts"] == 3
    assert found["ce_difference_per_text"] == expected["ce_difference_per_text"]
    texts = [lm.encode(text.text) for text in TEXTS[:2]]
    sizes = [ids.numel() - 1 for ids in texts]
    with torch.no_grad():
        each = [[m(ids, labels=ids).loss.item() for ids in texts] for m in (lm.model, other.model)]
    losses = np.average(each, axis=1, weights=sizes)
    assert found["ce"]["a"] == pytest.approx(losses[0], rel=1e-4)
    assert found["ce"]["difference"] == pytest.approx(losses[1] - losses[0], abs=1e-3)
    assert found["shares"] is found["support"] is None
    assert compare_prototypes(lm, other)["pairs"][0]["b_name"] is None
