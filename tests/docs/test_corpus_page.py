from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from prismlm.corpus import sample_path

PAGE = Path(__file__).parents[2] / "docs" / "corpus.md"


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Every eighth text of the sample: the page reads some of them, and none of how many there are.
    table = pq.read_table(sample_path())
    texts = tmp_path / "texts.parquet"
    pq.write_table(table.take(list(range(0, len(table), 8))), texts)
    monkeypatch.setattr("prismlm.corpus.sample_path", lambda: texts)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
