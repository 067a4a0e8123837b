"""Labelled examples to a controller: which prototypes to turn so that right answers win.

Answer c of an example is scored by the log-probability of its tokens y_t after the context,
S(c) = Σ_t log p(y_t), and the loss is the cross-entropy of softmax(S) at the right answer. S is
linearised in the scales s at s = 1,

    S(c; s) ≈ S(c) + Σ_i (s_i − 1) g_i(c)
    g_i(c)  = Σ_t α_i(t) · scale · ((W p_i)[y_t] − E_p(t)[W p_i])

which makes the loss convex; so is the pull λ Σ_i |s_i − 1| that leaves most prototypes alone, and
the box 0 ≤ s ≤ 5. λ is the strongest whose held-out loss, over five folds, is within a standard
error of the least. What a controller does is then measured with the edited states themselves.
Source: *Prototype Language Models*, arXiv 2607.00510, whose details are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import optimize, sparse
from torch import Tensor
from torch.func import functional_call

from prismlm.corpus.encode import encode_text
from prismlm.corpus.formats import InputFile, Record, read_rows
from prismlm.errors import BadRow, InputError, check_path, shown
from prismlm.interventions.plan import applied, plan_for
from prismlm.interventions.values import Controller
from prismlm.lens.layout import prototypes_fingerprint
from prismlm.lens.opened_model import OpenedModel, check_embedded
from prismlm.models.seam import Text, output_embedding, read_texts
from prismlm.ops.prototype_head import Nearest
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import bootstrap

LARGEST, FOLDS, PULLS, PATIENCE = 5.0, 5, 10, 2
TURNED = 1e-6  # an offset from 1 that is none
STATES = 128  # at once; larger blocks are slower on a CPU
EXPECTED = "context, choices and label, or prompt, chosen and rejected"


def route(lm: OpenedModel, z: Tensor) -> Nearest:
    """Return the prototypes of states [T, d], where the states are."""
    nearest = lm.head.nearest(z.to(lm.model.device).float())
    return Nearest(*(column.to(z.device) for column in nearest))


def along(routed: Nearest, directions: Tensor, prototypes: Tensor) -> Tensor:
    """Return α_i p_i·v for a direction v of each state, [T, d] to [T, k]."""
    blocks = zip(directions.split(STATES), routed.indices.split(STATES), strict=True)
    products = [(v.float() @ prototypes.T).gather(1, i) for v, i in blocks]
    return torch.cat(products) * routed.activations


def log_probabilities(
    lm: OpenedModel, z: Tensor, tokens: Tensor, *, slopes: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log p of a token at each state [T], and its slope in the state, [T, d] or nothing.

    Both are float32, whatever the model is in; edits of a block around it apply.
    """
    embedding: Any = output_embedding(lm.model)
    float32 = {name: p.detach().float() for name, p in embedding.named_parameters()}
    device = embedding.weight.device
    values, gradients = list[Tensor](), [torch.zeros(0, z.shape[1])]
    for part, wanted in zip(z.split(STATES), tokens.split(STATES), strict=True):
        block = part.to(device, torch.float32).requires_grad_(slopes)
        with torch.set_grad_enabled(slopes):
            logits = lm.logit_map(functional_call(embedding, float32, block))
            own = logits.log_softmax(-1).gather(1, wanted.to(block.device)[:, None])[:, 0]
        values.append(own.detach().cpu())
        if slopes:
            gradients.append(torch.autograd.grad(own.sum(), block)[0].cpu())
    return torch.cat(values), torch.cat(gradients)


class Example(NamedTuple):
    """A question: what stands before each answer, the answers, and the number of the right one."""

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    label: int
    where: str = "the example"  # for messages
    preferred: bool = False  # a text to prefer, which comes first, and one to avoid


