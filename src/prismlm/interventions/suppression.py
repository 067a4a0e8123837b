"""Suppressing a behaviour: a few prototypes are turned down, as little as makes it rare.

Marked tokens, a set Y, are those of a phrase, or those that come much more often in the examples
than in the text to keep. A prototype *marks* the behaviour if its evidence for them in the examples
is larger than its evidence in the text to keep. The scales s of these prototypes minimise

    mean_b max(0, m_b(s) − M)  +  λ (mean_t D_t(s) + mean_e D′_e(s))  +  μ Σ_i (1 − s_i)

with 0 ≤ s_i ≤ 1, over positions b of the examples before a marked token, t of the text to keep, and
e of the examples. p(s) is the prediction from z + Σ_i (s_i − 1) α_i p_i, m(s) the log-odds of Y
under it, D(s) = KL(p ‖ p(s)), and D′ the same among the tokens outside Y. λ falls until the
behaviour is rare enough in texts sampled for choosing; what is reported is of texts and prompts
that had no part in it. *Prototype Language Models* (arXiv 2607.00510) suppresses behaviours by a
few prototypes; how they are found here is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prismlm.corpus.pieces import token_alone
from prismlm.errors import InputError
from prismlm.interventions.behaviour import (
    MIN_KEPT,
    Examples,
    Judge,
    Read,
    SuppressOptions,
    Text,
    Way,
    encoded,
    phrase_rows,
    read,
    sample,
    summed_losses,
)
from prismlm.interventions.controller import Controller
from prismlm.lens.layout import prototypes_fingerprint
from prismlm.lens.opened_model import OpenedModel
from prismlm.models.seam import output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import Interval, bootstrap, wilson

# A marked token: times as often as in the text to keep, standard errors, occurrences, how many.
TIMES, TOKEN_ERRORS, SEEN, MAX_MARKED, PRIOR = 4.0, 2.0, 3, 128, 500.0
# Standard errors by which a prototype's evidence is larger: of those turned down, and of one at
# least, which chance does to one prototype in 30,000.
MIN_ERRORS, ERRORS = 2.0, 4.0
# λ, in the order in which they are tried.
WEIGHTS = (300.0, 100.0, 30.0, 10.0, 5.0, 2.5, 1.0, 0.3, 0.1)
MARGIN, PULL = -4.6, 0.005  # M, the log-odds of 1 %, and μ
STEPS, RATE, POSITIONS, UNCHANGED = 80, 0.1, 256, 0.98
# Tokens of the vocabulary that the fit sees: all targets, the top ones everywhere, and a spread.
TOP, SPREAD = 8, 2000
NEAREST = 8
BIASES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
NAMED, REPORT_SEED = 12, 1_000_000


@dataclass(frozen=True)
class Point:
    """One strength: its scales, with behaviour and perplexity on what is for choosing."""

    weight: float | None  # λ; None: all that mark the behaviour are removed, never chosen
    scales: tuple[tuple[int, float], ...]
    behaviour: float  # share of the sampled texts
    cost: float  # relative growth of perplexity

    @property
    def turned(self) -> float:
        """Σ (1 − s)."""
        return sum(1 - s for _, s in self.scales)


@dataclass(frozen=True)
class Outcome:
    """One way to suppress, on what had no part in choosing."""

    name: str
    behaviour: Interval  # share of the sampled texts
    perplexity: float
    cost: Interval  # relative growth of perplexity, over texts
    texts: tuple[str, ...]  # sampled, of each prompt in turn


@dataclass(frozen=True)
class Suppression:
    """What was found; ``chosen`` is None if no strength reaches the target within the cost."""

    chosen: Point | None
    reached: bool  # whether the chosen point reaches the target
    controller: Controller | None  # of the chosen point
    judge: Judge
    marked: tuple[str, ...]  # tokens, the clearest first
    candidates: int  # prototypes that mark the behaviour
    before: float  # behaviour at the prompts for choosing
    frontier: tuple[Point, ...]
    ways: dict[str, Way]  # by the names of the outcomes
    outcomes: tuple[Outcome, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of ``prismlm suppress --json``; the controller is its file."""
        fields = asdict(self) | {"judge": self.judge.description}
        del fields["controller"]
        return fields


