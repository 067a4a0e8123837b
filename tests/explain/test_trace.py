"""A trace as tables, files and HTML; its citations against support, asked of each sentence."""

import json
from collections import defaultdict

import pyarrow.parquet as pq
import pytest

from prismlm.explain.attribution import Share, Sources
from prismlm.lens.lens import sentences


@pytest.fixture(scope="module")
def trace(lm):
    return lm.explain("The cell is the smallest unit", generate=3)


def test_passages_and_shares_as_data_frames(trace):
    passages, shares = trace.passages(4), trace.sources("domain")
    assert passages.to_pandas()["share"].tolist() == [one.share for one in passages]
    page = passages._repr_html_()
    assert page.count("<tr>") == 4
    assert f"{passages[0].share:.3g}" in page
    frame = shares.to_pandas()
    assert frame["share"].sum() == pytest.approx(1.0)
    assert frame["domain"].tolist()[-1] == "unattributed"
    assert f"{shares.items[0].share:.3g}" in shares._repr_html_()


def test_a_trace_as_a_data_frame_parquet_and_json(trace, tmp_path):
    frame = trace.to_pandas()
    trace.to_parquet(tmp_path / "t.parquet")
    assert frame.to_dict("list").keys() == pq.read_table(tmp_path / "t.parquet").to_pydict().keys()
    assert len(frame) == sum(len(step.prototypes) for step in trace)
    trace.to_json(tmp_path / "t.json")
    value = json.loads((tmp_path / "t.json").read_text())
    assert len(value["positions"]) == len(trace)
    shares = sum(item["share"] for item in value["sources"]["items"])
    assert shares + value["sources"]["unattributed"] == pytest.approx(1.0, abs=1e-6)


def test_text_stays_text():
    shares = Sources("domain", (Share("<script>alert(1)</script> \u202e", 0.25),), 0.75)
    page = shares._repr_html_()
    assert "&lt;script&gt;" in page
    assert not {"<script>", "\u202e"} & {*page.split(), *page}
    # A column that nothing has is left out.
    assert "lift" not in page


def naive(trace):
    """Of each sentence, the documents that carry s ≥ 0.8 of it: by loops over its tokens."""
    told, ids = trace.attribution("evidence").coverage, trace.answer_ids
    words = [len(trace.lm.words(ids[:count])) for count in range(len(ids) + 1)]
    shift = 0 if trace.first or trace.written else 1
    expected = set()
    for start, end in sentences(trace.answer):
        spelt = (t for t in range(shift, len(ids)) if words[t + 1] > start and words[t] < end)
        inside, carried = {token - shift for token in spelt}, defaultdict(set)
        tokens = {int(told.tokens[one]): float(told.weights[one]) for one in inside}
        for prediction, document, _ in told.carried.tolist():
            if prediction in inside and sum(tokens.values()) >= 1:
                carried[document].add(int(told.tokens[prediction]))
        for document, its in carried.items():
            share = sum(tokens[token] for token in its) / sum(tokens.values())
            if share >= 0.8:
                doc_id = trace.lens.cells.facts(document)["doc_id"]
                expected.add((start, end, doc_id, round(share, 6)))
    return expected


def test_a_sentence_cites_the_documents_that_carry_nearly_all_of_it(lm):
    corpus, cited = lm.lens.corpus, 0
    for number in (0, 3, 6, 30):
        text = corpus.text(number)[:300]
        whole = lm.explain(text)
        for trace in (whole, lm.explain(text[:40], generate=30), whole[5:]):
            marks = [
                (*one[:2], one.document["doc_id"], round(one.share, 6)) for one in trace.citations()
            ]
            assert set(marks) == naive(trace)
            assert len(set(marks)) == len(marks)
            assert marks == sorted(marks, key=lambda mark: (mark[0], -mark[3]))
            cited += len(marks)
    assert cited > 10
