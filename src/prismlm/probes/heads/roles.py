"""Do heads look for the subject, the object, determiners or verbs more than for other words?

A head's ``lift`` is the attention M that it gives the words of a role over the attention U that a
head without preferences gives them (:func:`word_sums`); ``excess`` has M − E for M, with E what the
head gives by distance alone (:func:`expected_by_distance`). docs/signal_noise_attention.md has the
equations. The control moves the role to as many random words of the sentence, its own among them,
as in any permutation test. The draws say that a head prefers a role's words, not that it learned
to, so compare a model with :func:`random_model`.

A file of sentences is JSON lines, each ``{"text": "The {subject:frog} {action:found} …"}``; marks
are removed before a model reads the text. Source: Prism, Fig. 3, which shows one head of each
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
from typing import Literal, NamedTuple, cast, get_args

import torch
from jaxtyping import Bool
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.errors import InputError, check_finite, suggest
from prismlm.explain.attention_maps import Head, heads_of, read_weights
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.probes.channels.effects import read_rows
from prismlm.probes.results import Row, Table
from prismlm.progress import SILENT, Reporter

Role = Literal["subject", "object", "structure", "action"]
ROLES: tuple[Role, ...] = get_args(Role)
TARGET = "target"
MARK = re.compile(r"\{(\w+):([^{}:]+)\}")
BUNDLED = Path(__file__).parent / "cases" / "roles.jsonl"
LEVEL = 0.05
COLUMNS = "role layer head group lift:.2f control:.2f excess:.2f rank:, p:.1g q:.2g"
MIN_DRAWS = 10_000
DRAWS_PER_BATCH = 2048
TIE = 1e-4
"""Differences of lift below this are rounding, and count as ties."""
FITTING_STEPS = 200


Mark = tuple[str, int, int]
"""A role, and the characters from start to stop that have it."""


class RoleCase(NamedTuple):
    """A text and the marks that were removed from it, the last of which is the target.

    The target is the word whose prediction should need the object; it ends the text.
    """

    text: str
    marks: tuple[Mark, ...]


class RoleText(NamedTuple):
    """A case as T tokens in W words that may have a role or be a control.

    Those are not the first word, not punctuation, and not the target.
    """

    ids: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]  # the tokens of each
    roles: dict[Role, tuple[int, ...]]  # indices of the words of each role
    predicting: int  # the token that predicts the target

    def pairs(self, role: Role) -> Bool[Tensor, "W T T"]:
        """Return which queries i attend to which token j of each word.

        Queries are the tokens after the word; for the object, only the one that predicts the
        target. Pairs of equal tokens do not count: tied heads attend to repetitions, "the" to
        "the".
        """
        ids, position = torch.tensor(self.ids), torch.arange(len(self.ids))
        queries = position == self.predicting if role == "object" else position >= 0
        differ = queries[:, None] & (ids[:, None] != ids)
        inside = torch.stack([torch.isin(position, torch.tensor(word)) for word in self.words])
        after = position > torch.tensor([word[-1] for word in self.words])[:, None]
        return differ & inside[:, None] & after[:, :, None]

    def visible(self, role: Role) -> list[int]:
        """Return the indices of the words that any query attends to."""
        return self.pairs(role).any((1, 2)).nonzero()[:, 0].tolist()


def load_role_cases(path: str | os.PathLike[str] | None = None) -> tuple[RoleCase, ...]:
    """Read cases from a file, by default the bundled one."""
    file = BUNDLED if path is None else Path(path)
    rows = enumerate(read_rows(file, ["text"]), 1)
    return tuple(parse_case(row["text"], f"row {number} of {file}") for number, row in rows)


def parse_case(marked: str, line: str = "the case") -> RoleCase:
    """Return a case from a text with marks; ``line`` names it in messages."""
    text, marks, end = "", list[Mark](), 0
    known = [*ROLES, TARGET]
    for match in MARK.finditer(marked):
        role, words = match.groups()
        if role not in known:
            raise InputError(
                f"{line}: unknown role {role!r}: expected {', '.join(known)}.{suggest(role, known)}"
            )
        text += marked[end : match.start()]
        marks.append((role, len(text), len(text) + len(words)))
        text, end = text + words, match.end()
    text += marked[end:]
    targets = [stop for role, _, stop in marks if role == TARGET]
    if "{" in text or "}" in text or len(marks) < 2 or targets != [len(text)]:
        raise InputError(
            f"{line}: expected marks like {{subject:frog}} and {{target:door}}, words of at least "
            f"one role, {', '.join(ROLES)}, and one target at the end of the text, got {marked!r}."
        )
    return RoleCase(text, tuple(marks))


def role_text(tokenizer: PreTrainedTokenizerBase, case: RoleCase) -> RoleText:
    """Return a case as tokens and words; InputError if it cannot be measured."""
    from prismlm.corpus.pieces import encode, token_words

    ids, spans = encode(tokenizer, case.text)
    text = token_words(case.text, spans)
    tokens_of: list[list[int]] = [[] for _ in text.words]
    for token, word in enumerate(text.word_of):
        tokens_of[word].append(token)

    def words_of(mark: Mark) -> list[int]:
        """Return the words whose tokens share a character with a mark."""
        _, start, stop = mark
        overlaps = [first < stop and last > start for first, last in spans.tolist()]
        return [word for word, overlap in zip(text.word_of, overlaps, strict=True) if overlap]

    target = words_of(case.marks[-1])[0]
    # Spaces and punctuation have no letter or digit.
    usable = [
        word
        for word in range(1, target)
        if any(letter.isalnum() for letter in text.words[word]) and tokens_of[word][0] > 0
    ]
    indices: dict[Role, dict[int, None]] = {}
    for mark in case.marks[:-1]:
        for word in words_of(mark):
            if word not in usable:
                raise InputError(
                    f"{text.words[word]!r} of {case.text!r} cannot have a role: it is punctuation, "
                    "or part of the first word or the target. Mark another word."
                )
            indices.setdefault(cast(Role, mark[0]), {})[usable.index(word)] = None
    roles: dict[Role, tuple[int, ...]] = {r: tuple(indices[r]) for r in ROLES if r in indices}
    words = tuple(tuple(tokens_of[word]) for word in usable)
    result = RoleText(tuple(ids), words, roles, tokens_of[target][0] - 1)
    for role, members in roles.items():
        visible = result.visible(role)
        if not set(members) <= set(visible):
            raise InputError(
                f"the {role} of {case.text!r} is not before the token that predicts the target: "
                "put a word between the two."
            )
        if (others := len(visible) - len(members)) < len(members):
            raise InputError(
                f"{case.text!r} has {len(members)} words of the role {role} and {others} others: "
                "expected at least as many others, for controls."
            )
    return result


def word_sums(weights: Tensor, text: RoleText, role: Role) -> tuple[Tensor, Tensor]:
    """Return M [heads, words] and U [words] of the visible words w, from [heads, T, T].

        M_w = Σ_i Σ_{j∈w} A_ij    U_w = Σ_i Σ_{j∈w} 1 / (i + 1)

    over :meth:`RoleText.pairs` i, j; U is what uniform attention gives w.
    """
    pairs = text.pairs(role)[text.visible(role)].to(weights.dtype)
    uniform = 1 / torch.arange(1, len(text.ids) + 1, dtype=weights.dtype)
    return torch.einsum("hij,wij->hw", weights, pairs), torch.einsum("i,wij->w", uniform, pairs)


def expected_by_distance(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return what each head would give if only distance counted, from float64 [heads, T, T].

        E_w = Σ_i Σ_{j∈w} r_i f(i − j) / Σ_{0<k≤i} f(i − k)

    r_i is the row's weight outside of the first token, the attention sink; that token's column
    stays as it is. f is the head's likelihood by distance, its maximum-likelihood fit over all
    texts, by Hunter's iteration f_d ← Σ A_{i,i−d} / Σ_i r_i / Σ_{k<i} f_k.
    """
    heads, longest = len(weights[0]), max(text.shape[-1] for text in weights)
    by_distance = weights[0].new_zeros(heads, longest - 1)
    outside = torch.zeros_like(by_distance)  # r of each row from the second
    for text in weights:
        inner = text[:, 1:, 1:]
        outside[:, : inner.shape[1]] += inner.sum(-1)
        for distance in range(inner.shape[1]):
            by_distance[:, distance] += inner.diagonal(-distance, 1, 2).sum(-1)
    f = torch.ones_like(by_distance)
    for _ in range(FITTING_STEPS):
        # Where f sums to 0, so do the weights.
        share = outside / f.cumsum(1).clamp_min(1e-300)
        f = by_distance / share.flip(1).cumsum(1).flip(1).clamp_min(1e-300)
    expected: list[Tensor] = []
    for text in weights:
        position = torch.arange(text.shape[-1] - 1)
        distance = position[:, None] - position
        likelihood = f[:, distance.clamp_min(0)] * (distance >= 0)
        share = likelihood / likelihood.sum(-1, keepdim=True).clamp_min(1e-300)
        expected.append(text.clone())
        expected[-1][:, 1:, 1:] = share * text[:, 1:, 1:].sum(-1, keepdim=True)
    return expected


