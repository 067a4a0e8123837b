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

The judge of a phrase looks for it. That of a topic or style goes by the mean l of a text's words,
with n their counts plus 1, and 0 within two standard errors:

    l_w = ln(n_w(examples) / n_w(keep)) − ln(Σ_v n_v(examples) / Σ_v n_v(keep))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextlib import suppress as suppress_errors
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prismlm.corpus.chat import ASSISTANT, Messages, text_of
from prismlm.corpus.pieces import pieces_of, token_alone
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.errors import InputError, check_number
from prismlm.interventions.calibration import along, log_probabilities, route
from prismlm.interventions.plan import applied, dense_activations, plan_for
from prismlm.interventions.values import Controller
from prismlm.lens.layout import prototypes_fingerprint
from prismlm.lens.opened_model import OpenedModel, TooLongError, write_after
from prismlm.models.seam import Read, Text, output_embedding, read_texts
from prismlm.models.sidecar import weight_of
from prismlm.models.watch import Hook, watch
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import Interval, bootstrap, wilson

MAX_TOKENS, OPENING, BATCH_TEXTS = 512, 16, 32
MIN_EXAMPLES, MIN_KEPT, WORD_ERRORS = 8, 4, 2.0
Prompt = str | Messages
Scales = tuple[tuple[int, float], ...]
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
MOST = 8192  # positions of each kind that the fit draws from, whose logits are in memory
BIASES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
NEAREST, NAMED, REPORT_SEED = 8, 12, 1_000_000


@dataclass(frozen=True)
class SuppressOptions:
    """What is to become rare, how rare, and how that is measured."""

    phrases: tuple[str, ...] = ()  # the behaviour is writing one of them; else a topic or style
    target: float = 0.9  # share of the behaviour to remove
    max_cost: float = 0.02  # allowed growth of perplexity
    tokens: int = 40  # of a sampled text
    samples: int = 64  # texts sampled to report, and half as many at each strength to choose
    temperature: float = 0.7
    heldout: int = 6000  # tokens of the text to keep, for the fit and again for the report
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("the target", self.target, "more than 0 and at most 1", lambda x: 0 < x <= 1)
        if not all(phrase.split() for phrase in self.phrases):
            raise InputError("a phrase is empty: expected words that must not be written.")


class Examples(NamedTuple):
    """Texts or chats with the behaviour: to find its prototypes, to choose how far, to report."""

    find: Sequence[Prompt]
    choose: Sequence[Prompt]
    report: Sequence[Prompt]


