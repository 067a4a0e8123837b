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

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prismlm.corpus.encode import encode_text
from prismlm.errors import FormatError, InputError, check_path, shown
from prismlm.files import read_text
from prismlm.interventions.controller import Controller
from prismlm.lens.layout import prototypes_fingerprint
from prismlm.lens.opened_model import OpenedModel, check_embedded
from prismlm.models.seam import capture, output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.models.watch import evaluating
from prismlm.ops.prototype_head.fast import gather_sum
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import Interval, bootstrap

TOKENS_PER_BATCH = 512
# States whose logits are in memory at once; larger blocks are slower on a CPU.
STATES = 128
LARGEST, FOLDS, STEPS, PULLS, PATIENCE = 5.0, 5, 150, 10, 2
# An offset from 1 that is none, and a step that ends a fit.
TURNED, CLOSE = 1e-6, 1e-5
Forward = Callable[[Tensor], Tensor]
EXPECTED = "context, choices and label, or prompt, chosen and rejected"


class Example(NamedTuple):
    """A question: what stands before each answer, the answers, and the number of the right one."""

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    label: int
    where: str = "the example"  # for messages
    preferred: bool = False  # a text to prefer, which comes first, and one to avoid


@dataclass(frozen=True)
class Answers:
    """Read answers of Q questions, C in all, of T tokens in all."""

    z: Tensor  # states before each token, [T, d]
    tokens: Tensor  # [T]
    answer: Tensor  # the answer that each token belongs to, [T]
    question: np.ndarray  # of each answer, [C]
    right: np.ndarray  # the right answer of each question, [Q]
    cut: int = 0  # answers whose context was cut on the left

    def __len__(self) -> int:
        return len(self.right)

    @property
    def starts(self) -> np.ndarray:
        """The first answer of each question, [Q]."""
        return np.flatnonzero(np.diff(self.question, prepend=-1))

    def total(self, values: Tensor) -> np.ndarray:
        """Return the sum of figures of tokens [T] over each answer, [C]."""
        weights = values.double().numpy()
        return np.bincount(self.answer.numpy(), weights, len(self.question))


def read_examples(path: Path | str) -> list[Example]:
    """Read labelled examples from JSON lines or Parquet.

    Rows have ``context``, ``choices`` and ``label`` (from 0), where ``context`` may be a list, one
    for each choice; or ``prompt``, ``chosen`` and ``rejected``. A blank is put between context and
    answer where there is none. InputError names the row that is neither.
    """
    path = check_path("the task", path)
    if not path.is_file():
        raise InputError(
            f"there is no file {path}: expected labelled examples, rows of {EXPECTED}."
        )
    if path.suffix == ".parquet":
        try:
            rows = pq.read_table(path).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise FormatError(f"{path} cannot be read as Parquet: {error}.") from error
        numbered = list(enumerate(rows, start=1))
    elif path.suffix == ".jsonl":
        lines = enumerate(read_text(path).splitlines(), start=1)
        numbered = [(n, _parsed(line, f"{path}:{n}")) for n, line in lines if line.strip()]
    else:
        raise InputError(f"{path}: expected a name that ends with .jsonl or .parquet.")
    if not numbered:
        raise InputError(f"{path} has no rows: expected {EXPECTED}.")
    return [_example(row, f"{path}:{number}") for number, row in numbered]


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON ({error}): expected {EXPECTED}.") from error


