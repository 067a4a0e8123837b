"""Controllers fitted on eight tasks, beside their controls: docs/results/control_calibrate.json.

    prismlm demo --no-serve --out prismlm-demo
    python -m benchmarks.control.calibrate states prismlm-demo/model --data lm_eval \
        --text wikitext2.txt --work WORK
    python -m benchmarks.control.calibrate fit prismlm-demo/model --data lm_eval \
        --text wikitext2.txt --work WORK

``states`` reads every question once, with the decoder in bfloat16; ``fit`` needs the output layer
alone. Questions of one task are drawn by a seed into those to fit and those to test; three draws
of the former are fitted. DATA has Parquet files as ``prismlm eval suite`` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import prismlm
from benchmarks.control.local_tasks import documents, right_answer
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.eval.suite import SEED, Benchmark, SuiteOptions, select_questions
from prismlm.files import read_json, write_json
from prismlm.interventions.calibration import (
    FOLDS,
    STATES,
    TURNED,
    Answers,
    Example,
    Scored,
    choose,
    is_right,
    log_probabilities,
    prototype_gains,
    read_answers,
    route,
)
from prismlm.ops.prototype_head import Nearest
from prismlm.ops.prototype_head.fast import gather_sum

# Questions to draw from, and to test.
POOL, TEST, FITTED, SEEDS = 600, 500, 400, 3
TEXT, WINDOW = 4_096, 512  # held-out tokens for perplexity
DIRECTIONS, CHECKS, LORA_RATES = 128, (0, 10, 30), (3e-3, 3e-2)
LONGEST = 320  # tokens; contexts are cut on the left
TRAIN = {"arc_challenge": "train", "arc_easy": "train", "openbookqa": "train", "mmlu": "val"}


def questions_of(benchmark: Benchmark, data: Path) -> tuple[list[Example], list[Example]]:
    """Return the questions to draw from and those to test: other files, or other rows of one."""
    pool, test, own = POOL, TEST, TRAIN.get(benchmark.name)

    def drawn(count: int, suffix: str | None = None) -> list[Example]:
        options = SuiteOptions(limit=count)
        chosen = select_questions(benchmark, options, documents(data, suffix))[0]
        order = np.random.default_rng(0).permutation(len(chosen))
        return [
            Example(
                tuple(before for before, _ in chosen[n].pairs),
                tuple(answer for _, answer in chosen[n].pairs),
                right_answer(chosen[n]),
                f"question {chosen[n].number} of {benchmark.name}",
            )
            for n in order
            # One question of OpenBookQA has an answer twice.
            if len(set(chosen[n].pairs)) == len(chosen[n].pairs)
        ]

    if own:
        return drawn(pool, own), drawn(test)
    together = drawn(pool + test)
    return together[:pool], together[pool:]


@torch.no_grad()
def read_states(lm: prismlm.PrismLM, data: Path, text: Path, work: Path) -> None:
    """Write the answers of every task: z, and what enters the last norm and the last MLP's end."""
    model: Any = lm.model
    model = model.to(torch.bfloat16)
    model.config.max_position_embeddings = LONGEST
    decoder, seen = model.get_decoder(), {}
    for name, module in (("h", decoder.norm), ("a", decoder.layers[-1].mlp.down_proj)):
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))

    def forward(ids: Tensor) -> Tensor:
        z = decoder(input_ids=ids, use_cache=False).last_hidden_state
        return torch.cat([z, seen["h"], seen["a"]], -1)

    def last_states(_: Any, rows: list[list[int]], counts: list[int]) -> Tensor:
        states = forward(pad_sequence([torch.tensor(row) for row in rows], batch_first=True))
        ends = zip(states, rows, counts, strict=True)
        return torch.cat([each[len(row) - count : len(row)] for each, row, count in ends])

    if not (work / "text.pt").is_file():
        ids = torch.tensor(lm.tokenizer(text.read_text())["input_ids"][: TEXT + 1])
        windows = [forward(ids[None, n : n + WINDOW])[0] for n in range(0, TEXT, WINDOW)]
        none = torch.zeros(TEXT, dtype=torch.int64)
        z = torch.cat(windows)[:TEXT]
        torch.save(Answers(z, ids[1:], none, np.zeros(1, int), np.zeros(1, int)), work / "text.pt")
    for benchmark in SEED:
        path = work / f"{benchmark.name}.pt"
        if path.is_file():
            continue
        parts: dict[str, Answers] = {}
        for part, examples in zip(("fit", "test"), questions_of(benchmark, data), strict=True):
            with patch("prismlm.models.seam.last_states", last_states):
                parts[part] = read_answers(lm, examples)
            print(benchmark.name, part, len(examples), len(parts[part].tokens), flush=True)
        torch.save(parts, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


def part_of(lm: prismlm.PrismLM, answers: Answers, *, slopes: bool) -> Part:
    """Split the columns of stored states: z, the last norm's input and the MLP's."""
    width = lm.head.width
    z, normed, inner = answers.z.float().split([width, width, answers.z.shape[1] - 2 * width], 1)
    log_p, slope = log_probabilities(lm, z, answers.tokens, slopes=slopes)
    own = replace(answers, z=z)
    slope = slope if slopes else torch.zeros(len(z), 0)
    return Part(own, route(lm, z), own.total(log_p), slope, normed, inner)


class Part(NamedTuple):
    """Answers with the prototypes of their states, scores, and for LoRA two inputs."""

    answers: Answers
    routed: Nearest
    scores: np.ndarray
    slope: Tensor  # of log p in z, [T, d]
    normed: Tensor  # what enters the last norm, [T, d]
    inner: Tensor  # what enters the last MLP's second matrix, [T, m]

    def questions(self, chosen: np.ndarray) -> Part:
        """Return some of the questions."""
        answers = self.answers
        kept = np.isin(answers.question, chosen)
        tokens = torch.tensor(kept)[answers.answer]
        number = np.cumsum(kept) - 1
        first = np.unique(answers.question[kept], return_inverse=True)[1]
        own = Answers(
            answers.z[tokens],
            answers.tokens[tokens],
            torch.tensor(number)[answers.answer[tokens]],
            first,
            number[answers.right[np.unique(answers.question[kept])]],
        )
        routed = Nearest(*(column[tokens] for column in self.routed))
        rest = [column[tokens] for column in self[3:]]
        return Part(own, routed, self.scores[kept], *rest)

    def right(self, lm: prismlm.PrismLM, z: Tensor) -> np.ndarray:
        """Return which questions are answered rightly from edited states, by their own logits."""
        scores = self.answers.total(log_probabilities(lm, z, self.answers.tokens)[0])
        return is_right(scores, self.answers.starts, self.answers.right)


def random_alike(own: Scored, offsets: np.ndarray, seed: int) -> np.ndarray:
    """Fit as many random prototypes, of those active in the examples, in the same way."""
    turned = np.flatnonzero(np.abs(offsets) > TURNED)
    active = np.setdiff1d(np.unique(own.gains.indices), turned)
    drawn = np.random.default_rng(seed).choice(active, max(1, len(turned)), replace=False)
    columns = np.arange(offsets.size)
    kept = sparse.csr_array(sparse.diags_array(np.isin(columns, drawn) * 1.0))
    return choose(own._replace(gains=sparse.csr_array(own.gains @ kept)), seed)[0]


class Probe(NamedTuple):
    """z′ = z + Σ_j w_j (u_j·(z − z̄)) u_j along the principal directions u_j of the examples' z."""

    mean: Tensor
    directions: Tensor  # [n, d], the leading ones
    weights: Tensor  # [n]

    def __call__(self, z: Tensor) -> Tensor:
        """Return z′."""
        along = (z - self.mean) @ self.directions.T
        return z + (along * self.weights) @ self.directions


def probe(part: Part, seed: int) -> Probe:
    """Fit scales of principal directions as those of prototypes are fitted."""
    z = part.answers.z
    mean = z.mean(0)
    _, _, found = torch.linalg.svd(z[:: max(1, len(z) // 5000)] - mean, full_matrices=False)
    directions = found[:DIRECTIONS]
    each = ((z - mean) @ directions.T) * (part.slope @ directions.T)
    summed = torch.zeros(len(part.scores), DIRECTIONS).index_add(0, part.answers.answer, each)
    gains = sparse.csr_array(summed.double().numpy())
    own = Scored(part.scores, gains, part.answers.starts, part.answers.right)
    weights = choose(own, seed)[0]
    return Probe(mean, directions, torch.tensor(weights, dtype=torch.float32))


class LoRA(NamedTuple):
    """Rank one on the second matrix of the last layer's MLP: it adds (a·A) B before the norm."""

    norm: Any
    down: Tensor  # A [m]
    up: Tensor  # B [d]

    def __call__(self, part: Part) -> Tensor:
        """Return z′."""
        return self.norm(part.normed + (part.inner @ self.down)[:, None] * self.up)


def trained_lora(lm: prismlm.PrismLM, part: Part, seed: int) -> tuple[LoRA, float, int]:
    """Train by Adam on the same loss, linearised in z; rate and steps are by a held-out fifth.

    Its loss is the true one.
    """
    order = np.random.default_rng(seed).permutation(len(part.answers.right))
    held = len(order) // FOLDS
    outer, inner = part.questions(order[:held]), part.questions(order[held:])
    answers, losses = outer.answers, {}
    for rate in LORA_RATES:
        for steps, lora in zip(CHECKS, lora_steps(lm, inner, rate, seed, CHECKS[-1]), strict=True):
            scores = answers.total(log_probabilities(lm, lora(outer), answers.tokens)[0])
            none = sparse.csr_array((len(scores), 0))
            loss, _ = Scored(scores, none, answers.starts, answers.right).loss(scores)
            losses[rate, steps] = float(loss.mean())
    rate, steps = min(losses, key=losses.__getitem__)
    *_, last = lora_steps(lm, part, rate, seed, steps)
    return last, rate, steps


def lora_steps(
    lm: prismlm.PrismLM, part: Part, rate: float, seed: int, steps: int
) -> Iterator[LoRA]:
    """Yield the adapter after each number of steps of ``CHECKS`` up to ``steps``."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(part.inner.shape[1], generator=generator) / part.inner.shape[1] ** 0.5
    lora = LoRA(
        lm.model.get_decoder().norm,
        down.requires_grad_(),
        torch.zeros(lm.head.width, requires_grad=True),
    )
    optimiser = torch.optim.Adam([lora.down, lora.up], lr=rate)
    answers, base = part.answers, torch.tensor(part.scores, dtype=torch.float32)
    for step in range(steps + 1):
        if step in CHECKS:
            with torch.no_grad():
                yield lora
        if step == steps:
            return
        moved = ((lora(part) - answers.z) * part.slope).sum(1)
        scores = base.index_add(0, answers.answer, moved)
        question = torch.tensor(answers.question)
        top = torch.full((len(answers.right),), -torch.inf).scatter_reduce(
            0, question, scores.detach(), "amax"
        )
        total = torch.zeros(len(answers.right)).index_add(
            0, question, (scores - top[question]).exp()
        )
        loss = (total.log() + top - scores[torch.tensor(answers.right)]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def measure(lm: prismlm.PrismLM, parts: dict[str, Answers], text: Part) -> dict[str, Any]:
    """Fit all methods to each draw of one task's questions, and test them."""
    pool, test = (part_of(lm, parts[name], slopes=name == "fit") for name in ("fit", "test"))
    before = is_right(test.scores, test.answers.starts, test.answers.right)
    places, runs = test.answers.right - test.answers.starts, list[dict[str, Any]]()
    for seed in range(SEEDS):
        drawn = np.random.default_rng(seed).permutation(len(pool.answers.right))[:FITTED]
        for name, (edit, facts) in fitted(lm, pool.questions(drawn), seed).items():
            with torch.no_grad():
                right = test.right(lm, edit(test))
                log_p, _ = log_probabilities(lm, edit(text), text.answers.tokens)
            perplexity = float(np.exp(-log_p.double().mean()))
            row = {"method": name, "seed": seed, "perplexity": perplexity} | facts
            print(row, before.mean(), right.mean(), flush=True)
            runs.append(row | {"right": digits(right)})
    return {
        "questions": len(before),
        "cut": [parts[name].cut for name in ("fit", "test")],
        "chance": float(np.mean(1 / np.bincount(test.answers.question))),
        "before": digits(before),
        "most_common": float(np.bincount(places).max() / len(before)),
        "perplexity": float(np.exp(-text.scores.sum() / len(text.answers.tokens))),
        "runs": runs,
    }


def digits(right: np.ndarray) -> str:
    """Return 1 for each question that is answered rightly, else 0."""
    return "".join(map(str, right.astype(int)))


def fitted(lm: prismlm.PrismLM, part: Part, seed: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return each method's edit, a function from a part to z′, and the facts of its fit."""
    gains = prototype_gains(lm, part.answers, part.routed, part.slope)
    own = Scored(part.scores, gains, part.answers.starts, part.answers.right)
    offsets, _, heldout = choose(own, seed)
    others = random_alike(own, offsets, seed)
    scales, (lora, rate, steps) = probe(part, seed), trained_lora(lm, part, seed)
    turned = np.flatnonzero(np.abs(offsets) > TURNED)
    facts: dict[str, dict[str, Any]] = {
        "controller": {"parameters": len(turned), "losses": heldout},
        "random": {"parameters": int((np.abs(others) > TURNED).sum())},
        "probe": {"parameters": int((scales.weights.abs() > TURNED).sum())},
        "lora": {"parameters": len(lora.down) + len(lora.up), "rate": rate, "steps": steps},
    }
    facts["controller"]["scales"] = [[int(i), float(1 + offsets[i])] for i in turned]
    scaled = (lambda one, u=u: moved(lm, one, u) for u in (offsets, others))
    edits = (*scaled, lambda one: scales(one.answers.z), lora)
    return dict(zip(facts, zip(edits, facts.values(), strict=True), strict=True))


def moved(lm: prismlm.PrismLM, part: Part, offsets: np.ndarray) -> Tensor:
    """Return z′ = z + Σ_i (s_i − 1) α_i p_i for offsets s − 1 [K]."""
    (indices, _, activations), bank = part.routed, lm.head.prototypes.detach().float()
    change = activations * torch.tensor(offsets, dtype=torch.float32)[indices]
    blocks = zip(indices.split(STATES), change.split(STATES), strict=True)
    return part.answers.z.float() + torch.cat([gather_sum(i, c, bank) for i, c in blocks])


def main() -> None:
    """Run a stage."""
    parser = script_options(__doc__, RESULTS / "control_calibrate.json")
    parser.add_argument("stage", choices=("states", "fit"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="Parquet files of the tasks")
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    args.work.mkdir(parents=True, exist_ok=True)
    lm = prismlm.load(args.model)
    if args.stage == "states":
        read_states(lm, args.data, args.text, args.work)
        return
    # Products in bfloat16, summed in float32.
    torch.set_float32_matmul_precision("medium")
    text = part_of(lm, torch.load(args.work / "text.pt", weights_only=False), slopes=False)
    paths = {benchmark: args.work / f"{benchmark.name}.pt" for benchmark in SEED}
    # The one with the longest answers comes last.
    for benchmark, path in sorted(paths.items(), key=lambda item: item[1].stat().st_size):
        done = path.with_suffix(".json")
        if not done.is_file():
            parts = torch.load(path, weights_only=False)
            task = {"title": benchmark.title, "environment": environment()}
            write_json(done, task | measure(lm, parts, text))
    tasks = {one.name: read_json(path.with_suffix(".json")) for one, path in paths.items()}
    head = {"prototypes": lm.head.num_prototypes, "per_token": lm.head.prototypes_per_token}
    setting = {"pool": POOL, "fitted": FITTED, "draws": SEEDS, "longest": LONGEST, "text": TEXT}
    write_json(args.out, {"environment": environment(), "model": head} | setting | {"tasks": tasks})


if __name__ == "__main__":
    main()