def marked_tokens(examples: Tensor, keep: Tensor, vocabulary: int) -> list[int]:
    """Return tokens that come several times as often in the examples, the clearest first.

    By log-odds with the counts of both as a prior, over their standard error.
    """
    counts = torch.stack([torch.bincount(t.cpu(), minlength=vocabulary) for t in (examples, keep)])
    n = counts.double() + PRIOR * counts.sum(0) / counts.sum()
    odds = (n / (n.sum(1, keepdim=True) - n)).log()
    difference = (odds[0] - odds[1]).nan_to_num(-torch.inf)
    errors = difference / (1 / n).sum(0).sqrt()
    chosen = (difference > np.log(TIMES)) & (errors > TOKEN_ERRORS) & (counts[0] >= SEEN)
    order = errors.argsort(descending=True)
    return order[chosen[order]][:MAX_MARKED].tolist()


@torch.no_grad()
def marking_prototypes(lm: OpenedModel, marked: Read, keep: Read) -> Tensor:
    """Return the prototypes whose evidence for marked tokens is larger than for kept ones, int64.

    Ordered by the difference of the means over positions, in standard errors; none if no difference
    is clear.
    """
    moments = [_evidence_moments(lm, part) for part in (marked, keep)]
    (first, spread), (second, other) = moments
    errors = (first - second) / (spread + other).sqrt().clamp_min(1e-9)
    order = errors.argsort(descending=True)
    return order[errors[order] > (MIN_ERRORS if bool((errors > ERRORS).any()) else ERRORS)]


def _evidence_moments(lm: OpenedModel, part: Read) -> tuple[Tensor, Tensor]:
    """Return the mean evidence of each prototype for the targets, [K], and its squared error."""
    weight, bank = weight_of(lm.model), lm.head.prototypes
    mean = weight.mean(0, dtype=torch.float32)
    sums = torch.zeros(2, lm.head.num_prototypes, device=bank.device)
    for z, targets in zip(part.z.split(256), part.targets.split(256), strict=True):
        routing = lm.head(z.float()).routing
        rows = (weight[targets].float() - mean)[:, :, None]
        evidence = (bank[routing.indices].float() @ rows)[:, :, 0] * routing.activations
        for power in (1, 2):
            sums[power - 1].scatter_add_(0, routing.indices.flatten(), (evidence**power).flatten())
    means = sums / len(part.targets)
    return means[0], (means[1] - means[0] ** 2) / len(part.targets)


class _Side(NamedTuple):
    """Positions in the fit: W z + b [N, v], and activations of the candidates [N, C]."""

    embedded: Tensor
    activations: Tensor


