import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.errors import FormatError, InputError
from prismlm.eval.pairs import COLUMNS, read_pairs

ROW = {"id": "0", "slice": "typo", "original": "It was good.", "perturbed": "It was giod."}


def write(path, *rows, schema=COLUMNS):
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path)
    return path


def test_pairs_come_slice_by_slice_and_a_limit_samples_each(tmp_path):
    rows = [ROW | {"id": f"{s}-{n}", "slice": s} for s in ("gender", "typo") for n in range(9)]
    path = write(tmp_path / "a.parquet", *rows)
    assert [pair.slice for pair in read_pairs(path)] == ["typo"] * 9 + ["gender"] * 9
    sample = read_pairs(path, 3)
    assert [pair.slice for pair in sample] == ["typo"] * 3 + ["gender"] * 3
    assert sample == read_pairs(path, 3) != read_pairs(path, 3, seed=1)
    with pytest.raises(InputError, match="the limit is 0: expected a whole number"):
        read_pairs(path, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has 0 rows"),
        ([ROW, ROW | {"slice": "tpyo"}], "row 1 of .*'tpyo'.*one of the slices synonym, typo"),
        ([ROW | {"perturbed": None}], "row 0 of .*expected id, slice, original, perturbed as text"),
    ],
)
def test_other_rows_are_refused(tmp_path, rows, message):
    with pytest.raises(FormatError, match=message):
        read_pairs(write(tmp_path / "a.parquet", *rows))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="is not a file"):
        read_pairs(tmp_path)
    (tmp_path / "a.parquet").write_text("text")
    with pytest.raises(FormatError, match="cannot be read as Parquet"):
        read_pairs(tmp_path / "a.parquet")
    ids = pa.schema([COLUMNS.field("id")])
    with pytest.raises(FormatError, match="expected rows of id, slice, original, perturbed"):
        read_pairs(write(tmp_path / "b.parquet", {"id": "a"}, schema=ids))
