"""How a study is made: its parts are kept one by one in a directory, and then a result of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prismlm.files import keep_json
from prismlm.run_state import begin, keeping


def make_parts(
    place: Path, folder: str, note: Mapping[str, Any], parts: Mapping[str, Callable[[], Any]]
) -> None:
    """Make the parts that ``place/folder`` lacks, a JSON file ``NAME.json`` each.

    ``run.json`` in ``place`` notes what they are made with. A run that makes no part leaves
    nothing behind.

    Args:
        place: the directory of the study.
        folder: that its parts are in.
        note: JSON values; they must be those that the directory was begun with.
        parts: what makes each, by name.

    Raises:
        InputError: the directory was begun with something else.
    """
    kept = place / folder
    made = any(kept.glob("*.json"))
    if made:
        begin(place, note, made=True)
    with keeping(lambda: f"{len([*kept.glob('*.json')])} finished parts are kept in {place}."):
        for name, make in parts.items():
            path = kept / f"{name}.json"
            if path.is_file():
                continue
            value = make()
            if not made:
                kept.mkdir(parents=True, exist_ok=True)
                begin(place, note, made=False)
                made = True
            keep_json(path, value)
