"""What an explanation lists goes to notebooks, pandas, Parquet and JSON, and stays text in HTML."""

import json

import pyarrow.parquet as pq
import pytest

import prismlm
from prismlm.explain.attribution import Share, Sources


@pytest.fixture(scope="module")
def trace(tiny_model):
    return prismlm.load(tiny_model).explain("The cell is the smallest unit", generate=3)


def test_passages_and_shares_as_data_frames(trace):
    passages, shares = trace.passages(4), trace.sources("domain")
    frame = passages.to_pandas()
    assert frame["share"].tolist() == [one.share for one in passages]
    assert frame["doc_id"].tolist() == [one.doc_id for one in passages]
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
