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


def test_pairs_come_slice_by_slice_and_a_limit_draws_of_each(tmp_path):
    rows = [
        ROW | {"id": f"{name}-{n}", "slice": name} for name in ("gender", "typo") for n in range(9)
    ]
    path = write(tmp_path / "a.parquet", *rows)
    assert [pair.slice for pair in read_pairs(path)] == ["typo"] * 9 + ["gender"] * 9
    few = read_pairs(path, 3)
    assert [pair.slice for pair in few] == ["typo"] * 3 + ["gender"] * 3
    assert few == read_pairs(path, 3) != read_pairs(path, 3, seed=1)
    for limit in (0, -1):
        with pytest.raises(InputError, match=f"the limit is {limit}: expected a whole number"):
            read_pairs(path, limit)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has 0 rows"),
        ([ROW | {"slice": "tpyo"}], "has the slice 'tpyo'"),
        ([ROW | {"perturbed": None}], "each with id, slice, original, perturbed"),
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
