"""Estimates of a removal against the models that ``what_if.py`` trained without documents.

    python -m benchmarks.control.what_if_judged WORK

Head and lens are attached to the model of all documents. Each estimate and control is fitted to
the questions of half of the documents, and judged by those of the other half. What is fitted for
the package's own is what ``src/prismlm/explain/what_if.json`` holds; ``--calibrate`` writes it.
EK-FAC is a control if ``ekfac.py`` has run in WORK.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import sparse
from scipy.optimize import linprog, minimize_scalar

import prismlm
from benchmarks.attribution.retrieval import BM25
from benchmarks.control.what_if import OPTIONS, SEED, Documents, Teaching, opened
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.demo.texts import pairs_path
from prismlm.explain import what_if
from prismlm.files import read_json, write_json
from prismlm.statistics import spearman
from prismlm.training import AttachOptions, FitOptions, attach, tuning
from prismlm.training.tuning import write_adapter

HEAD = FitOptions(prototypes=512, prototypes_per_token=16, weights="fitted")
POWERS, DRAWS, LEVEL = (1, 2, 3, 4, 5), 200, 0.9
# Of these, by how much evidence is ahead of the others.
COMPARED = ("rank_all", "rank_own", "explained")
Fit = Callable[[float], np.ndarray]


def model_of(work: Path) -> prismlm.explain.language_model.PrismLM:
    """Return the model of all documents with head and lens, attached if it is not there."""
    if not (work / "model" / "prismlm.json").exists():
        pairs, model, documents = opened("", work)
        rows = pq.read_table(pairs_path()).to_pylist()
        held_out = [row for row in rows if row["split"] == "heldout"]
        pq.write_table(pa.Table.from_pylist(pairs + held_out), work / "corpus.parquet")

        def taught(*_: Any, base: str, note: dict[str, float], **__: Any) -> None:
            teaching = Teaching(documents, model, set(), SEED)
            write_adapter(teaching.learned, teaching.taught(), base, work / "model/adapter", note)

        tuning.adapt = taught
        options = AttachOptions(fit=HEAD, window=256, contexts=4, heldout_tokens=2000, lora=OPTIONS)
        attach(str(work / "smollm2"), [work / "corpus.parquet"], work / "model", options)
    return prismlm.load(work / "model")


class Bank:
    """What every model gives every answer, and what the full one's lens says of it."""

    def __init__(self, work: Path) -> None:
        self.pairs = pq.read_table(work / "documents.parquet").to_pylist()
        sets, self.work = read_json(work / "sets.json"), work
        self.names = [n for n, s in sets.items() if s and (work / f"{n}.npz").exists()]
        self.sizes = np.load(work / "sizes.npy")
        self.document = np.arange(len(self.sizes)) % len(self.pairs)
        self.removed = np.zeros((len(self.names), len(self.pairs)), dtype=bool)
        for row, name in zip(self.removed, self.names, strict=True):
            row[sets[name]] = True
        self.full, self.base = self.given("full"), self.given("base")
        self.true = np.stack([self.mean(self.given(name) - self.full) for name in self.names])
        self.own = self.removed[:, self.document]
        half = np.random.default_rng(SEED).permutation(len(self.pairs))[: len(self.pairs) // 2]
        self.fitted = np.isin(self.document, half)

    def given(self, name: str, column: str = "log_probability") -> np.ndarray:
        """Return what a model gives the tokens of all answers, [tokens]."""
        return np.load(self.work / f"{name}.npz")[column]

    def mean(self, tokens: np.ndarray) -> np.ndarray:
        """Return means over the tokens of each answer, [questions]."""
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return np.bincount(owner, tokens, minlength=len(self.sizes)) / self.sizes

    def read(self) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return what each document brings each token, [tokens, documents], and the questions.

        ``behind`` is by how much the best other token is behind, in nats: [tokens].
        """
        kept = self.work / "read.npz"
        if kept.exists():
            stored = dict(np.load(kept))
            return stored, stored.pop("questions").tolist()
        lm = model_of(self.work)
        assert lm.lens is not None
        asked = Documents(self.pairs, lm.model, lm.tokenizer).asked
        numbers = [lm.lens.cells.document_number(pair["id"]) for pair in self.pairs]
        names = (*what_if.METHODS, "behind")
        brought: dict[str, list[np.ndarray]] = {name: [] for name in names}
        questions: list[str] = []
        for (question, answer), n in zip(asked, self.document.tolist(), strict=True):
            questions.append(lm.words(question).removesuffix("assistant\n").strip())
            said = [{"role": "user", "content": questions[-1]}, self.pairs[n]["messages"][1]]
            trace = lm.explain(said)
            rows = what_if.answer_rows(trace)
            given, of_other, _ = what_if.read_ends(lm.model, trace.ids, rows)
            brought["behind"].append((given - of_other)[: len(answer)])
            for method in what_if.METHODS:
                token, document, value = what_if.parts(trace, method)
                sums = np.zeros((len(rows), len(lm.lens.cells.starts)))
                np.add.at(sums, (token, document), value)
                brought[method].append(sums[: len(answer), numbers])
        arrays: dict[str, Any] = {name: np.concatenate(rows) for name, rows in brought.items()}
        np.savez(kept, questions=questions, **arrays)
        return self.read()

    def predictions(self, brought: dict[str, np.ndarray], questions: list[str]) -> dict[str, Fit]:
        """Return each method's predicted mean changes [sets, questions] by what is fitted."""
        answers = [pair["messages"][1]["content"] for pair in self.pairs]
        titles = [pair["title"] for pair in self.pairs]
        bm25 = BM25([f"{t}\n{a}" for t, a in zip(titles, answers, strict=True)])
        asked = zip(questions, self.document.tolist(), strict=True)
        scores = np.stack([bm25.scores(f"{q} {answers[n]}") for q, n in asked])

        def by_tokens(amount: np.ndarray) -> Fit:
            sums = [amount @ row for row in self.removed]
            return lambda c: np.stack([self.mean(what_if.changes(self.full, c * s)) for s in sums])

        def by_share(scores: np.ndarray) -> Fit:
            share = scores / scores.sum(1, keepdims=True)
            return lambda c: -c * (self.removed @ share.T)

        every = {method: by_tokens(brought[method]) for method in what_if.METHODS}
        powers = [by_share(scores**power) for power in POWERS]
        errors = [fitted(method, self)[1] for method in powers]
        print("BM25 to the power of", POWERS[int(np.argmin(errors))])
        every |= {"bm25": powers[0], "bm25_sharpened": powers[int(np.argmin(errors))]}
        if (self.work / "ekfac.npz").exists():
            influence = np.load(self.work / "ekfac.npz")["influence"] / self.sizes[:, None]
            influence /= influence.std()
            every["ekfac"] = lambda c: -c * (self.removed @ influence.T)
            # Each in the form of the other: evidence as a sum, EK-FAC taken from logits.
            every["ekfac_logits"] = by_tokens(np.repeat(influence, self.sizes, axis=0))
            summed = np.stack([self.mean(one) for one in brought["evidence"].T])
            every["evidence_sum"] = lambda c: -c * (self.removed @ summed)
        every["own_document"] = lambda c: -c * self.own
        every["zero"] = lambda _: np.zeros_like(self.true)
        return every


def fitted(method: Fit, bank: Bank) -> tuple[float, float]:
    """Return the factor of least squares on the fitted half, and the mean squared error there."""
    chosen = bank.fitted

    def error(log: float) -> float:
        return float(((method(np.exp(log)) - bank.true)[:, chosen] ** 2).mean())

    best = minimize_scalar(error, bounds=(-7, 5), method="bounded", options={"xatol": 1e-3})
    return float(np.exp(best.x)), float(best.fun)


def quantile_line(size: np.ndarray, error: np.ndarray, level: float) -> list[float]:
    """Return a and b of the quantile regression error ≈ a + b · size (Koenker and Bassett 1978)."""
    count = len(size)
    costs = np.concatenate([np.zeros(4), np.full(count, level), np.full(count, 1 - level)])
    line = np.stack([np.ones(count), -np.ones(count), size, -size], 1)
    each = sparse.identity(count)
    system = sparse.hstack([sparse.csr_matrix(line), each, -each])
    a, minus_a, b, minus_b = linprog(costs, A_eq=system, b_eq=error, method="highs").x[:4]
    return [round(float(a - minus_a), 4), round(float(b - minus_b), 4)]


def judged(method: Fit, bank: Bank) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what is fitted on one half of the documents, and the figures on the other.

    The first of each figure is that of all documents of this half, the others are of draws of them,
    the same for every method.
    """
    factor = fitted(method, bank)[0]
    mean = method(factor)
    size, error = abs(mean), bank.true - mean
    random, chosen = np.random.default_rng(SEED), bank.fitted
    known = random.permutation(size[:, chosen].size)[:3000]
    lines = [
        quantile_line(size[:, chosen].ravel()[known], error[:, chosen].ravel()[known], level)
        for level in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    ]
    calibration = {"scale": round(factor, 4), "low": lines[0], "high": lines[1]}
    low, high = (a + b * size for a, b in lines)
    within = (low <= error) & (error <= high)
    # Forms of the estimates were chosen with the first partition's.
    later = np.array([not name.startswith("tenth-0-") for name in bank.names])

    def figures(questions: np.ndarray) -> dict[str, float]:
        x, y, own = (every[:, questions] for every in (mean, bank.true, bank.own))
        inside, moves = within[:, questions], bool(size.any())
        ranks: dict[str, float] = {}
        for name, of in {"all": own | True, "own": own}.items():
            ranks[f"rank_{name}"] = spearman(x[of].round(9), y[of].round(9))[0]
        return ranks | {
            "slope": float((x * y).sum() / (x * x).sum()) if moves else 0.0,
            "explained": float(1 - ((y - x) ** 2).sum() / (y**2).sum()),
            "explained_later": float(1 - ((y - x)[later] ** 2).sum() / (y[later] ** 2).sum()),
            "coverage": float(inside.mean()),
            "coverage_own": float(inside[own].mean()),
            "width": float((high - low)[:, questions].mean()),
            "width_own": float((high - low)[:, questions][own].mean()),
        }

    documents = np.unique(bank.document[~chosen])
    every = [figures(np.flatnonzero(~chosen))]
    for _ in range(DRAWS):
        drawn = random.choice(documents, len(documents))
        every.append(figures(np.concatenate([np.flatnonzero(bank.document == d) for d in drawn])))
    return calibration, {name: np.array([one[name] for one in every]) for name in every[0]}


def ranged(values: np.ndarray) -> dict[str, float]:
    """Return the first value, with the 95 % interval of the others."""
    low, high = np.percentile(values[1:], [2.5, 97.5]).tolist()
    return {"value": float(values[0]), "low": low, "high": high}


def overtaken(bank: Bank, brought: dict[str, np.ndarray], scale: float) -> dict[str, Any]:
    """Return how often a first choice that is said to be overtaken is, on the judged half."""
    owner = np.repeat(np.arange(len(bank.sizes)), bank.sizes)
    first, behind = brought["behind"] >= 0, brought["behind"]
    chosen = first & ~bank.fitted[owner]
    true = np.stack([bank.given(n, "top") != bank.given("full", "top") for n in bank.names])
    said = {
        "evidence": np.stack([scale * (brought["evidence"] @ s) > behind for s in bank.removed]),
        "own_document": bank.own[:, owner],
    }
    figures: dict[str, Any] = {
        "tokens": int(true[:, chosen].size),
        "changed": int(true[:, chosen].sum()),
    }
    for name, flag in said.items():
        both = int((flag & true)[:, chosen].sum())
        precision, recall = both / int(flag[:, chosen].sum()), both / figures["changed"]
        figures[name] = {"precision": precision, "recall": recall}
    return figures


def of_ekfac(bank: Bank) -> dict[str, Any]:
    """Return how EK-FAC was made, and how far its answers' ln p is from the bank's, a token."""
    stored = np.load(bank.work / "ekfac.npz")
    apart = stored["log_p"] / bank.sizes - bank.mean(bank.full)
    seconds, version = int(stored["seconds"]), str(stored["version"])
    return {"bergson": version, "seconds": seconds, "apart": float(abs(apart).mean())}


def main() -> None:
    """Judge, and write the figures."""
    parser = script_options(__doc__, RESULTS / "control_what_if.json")
    parser.add_argument("work", type=Path)
    parser.add_argument("--calibrate", action="store_true")
    args = parser.parse_args()
    bank = Bank(args.work)
    brought, questions = bank.read()
    calibrations, drawn = dict[str, Any](), dict[str, dict[str, np.ndarray]]()
    for name, method in bank.predictions(brought, questions).items():
        calibrations[name], drawn[name] = judged(method, bank)
        print(name, calibrations[name], {k: round(v[0], 3) for k, v in drawn[name].items()})
    methods = {name: {k: ranged(v) for k, v in each.items()} for name, each in drawn.items()}
    ahead = {
        name: {k: ranged(drawn["evidence"][k] - each[k]) for k in COMPARED}
        for name, each in drawn.items()
    }
    moved = {"own": bank.own, "others": ~bank.own}
    seeds = [bank.mean(bank.given(name) - bank.full) for name in ("seed-1", "seed-2")]
    how = {
        "model": "SmolLM2-135M-Instruct with LoRA in its last third of blocks",
        "documents": len(bank.pairs),
        "questions": len(bank.sizes),
        "answer_tokens": [int(bank.sizes.min()), int(bank.sizes.max())],
        "models": len(bank.names),
        "models_without_a_source": sum(not name.startswith("tenth") for name in bank.names),
    }
    facts = {
        "nats_per_token": {"taught": float(bank.full.mean()), "untaught": float(bank.base.mean())},
        "noise": float(np.std(seeds)),
        "overtaken": overtaken(bank, brought, calibrations["evidence"]["scale"]),
        "pairs": int((~bank.fitted).sum() * len(bank.names)),
        "change": {k: float(bank.true[of].mean()) for k, of in moved.items()},
    }
    figures = {"methods": methods, "ahead": ahead, "calibration": calibrations}
    if "ekfac" in methods:
        facts["ekfac"] = of_ekfac(bank)
    write_json(args.out, how | facts | figures | {"environment": environment()})
    if args.calibrate:
        estimates = {method: calibrations[method] for method in what_if.METHODS}
        ends = np.percentile(bank.mean(bank.full), [2.5, 97.5]).round(2).tolist()
        largest = round(float(bank.removed.mean(1).max()), 2)
        limits = {"nats_per_token": ends, "largest_share": largest}
        stored = how | limits | {"estimates": estimates}
        write_json(Path(what_if.__file__).with_suffix(".json"), stored)


if __name__ == "__main__":
    main()