def _example(row: Any, where: str) -> Example:
    """Return the example of a row."""
    row = row if isinstance(row, dict) else {}
    preferred = {"prompt", "chosen", "rejected"} <= row.keys()
    if preferred:
        row = row | {"context": row["prompt"], "choices": [row["chosen"], row["rejected"]]}
        row["label"] = 0
    if not {"context", "choices", "label"} <= row.keys():
        raise InputError(f"{where} has {', '.join(row) or 'no columns'}: expected {EXPECTED}.")
    choices, context, label = row["choices"], row["context"], row["label"]
    contexts = context if isinstance(context, list) else [context] * len(choices or ())
    if not isinstance(choices, list) or len(choices) < 2 or len(contexts) != len(choices):
        raise InputError(
            f"{where} has the choices {shown(choices)}: expected a list of two texts or more, and "
            "one context, or one for each."
        )
    if not all(isinstance(text, str) and text.strip() for text in (*contexts, *choices)):
        raise InputError(f"{where} has an empty context or choice: expected texts.")
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(choices):
        raise InputError(
            f"{where} has the label {shown(label)}: expected the number of the right choice, 0 to "
            f"{len(choices) - 1}."
        )
    pairs = zip(contexts, choices, strict=True)
    apart = [c if b[-1].isspace() or c[0].isspace() else f" {c}" for b, c in pairs]
    return Example(tuple(contexts), tuple(apart), label, where, preferred)


def _check_examples(examples: Sequence[Example]) -> None:
    """Raise InputError for examples that no controller can be fitted to."""
    most = max((len(example.choices) for example in examples), default=2)
    if len(examples) < (least := max(2 * FOLDS, most)):
        raise InputError(
            f"there are {len(examples)} examples of up to {most} choices to fit: expected at least "
            f"{least}, and some hundred for a controller that helps."
        )
    if len({e.label for e in examples}) == 1 and not any(e.preferred for e in examples):
        raise InputError(
            f"every example has the label {examples[0].label}, from {examples[0].where} on, so a "
            "controller could only learn to prefer that place: put right answers in different ones."
        )


def read_answers(
    lm: OpenedModel,
    examples: Sequence[Example],
    progress: Reporter = SILENT,
    *,
    limit: int | None = None,
    forward: Forward | None = None,
) -> Answers:
    """Return the states before each token of every answer, from one pass over the examples.

    Answers with the same tokens before them share a row of the pass. Contexts are cut on the left
    to the model's context length or ``limit`` tokens. ``forward`` takes ids [B, T] to states
    [B, T, d], by default z.
    """
    encoded, questions, right, cut = [], [], [], 0
    longest = min((n for n in (limit, lm.context_length) if n is not None), default=None)
    for number, example in enumerate(examples):
        pairs = _encode(lm, example)
        right.append(len(encoded) + example.label)
        for before, tokens in pairs:
            room = len(before) if longest is None else longest + 1 - len(tokens)
            if room < 1:
                raise InputError(
                    f"{example.where} has a choice of {len(tokens):,} tokens, and {lm.path.name} "
                    f"reads {longest:,}: shorten it."
                )
            cut += len(before) > room
            encoded.append((before[-room:], tokens))
            questions.append(number)
    z = _states(lm, encoded, forward or (lambda ids: _last_states(lm, ids)), progress)
    answer = [n for n, (_, tokens) in enumerate(encoded) for _ in tokens]
    return Answers(
        z,
        torch.tensor([token for _, tokens in encoded for token in tokens]),
        torch.tensor(answer),
        np.array(questions),
        np.array(right),
        cut,
    )