@dataclass(frozen=True)
class Answers:
    """Answers to Q questions, C in all, as they were read, of T tokens in all."""

    z: Tensor  # states before each token, [T, d]
    tokens: Tensor  # [T]
    answer: Tensor  # the answer that each token belongs to, [T]
    question: np.ndarray  # of each answer, [C]
    right: np.ndarray  # the right answer of each question, [Q]
    cut: int = 0  # answers whose context was cut on the left

    @property
    def starts(self) -> np.ndarray:
        """The first answer of each question, [Q]."""
        return np.flatnonzero(np.diff(self.question, prepend=-1))

    def total(self, values: Tensor) -> np.ndarray:
        """Return the sum of figures of tokens [T] over each answer, [C]."""
        return np.bincount(self.answer.numpy(), values.double().numpy(), len(self.question))


def read_examples(path: Path | str) -> list[Example]:
    """Read labelled examples from a file of records: JSON, JSON lines, CSV or Parquet.

    Rows have ``context``, ``choices`` and ``label`` (from 0), where ``context`` may be a list, one
    for each choice; or ``prompt``, ``chosen`` and ``rejected``. A blank is put between context and
    answer where there is none. InputError names the row that is neither.
    """
    file = InputFile.of(check_path("the task", path))
    examples = [_example(row.record, row.location) for row in read_rows(file)]
    if not examples:
        raise InputError(f"{path} has no rows: expected {EXPECTED}.")
    return examples


def _example(row: Record, where: str) -> Example:
    if isinstance(row, BadRow):
        raise row
    if isinstance(row, str):
        row = {"text": row}
    preferred = {"prompt", "chosen", "rejected"} <= row.keys()
    if preferred:
        row = {"context": row["prompt"], "choices": [row["chosen"], row["rejected"]], "label": 0}
    if not {"context", "choices", "label"} <= row.keys():
        raise InputError(f"{where} has {', '.join(row) or 'no columns'}: expected {EXPECTED}.")
    choices, context, label = row["choices"], row["context"], row["label"]
    count = len(choices) if isinstance(choices, list) else 0
    contexts = context if isinstance(context, list) else [context] * count
    texts = (*contexts, *choices) if len(contexts) == count > 1 else ("",)
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise InputError(
            f"{where} has the context {shown(context)} and the choices {shown(choices)}: expected "
            "a list of two texts or more, and one context, or one for each, none of them empty."
        )
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < count:
        raise InputError(
            f"{where} has the label {shown(label)}: expected the number of the right choice, 0 to "
            f"{count - 1}."
        )
    pairs = zip(contexts, choices, strict=True)
    apart = [c if b[-1].isspace() or c[0].isspace() else f" {c}" for b, c in pairs]
    return Example(tuple(contexts), tuple(apart), label, where, preferred)


def read_answers(
    lm: OpenedModel, examples: Sequence[Example], progress: Reporter = SILENT
) -> Answers:
    """Return the states before each token of every answer, from one pass over the examples.

    Contexts are cut on the left to the model's context length.
    """
    texts, questions, right, cut, longest = list[Text](), [], [], 0, lm.context_length
    for number, example in enumerate(examples):
        right.append(len(texts) + example.label)
        for before, tokens in _encode(lm, example):
            room = len(before) if longest is None else longest + 1 - len(tokens)
            if room < 1:
                raise InputError(
                    f"{example.where} has a choice of {len(tokens):,} tokens, and {lm.path.name} "
                    f"reads {longest:,}: shorten it."
                )
            cut += len(before) > room
            texts.append(Text([*before[-room:], *tokens], min(len(before), room)))
            questions.append(number)
    found = read_texts(lm.model, texts, progress=progress)
    order = found.text.argsort(stable=True)
    z, tokens, answer = (column[order].cpu() for column in found)
    return Answers(z, tokens, answer, np.array(questions), np.array(right), cut)


