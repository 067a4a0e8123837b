"""Test cases of interventions: a context, and the word that the model may put next.

A file holds JSON lines, ``{"concept": "women", "context": "…", "target": "women"}``; one space
joins context and target. Source: ProtoT, A.3.1 to A.3.3, with other sentences.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prismlm.corpus.encode import encode_text
from prismlm.corpus.pieces import pieces_of
from prismlm.errors import InputError, check_text, suggest
from prismlm.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUNDLED = Path(__file__).parent / "cases"


@dataclass(frozen=True)
class Case:
    """A context with the word whose probability is measured after it, without the space between."""

    concept: str
    context: str
    target: str


@dataclass(frozen=True)
class Probe(Case):
    """A case as tokens.

    Attributes:
        ids: of the context.
        target_id: the token whose probability is measured after them.
        document: the number of its document, if it comes from a corpus.
        first: the text of the first token, where the target is several and it alone is measured.
    """

    ids: tuple[int, ...]
    target_id: int
    document: int | None = None
    first: str | None = None

    @property
    def measured(self) -> str:
        """The text whose probability is measured: the target, or its first token."""
        return self.target if self.first is None else self.first

    @property
    def label(self) -> str:
        """The target, or which part of it is measured."""
        return self.target if self.first is None else f"{self.first}… of {self.target}"


def case_sets() -> tuple[str, ...]:
    """Return the names of the bundled sets of cases."""
    return tuple(sorted(path.stem for path in BUNDLED.glob("*.jsonl")))


def load_cases(source: str | os.PathLike[str]) -> tuple[Case, ...]:
    """Read cases from a file, or a bundled set by its name."""
    names = list(case_sets())
    path = BUNDLED / f"{source}.jsonl" if str(source) in names else Path(source)
    if not path.is_file():
        raise InputError(
            f"{str(source)!r} is neither a file of cases nor one of the bundled sets "
            f"{', '.join(names)}.{suggest(str(source), names)}"
        )
    rows = read_rows(path, ("concept", "context", "target"))
    return tuple(Case(**row) for row in rows.values())


def read_rows(path: Path, keys: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the texts of each line of a file of cases, by the line's name in messages."""
    rows: dict[str, dict[str, str]] = {}
    # Texts may hold other line ends, such as U+2028.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place}: not a JSON object ({error}).") from error
        if not isinstance(row, dict) or set(row) != set(keys):
            found = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise InputError(
                f"{place}: expected a JSON object with {', '.join(keys)} and nothing else, found "
                f"{found or 'nothing'}."
            )
        for key, text in row.items():
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"{place}: {key!r} is {text!r}, expected some text.")
            check_text(f"{place}: {key!r}", text)
        rows[place] = row
    if not rows:
        raise InputError(
            f"{path} holds no cases: expected a JSON object in each line, with {', '.join(keys)}."
        )
    return rows


def probe_of(tokenizer: PreTrainedTokenizerBase, case: Case, *, first_token: bool = False) -> Probe:
    """Return a case as tokens: context and target are encoded together, then taken apart.

    Of a target of several tokens ``first_token`` measures the first; else it is an error.
    """
    context, target = case.context.rstrip(), case.target.strip()
    end = context if len(context) <= 30 else f"…{context[-30:]}"
    before = encode_text(tokenizer, context, end=False)
    whole = encode_text(tokenizer, f"{context} {target}", end=False)
    ids = whole[len(before) :]
    if not before or whole[: len(before)] != before or not ids:
        raise InputError(
            f"the target {target!r} changes the tokens of the context {end!r} before it, "
            "so it has no probability after it: move words between the two."
        )
    tokens = [piece.label for piece in pieces_of(tokenizer, ids)]
    if len(ids) > 1 and not first_token:
        raise InputError(
            f"the target {target!r} after {end!r} is {len(ids)} tokens, "
            f"{', '.join(map(repr, tokens))}: expected one. Choose another target, or measure the "
            "first of them alone (first_token, --first-token)."
        )
    first = tokens[0].strip() or "␣" if len(ids) > 1 else None
    return Probe(case.concept, context, target, tuple(before), ids[0], first=first)


def words_of(cases: Iterable[Case]) -> tuple[str, ...]:
    """Return the targets of cases, each once."""
    return tuple(dict.fromkeys(case.target.strip() for case in cases))
