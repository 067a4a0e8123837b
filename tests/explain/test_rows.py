"""What an explanation lists goes to notebooks, pandas, Parquet and JSON, and stays text in HTML."""

import json

import pyarrow.parquet as pq
import pytest

import prismlm
from prismlm.explain.rows import Rows, table


@pytest.fixture(scope="module")
def trace(tiny_model):
    return prismlm.load(tiny_model).explain("The cell is the smallest unit", generate=3)


def test_passages_as_a_data_frame_parquet_and_json(trace, tmp_path):
    found = trace.passages(4)
    frame = found.to_pandas()
    assert frame["share"].tolist() == [one.share for one in found]
    assert frame["doc_id"].tolist() == [one.doc_id for one in found]
    found.to_parquet(tmp_path / "p.parquet")
    found.to_json(tmp_path / "p.json")
    expected = [one.to_dict() for one in found]
    assert pq.read_table(tmp_path / "p.parquet").to_pylist() == expected
    assert json.loads((tmp_path / "p.json").read_text()) == expected
    assert len(expected) == 4
    page = found._repr_html_()
    assert page.count("<tr>") == 5
    assert f"{found[0].share:.1%}" in page


def test_shares_sum_to_one_in_a_data_frame(trace):
    shares = trace.sources("domain")
    frame = shares.to_pandas()
    assert frame["share"].sum() == pytest.approx(1.0)
    assert frame["domain"].tolist()[-1] == "unattributed"
    assert f"{shares.items[0].share:.1%}" in shares._repr_html_()


def test_a_trace_as_a_data_frame_and_json(trace, tmp_path):
    frame = trace.to_pandas()
    trace.to_parquet(tmp_path / "t.parquet")
    assert frame.to_dict("list").keys() == pq.read_table(tmp_path / "t.parquet").to_pydict().keys()
    assert len(frame) == sum(len(list(step.rows())) for step in trace)
    trace.to_json(tmp_path / "t.json")
    assert len(json.loads((tmp_path / "t.json").read_text())["positions"]) == len(trace)


def test_text_stays_text():
    page = table([{"text": "<script>alert(1)</script> & more", "share": 0.25, "url": None}])
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "25.0%" in page
    # A column that nothing has is left out.
    assert "url" not in page
    assert table([]).count("<tr>") == 1
    assert Rows()._repr_html_() == table([])
