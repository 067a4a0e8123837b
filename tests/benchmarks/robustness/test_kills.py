"""Commands that are killed at random moments end as if they had not been."""

import json

import pytest

from benchmarks.robustness.kills import COMMANDS, contents, varying
from benchmarks.robustness.render import LOST, render
from tests.helpers.forked import ROOT, run

CODE = """
import json, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmarks.robustness.kills import import_all, measure
import_all()
print(json.dumps(dict(measure(Path(sys.argv[1]), [sys.argv[2]], 3, 1, 7))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_few_kills_change_no_byte(command, tmp_path):
    code = CODE.format(root=ROOT)
    done = run(tmp_path, command, code=code, cwd=".", timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])[command]
    assert found["kills"] == 3
    assert found["files_compared"] > 0
    assert {key: found[key] for key in LOST} == {key: [] for key in LOST}
    assert found["slowest_answer_seconds"] < 2


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


def test_the_page_says_what_was_lost():
    empty = {key: [] for key in LOST}
    of = {
        "seconds": 2.0,
        "kills": 40,
        "rounds": 16,
        "files_compared": 160,
        "bytes_compared": 4_000_000,
        "not_compared": [],
        "signals": 10,
        "slowest_answer_seconds": 0.5,
        "environment": {"date": "2026-01-01", "python": "3.11"},
    }
    fine = render({"commands": {"corpus": of | empty}}, None)
    assert "**40 kills: nothing was lost and no byte differs.**" in fine
    assert "answered within 2 s every time" in fine
    lost = empty | {"missing": ["out/corpus.json"]}
    page = render({"commands": {"corpus": of | lost | {"slowest_answer_seconds": 3.0}}}, None)
    assert "1 findings, below" in page
    assert "corpus: 1 files are missing: `out/corpus.json`" in page
    assert "took longer than 2 s in corpus: that does not work" in page