class ScaleFit:
    """The objective of scales, over a part of the vocabulary.

    Args:
        lm: the model.
        examples: all predicted positions of the examples.
        marked: the rows of those before a marked token.
        keep: positions of the text to keep.
        tokens: the marked ones.
        candidates: the prototypes to turn, [C].
    """

    def __init__(
        self,
        lm: OpenedModel,
        examples: Read,
        marked: Tensor,
        keep: Read,
        tokens: Sequence[int],
        candidates: Tensor,
    ) -> None:
        self.candidates, self._map, self._rows = candidates, lm.logit_map, marked
        weight = weight_of(lm.model)
        self.vocabulary = vocabulary = self._vocabulary(lm, examples, keep)
        self._marked = torch.isin(vocabulary, torch.tensor(tokens, device=vocabulary.device))
        rows, bias = weight[vocabulary].float(), getattr(output_embedding(lm.model), "bias", None)
        offset = 0.0 if bias is None else bias.detach()[vocabulary].float()
        self._directions = lm.head.prototypes.detach()[candidates].float() @ rows.T
        self._examples, self._keep = (
            _Side(part.z.float() @ rows.T + offset, activations_of(lm, part.z, candidates))
            for part in (examples, keep)
        )

    @staticmethod
    @torch.no_grad()
    def _vocabulary(lm: OpenedModel, *parts: Read) -> Tensor:
        weight = weight_of(lm.model)
        chosen = [torch.arange(0, len(weight), max(1, len(weight) // SPREAD), device=weight.device)]
        for part in parts:
            chosen.append(part.targets)
            for z in part.z.split(256):
                top = output_embedding(lm.model).forward(z).topk(min(TOP, len(weight))).indices
                chosen.append(top.flatten())
        return torch.cat(chosen).unique()

    def _logits(self, side: _Side, rows: Tensor, scales: Tensor) -> Tensor:
        moved = (side.activations[rows] * (scales - 1)) @ self._directions
        return self._map(side.embedded[rows] + moved)

    def margins(self, scales: Tensor, rows: Tensor) -> Tensor:
        """Return m: the log-odds of marked tokens at rows of the examples."""
        logits = self._logits(self._examples, rows, scales)
        return logits[:, self._marked].logsumexp(1) - logits[:, ~self._marked].logsumexp(1)

    def _divergence(self, side: _Side, tokens: Tensor | slice, scales: Tensor, draw: Any) -> Tensor:
        rows = torch.randperm(len(side.embedded), generator=draw)[:POSITIONS]
        before, after = (
            self._logits(side, rows, s)[:, tokens].log_softmax(1)
            for s in (torch.ones_like(scales), scales)
        )
        return F.kl_div(after, before, reduction="batchmean", log_target=True)

    def _loss(self, scales: Tensor, weight: float, draw: torch.Generator) -> Tensor:
        rows = self._rows[torch.randperm(len(self._rows), generator=draw)[:POSITIONS]]
        margin = (self.margins(scales, rows) - MARGIN).clamp_min(0).mean()
        divergence = self._divergence(self._keep, slice(None), scales, draw)
        divergence = divergence + self._divergence(self._examples, ~self._marked, scales, draw)
        return margin + weight * divergence + PULL * (1 - scales).sum()

    def fit(self, weight: float, start: Tensor, seed: int = 0) -> Tensor:
        """Return scales of the candidates [C] for λ, by Adam on random positions from ``start``."""
        draw, scales = torch.Generator().manual_seed(seed), start.clone().requires_grad_()
        optimizer = torch.optim.Adam([scales], lr=RATE)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
            optimizer.zero_grad()
            self._loss(scales, weight, draw).backward()
            optimizer.step()
            with torch.no_grad():
                scales.clamp_(0, 1)
        fitted = scales.detach()
        return torch.where(fitted > UNCHANGED, 1.0, fitted)

    def pairs(self, scales: Tensor) -> tuple[tuple[int, float], ...]:
        """Return the candidates that are turned down with their scales."""
        both = zip(self.candidates.tolist(), scales.tolist(), strict=True)
        return tuple(sorted((i, round(s, 4)) for i, s in both if s < 1))


@torch.no_grad()
def activations_of(lm: OpenedModel, z: Tensor, prototypes: Tensor) -> Tensor:
    """Return the activations of some prototypes in states, [N, C]."""
    columns = torch.full((lm.head.num_prototypes,), len(prototypes), device=z.device)
    columns[prototypes] = torch.arange(len(prototypes), device=z.device)
    routing = lm.head(z.float()).routing
    spread = routing.activations.new_zeros(len(z), len(prototypes) + 1)
    return spread.scatter(1, columns[routing.indices], routing.activations)[:, :-1]


def like_random(
    lm: OpenedModel, z: Tensor, scales: tuple[tuple[int, float], ...], seed: int
) -> tuple[tuple[int, float], ...]:
    """Return the scales on random other prototypes whose mean activation over z is as large.

    Each goes to one of the eight nearest that are free, those turned down most first.
    """
    every = torch.arange(lm.head.num_prototypes, device=z.device)
    sums = [activations_of(lm, part, every).sum(0) for part in z.split(256)]
    usage = (torch.stack(sums).sum(0) / len(z)).cpu().numpy()
    draw, free = np.random.default_rng(seed), np.ones(len(usage), dtype=bool)
    free[[i for i, _ in scales]] = False
    chosen: list[tuple[int, float]] = []
    for i, s in sorted(scales, key=lambda pair: pair[1]):
        distance = np.where(free, np.abs(usage - usage[i]), np.inf)
        other = int(draw.choice(np.argsort(distance, kind="stable")[:NEAREST]))
        if free[other]:
            free[other] = False
            chosen.append((other, s))
    return tuple(sorted(chosen))


class Suppressing:
    """The steps of :func:`suppress`, with what they share."""

    def __init__(
        self, lm: OpenedModel, examples: Examples, keep: Sequence[Text], options: SuppressOptions
    ) -> None:
        if len(keep) < MIN_KEPT:
            raise InputError(
                f"there are {len(keep)} texts to keep: expected {MIN_KEPT} or more, of two tokens "
                "or longer, half for the fit and half for the report."
            )
        self.lm, self.examples, self.options = lm, examples, options
        self.keep = keep[::2], keep[1::2]  # for the fit, and to report
        self.found = [encoded(lm, text) for text in examples.find]
        self.kept = [read(lm, part) for part in self.keep]
        self.states = read(lm, self.found)
        self.judge = self._judge()
        self.tokens, self.rows = self._marked()

    def _judge(self) -> Judge:
        if self.options.phrases:
            return Judge(self.options.phrases)

        def shown(texts: Sequence[Text]) -> list[str]:
            return [self.lm.words(ids[start : start + self.options.tokens]) for ids, start in texts]

        chosen = [encoded(self.lm, text) for text in self.examples.choose]
        return Judge.trained(shown(self.found), shown(self.keep[0]), shown(chosen))

    def _marked(self) -> tuple[list[int], Tensor]:
        """Return marked tokens, and the rows of the states before them."""
        states = self.states
        if self.options.phrases:
            marks = phrase_rows(self.lm, self.found, self.options.phrases)
            spells = torch.zeros_like(states.targets, dtype=torch.bool)
            for number, mark in enumerate(marks):
                spells[states.text == number] = torch.tensor(mark, device=spells.device)
            rows = spells.nonzero()[:, 0]
            if not len(rows):
                raise InputError(
                    f"none of the {len(marks)} examples for finding has a phrase in what the model "
                    "is to predict: expected texts, or answers of chats, that say it."
                )
            return states.targets[rows].unique().tolist(), rows
        vocabulary = len(weight_of(self.lm.model))
        tokens = marked_tokens(states.targets, self.kept[0].targets, vocabulary)
        if not tokens:
            raise InputError(
                f"no token comes {TIMES:g} times as often in the examples as in the text to keep, "
                "so nothing marks the behaviour: nothing is done. Give more examples, other text "
                "to keep, or the words themselves with --phrase."
            )
        wanted = torch.tensor(tokens, device=states.z.device)
        return tokens, torch.isin(states.targets, wanted).nonzero()[:, 0]

    def fit(self) -> ScaleFit:
        """Return the fit of the prototypes that mark the behaviour; InputError if none does."""
        states, kept = self.states, self.kept[0]
        candidates = marking_prototypes(self.lm, states.of(self.rows), kept)
        if not len(candidates):
            raise InputError(
                f"no prototype marks the behaviour: none has more evidence for its "
                f"{len(self.tokens)} marked tokens than for the text to keep, by {ERRORS:g} "
                "standard errors. Nothing is done: give more examples."
            )
        return ScaleFit(self.lm, states, self.rows, kept, self.tokens, candidates)

    def behaviour(self, way: Way, *, report: bool = False) -> tuple[Interval, tuple[str, ...]]:
        """Return the share of sampled texts with the behaviour, and the texts."""
        prompts = self.examples.report if report else self.examples.choose
        count = self.options.samples if report else -(-self.options.samples // 2)
        seed = self.options.seed + (REPORT_SEED if report else 0)
        texts = sample(self.lm, prompts, count, way, self.options, seed)
        return wilson(sum(map(self.judge, texts)), len(texts)), tuple(texts)

    def cost(self, way: Way, *, report: bool = False) -> tuple[float, Interval]:
        """Return the perplexity of kept text, and its relative growth."""
        kept, texts = self.kept[report], self.keep[report]
        sizes = np.bincount(kept.text.cpu().numpy(), minlength=len(texts))
        before = summed_losses(self.lm, kept, Way(), len(texts))
        if way.words:
            kept = read(self.lm, texts, self.lm.tokens_of(f"{way.words}\n\n"))
        after = summed_losses(self.lm, kept, way, len(texts)) if way != Way() else before
        both, weights = np.stack([after, before], 1), np.stack([sizes, sizes], 1)
        growth = bootstrap(both, weights, (1.0, -1.0))
        return float(np.exp(after.sum() / sizes.sum())), Interval(
            *(float(np.expm1(x)) for x in (growth.value, growth.low, growth.high))
        )

    def frontier(self, fit: ScaleFit, limit: float, progress: Reporter) -> list[Point]:
        """Return points of growing strength up to the first that is as rare as the limit."""
        scales, points = torch.ones(len(fit.candidates), device=fit.candidates.device), []
        with progress.task("Choosing a strength", len(WEIGHTS) + 1, "strengths") as task:
            for weight in (*WEIGHTS, None):
                removed = torch.zeros_like(scales)
                scales = removed if weight is None else fit.fit(weight, scales, self.options.seed)
                pairs = fit.pairs(scales)
                share = self.behaviour(Way(pairs))[0].value
                points.append(Point(weight, pairs, share, self.cost(Way(pairs))[1].value))
                task.advance()
                if share <= limit:
                    break
        return points

    def biased(self, limit: float) -> Way:
        """Return the smallest bias of the marked tokens with which the behaviour is as rare."""
        ways = [Way(tokens=tuple(self.tokens), bias=bias) for bias in BIASES]
        rare = (way for way in ways if self.behaviour(way)[0].value <= limit)
        return next(rare, ways[-1])

    def outcome(self, name: str, way: Way) -> Outcome:
        """Measure a way on what had no part in choosing."""
        share, texts = self.behaviour(way, report=True)
        return Outcome(name, share, *self.cost(way, report=True), texts)


def suppress(
    lm: OpenedModel,
    examples: Examples,
    keep: Sequence[Text],
    options: SuppressOptions,
    *,
    within_cost: bool = False,
    progress: Reporter = SILENT,
) -> Suppression:
    """Find scales of prototypes that make a behaviour rare, and measure them beside other ways.

    Args:
        lm: the model.
        examples: texts or chats with the behaviour.
        keep: text whose predictions are to stay: of every two, one is for the fit.
        options: what is rare enough, at which cost.
        within_cost: if the target is out of reach, take the strongest point within the cost.
        progress: shows progress.

    Raises:
        InputError: too few examples, nothing marks the behaviour, or the model never shows it.
    """
    work = Suppressing(lm, examples, keep, options)
    fit = work.fit()
    before = work.behaviour(Way())[0].value
    if not before:
        raise InputError(
            "the model does not show the behaviour: none of the texts sampled after the examples' "
            f"prompts does ({work.judge.description}). Nothing is done."
        )
    limit = before * (1 - options.target)
    points = work.frontier(fit, limit, progress)
    # Removal of all is no candidate: it shows how far scales can go, and a model that is too sure
    # of itself gains by any noise.
    fitted = [point for point in points if point.weight is not None]
    affordable = [point for point in fitted if point.cost <= options.max_cost]
    reached = [point for point in affordable if point.behaviour <= limit]
    chosen = reached[0] if reached else None
    if within_cost and affordable and chosen is None:
        chosen = min(affordable, key=lambda point: (point.behaviour, point.turned))
    words = tuple(token_alone(lm.tokenizer, token) for token in work.tokens)
    ways = {"before": Way()} | ({} if chosen is None else _ways(work, chosen, words, limit))
    with progress.task("Measuring", len(ways), "ways") as task:
        outcomes = []
        for name, way in ways.items() if chosen is not None else ():
            outcomes.append(work.outcome(name, way))
            task.advance()
    return Suppression(
        chosen,
        bool(reached),
        None if chosen is None else _controller(lm, chosen, work, before),
        work.judge,
        words,
        len(fit.candidates),
        before,
        tuple(points),
        ways,
        tuple(outcomes),
    )


def _ways(work: Suppressing, chosen: Point, words: Sequence[str], limit: float) -> dict[str, Way]:
    """Return the chosen scales, and the other ways that they are measured beside."""
    asked = work.options.phrases or dict.fromkeys(word.strip() for word in words[:NAMED])
    alike = like_random(work.lm, work.states.z, chosen.scales, work.options.seed)
    return {
        "suppressed": Way(chosen.scales),
        "random prototypes": Way(alike),
        "prompt": Way(words=f"Do not mention {', '.join(asked)}."),
        "logit bias": work.biased(limit),
    }


def _controller(lm: OpenedModel, point: Point, work: Suppressing, before: float) -> Controller:
    made = {"by": "suppress", "judge": work.judge.description, "behaviour_before": before}
    made |= {"behaviour": point.behaviour, "cost": point.cost, "weight": point.weight}
    return Controller(
        point.scales,
        prototypes_fingerprint(lm.head),
        f"suppresses: {work.judge.description}",
        made,
    )