def search_roles(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[RoleCase] | None = None,
    heads: Sequence[Head] | None = None,
    *,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Table:
    """Measure what heads give to the roles of marked sentences, with random words as a control.

    The defaults are the bundled sentences and all heads of the model. There are at least twice the
    draws that a single head needs to be significant after correction. There is a row for each
    ``role`` and head, by p and then by lift: ``control`` is the mean lift of the draws; ``rank``,
    1 + the draws at least as good as the head by lift or by excess, whichever are more; ``p``,
    rank / (draws + 1); and ``q``, p corrected over all heads and roles. A head is ``found`` if q is
    at most ``level``.
    """
    heads = heads_of(model) if heads is None else heads
    draws = max(MIN_DRAWS, math.ceil(2 * len(heads) * len(ROLES) / LEVEL))
    texts = [role_text(tokenizer, case) for case in (load_role_cases() if cases is None else cases)]
    weights: list[Tensor] = []
    with progress.task("Reading attention", len(texts), "sentences") as task:
        for text in texts:
            weights.append(read_weights(model, torch.tensor([text.ids]), heads))
            task.advance()
    return score_roles(texts, weights, heads, draws=draws, seed=seed)


def random_model(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Return a model of the same configuration with random weights, in evaluation mode.

    λ of signal/noise attention is copied, since the configuration may have another.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random = type(model)(copy.deepcopy(model.config))
    if isinstance(model, SignalNoiseForCausalLM) and isinstance(random, SignalNoiseForCausalLM):
        random.set_noise_weight(model.model.noise_weight)
    return random.to(model.device).eval()  # pyright: ignore[reportArgumentType]


def score_roles(
    texts: Sequence[RoleText],
    weights: Sequence[Tensor],
    heads: Sequence[Head],
    *,
    draws: int,
    seed: int = 0,
) -> Table:
    """Score heads as :func:`search_roles`, from the attention weights of each text [heads, T, T].

    Weights must be finite: no draw is as good as NaN, so every head would be significant.
    """
    check_finite("attention weights", *weights)
    weights = [text.double() for text in weights]
    inputs = list(zip(texts, weights, expected_by_distance(weights), strict=True))
    generator = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    roles: dict[str, Row] = {}
    for role in ROLES:
        sentences: list[tuple[Tensor, Tensor, Tensor]] = []
        for text, attention, expected in inputs:
            if role in text.roles:
                mass, uniform = word_sums(attention, text, role)
                excess = mass - word_sums(expected, text, role)[0]
                has_role = torch.tensor([word in text.roles[role] for word in text.visible(role)])
                sentences.append((torch.cat([mass, excess]).float(), uniform.float(), has_role))
        words = sum(int(has_role.sum()) for _, _, has_role in sentences)
        roles[role] = {"sentences": len(sentences), "words": words}
        if sentences:
            scores = zip(heads, _scores(sentences, draws, generator), strict=True)
            scored: list[Row] = [{"role": role} | head._asdict() | score for head, score in scores]
            rows += sorted(scored, key=lambda row: (row["p"], -row["lift"]))
    corrected = stats.false_discovery_control([row["p"] for row in rows]).tolist()
    rows = [row | {"q": q} for row, q in zip(rows, corrected, strict=True)]
    for role, facts in roles.items():
        facts["found"] = sum(row["role"] == role and row["q"] <= LEVEL for row in rows)
    facts = {"heads": len(heads), "draws": draws, "seed": seed, "level": LEVEL, "roles": roles}
    return Table("Heads that look for a role", COLUMNS, tuple(rows), facts)


def best_heads(search: Table) -> Table:
    """Return the rows that beat their controls, and the first row of each role."""
    first = {row["role"]: row for row in reversed(search.rows)}
    rows = [row for row in search.rows if row["q"] <= LEVEL or row is first[row["role"]]]
    return replace(search, rows=tuple(rows))


def _scores(
    sentences: Sequence[tuple[Tensor, Tensor, Tensor]], draws: int, generator: torch.Generator
) -> list[dict[str, float]]:
    """Return lifts and ranks of every head.

    Of each sentence with W words there are sums M and M − E [2·heads, W], U [W], and which words
    have the role [W].
    """
    sums, uniforms, members = zip(*sentences, strict=True)
    mean_sums = torch.cat(sums, 1) / len(sums)

    def figures(choices: Sequence[Tensor]) -> Tensor:
        """Return lifts and excesses [n, 2·heads] of n choices of words, as 0 and 1 [n, W]."""
        shares = [
            choice / (choice @ uniform)[:, None]
            for uniform, choice in zip(uniforms, choices, strict=True)
        ]
        return torch.cat(shares, 1) @ mean_sums.T

    (actual,) = figures([has_role[None].float() for has_role in members])
    at_least_as_good = torch.zeros(len(actual), dtype=torch.int64)
    total = torch.zeros(len(actual), dtype=torch.float64)
    for first in range(0, draws, DRAWS_PER_BATCH):
        count = min(DRAWS_PER_BATCH, draws - first)
        drawn = figures([_random_words(has_role, count, generator) for has_role in members])
        total += drawn.double().sum(0)
        at_least_as_good += (drawn >= actual - TIE).sum(0)
    lift, excess = actual.chunk(2)
    control, rank = total.chunk(2)[0] / draws, 1 + at_least_as_good.view(2, -1).amax(0)
    columns = {"lift": lift, "control": control, "excess": excess, "rank": rank}
    columns["p"] = rank.double() / (draws + 1)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _random_words(has_role: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Return as many random words as have the role, as 0 and 1 [draws, W]."""
    keys = torch.rand(draws, len(has_role), generator=generator)
    chosen = keys.topk(int(has_role.sum()), 1).indices
    return torch.zeros_like(keys).scatter_(1, chosen, 1)
