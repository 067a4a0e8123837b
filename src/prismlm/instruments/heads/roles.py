"""Do heads look for the subject, the object, determiners or verbs more than for other words?

Over the sentences of a set, for each head and role:

    lift = mean over sentences of Σ_w M_w / Σ_w U_w

with M and U of :func:`word_sums`, E of :func:`expected`. A head that looks at what is near,
whatever it is, has a large lift on words that are late. So a second figure takes off what the head
gives at the same distances to any word:

    excess = mean over sentences of Σ_w (M_w − E_w) / Σ_w U_w

The control moves the role to as many random words of the same sentence. Its own are among them, as
in any permutation test: otherwise two sentences would do to beat all draws. A head beats the
control if both figures do. p-values are corrected over all heads and roles by Benjamini and
Hochberg.

A head of random weights has words that it happens to like, and determiners are few different words:
the draws say that a head prefers a role's words, not that it learnt to. So compare a model with
:func:`untrained`.

Source: Prism, Fig. 3, which shows one head of each role on one sentence; the measure is ours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from scipy import stats
from torch import Tensor

from prismlm.errors import InputError, check_finite
from prismlm.explain.attention_maps import Head, heads_of, read_weights
from prismlm.instruments.heads.role_cases import (
    ROLES,
    Role,
    RoleCase,
    RoleText,
    expected,
    load_role_cases,
    role_text,
    word_sums,
)
from prismlm.instruments.results import Row, Table
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LEVEL = 0.05
COLUMNS = {"role": "", "layer": "", "head": "", "group": "", "lift": ".2f", "control": ".2f",
           "excess": ".2f", "rank": ",", "p": ".1g", "q": ".2g"}  # fmt: skip
LEAST_DRAWS = 10_000
DRAWS_AT_ONCE = 2048
# In units of lift; smaller differences are rounding, and count as ties.
TIE = 1e-4


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
    """Measure what heads give to the roles of marked sentences, beside random other words.

    Args:
        model: a decoder with attention.
        tokenizer: its tokenizer.
        cases: the sentences; None for the bundled ones.
        heads: those tested, and corrected for; None for all of the model.
        draws: of the control; None for as many as one head alone needs to be found, twice over.
        seed: of the draws.
        progress: is shown the sentences read.

    Returns:
        A row for each ``role`` and head, its ``layer``, ``head``, ``group`` and ``group_head``,
        by p and then by lift within a role: ``lift`` on the words of the role, 1 for uniform
        attention; ``control``, the mean lift of the draws; ``excess``, lift beyond the head's own
        habit at those distances; ``rank``, 1 + the draws that come up to the head, by lift or
        excess, whichever is more; ``p``, rank / (draws + 1); and ``q``, p corrected over all heads
        and roles. A head beats its controls where q is at most ``level``. The fact ``roles`` has,
        of each role, how many sentences and words of them there are, and heads ``found``.

    Raises:
        InputError: the model has no attention, a sentence that cannot be measured, no sentence,
            too few draws for any head to be found, or weights that are not finite.
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
    """Return how many draws to take; by default twice what one head alone needs to be found.

    Raises:
        InputError: so few that no head could be found.
    """
    tests = heads * len(ROLES)
    if draws is None:
        return max(LEAST_DRAWS, math.ceil(2 * tests / LEVEL))
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
    """Score heads by weights that were read, each [heads, T, T]; see :func:`search_roles`.

    Raises:
        InputError: no text, too few draws, or weights that are not finite: no draw comes up to
            NaN, so that every head would be found.
    """
    if not texts or not heads:
        raise InputError(f"{len(texts)} sentences and {len(heads)} heads: expected at least 1.")
    draws = check_draws(draws, len(heads))
    check_finite("attention weights", *weights)
    own = [one.double() for one in weights]
    usual = expected(own)
    generator = torch.Generator().manual_seed(seed)
    tested = {role: _tested(role, texts, own, usual, draws, generator) for role in ROLES}
    p = torch.cat([t.rank.double() / (draws + 1) for t in tested.values() if t is not None])
    q = iter(stats.false_discovery_control(p.numpy()).tolist())
    rows: list[Row] = []
    roles: Row = {}
    for role in ROLES:
        having = [text for text in texts if role in text.roles]
        found = tested[role]
        scores = [] if found is None else _scores(role, found, heads, draws, q)
        rows += sorted(scores, key=lambda row: (row["p"], -row["lift"]))
        roles[role] = {
            "sentences": len(having),
            "words": sum(len(text.roles[role]) for text in having),
            "found": sum(row["q"] <= LEVEL for row in scores),
        }
    facts = {"heads": len(heads), "draws": draws, "seed": seed, "level": LEVEL, "roles": roles}
    return Table("Heads that look for a role", COLUMNS, tuple(rows), facts)


