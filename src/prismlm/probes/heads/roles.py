"""Do heads look for the subject, the object, determiners or verbs more than for other words?

Over the sentences of a set, for each head and role:

    lift = mean over sentences of Σ_w M_w / Σ_w U_w

with M and U of :func:`word_sums`. A head that looks at what is near has a large lift on late words,
so ``excess`` has M_w − E_w for M_w, less what it gives to any word at these distances, E of
:func:`expected`. The control moves the role to as many random words of the sentence, the role's own
among them, as in any permutation test. A head beats it if both figures do, at a p that is corrected
over all heads and roles by Benjamini and Hochberg. The draws say that a head prefers a role's
words, not that it learnt to, so compare a model with :func:`untrained`.

A file of sentences is JSON lines, each ``{"text": "The {subject:frog} {action:found} …"}``; marks
are taken out before a model reads the text. Source: Prism, Fig. 3, which shows one head of each
role on one sentence, the first of the bundled ones. The measure and the other sentences are ours.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import torch
from jaxtyping import Bool
from scipy import stats
from torch import Tensor

from prismlm.errors import InputError, check_finite, suggest
from prismlm.explain.attention_maps import Head, heads_of, read_weights
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.probes.channels.case_files import read_rows
from prismlm.probes.results import Row, Table
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Role = Literal["subject", "object", "structure", "action"]
ROLES: tuple[Role, ...] = get_args(Role)
TARGET = "target"
MARK = re.compile(r"\{(\w+):([^{}:]+)\}")
BUNDLED = Path(__file__).parent / "cases" / "roles.jsonl"
LEVEL = 0.05
COLUMNS = {"role": "", "layer": "", "head": "", "group": "", "lift": ".2f", "control": ".2f",
           "excess": ".2f", "rank": ",", "p": ".1g", "q": ".2g"}  # fmt: skip
MIN_DRAWS = 10_000
DRAWS_AT_ONCE = 2048
# In units of lift; smaller differences are rounding, and count as ties.
TIE = 1e-4
FITTING_STEPS = 200


class Mark(NamedTuple):
    """A marked stretch of a text: characters ``start`` to ``stop``."""

    role: str
    start: int
    stop: int


class RoleCase(NamedTuple):
    """A text without its marks, and these.

    The last is of the ``target``, the word whose prediction should need the object; it ends the
    text.
    """

    text: str
    marks: tuple[Mark, ...]


class RoleText(NamedTuple):
    """A case as T tokens in W words.

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

    def pairs(self, role: Role) -> Bool[Tensor, "W T T"]:
        """Return which rows i look at which token j of each word.

        Rows are the tokens after the word, or of the object the one that predicts the target alone.
        Where i and j are the same token the pair does not count: tied heads look for their own
        likes, "the" at "the".
        """
        ids, place = torch.tensor(self.ids), torch.arange(len(self.ids))
        rows = place == self.row if role == "object" else place >= 0
        differ = rows[:, None] & (ids[:, None] != ids)
        inside = torch.stack([torch.isin(place, torch.tensor(word)) for word in self.words])
        after = place > torch.tensor([word[-1] for word in self.words])[:, None]
        return differ & inside[:, None] & after[:, :, None]

    def seen(self, role: Role) -> list[int]:
        """Return the numbers of the words that a row looks at."""
        return self.pairs(role).any((1, 2)).nonzero()[:, 0].tolist()


def load_role_cases(path: str | os.PathLike[str] | None = None) -> tuple[RoleCase, ...]:
    """Read cases from a file, or the bundled ones."""
    rows = read_rows(BUNDLED if path is None else Path(path), ["text"])
    return tuple(parse_case(row["text"], place) for place, row in rows.items())


def parse_case(marked: str, place: str = "the case") -> RoleCase:
    """Return a case from a text with marks; ``place`` names it in messages."""
    text, marks, end = "", list[Mark](), 0
    known = [*ROLES, TARGET]
    for match in MARK.finditer(marked):
        role, words = match.groups()
        if role not in known:
            raise InputError(
                f"{place}: there is no role {role!r}: expected {', '.join(known)}."
                f"{suggest(role, known)}"
            )
        text += marked[end : match.start()]
        marks.append(Mark(role, len(text), len(text) + len(words)))
        text, end = text + words, match.end()
    text += marked[end:]
    if "{" in text or "}" in text:
        raise InputError(f"{place}: a brace in {text!r} belongs to no mark like {{subject:frog}}.")
    if len(marks) < 2 or [mark.stop for mark in marks if mark.role == TARGET] != [len(text)]:
        raise InputError(
            f"{place}: expected words of some role, of {', '.join(ROLES)}, and one target, marked "
            "{target:door}, at the end of the text."
        )
    return RoleCase(text, tuple(marks))


