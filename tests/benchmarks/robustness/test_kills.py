"""What of the files of two runs is compared."""

import json

from benchmarks.robustness.kills import contents, varying


def test_times_are_left_out_by_name_and_nothing_else(tmp_path):
    one, other = ({"loss": 1.5, "steps": [{"rate": rate, "n": 3}]} for rate in (7.0, 8.0))
    assert list(varying(one, other)) == ["rate"]
    digests = []
    for number, value in enumerate((one, other, other | {"loss": 1.6})):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "a.json").write_text(json.dumps(value))
        (directory / "a.bin").write_bytes(b"same")
        digests.append(contents(directory, frozenset({"rate"})))
    assert digests[0] == digests[1] != digests[2]
    assert digests[0].keys() == {"a.json", "a.bin"}
    assert contents(tmp_path / "0") != contents(tmp_path / "1")
