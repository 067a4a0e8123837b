import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.errors import FormatError, InputError
from prismlm.eval.pairs import COLUMNS, read_pairs

ROW = {
    "id": "typo-00000",
    "slice": "typo",
    "original": "It was good.",
    "perturbed": "It was giod.",
    "source": "wikitext2",
    "similarity": None,
    "distance": 1,
}


def write(path, *rows, schema=COLUMNS):
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path)
    return path


def test_pairs_come_back_with_their_columns(tmp_path):
    wide = pa.schema([pa.field("more", pa.int8()), *COLUMNS])
    table = read_pairs(write(tmp_path / "a.parquet", ROW | {"more": 1}, schema=wide))
    assert table.schema.equals(COLUMNS)
    assert table.to_pylist() == [ROW]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "holds no pairs"),
        ([ROW, ROW], "several rows of one id"),
        ([ROW | {"slice": "tpyo"}], "has the slice 'tpyo'"),
        ([ROW | {"perturbed": None}], "rows without id, slice"),
    ],
)
def test_other_rows_are_refused(tmp_path, rows, words):
    with pytest.raises(FormatError, match=words):
        read_pairs(write(tmp_path / "a.parquet", *rows))


def test_what_holds_no_pairs_is_refused(tmp_path):
    with pytest.raises(InputError, match="is not a file"):
        read_pairs(tmp_path)
    (tmp_path / "a.parquet").write_text("text")
    with pytest.raises(FormatError, match="does not hold pairs"):
        read_pairs(tmp_path / "a.parquet")
    few = pa.schema([COLUMNS.field("id")])
    with pytest.raises(FormatError, match="no column slice, original"):
        read_pairs(write(tmp_path / "b.parquet", {"id": "a"}, schema=few))