def role_text(tokenizer: PreTrainedTokenizerBase, case: RoleCase) -> RoleText:
    """Return a case as tokens and words; InputError if it cannot be measured."""
    from prismlm.corpus.words import encode, worded

    ids, spans = encode(tokenizer, case.text)
    text = worded(case.text, spans)
    groups: list[list[int]] = [[] for _ in text.words]
    for token, word in enumerate(text.word_of):
        groups[word].append(token)

    def words_of(mark: Mark) -> list[int]:
        """Return the words whose tokens share a character with a mark."""
        touched = [first < mark.stop and last > mark.start for first, last in spans.tolist()]
        return [word for word, inside in zip(text.word_of, touched, strict=True) if inside]

    target = words_of(case.marks[-1])[0]
    # Spaces and punctuation have no letter or digit.
    usable = [
        word
        for word in range(1, target)
        if any(letter.isalnum() for letter in text.words[word]) and groups[word][0] > 0
    ]
    roles: dict[Role, dict[int, None]] = {}
    for mark in case.marks[:-1]:
        for word in words_of(mark):
            if word not in usable:
                raise InputError(
                    f"{text.words[word]!r} of {case.text!r} cannot stand for a role: it is "
                    "punctuation, or one word with the first or with the target."
                )
            roles.setdefault(cast(Role, mark.role), {})[usable.index(word)] = None
    words = tuple(tuple(groups[word]) for word in usable)
    numbers: dict[Role, tuple[int, ...]] = {
        role: tuple(roles[role]) for role in ROLES if role in roles
    }
    found = RoleText(tuple(ids), words, numbers, groups[target][0] - 1)
    for role, own in numbers.items():
        seen = found.seen(role)
        if not set(own) <= set(seen):
            raise InputError(
                f"the {role} of {case.text!r} is not before the token that predicts the target: "
                "put a word between the two."
            )
        if (others := len(seen) - len(own)) < len(own):
            raise InputError(
                f"{case.text!r} has {len(own)} words of the role {role} and {others} others: "
                "expected at least as many others, for controls."
            )
    return found


def word_sums(weights: Tensor, text: RoleText, role: Role) -> tuple[Tensor, Tensor]:
    """Return M [heads, words] and U [words] of the words w that are seen, from [heads, T, T].

        M_w = Σ_i Σ_{j∈w} A_ij    U_w = Σ_i Σ_{j∈w} 1 / (i + 1)

    over :meth:`RoleText.pairs` i, j; U is what uniform attention gives w.
    """
    pairs = text.pairs(role)[text.seen(role)].to(weights.dtype)
    uniform = 1 / torch.arange(1, len(text.ids) + 1, dtype=weights.dtype)
    return torch.einsum("hij,wij->hw", weights, pairs), torch.einsum("i,wij->w", uniform, pairs)