def _encode(lm: OpenedModel, example: Example) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of context and answer, of the two encoded together, for each answer."""
    pairs: list[tuple[list[int], list[int]]] = []
    for context, choice in zip(example.contexts, example.choices, strict=True):
        # As lm-eval does: a blank at the end of a context belongs to the answer's first word.
        before = encode_text(lm.tokenizer, context.rstrip(), end=False)
        whole = encode_text(lm.tokenizer, context + choice, end=False)
        check_embedded(lm.model, lm.tokenizer, whole, lm.path, example.where)
        pairs.append((whole[: len(before)], whole[len(before) :]))
        if not before or not pairs[-1][1]:
            raise InputError(f"{example.where} has a context or choice without tokens.")
    if len({(*before, -1, *tokens) for before, tokens in pairs}) < len(pairs):
        raise InputError(
            f"two choices of {example.where} have the same tokens, so no controller can tell them "
            "apart: remove one, or correct it."
        )
    return pairs


class Scored(NamedTuple):
    """Scores of C answers and how they change with the scales, linearised."""

    scores: np.ndarray  # Σ_t log p(y_t), [C]
    gains: sparse.csr_array  # g, [C, K]
    starts: np.ndarray  # first answer of each question, [Q]
    right: np.ndarray  # [Q]

    def loss(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the cross-entropy of each question and its gradient in the scores [C]."""
        counts = np.diff(np.append(self.starts, len(scores)))
        shifted = scores - np.repeat(np.maximum.reduceat(scores, self.starts), counts)
        total = np.add.reduceat(np.exp(shifted), self.starts)
        gradient = np.exp(shifted) / np.repeat(total, counts)
        gradient[self.right] -= 1
        return np.log(total) - shifted[self.right], gradient