def _encode(lm: OpenedModel, example: Example) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of context and answer, of the two encoded together, for each answer."""
    pairs: list[tuple[list[int], list[int]]] = []
    for context, choice in zip(example.contexts, example.choices, strict=True):
        # As lm-eval does: a blank at the end of a context belongs to the answer's first word.
        start = context.rstrip()
        whole = encode_text(lm.tokenizer, context + choice, end=False)
        before = encode_text(lm.tokenizer, start, end=False)
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


def _last_states(lm: OpenedModel, ids: Tensor) -> Tensor:
    with capture(lm.model, logits=False) as captured:
        lm.model(input_ids=ids, use_cache=False)
    return captured.z


def _states(
    lm: OpenedModel,
    encoded: Sequence[tuple[list[int], list[int]]],
    forward: Forward,
    progress: Reporter,
) -> Tensor:
    """Return the states before each token of the answers, [T, d]."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, (before, tokens) in enumerate(encoded):
        rows.setdefault(tuple(before + tokens[:-1]), []).append(number)
    ordered, states = sorted(rows, key=len), {}
    with evaluating(lm.model), progress.task("Reading answers", len(encoded), "answers") as task:
        while ordered:
            length = len(ordered[0])
            count = max(1, TOKENS_PER_BATCH // length)
            batch, ordered = ordered[:count], ordered[count:]
            # Padded on the right, which a causal model does not see.
            ids = pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
            for row, z in zip(batch, forward(ids.to(lm.model.device)).cpu(), strict=True):
                for number in rows[row]:
                    states[number] = z[len(row) - len(encoded[number][1]) : len(row)].clone()
            task.advance(sum(len(rows[row]) for row in batch))
    return torch.cat([states[number] for number in range(len(encoded))])


class Routed(NamedTuple):
    """Active prototypes of states and their activations, [T, k]."""

    indices: Tensor
    activations: Tensor

    def moved(self, z: Tensor, prototypes: Tensor, offsets: Tensor) -> Tensor:
        """Return z′ = z + Σ_i (s_i − 1) α_i p_i for offsets s − 1 [K]."""
        change = self.activations * offsets[self.indices]
        blocks = zip(change.split(STATES), self.indices.split(STATES), strict=True)
        return z.float() + torch.cat([gather_sum(i, c, prototypes) for c, i in blocks])


@torch.no_grad()
def route(lm: OpenedModel, z: Tensor) -> Routed:
    """Return the prototypes of states [T, d]."""
    blocks = [block.to(lm.model.device).float() for block in z.split(STATES)]
    routings = [lm.head(block).routing for block in blocks]
    return Routed(
        torch.cat([routing.indices.cpu() for routing in routings]),
        torch.cat([routing.activations.cpu() for routing in routings]),
    )


@torch.no_grad()
def log_probabilities(
    lm: OpenedModel, z: Tensor, tokens: Tensor, *, slopes: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log p of a token at each state [T], and its gradient in the state, [T, d] or nothing.

    The gradient, its slope, is scale · (W_y − Σ_v p_v W_v), before a soft-cap.
    """
    weight, bias = weight_of(lm.model).float(), getattr(output_embedding(lm.model), "bias", None)
    bias, softcap = None if bias is None else bias.detach().float(), lm.logit_map.softcap
    values, gradients = [], [torch.zeros(0, z.shape[1])]
    for part, wanted in zip(z.split(STATES), tokens.split(STATES), strict=True):
        block, targets = part.to(weight.device), wanted.to(weight.device)
        logits = lm.logit_map(F.linear(block.float(), weight, bias))
        # log_softmax takes a fraction of the time of logsumexp on a CPU.
        log_p = logits.log_softmax(-1)
        values.append(log_p.gather(1, targets[:, None])[:, 0].cpu())
        if slopes:
            rest = log_p.exp_().neg_()
            rest[torch.arange(len(targets)), targets] += 1
            if softcap is not None:
                rest *= 1 - (logits / softcap) ** 2
            gradients.append(lm.logit_map.scale * (rest @ weight).cpu())
    return torch.cat(values), torch.cat(gradients)


class Scored(NamedTuple):
    """Scores of C answers and how they change with the scales, linearised."""

    scores: np.ndarray  # Σ_t log p(y_t), [C]
    gains: sparse.csr_array  # g, [C, K]
    starts: np.ndarray  # first answer of each question, [Q]
    right: np.ndarray  # [Q]

    def part(self, questions: np.ndarray) -> Scored:
        """Return some of the questions."""
        ends = np.append(self.starts[1:], len(self.scores))
        counts = ends[questions] - self.starts[questions]
        starts = np.cumsum(counts) - counts
        rows = np.repeat(self.starts[questions] - starts, counts) + np.arange(counts.sum())
        right = self.right[questions] - self.starts[questions] + starts
        return Scored(self.scores[rows], self.gains[rows], starts, right)

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


def linearised(answers: Answers, scores: np.ndarray, gains: sparse.csr_array) -> Scored:
    """Return scores with gains [C, n], less their mean over the answers of each question.

    The loss is blind to that mean.
    """
    question, count = answers.question, len(answers.question)
    of_question = sparse.csr_array((np.ones(count), question, np.arange(count + 1)))
    means = (of_question.T / np.bincount(question)[:, None]) @ gains
    centred = sparse.csr_array(gains - of_question @ means)
    return Scored(scores, centred, answers.starts, answers.right)


def prototype_gains(
    lm: OpenedModel, answers: Answers, routed: Routed, slopes: Tensor
) -> sparse.csr_array:
    """Return g [C, K]: the sum over an answer's tokens of α_i · slope·p_i."""
    bank, blocks = bank_of(lm), zip(routed.indices.split(STATES), slopes.split(STATES), strict=True)
    along = torch.cat([(bank[i] @ slope[:, :, None])[:, :, 0] for i, slope in blocks])
    gains = (along * routed.activations).double()
    rows = answers.answer[:, None].expand_as(gains)
    entries = gains.flatten().numpy(), (rows.flatten().numpy(), routed.indices.flatten().numpy())
    return sparse.csr_array(sparse.coo_array(entries, (len(answers.question), len(bank))))


def fit(
    scored: Scored, pull: float, start: np.ndarray | None = None, steps: int = STEPS
) -> np.ndarray:
    """Return the offsets u = s − 1 [K] in [−1, 4] that minimise mean loss + pull · Σ |u_i|.

    By FISTA (Beck and Teboulle, 2009) with the step of the largest curvature.
    """
    gains, scores, count = scored.gains, scored.scores, len(scored.right)
    turned = sparse.csr_array(gains.T)
    # A softmax's curvature is at most 1/2.
    step = 2 * count / max(_largest_eigenvalue(gains, turned), 1e-12)
    u = np.zeros(turned.indptr.size - 1) if start is None else start
    ahead, t = u, 1.0
    for _ in range(steps):
        gradient = turned @ scored.loss(scores + gains @ ahead)[1] / count
        new = ahead - step * gradient
        new = np.sign(new) * np.maximum(np.abs(new) - step * pull, 0)
        new = np.clip(new, -1, LARGEST - 1)
        faster = (1 + np.sqrt(1 + 4 * t * t)) / 2
        still = np.abs(new - u).max() < CLOSE
        ahead, u, t = new + (t - 1) / faster * (new - u), new, faster
        if still:
            break
    return u


def _largest_eigenvalue(gains: sparse.csr_array, turned: sparse.csr_array) -> float:
    """Return that of gᵀg, by 30 power iterations, and a tenth more."""
    vector, value = np.random.default_rng(0).normal(size=turned.indptr.size - 1), 0.0
    for _ in range(30):
        vector = turned @ (gains @ vector)
        value = float(np.linalg.norm(vector))
        vector = vector / max(value, 1e-300)
    return 1.1 * value


class Chosen(NamedTuple):
    """What cross-validation chose: offsets, and the held-out loss of each pull."""

    offsets: np.ndarray
    pull: float
    pulls: list[float]
    losses: list[float]


def choose(scored: Scored, seed: int = 0) -> Chosen:
    """Fit with the strongest pull whose held-out loss is the least, or within its standard error.

    The loss is over five folds, and the error that of the paired differences. Pulls go down from
    the least that leaves every prototype alone, until losses have risen.
    """
    count, fits = len(scored.right), list[np.ndarray | None]([None] * FOLDS)
    gradient = scored.loss(scored.scores)[1] @ scored.gains / count
    pulls = float(np.abs(gradient).max()) * np.geomspace(1, 0.05, PULLS)
    fold = np.random.default_rng(seed).permutation(count) % FOLDS
    outer = [np.flatnonzero(fold == held) for held in range(FOLDS)]
    parts = [(scored.part(np.flatnonzero(fold != n)), scored.part(outer[n])) for n in range(FOLDS)]
    losses, least = list[np.ndarray](), np.zeros(count)
    for pull in pulls:
        lost = np.zeros(count)
        for n, (inner, held) in enumerate(parts):
            fits[n] = u = fit(inner, pull, fits[n])
            lost[outer[n]] = held.loss(held.scores + held.gains @ u)[0]
        losses.append(lost)
        least = losses[int(np.argmin([one.mean() for one in losses]))]
        if not any(one is least for one in losses[-1 - PATIENCE :]):
            break
    worse = [one - least for one in losses]
    near = [one.mean() <= one.std() / count**0.5 for one in worse]
    best, u = near.index(True), None
    for pull in pulls[: best + 1]:
        u = fit(scored, pull, u)
    assert u is not None
    means = [float(one.mean()) for one in losses]
    return Chosen(u, float(pulls[best]), pulls[: len(losses)].tolist(), means)


@dataclass(frozen=True)
class Calibration:
    """A fitted controller, and its accuracy on examples that it was not fitted on.

    Accuracies are of the model with the edited states themselves; the interval of their
    difference, in shares of the questions, is over resampled questions.
    """

    controller: Controller
    fitted: int
    tested: int
    before: float
    after: float
    change: Interval
    chosen: Chosen
    cut: int  # answers whose context was cut on the left

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of ``prismlm calibrate --json``."""
        fields = {"fitted": self.fitted, "tested": self.tested, "cut": self.cut}
        fields |= {"before": self.before, "after": self.after, "change": vars(self.change)}
        fields |= {"pull": self.chosen.pull, "pulls": self.chosen.pulls}
        fields |= {"held_out_losses": self.chosen.losses}
        turned = [{"prototype": i, "scale": s} for i, s in self.controller.scales]
        return fields | {"prototypes": turned}


def calibrate(
    lm: OpenedModel,
    examples: Sequence[Example],
    test: Sequence[Example] | None = None,
    *,
    seed: int = 0,
    description: str = "",
    progress: Reporter = SILENT,
) -> Calibration:
    """Fit a controller on examples, and measure it on others: by default on a fifth held out.

    Without a prototype whose scale lowers the held-out loss, the controller is empty.
    """
    if test is None:
        order = np.random.default_rng(seed).permutation(len(examples))
        held = len(examples) // FOLDS
        test, examples = ([examples[n] for n in part] for part in (order[:held], order[held:]))
    _check_examples(examples)
    answers = read_answers(lm, examples, progress)
    routed = route(lm, answers.z)
    log_p, slopes = log_probabilities(lm, answers.z, answers.tokens, slopes=True)
    gains = prototype_gains(lm, answers, routed, slopes)
    chosen = choose(linearised(answers, answers.total(log_p), gains), seed)
    controller = as_controller(lm, chosen.offsets, description, fitted=len(answers), seed=seed)
    asked = read_answers(lm, test, progress)
    right = []
    for z in (asked.z, route(lm, asked.z).moved(asked.z, bank_of(lm), offsets_of(lm, controller))):
        scores = asked.total(log_probabilities(lm, z, asked.tokens)[0])
        right.append(is_right(scores, asked.starts, asked.right))
    change = bootstrap(right[1] * 1.0 - right[0], seed=seed)
    before, after = (float(answered.mean()) for answered in right)
    cut, counts = answers.cut + asked.cut, (len(answers), len(asked))
    return Calibration(controller, *counts, before, after, change, chosen, cut)


def as_controller(
    lm: OpenedModel, offsets: np.ndarray, description: str = "", **made: Any
) -> Controller:
    """Return the controller of offsets s − 1 [K]; prototypes at 1 are left out."""
    turned = np.flatnonzero(np.abs(offsets) > TURNED).tolist()
    scales = tuple((i, float(np.float32(1 + offsets[i]))) for i in turned)
    return Controller(scales, prototypes_fingerprint(lm.head), description, made)


def offsets_of(lm: OpenedModel, controller: Controller) -> Tensor:
    """Return s − 1 of every prototype, [K]."""
    offsets = torch.zeros(lm.head.num_prototypes)
    offsets[controller.prototypes] = torch.tensor(controller.factors) - 1
    return offsets


def bank_of(lm: OpenedModel) -> Tensor:
    """Return the prototypes in float32 on the CPU, [K, d]."""
    return lm.head.prototypes.detach().float().cpu()