def expected(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return what each head would give if it went by distance alone, from float64 [heads, T, T].

        E_w = Σ_i Σ_{j∈w} r_i f(i − j) / Σ_{0<k≤i} f(i − k)

    r_i is the row's weight outside of the first token, where heads put what they have no use for;
    that token's column stays as it is. f is the head's likelihood by distance, its maximum-
    likelihood fit over all texts, by Hunter's iteration f_d ← Σ A_{i,i−d} / Σ_i r_i / Σ_{k<i} f_k.
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
    habits: list[Tensor] = []
    for one in weights:
        place = torch.arange(one.shape[-1] - 1)
        distance = place[:, None] - place
        likelihood = f[:, distance.clamp_min(0)] * (distance >= 0)
        share = likelihood / likelihood.sum(-1, keepdim=True).clamp_min(1e-300)
        habit = one.clone()
        habit[:, 1:, 1:] = share * one[:, 1:, 1:].sum(-1, keepdim=True)
        habits.append(habit)
    return habits


def search_roles(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[RoleCase] | None = None,
    heads: Sequence[Head] | None = None,
    *,
    draws: int | None = None,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Table:
    """Measure what heads give to the roles of marked sentences, with random words as a control.

    Without ``cases`` they are the bundled sentences; without ``heads``, which are tested and
    corrected for, all of the model; without ``draws``, twice what one head alone needs to be found.

    Returns:
        A row for each ``role`` and head, its ``layer``, ``head``, ``group`` and ``group_head``,
        by p and then by lift within a role: ``lift`` on the words of the role, 1 for uniform
        attention; ``control``, the mean lift of the draws; ``excess``, lift beyond the head's own
        habit at those distances; ``rank``, 1 + the draws that come up to the head, by lift or
        excess, whichever is more; ``p``, rank / (draws + 1); and ``q``, p corrected over all heads
        and roles. A head beats its controls where q is at most ``level``. The fact ``roles`` has,
        of each role, its sentences and words, and the number of heads ``found``.
    """
    heads = heads_of(model) if heads is None else heads
    check_draws(draws, len(heads))
    texts = [role_text(tokenizer, case) for case in (load_role_cases() if cases is None else cases)]
    weights: list[Tensor] = []
    with progress.task("Reading attention", len(texts), "sentences") as task:
        for text in texts:
            weights.append(read_weights(model, torch.tensor([text.ids]), heads))
            task.advance()
    return score_roles(texts, weights, heads, draws=draws, seed=seed)


def check_draws(draws: int | None, heads: int) -> int:
    """Return how many draws to take; InputError for so few that no head could be found."""
    tests = heads * len(ROLES)
    if draws is None:
        return max(MIN_DRAWS, math.ceil(2 * tests / LEVEL))
    if (draws + 1) * LEVEL < tests:
        raise InputError(
            f"{draws} draws give a p of 1 / {draws + 1} at best, and {tests} tests at a level of "
            f"{LEVEL} need one of {LEVEL / tests:.2g}: draw at least {math.ceil(tests / LEVEL)}."
        )
    return draws


def untrained(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Return a model of the same configuration with random weights, in evaluation mode.

    λ of signal/noise attention is the model's own, which training sets and a configuration may
    not say.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = type(model)(copy.deepcopy(model.config))
    if isinstance(model, SignalNoiseForCausalLM) and isinstance(made, SignalNoiseForCausalLM):
        made.set_noise_weight(model.model.noise_weight)
    return made.to(model.device).eval()  # pyright: ignore[reportArgumentType]


def score_roles(
    texts: Sequence[RoleText],
    weights: Sequence[Tensor],
    heads: Sequence[Head],
    *,
    draws: int | None = None,
    seed: int = 0,
) -> Table:
    """Score heads as :func:`search_roles`, by weights that were read, each [heads, T, T].

    Weights that are not finite are refused: no draw comes up to NaN, so every head would be found.
    """
    draws = check_draws(draws, len(heads))
    check_finite("attention weights", *weights)
    own = [one.double() for one in weights]
    read = list(zip(texts, own, expected(own), strict=True))
    generator = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    roles: dict[str, Row] = {}
    for role in ROLES:
        sentences = [_sentence(role, *one) for one in read if role in one[0].roles]
        words = sum(int(sentence.of_role.sum()) for sentence in sentences)
        roles[role] = {"sentences": len(sentences), "words": words}
        if sentences:
            scores: list[Row] = [
                {"role": role} | head._asdict() | score
                for head, score in zip(heads, _scores(sentences, draws, generator), strict=True)
            ]
            rows += sorted(scores, key=lambda row: (row["p"], -row["lift"]))
    corrected = stats.false_discovery_control([row["p"] for row in rows]).tolist()
    scored = tuple(row | {"q": q} for row, q in zip(rows, corrected, strict=True))
    for role, facts in roles.items():
        facts["found"] = sum(row["role"] == role and row["q"] <= LEVEL for row in scored)
    facts = {"heads": len(heads), "draws": draws, "seed": seed, "level": LEVEL, "roles": roles}
    return Table("Heads that look for a role", COLUMNS, scored, facts)


def best_of_roles(search: Table) -> Table:
    """Return the rows of a search that beat their controls, or the nearest of a role."""
    best = {row["role"]: row for row in reversed(search.rows)}
    kept = [row for row in search.rows if row["q"] <= LEVEL or row is best[row["role"]]]
    return replace(search, rows=tuple(kept))


class _Sentence(NamedTuple):
    """A sentence's sums [2·heads, W], M and M − E; U [W]; and which words are the role's [W]."""

    sums: Tensor
    uniform: Tensor
    of_role: Tensor


def _sentence(role: Role, text: RoleText, weights: Tensor, habit: Tensor) -> _Sentence:
    mass, uniform = word_sums(weights, text, role)
    beyond = mass - word_sums(habit, text, role)[0]
    of_role = torch.tensor([number in text.roles[role] for number in text.seen(role)])
    return _Sentence(torch.cat([mass, beyond]).float(), uniform.float(), of_role)


def _scores(
    sentences: Sequence[_Sentence], draws: int, generator: torch.Generator
) -> list[dict[str, float]]:
    """Return lifts and ranks of every head."""
    sums = torch.cat([one.sums for one in sentences], 1) / len(sentences)

    def figures(chosen: Sequence[Tensor]) -> Tensor:
        """Return lifts and then excesses [n, 2·heads] of words chosen by 0 and 1, each [n, W]."""
        shares = [
            words / (words @ one.uniform)[:, None]
            for one, words in zip(sentences, chosen, strict=True)
        ]
        return torch.cat(shares, 1) @ sums.T

    (own,) = figures([one.of_role[None].float() for one in sentences])
    above = torch.zeros(len(own), dtype=torch.int64)
    total = torch.zeros(len(own), dtype=torch.float64)
    for first in range(0, draws, DRAWS_AT_ONCE):
        count = min(DRAWS_AT_ONCE, draws - first)
        drawn = figures([_drawn(one.of_role, count, generator) for one in sentences])
        total += drawn.double().sum(0)
        above += (drawn >= own - TIE).sum(0)
    lift, excess = own.chunk(2)
    control, rank = total.chunk(2)[0] / draws, 1 + above.view(2, -1).amax(0)
    columns = {"lift": lift, "control": control, "excess": excess, "rank": rank}
    columns["p"] = rank.double() / (draws + 1)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _drawn(of_role: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Return as many random words as the role has, as 0 and 1 [draws, W]."""
    keys = torch.rand(draws, len(of_role), generator=generator)
    chosen = keys.topk(int(of_role.sum()), 1).indices
    return torch.zeros_like(keys).scatter_(1, chosen, 1)
