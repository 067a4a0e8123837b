"""Sentences with marked words, and what heads give to them: subject, object, determiners, verbs.

A file is JSON lines, each ``{"text": "The {subject:frog} {action:found} {structure:a} …"}``. Marks
are taken out before a model reads the text.

Source: Prism, Fig. 3, whose one sentence is the first of the bundled ones; it prints that with an
ellipsis, and its middle and the other sentences are ours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from prismlm.errors import InputError, suggest
from prismlm.instruments.channels.case_files import read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Role = Literal["subject", "object", "structure", "action"]
ROLES: tuple[Role, ...] = get_args(Role)
TARGET = "target"
MARK = re.compile(r"\{(\w+):([^{}:]+)\}")


class Mark(NamedTuple):
    """A marked stretch of a text: characters ``start`` to ``stop``."""

    role: str
    start: int
    stop: int


@dataclass(frozen=True)
class RoleCase:
    """A text with the words that have a role in it.

    Attributes:
        text: without marks.
        marks: of roles, and one of the ``target``, the word whose prediction should need the
            object; it ends the text.
    """

    text: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class RoleText:
    """A case as the model reads it, T tokens in W words.

    Attributes:
        ids: the tokens.
        words: the tokens of each word that may stand for a role or as a control: not the first
            word, not punctuation, not the target.
        roles: numbers of the words of each role the text has.
        row: the token after which the target is predicted.
    """

    ids: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]
    roles: dict[Role, tuple[int, ...]]
    row: int

    def rows(self, role: Role) -> range:
        """Return the tokens whose attention counts: all, or of the object ``row`` alone."""
        return range(self.row, self.row + 1) if role == "object" else range(len(self.ids))

    def pairs(self, word: int, role: Role) -> list[tuple[int, int]]:
        """Return (row, token) of all rows after a word and its tokens, less those of one token."""
        tokens = self.words[word]
        rows = [i for i in self.rows(role) if i > tokens[-1]]
        return [(i, j) for i in rows for j in tokens if self.ids[i] != self.ids[j]]

    def seen(self, role: Role) -> tuple[int, ...]:
        """Return the numbers of the words that one of those tokens can look at."""
        return tuple(n for n in range(len(self.words)) if self.pairs(n, role))


def load_role_cases(path: str | os.PathLike[str] | None = None) -> tuple[RoleCase, ...]:
    """Read cases from a file, or the bundled ones.

    Raises:
        InputError: no such file, or a line that is no case: the message has its number.
    """
    source = bundled_cases() if path is None else Path(path)
    rows = read_rows(source, ["text"])
    return tuple(parse_case(row["text"], place) for place, row in rows.items())


def bundled_cases() -> Path:
    """Return the file of the bundled sentences."""
    return Path(str(files("prismlm.instruments.heads"))) / "cases" / "roles.jsonl"


def parse_case(marked: str, place: str = "the case") -> RoleCase:
    """Return a case from a text with marks.

    Raises:
        InputError: an unknown role, a brace that is no mark, no role, or not one target at the end.
    """
    text, marks, end = "", list[Mark](), 0
    known = [*ROLES, TARGET]
    for found in MARK.finditer(marked):
        role, words = found.groups()
        if role not in known:
            raise InputError(
                f"{place}: there is no role {role!r}: expected {', '.join(known)}."
                f"{suggest(role, known)}"
            )
        text += marked[end : found.start()]
        marks.append(Mark(role, len(text), len(text) + len(words)))
        text, end = text + words, found.end()
    text += marked[end:]
    if "{" in text or "}" in text:
        raise InputError(f"{place}: a brace in {text!r} belongs to no mark like {{subject:frog}}.")
    targets = [mark for mark in marks if mark.role == TARGET]
    if len(targets) != 1 or targets[0].stop != len(text):
        raise InputError(
            f"{place}: expected one target, marked {{target:door}}, at the end of the text."
        )
    if len(marks) == 1:
        raise InputError(f"{place}: no word has a role: mark some of {', '.join(ROLES)}.")
    if text[: marks[0].start].strip() == "":
        raise InputError(
            f"{place}: the first word, {text[: marks[0].stop].strip()!r}, cannot have a role, for "
            "a head that leaves its weight on the first token would seem to look for it."
        )
    return RoleCase(text, tuple(marks))


def role_text(tokenizer: PreTrainedTokenizerBase, case: RoleCase) -> RoleText:
    """Return a case in tokens and words.

    Raises:
        InputError: a tokenizer that is not a fast one, a word that cannot stand for its role, or
            fewer other words than a role has: its control needs as many.
    """
    from prismlm.corpus.words import encode, worded

    ids, spans = encode(tokenizer, case.text)
    text = worded(case.text, spans)
    groups: list[list[int]] = [[] for _ in text.words]
    for token, word in enumerate(text.word_of):
        groups[word].append(token)
    target = _words_of(case, spans, text.word_of, case.marks[-1])[0]
    # Spaces and punctuation have no letter or digit.
    usable = [
        word
        for word in range(1, target)
        if any(letter.isalnum() for letter in text.words[word]) and groups[word][0] > 0
    ]
    number_of = {word: number for number, word in enumerate(usable)}
    roles: dict[Role, list[int]] = {}
    for mark in case.marks[:-1]:
        for word in _words_of(case, spans, text.word_of, mark):
            if word not in number_of:
                raise InputError(
                    f"{text.words[word]!r} of {case.text!r} cannot stand for a role: it is "
                    "punctuation, or one word with the first or with the target."
                )
            roles.setdefault(cast(Role, mark.role), []).append(number_of[word])
    found = RoleText(
        tuple(ids),
        tuple(tuple(groups[word]) for word in usable),
        {role: tuple(dict.fromkeys(roles[role])) for role in ROLES if role in roles},
        groups[target][0] - 1,
    )
    _check_controls(case, found)
    return found


def _check_controls(case: RoleCase, text: RoleText) -> None:
    for role, words in text.roles.items():
        seen = text.seen(role)
        if not set(words) <= set(seen):
            raise InputError(
                f"the {role} of {case.text!r} is not before the token that predicts the target: "
                "put a word between the two."
            )
        others = len(seen) - len(words)
        if others < len(words):
            raise InputError(
                f"{case.text!r} has {len(words)} words of the role {role} and {others} others: "
                "expected at least as many others, for controls."
            )


def _words_of(case: RoleCase, spans: Any, word_of: tuple[int, ...], mark: Mark) -> list[int]:
    """Return the words whose tokens share a character with a mark."""
    found = [
        word_of[token]
        for token, (first, last) in enumerate(spans.tolist())
        if first < mark.stop and last > mark.start
    ]
    if not found:
        marked = case.text[mark.start : mark.stop]
        raise InputError(f"the tokenizer gives no token for {marked!r} of {case.text!r}.")
    return list(dict.fromkeys(found))


FITTING_STEPS = 200


def expected(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return what each head would give if it went by distance alone.

        E_w = Σ_i Σ_{j∈w} r_i f(i − j) / Σ_{0<k≤i} f(i − k)

    r_i is the row's weight outside of the first token, where heads put what they have no use for.
    f is the head's own likelihood by distance, its maximum-likelihood fit over all texts, by
    Hunter's iteration f_d ← Σ A_{i,i−d} / Σ_i r_i / Σ_{k<i} f_k. The column of the first token is
    that of the weights.

    Args:
        weights: of each text, float64 [heads, T, T].
    """
    heads, longest = len(weights[0]), max(one.shape[-1] for one in weights)
    at = weights[0].new_zeros(heads, longest - 1)  # of each distance
    outside = torch.zeros_like(at)  # of each row from the second, r
    for one in weights:
        inner = one[:, 1:, 1:]
        outside[:, : inner.shape[1]] += inner.sum(-1)
        for distance in range(inner.shape[1]):
            at[:, distance] += inner.diagonal(-distance, 1, 2).sum(-1)
    f = torch.ones_like(at)
    for _ in range(FITTING_STEPS):
        # A row whose distances all have no weight has none outside of the first token.
        share = outside / f.cumsum(1).clamp_min(1e-300)
        f = at / share.flip(1).cumsum(1).flip(1).clamp_min(1e-300)
    return [_by_distance(one, f) for one in weights]