def is_right(scores: np.ndarray, starts: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return for each question whether the right answer has the highest score, [Q]."""
    return scores[right] >= np.maximum.reduceat(scores, starts)


def prototype_gains(
    lm: OpenedModel, answers: Answers, routed: Nearest, slopes: Tensor
) -> sparse.csr_array:
    """Return g [C, K]: the sum over an answer's tokens of α_i · slope·p_i."""
    bank = lm.head.prototypes.detach().float().cpu()
    gains = along(routed, slopes, bank).double()
    rows = answers.answer[:, None].expand_as(gains)
    entries = gains.flatten().numpy(), (rows.flatten().numpy(), routed.indices.flatten().numpy())
    return sparse.csr_array(sparse.coo_array(entries, (len(answers.question), len(bank))))


def fit(
    scored: Scored, pull: float, start: np.ndarray | None = None, kept: np.ndarray | None = None
) -> np.ndarray:
    """Return the offsets u = s − 1 [K] in [−1, 4] that minimise mean loss + pull · Σ |u_i|.

    The mean is over the questions ``kept``, bool [Q], by default all. u is the difference of what
    goes up and what goes down, both positive, so that L-BFGS-B applies.
    """
    gains, turned, count = scored.gains, sparse.csr_array(scored.gains.T), len(scored.right)
    share = np.ones(count) if kept is None else kept * 1.0
    share /= share.sum()
    each = np.repeat(share, np.diff(np.append(scored.starts, len(scored.scores))))

    def objective(both: np.ndarray) -> tuple[float, np.ndarray]:
        up, down = np.split(both, 2)
        losses, gradient = scored.loss(scored.scores + gains @ (up - down))
        slope = turned @ (each * gradient)
        return share @ losses + pull * both.sum(), np.concatenate([slope, -slope]) + pull

    u = np.zeros(turned.indptr.size - 1) if start is None else start
    begin = np.concatenate([u.clip(0), (-u).clip(0)])
    limits = [(0, LARGEST - 1)] * len(u) + [(0, 1)] * len(u)
    up, down = np.split(optimize.minimize(objective, begin, jac=True, bounds=limits).x, 2)
    return up - down


def choose(scored: Scored, seed: int = 0) -> tuple[np.ndarray, float, list[float]]:
    """Fit with the strongest pull whose held-out loss is the least, or within its standard error.

    Returns the offsets, their pull, and the held-out loss of each pull that was tried. The loss is
    over five folds, and the error that of the paired differences. Pulls go down from
    the least that leaves every prototype alone, until losses have risen.
    """
    count, fits = len(scored.right), list[np.ndarray | None]([None] * FOLDS)
    gradient = scored.loss(scored.scores)[1] @ scored.gains / count
    pulls = float(np.abs(gradient).max()) * np.geomspace(1, 0.05, PULLS)
    fold = np.random.default_rng(seed).permutation(count) % FOLDS
    losses, best = list[np.ndarray](), 0
    for pull in pulls:
        lost = np.zeros(count)
        for n in range(FOLDS):
            fits[n] = u = fit(scored, pull, fits[n], fold != n)
            held = scored.loss(scored.scores + scored.gains @ u)[0]
            lost[fold == n] = held[fold == n]
        losses.append(lost)
        best = int(np.argmin([one.mean() for one in losses]))
        if len(losses) - 1 - best > PATIENCE:
            break
    worse = [one - losses[best] for one in losses]
    near = [one.mean() <= one.std() / count**0.5 for one in worse].index(True)
    return fit(scored, pulls[near]), float(pulls[near]), [float(one.mean()) for one in losses]


def calibrate(
    lm: OpenedModel,
    examples: Sequence[Example],
    test: Sequence[Example] | None = None,
    *,
    seed: int = 0,
    description: str = "",
    progress: Reporter = SILENT,
) -> tuple[Controller, dict[str, Any]]:
    """Fit a controller on examples, and measure it on others: by default on a fifth held out.

    Without a prototype whose scale lowers the held-out loss, the controller is empty. The report is
    that of ``prismlm calibrate --json``: accuracies ``before`` and ``after`` are of the model with
    the edited states themselves, and the interval of their ``change``, in shares of the questions,
    is over resampled questions; ``cut`` answers had their context cut on the left. InputError for
    examples that no controller can be fitted to.
    """
    if test is None:
        order = np.random.default_rng(seed).permutation(len(examples))
        held = len(examples) // FOLDS
        test, examples = ([examples[n] for n in part] for part in (order[:held], order[held:]))
    most = max((len(example.choices) for example in examples), default=2)
    if len(examples) < (least := max(2 * FOLDS, most)):
        raise InputError(
            f"there are {len(examples)} examples of up to {most} choices to fit: expected at least "
            f"{least}, and some hundred for a controller that helps."
        )
    if len({e.label for e in examples}) == 1 and not any(e.preferred for e in examples):
        raise InputError(
            f"all examples to fit have the label {examples[0].label}, such as {examples[0].where}: "
            "a controller could only learn to prefer that place. Put right answers in several."
        )
    answers = read_answers(lm, examples, progress)
    log_p, slopes = log_probabilities(lm, answers.z, answers.tokens, slopes=True)
    gains = prototype_gains(lm, answers, route(lm, answers.z), slopes)
    scored = Scored(answers.total(log_p), gains, answers.starts, answers.right)
    offsets, pull, _ = choose(scored, seed)
    turned = np.flatnonzero(np.abs(offsets) > TURNED).tolist()
    scales = tuple((i, float(np.float32(1 + offsets[i]))) for i in turned)
    made = {"fitted": len(examples), "seed": seed}
    controller = Controller(scales, prototypes_fingerprint(lm.head), description, made)
    asked = read_answers(lm, test, progress)

    def answered() -> np.ndarray:
        scores = asked.total(log_probabilities(lm, asked.z, asked.tokens)[0])
        return is_right(scores, asked.starts, asked.right)

    before = answered()
    with applied(lm.model, plan_for(lm, [controller])):
        after = answered()
    turns = [{"prototype": i, "scale": s} for i, s in scales]
    change = bootstrap(after * 1.0 - before, seed=seed)
    report = {"controller": turns, "fitted": len(examples), "tested": len(test)}
    report |= {"before": float(before.mean()), "after": float(after.mean()), "change": change}
    return controller, report | {"pull": pull, "cut": answers.cut + asked.cut}