def best_of_roles(search: Table) -> Table:
    """Return the rows of a search that beat their controls, or the nearest of a role."""
    best = {row["role"]: row for row in reversed(search.rows)}
    kept = [row for row in search.rows if row["q"] <= LEVEL or row is best[row["role"]]]
    return replace(search, rows=tuple(kept))


class _Tested(NamedTuple):
    lift: Tensor
    control: Tensor
    excess: Tensor
    rank: Tensor


class _Words(NamedTuple):
    """A sentence's sums [2·heads, W], M and M − E; U [W]; and which words are the role's [W]."""

    sums: Tensor
    uniform: Tensor
    of_role: Tensor


def _tested(
    role: Role,
    texts: Sequence[RoleText],
    own: Sequence[Tensor],
    usual: Sequence[Tensor],
    draws: int,
    generator: torch.Generator,
) -> _Tested | None:
    """Return lifts and ranks of every head; None if no text has the role."""
    sentences: list[_Words] = []
    for text, weights, habit in zip(texts, own, usual, strict=True):
        if role in text.roles:
            mass, uniform = word_sums(weights, text, role)
            seen = torch.tensor(text.seen(role))
            of_role = torch.isin(seen, torch.tensor(text.roles[role]))
            beyond = mass - word_sums(habit, text, role)[0]
            sums = torch.cat([mass, beyond]).float()
            sentences.append(_Words(sums, uniform.float(), of_role))
    if not sentences:
        return None
    figures = _figures(sentences, [one.of_role[None].float() for one in sentences])
    above = torch.zeros(figures.shape[1], dtype=torch.int64)
    total = torch.zeros(figures.shape[1], dtype=torch.float64)
    for first in range(0, draws, DRAWS_AT_ONCE):
        count = min(DRAWS_AT_ONCE, draws - first)
        drawn = _figures(sentences, [_drawn(s.of_role, count, generator) for s in sentences])
        total += drawn.double().sum(0)
        above += (drawn >= figures - TIE).sum(0)
    lift, excess = figures[0].chunk(2)
    return _Tested(lift, total.chunk(2)[0] / draws, excess, 1 + above.view(2, -1).amax(0))


def _figures(sentences: Sequence[_Words], chosen: Sequence[Tensor]) -> Tensor:
    """Return lifts and then excesses [draws, 2·heads] of words chosen by 0 and 1, [draws, W]."""
    shares = [
        words / (words @ one.uniform)[:, None] for one, words in zip(sentences, chosen, strict=True)
    ]
    return torch.cat(shares, 1) @ torch.cat([one.sums for one in sentences], 1).T / len(sentences)


def _drawn(of_role: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Return as many random words as the role has, as 0 and 1 [draws, W]."""
    keys = torch.rand(draws, len(of_role), generator=generator)
    chosen = keys.topk(int(of_role.sum()), 1).indices
    return torch.zeros_like(keys).scatter_(1, chosen, 1)


def _scores(role: Role, found: _Tested, heads: Sequence[Head], draws: int, q: Any) -> list[Row]:
    columns = (column.tolist() for column in found)
    return [
        {
            "role": role,
            "layer": head.layer,
            "head": head.head,
            "group": head.group,
            "group_head": head.number,
            "lift": lift,
            "control": control,
            "excess": excess,
            "rank": int(rank),
            "p": rank / (draws + 1),
            "q": next(q),
        }
        for head, lift, control, excess, rank in zip(heads, *columns, strict=True)
    ]