def split_examples(texts: Sequence[Prompt], seed: int) -> Examples:
    """Divide texts at random: half, a quarter and a quarter."""
    if len(texts) < MIN_EXAMPLES:
        raise InputError(
            f"there are {len(texts)} examples of the behaviour: expected {MIN_EXAMPLES} or more. "
            "Half of them find the prototypes, the others choose and report."
        )
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    parts = np.split(order, [len(texts) // 2, len(texts) * 3 // 4])
    return Examples(*([texts[n] for n in part] for part in parts))


class Judge(NamedTuple):
    """Tells whether a text shows the behaviour."""

    description: str  # what it goes by
    shows: Callable[[str], bool]


def phrase_pattern(phrases: Sequence[str]) -> re.Pattern[str]:
    """Return what matches any phrase, whatever its case and blanks."""
    each = (r"\s+".join(map(re.escape, phrase.split())) for phrase in phrases)
    return re.compile("|".join(each), re.IGNORECASE)


def phrase_judge(phrases: Sequence[str]) -> Judge:
    """Return the judge that looks for phrases."""
    pattern, named = phrase_pattern(phrases), " or ".join(f"“{phrase}”" for phrase in phrases)
    return Judge(f"the text has {named}", lambda text: pattern.search(text) is not None)


def word_judge(find: Sequence[str], keep: Sequence[str], choose: Sequence[str]) -> Judge:
    """Weigh words by examples and every other kept text; set the threshold on the rest.

    It is the one with the best balanced accuracy, examples for choosing against kept texts.
    """
    counts = [Counter(words_of("\n".join(texts))) for texts in (find, keep[::2])]
    known = sorted(counts[0] | counts[1])
    n = np.array([[count[word] + 1 for word in known] for count in counts])
    odds = np.log(n / n.sum(1, keepdims=True))
    clear = np.abs(odds[0] - odds[1]) > WORD_ERRORS * np.sqrt((1 / n).sum(0))
    weights = dict(zip(known, np.where(clear, odds[0] - odds[1], 0.0).tolist(), strict=True))

    def score(text: str) -> float:
        words = words_of(text)
        return sum(weights.get(word, 0.0) for word in words) / max(1, len(words))

    shown, others = (np.array([*map(score, part)]) for part in (choose, keep[1::2]))
    both = np.unique(np.concatenate([shown, others]))
    cuts = (both[1:] + both[:-1]) / 2 if len(both) > 1 else both
    right = [((shown > cut).mean() + (others <= cut).mean()) / 2 for cut in cuts]
    best = int(np.argmax(right))
    description = (
        "the mean log-odds of the text's words, examples against text to keep, is above "
        f"{cuts[best]:.2f} (right for {right[best]:.0%} of texts that are not reported)"
    )
    return Judge(description, lambda text: score(text) > float(cuts[best]))


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"[^\W\d_]+", text.casefold())


class Way(NamedTuple):
    """A way to suppress: scales of prototypes, tokens whose logits are lowered, or words before."""

    scales: Scales = ()
    tokens: tuple[int, ...] = ()
    bias: float = 0.0
    words: str = ""


@contextmanager
def using(lm: OpenedModel, way: Way) -> Iterator[None]:
    """Apply scales and biases to every forward pass of the block; words are the prompt's matter."""
    lower = torch.zeros(len(weight_of(lm.model)))
    lower[list(way.tokens)] = way.bias / lm.logit_map.scale
    hook = Hook(output_embedding(lm.model), after=lambda *call: call[-1] - lower.to(call[-1]))
    plan = plan_for(lm, [Controller(way.scales)] if way.scales else [])
    with applied(lm.model, plan), watch([hook] if way.bias else [], unwatched_too=True):
        yield


def most_tokens(lm: OpenedModel) -> int:
    """Return how many tokens of a text are read: half of the context leaves room for a prompt."""
    return MAX_TOKENS if lm.context_length is None else min(MAX_TOKENS, lm.context_length // 2)


def encoded(lm: OpenedModel, text: Prompt) -> Text:
    """Return a text's first tokens; of a chat, the last answer is predicted."""
    ids = lm.tokens_of(text)[: most_tokens(lm)]
    start = lm.answer_start(text, torch.tensor(ids))
    return Text(ids, start if 0 < start < len(ids) else 1)


def prompt_of(lm: OpenedModel, text: Prompt, words: str = "") -> list[int]:
    """Return what is continued to see the behaviour: a chat without its last answer, or an opening.

    ``words`` are the system prompt, or come before the text. A chat that has a system prompt, or
    whose template knows none, has them at the start of its first message.
    """
    if isinstance(text, str):
        before = lm.tokens_of(f"{words}\n\n") if words else []
        return before + lm.tokens_of(text)[:OPENING]
    first, *later = text[:-1] if len(text) > 1 and text[-1]["role"] == ASSISTANT else text
    if words and first["role"] != "system":
        with suppress_errors(InputError):
            return lm.tokens_of([{"role": "system", "content": words}, first, *later])
    if words:
        first = {**first, "content": f"{words}\n\n{text_of(first['content'])}"}
    return lm.tokens_of([first, *later])


def held_out(lm: OpenedModel, corpus: Corpus, tokens: int, seed: int) -> list[Text]:
    """Return held-out documents of a corpus in random order, cut to fit, of some ``tokens``."""
    check_tokenizer_of(corpus, lm.tokenizer, lm.path.name)
    order = np.random.default_rng(seed).permutation(corpus.split("heldout"))
    order = order[corpus.lengths[order] > 1]
    lengths = np.minimum(corpus.lengths[order], most_tokens(lm))
    count = np.searchsorted(lengths.cumsum(), tokens) + 1
    spans = zip(corpus.starts[order[:count]].tolist(), lengths[:count].tolist(), strict=True)
    return [Text(corpus.tokens(*span).tolist(), 1) for span in spans]


def summed_losses(lm: OpenedModel, text: Read, way: Way, count: int) -> np.ndarray:
    """Return −Σ log p of the tokens of each of ``count`` texts under a way's scales and biases."""
    with using(lm, way):
        log_p = log_probabilities(lm, text.z, text.targets)[0]
    return -np.bincount(text.text.cpu().numpy(), log_p.double().numpy(), count)


def growth(after: np.ndarray, before: np.ndarray, sizes: np.ndarray) -> Interval:
    """Return the relative growth of perplexity, by the losses and numbers of tokens of texts."""
    both, weights = np.stack([after, before], 1), np.stack([sizes, sizes], 1)
    change = bootstrap(both, weights, (1.0, -1.0))
    return Interval(*map(float, np.expm1([change.value, change.low, change.high])))


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


def phrase_marks(lm: OpenedModel, text: Text, phrases: Sequence[str]) -> np.ndarray:
    """Return for each predicted token of a text whether it spells a part of a phrase, bool."""
    pieces = [piece.shown for piece in pieces_of(lm.tokenizer, text.ids[text.start :])]
    ends = np.cumsum([0, *map(len, pieces)])
    marks = np.zeros(len(pieces), dtype=bool)
    for match in phrase_pattern(phrases).finditer("".join(pieces)):
        marks |= (ends[:-1] < match.end()) & (ends[1:] > match.start())
    return marks


@torch.no_grad()
def marking_prototypes(lm: OpenedModel, marked: Read, keep: Read) -> Tensor:
    """Return the prototypes whose evidence for marked tokens is larger than for kept ones, int64.

    Ordered by the difference of the means over positions, in standard errors; none if no difference
    is clear.
    """
    weight, bank = weight_of(lm.model), lm.head.prototypes.float()
    centre, means, squared = weight.mean(0, dtype=torch.float32), list[np.ndarray](), 0.0
    for part in (marked, keep):
        routed, count = route(lm, part.z), len(part.targets)
        evidence = along(routed, weight[part.targets].float() - centre, bank)
        evidence, places = (x.flatten().cpu().numpy() for x in (evidence, routed.indices))
        first, second = (np.bincount(places, evidence**p, len(bank)) / count for p in (1, 2))
        means.append(first)
        squared += (second - first**2) / count
    errors = torch.from_numpy((means[0] - means[1]) / np.maximum(squared**0.5, 1e-9))
    order = errors.argsort(descending=True)
    clear = order[errors[order] > (MIN_ERRORS if bool((errors > ERRORS).any()) else ERRORS)]
    return clear.to(bank.device)


class ScaleFit:
    """The objective of the candidates' scales, over a part of the vocabulary and of positions."""

    @torch.no_grad()
    def __init__(self, work: Suppressing, candidates: Tensor) -> None:
        lm, parts = work.lm, (work.states, work.kept[0])
        self.candidates, self._map = candidates, lm.logit_map
        embedding, weight = output_embedding(lm.model), weight_of(lm.model)
        step, top = max(1, len(weight) // SPREAD), min(TOP, len(weight))
        seen = [torch.arange(0, len(weight), step, device=weight.device)]
        for part in parts:
            likely = (embedding(z).topk(top).indices.flatten() for z in part.z.split(256))
            seen += [part.targets, *likely]
        self.vocabulary = vocabulary = torch.cat(seen).unique()
        self._marked = torch.isin(vocabulary, torch.tensor(work.tokens, device=vocabulary.device))
        directions, bias = weight[vocabulary].float(), getattr(embedding, "bias", None)
        offset = 0.0 if bias is None else bias[vocabulary].float()
        self._directions = lm.head.prototypes[candidates].float() @ directions.T
        draw = torch.Generator().manual_seed(0)
        states = (work.states.z[work.rows], work.states.z, work.kept[0].z)
        some = (z[torch.randperm(len(z), generator=draw)[:MOST].sort().values] for z in states)
        # W z + b [N, v], and activations of the candidates [N, C].
        self._before_marked, self._examples, self._keep = (
            (z.float() @ directions.T + offset, activations_of(lm, z, candidates)) for z in some
        )

    def logits(self, side: tuple[Tensor, Tensor], rows: Tensor, scales: Tensor) -> Tensor:
        """Return the logits of some rows of one side."""
        embedded, activations = side
        return self._map(embedded[rows] + (activations[rows] * (scales - 1)) @ self._directions)

    def margins(self, scales: Tensor, rows: Tensor) -> Tensor:
        """Return m: the log-odds of marked tokens at rows of the positions before one."""
        logits = self.logits(self._before_marked, rows, scales)
        return logits[:, self._marked].logsumexp(1) - logits[:, ~self._marked].logsumexp(1)

    def _divergence(self, side: Any, tokens: Tensor | slice, scales: Tensor, draw: Any) -> Tensor:
        rows = torch.randperm(len(side[0]), generator=draw)[:POSITIONS]
        logits = self._map(side[0][rows]), self.logits(side, rows, scales)
        before, after = (each[:, tokens].log_softmax(1) for each in logits)
        return F.kl_div(after, before, reduction="batchmean", log_target=True)

    def fit(self, weight: float, start: Tensor, seed: int = 0) -> Tensor:
        """Return scales of the candidates [C] for λ, by Adam on random positions from ``start``."""
        draw, scales = torch.Generator().manual_seed(seed), start.clone().requires_grad_()
        optimizer = torch.optim.Adam([scales], lr=RATE)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
            optimizer.zero_grad()
            rows = torch.randperm(len(self._before_marked[0]), generator=draw)[:POSITIONS]
            loss = (self.margins(scales, rows) - MARGIN).clamp_min(0).mean()
            kept = self._divergence(self._keep, slice(None), scales, draw)
            others = self._divergence(self._examples, ~self._marked, scales, draw)
            (loss + weight * (kept + others) + PULL * (1 - scales).sum()).backward()
            optimizer.step()
            with torch.no_grad():
                scales.clamp_(0, 1)
        return torch.where(scales > UNCHANGED, 1.0, scales.detach())

    def pairs(self, scales: Tensor) -> Scales:
        """Return the candidates that are turned down with their scales."""
        both = zip(self.candidates.tolist(), scales.tolist(), strict=True)
        return tuple(sorted((i, round(s, 4)) for i, s in both if s < 1))


def activations_of(lm: OpenedModel, z: Tensor, prototypes: Tensor) -> Tensor:
    """Return the activations of some prototypes in states, [N, C]."""
    return dense_activations(route(lm, z), prototypes, lm.head.num_prototypes)


def like_random(lm: OpenedModel, z: Tensor, scales: Scales, seed: int) -> Scales:
    """Return the scales on random other prototypes whose mean activation over z is as large.

    Each goes to one of the eight nearest that are free, those turned down most first.
    """
    indices, _, activations = (column.flatten().cpu().numpy() for column in route(lm, z))
    usage = np.bincount(indices, activations, lm.head.num_prototypes)
    draw = np.random.default_rng(seed)
    free, chosen = np.setdiff1d(np.arange(len(usage)), [i for i, _ in scales]), dict[int, float]()
    for i, s in sorted(scales, key=lambda pair: pair[1])[: len(free)]:
        near = np.argsort(np.abs(usage[free] - usage[i]), kind="stable")[:NEAREST]
        chosen[other := int(free[draw.choice(near)])] = s
        free = free[free != other]
    return tuple(sorted(chosen.items()))


class Suppressing:
    """What :func:`suppress` reads and marks, and how it measures."""

    def __init__(
        self, lm: OpenedModel, examples: Examples, keep: Sequence[Text], options: SuppressOptions
    ) -> None:
        if len(keep) < MIN_KEPT:
            raise InputError(
                f"there are {len(keep)} texts to keep: expected {MIN_KEPT} or more, of two tokens "
                "or longer, half for the fit and half for the report. Give more by --keep FILE."
            )
        self.lm, self.examples, self.options = lm, examples, options
        self.keep = keep[::2], keep[1::2]  # for the fit, and to report
        found = [encoded(lm, text) for text in examples.find]
        self.kept = [read_texts(lm.model, part) for part in self.keep]
        self.states = read_texts(lm.model, found)
        targets = self.states.targets
        if options.phrases:
            self.judge, marks = phrase_judge(options.phrases), torch.zeros_like(targets).bool()
            spelled = np.concatenate([phrase_marks(lm, text, options.phrases) for text in found])
            marks[self.states.text.argsort(stable=True)] = torch.from_numpy(spelled).to(
                marks.device
            )
            self.tokens = targets[marks].unique().tolist()
            reason = (
                f"none of the {len(found)} examples for finding has a phrase in what the model is "
                "to predict: expected texts, or answers of chats, that say it."
            )
        else:
            texts = found, self.keep[0], [encoded(lm, text) for text in examples.choose]
            self.judge = word_judge(
                *([lm.words(t.ids[t.start : t.start + options.tokens]) for t in p] for p in texts)
            )
            self.tokens = marked_tokens(targets, self.kept[0].targets, len(weight_of(lm.model)))
            marks = torch.isin(targets, torch.tensor(self.tokens, device=targets.device))
            reason = (
                f"no token comes {TIMES:g} times as often in the examples as in the text to keep, "
                "so nothing marks the behaviour: nothing is done. Give more examples, other text "
                "to keep, or the words themselves with --phrase."
            )
        if not self.tokens:
            raise InputError(reason)
        self.rows = marks.nonzero()[:, 0]  # before a marked token
        pairs = zip(self.kept, self.keep, strict=True)
        self.losses = [summed_losses(lm, kept, Way(), len(part)) for kept, part in pairs]

    def fit(self) -> ScaleFit:
        """Return the fit of the prototypes that mark the behaviour; InputError if none does."""
        marked = Read(*(column[self.rows] for column in self.states))
        candidates = marking_prototypes(self.lm, marked, self.kept[0])
        if not len(candidates):
            raise InputError(
                f"no prototype marks the behaviour: none has more evidence for its "
                f"{len(self.tokens)} marked tokens than for the text to keep, by {ERRORS:g} "
                "standard errors. Nothing is done: give more examples."
            )
        return ScaleFit(self, candidates)

    def behaviour(self, way: Way, *, report: bool = False) -> tuple[Interval, list[str]]:
        """Return the share of sampled texts with the behaviour, and the texts: of prompts in turn.

        TooLongError if the model cannot read a prompt and the tokens to sample.
        """
        lm, options = self.lm, self.options
        prompts = self.examples.report if report else self.examples.choose
        texts = [""] * (options.samples if report else -(-options.samples // 2))
        ids = [torch.tensor(prompt_of(lm, prompt, way.words)) for prompt in prompts[: len(texts)]]
        longest = max(map(len, ids))
        if lm.context_length is not None and longest + options.tokens > lm.context_length:
            raise TooLongError(
                f"what an example asks has {longest} tokens, and {options.tokens} (--tokens) are "
                f"sampled; {lm.path.name} reads {lm.context_length}: shorten it, or sample fewer."
            )
        order = sorted(range(len(texts)), key=lambda n: len(ids[n % len(ids)]))
        seed, padding = options.seed + REPORT_SEED * report, cast("int", lm.tokenizer.eos_token_id)
        how = options.tokens, options.temperature
        with using(lm, way):
            for first in range(0, len(texts), BATCH_TEXTS):
                batch = order[first : first + BATCH_TEXTS]
                rows = [ids[n % len(ids)].to(lm.model.device) for n in batch]
                padded = pad_sequence(rows, True, padding, "left")
                mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
                written = write_after(lm.model, lm.tokenizer, padded, *how, seed + first, mask=mask)
                for n, row in zip(batch, written, strict=True):
                    texts[n] = lm.words(row[padded.shape[1] :])
        return wilson(sum(map(self.judge.shows, texts)), len(texts)), texts

    def cost(self, way: Way, *, report: bool = False) -> tuple[float, Interval]:
        """Return the perplexity of kept text, and its relative growth."""
        kept, texts, before = self.kept[report], self.keep[report], self.losses[report]
        sizes = np.bincount(kept.text.cpu().numpy(), minlength=len(texts))
        if way.words:
            kept = read_texts(self.lm.model, texts, self.lm.tokens_of(f"{way.words}\n\n"))
        after = summed_losses(self.lm, kept, way, len(texts)) if way != Way() else before
        return float(np.exp(after.sum() / sizes.sum())), growth(after, before, sizes)

    def frontier(self, fit: ScaleFit, limit: float, progress: Reporter) -> list[dict[str, Any]]:
        """Return points of growing strength up to the first that is as rare as the limit."""
        scales, points = torch.ones(len(fit.candidates), device=fit.candidates.device), []
        with progress.task("Choosing a strength", len(WEIGHTS) + 1, "strengths") as task:
            for weight in (*WEIGHTS, None):
                scales = (
                    0 * scales if weight is None else fit.fit(weight, scales, self.options.seed)
                )
                way = Way(fit.pairs(scales))
                share, cost = self.behaviour(way)[0].value, self.cost(way)[1].value
                point = {"weight": weight, "scales": way.scales, "behaviour": share, "cost": cost}
                points.append(point | {"turned": sum(1 - s for _, s in way.scales)})
                task.advance()
                if share <= limit:
                    break
        return points

    def ways(self, scales: Scales, words: Sequence[str], limit: float) -> dict[str, Way]:
        """Return the chosen scales, and the other ways that they are measured beside.

        The bias is the smallest with which the behaviour is as rare as the limit.
        """
        asked = self.options.phrases or dict.fromkeys(word.strip() for word in words[:NAMED])
        biases = [Way(tokens=tuple(self.tokens), bias=bias) for bias in BIASES]
        rare = (way for way in biases if self.behaviour(way)[0].value <= limit)
        alike = like_random(self.lm, self.states.z, scales, self.options.seed)
        return {
            "before": Way(),
            "suppressed": Way(scales),
            "random prototypes": Way(alike),
            "prompt": Way(words=f"Do not mention {', '.join(asked)}."),
            "logit bias": next(rare, biases[-1]),
        }


def suppress(
    lm: OpenedModel,
    examples: Examples,
    keep: Sequence[Text],
    options: SuppressOptions,
    *,
    within_cost: bool = False,
    progress: Reporter = SILENT,
) -> tuple[Controller | None, dict[str, Any]]:
    """Find scales of prototypes that make a behaviour rare, and measure them beside other ways.

    Of every two texts to keep, one is for the fit. ``within_cost`` takes the strongest point within
    the cost if the target is out of reach; else there is no controller then. InputError if nothing
    marks the behaviour, or the model never shows it.

    The report is that of ``prismlm suppress --json``: ``marked`` tokens, the clearest first; the
    number of ``candidates``, prototypes that mark the behaviour; how often it is seen ``before``,
    at the prompts for choosing; the ``frontier`` of points with their λ (None where all candidates
    are removed), the ``chosen`` one, and whether it ``reached`` the target; ``ways`` to suppress,
    and their ``outcomes`` on what had no part in choosing.
    """
    work = Suppressing(lm, examples, keep, options)
    fit, before, judge = work.fit(), work.behaviour(Way())[0].value, work.judge.description
    if not before:
        raise InputError(
            "the model does not show the behaviour: none of the texts sampled after the examples' "
            f"prompts does ({judge}). Nothing is done."
        )
    limit = before * (1 - options.target)
    points = work.frontier(fit, limit, progress)
    # Removal of all is no candidate: it shows how far scales can go, and a model that is too sure
    # of itself gains by any noise.
    affordable = [p for p in points if p["weight"] is not None and p["cost"] <= options.max_cost]
    chosen = next((point for point in affordable if point["behaviour"] <= limit), None)
    reached = chosen is not None
    if within_cost and affordable and not reached:
        chosen = min(affordable, key=lambda point: (point["behaviour"], point["turned"]))
    words = [token_alone(lm.tokenizer, token) for token in work.tokens]
    report: dict[str, Any] = {"chosen": chosen, "reached": reached, "judge": judge}
    report |= {"marked": words, "candidates": len(fit.candidates), "before": before}
    report |= {"frontier": points, "ways": {}, "outcomes": []}
    if chosen is None:
        return None, report
    report["ways"] = ways = work.ways(chosen["scales"], words, limit)
    with progress.task("Measuring", len(ways), "ways") as task:
        for name, way in ways.items():
            share, texts = work.behaviour(way, report=True)
            perplexity, cost = work.cost(way, report=True)
            row = {"name": name, "behaviour": share, "perplexity": perplexity, "cost": cost}
            report["outcomes"].append(row | {"texts": texts})
            task.advance()
    made = {"by": "suppress", "judge": judge, "behaviour_before": before}
    made |= {name: chosen[name] for name in ("behaviour", "cost", "weight")}
    head, description = prototypes_fingerprint(lm.head), f"suppresses: {judge}"
    return Controller(chosen["scales"], head, description, made), report
