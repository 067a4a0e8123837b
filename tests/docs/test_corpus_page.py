from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_examples import few_texts as few_texts

PAGE = Path(__file__).parents[2] / "docs" / "corpus.md"


@pytest.mark.usefixtures("few_texts")
def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datatrove")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