def _by_distance(own: Tensor, f: Tensor) -> Tensor:
    inner = own[:, 1:, 1:]
    place = torch.arange(inner.shape[1])
    distance = place[:, None] - place
    likelihood = f[:, distance.clamp_min(0)] * (distance >= 0)
    total = likelihood.sum(-1, keepdim=True).clamp_min(1e-300)
    found = own.clone()
    found[:, 1:, 1:] = likelihood / total * inner.sum(-1, keepdim=True)
    return found


def word_sums(weights: Tensor, text: RoleText, role: Role) -> tuple[Tensor, Tensor]:
    """Return M [heads, words] and U [words] of the words w that are seen.

        M_w = Σ_i Σ_{j∈w} A_ij    U_w = Σ_i Σ_{j∈w} 1 / (i + 1)

    i are the tokens after w; for the object, only the token after which the target is predicted. U
    is what a head would give w that looks at all it sees alike. Where i and j are the same token
    the pair does not count: tied heads look for their own likes, "the" at "the".

    Args:
        weights: [heads, T, T].
        text: of T tokens.
        role: whose rows count.
    """
    masses: list[Tensor] = []
    uniform: list[float] = []
    for number in text.seen(role):
        rows, tokens = (list(side) for side in zip(*text.pairs(number, role), strict=True))
        masses.append(weights[:, rows, tokens].sum(1))
        uniform.append(sum(1 / (row + 1) for row in rows))
    return torch.stack(masses, 1), torch.tensor(uniform, dtype=weights.dtype)
