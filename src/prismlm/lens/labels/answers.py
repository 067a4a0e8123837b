"""What a language model is asked, what counts as its answer, and the answers that are kept.

What it says is untrusted: an answer has exactly the fields that were asked for, or is none.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from prismlm.errors import FormatError
from prismlm.files import check_json, json_text, room_to_write

FENCED = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL)
KINDS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    list[str]: {"type": "array", "items": {"type": "string"}},
}
# Each heading of the file with what stands below it.
PROMPTS = dict(
    re.findall(
        r"^# (\w+)\n+(.*?)\s*(?=^# |\Z)",
        (Path(__file__).parent / "prompts.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
)


class Failed(Exception):
    """There is no answer to a question: refused, too late, or not what was asked for."""


def prompt(name: str, **values: str) -> str:
    """Return a prompt of ``prompts.md`` with values in their places."""
    return Template(PROMPTS[name]).substitute(values)


def fenced(data: str) -> str:
    """Return untrusted text between two lines that it cannot hold: they are made of its digest."""
    fence = "data-" + hashlib.sha256(data.encode(errors="replace")).hexdigest()[:12]
    return f"<{fence}>\n{data}\n</{fence}>"


class Question(NamedTuple):
    """What is asked.

    Attributes:
        messages: of the chat, each with role and content.
        fields: of the JSON object that is the answer, each with its type, of ``KINDS``.
        choices: what a field is one of.
        holds: says whether the values of an answer can be used.
    """

    messages: tuple[dict[str, str], ...]
    fields: dict[str, Any]
    choices: Mapping[str, Sequence[str]] = {}
    holds: Callable[[dict[str, Any]], bool] = lambda answer: True

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of an answer."""
        properties = {
            name: KINDS[kind] | ({"enum": list(self.choices[name])} if name in self.choices else {})
            for name, kind in self.fields.items()
        }
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    def answer(self, text: object) -> dict[str, Any]:
        """Return the answer that a text is; Failed, saying why, if it is none."""
        if not isinstance(text, str):
            raise Failed("there is no text in it")
        inner = FENCED.fullmatch(text)
        try:
            found = json.loads(inner[1] if inner else text)
            check_json(found, self.fields, "the answer")
        except (ValueError, RecursionError, FormatError):
            found = {}
        if found.keys() != self.fields.keys():
            raise Failed(f"it is no JSON object with the fields {', '.join(self.fields)}")
        for name, names in self.choices.items():
            # Whatever its case, spaces and signs.
            known = {_letters(one): one for one in names}
            if _letters(found[name]) not in known:
                raise Failed(f"its {name} is none of those to choose from")
            found[name] = known[_letters(found[name])]
        if not self.holds(found):
            raise Failed("a value in it is empty or out of range")
        return found


class Answers:
    """Answers in a file of JSON lines, by what was asked; several threads may add to it.

    A line that is cut off or damaged is no answer: that question is asked again.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path, self.model, self._lock = path, model, threading.Lock()
        self._found: dict[str, Any] = {}
        data = path.read_bytes() if path.is_file() else b""
        # A line that was cut off is ended before the next one.
        self._end = b"" if data.endswith(b"\n") or not data else b"\n"
        for line in data.splitlines():
            try:
                value = json.loads(line)
                self._found[value["key"]] = value["answer"]
            except (ValueError, RecursionError, TypeError, KeyError):
                continue

    def _key(self, question: Question) -> str:
        asked = json_text([self.model, question.messages, question.schema])
        return hashlib.sha256(asked.encode(errors="replace")).hexdigest()

    def get(self, question: Question) -> dict[str, Any] | None:
        """Return the answer to a question; None where there is none that can be used."""
        try:
            return question.answer(json_text(self._found.get(self._key(question))))
        except Failed:
            return None

    def add(self, question: Question, answer: dict[str, Any]) -> None:
        """Keep an answer, on disk before it is used."""
        key = self._key(question)
        line = json_text({"key": key, "answer": answer}) + "\n"
        with self._lock, room_to_write(str(self.path), self.path.parent, self.kept):
            with self.path.open("ab") as file:
                file.write(self._end + line.encode(errors="replace"))
            self._end = b""
            self._found[key] = answer

    def kept(self) -> str:
        """Say where the answers are."""
        if not self.path.is_file():
            return "No answer is kept."
        return f"The answers so far are kept in {self.path}; run the same command again to resume."


def one_line(text: str, most: int) -> str:
    """Return a text from outside as one line of so many characters, without what drives terminals.

    What joins the parts of one sign, as in emoji and Persian, is kept.
    """
    # What is far beyond the cut is not looked at.
    seen = "".join(c if c.isprintable() or c in "\u200c\u200d" else " " for c in text[: 8 * most])
    line = " ".join(seen.split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def _letters(name: str) -> str:
    return re.sub(r"\W", "", name).casefold()
