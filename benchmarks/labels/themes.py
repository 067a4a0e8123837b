"""What the judge of themes by words is worth on planted units, and themes of models' units.

    python -m benchmarks.labels.themes planted MODEL
    python -m benchmarks.labels.themes units MODEL --of prototypes --called NAME
    python -m benchmarks.labels.themes units MODEL --of heads --corpus DIR --called NAME
    python -m benchmarks.labels.render_themes

``planted`` takes tokenizer and token embeddings of MODEL; ``units`` adds a row for it, whose lens
has a corpus that is there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.labels.planted_units import KINDS, Planted, Sample
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.cli.inspect.themes import read_report
from prismlm.corpus import build_corpus, sample_path
from prismlm.files import read_json, write_json
from prismlm.labels.themes import SEQUENCES, Judgement, Passage, WordJudge, rarities
from prismlm.models.checkpoint import read_checkpoint
from prismlm.statistics import spearman

QUANTILES = (0.9, 0.95, 0.98, 0.99)
EACH, RANDOM, CHANCE, DRAWN = 12, 120, 400, 12


class EmbeddingJudge(WordJudge):
    """The same by the mean of the words' token embeddings, weighted by rarity, in place of TF-IDF.

    x_n = Σ_w r_w (e_w − ē), r_w = ln((M + 1) / (df_w + ½)), e_w the mean embedding of the word's
    tokens and ē their mean over all words of the random passages, weighted by r.
    """

    def __init__(self, random: Sequence[Passage], quantile: float, vectors: Vectors) -> None:
        self.vectors = vectors
        rarity = rarities(random)
        words = [key for p in random for word in p.words if (key := word.strip().lower()) in rarity]
        self.mean = np.average(vectors.of(words), 0, weights=[rarity[word] for word in words])
        super().__init__(random, quantile)

    def cosine(self, bags: Sequence[Sequence[str]]) -> np.ndarray:
        """Return the cosine of each pair."""
        x = np.zeros((len(bags), len(self.mean)))
        for row, bag in enumerate(bags):
            if bag:
                rarity = np.array([self.rarity.get(word, self.most) for word in bag])
                x[row] = rarity @ (self.vectors.of(bag) - self.mean)
        x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)
        return x @ x.T


class Vectors:
    """The mean token embedding of words."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.table = model.get_input_embeddings().weight.detach().float().numpy()
        self.tokenizer, self.known = tokenizer, dict[str, np.ndarray]()

    def of(self, words: Sequence[str]) -> np.ndarray:
        """Return them, [words, d]."""
        new = sorted({*words} - self.known.keys())
        if new:
            ids = self.tokenizer([f" {word}" for word in new], add_special_tokens=False).input_ids
            self.known |= {w: self.table[own].mean(0) for w, own in zip(new, ids, strict=True)}
        return np.stack([self.known[word] for word in words])


def main() -> None:
    """Measure one part and add it to the result."""
    parser = script_options(__doc__, RESULTS / "themes.json")
    parser.add_argument("part", choices=("planted", "units"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--of", default="prototypes")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--called", default="the demo's model", help="the model, on the page")
    parser.add_argument("--said", default="", help="what it is, on the page")
    parser.add_argument("--units", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=100_000)
    given = parser.parse_args()
    result = read_json(given.out) if given.out.is_file() else {"planted": None, "units": []}
    if given.part == "planted":
        result["planted"] = planted(given.model)
    else:
        found = units(given)
        key = found["called"], found["of"]
        kept = [one for one in result["units"] if (one["called"], one["of"]) != key]
        result["units"] = [*kept, found]
    write_json(given.out, result)


def planted(path: Path) -> dict[str, Any]:
    """Choose on one half of the documents of the bundled sample, and report on the other."""
    model, tokenizer = read_checkpoint(path)
    vectors = Vectors(model, tokenizer)
    with tempfile.TemporaryDirectory() as directory:
        corpus = build_corpus(sample_path(), Path(directory) / "sample", tokenizer=path)
        choosing, reporting = (Sample(corpus, half) for half in (0, 1))
        documents = len(corpus)

    def judges(sample: Sample, quantile: float) -> dict[str, WordJudge]:
        chance = [sample.random() for _ in range(CHANCE)]
        return {
            "TF-IDF": WordJudge(chance, quantile),
            "token embeddings": EmbeddingJudge(chance, quantile, vectors),
        }

    some = _units(choosing)
    tried = [
        {"by": by, "quantile": quantile, **_agreement(some, judge)}
        for quantile in QUANTILES
        for by, judge in judges(choosing, quantile).items()
    ]
    others = _units(reporting)
    random = [[reporting.random() for _ in range(SEQUENCES)] for _ in range(RANDOM)]
    reported = []
    for by in ("TF-IDF", "token embeddings"):
        own = [one for one in tried if one["by"] == by]
        best = max(own, key=lambda one: one["mean_rho"])
        judge = judges(reporting, best["quantile"])[by]
        reported.append(
            {
                "by": by,
                "quantile": best["quantile"],
                **_agreement(others, judge),
                "by_themes": _by_themes(others, judge),
                "random": _means(judge.judge(random)),
            }
        )
    return {
        "documents": documents,
        "units": len(others),
        "random_units": RANDOM,
        "tried": tried,
        "reported": reported,
        "environment": environment(),
    }


def _units(sample: Sample) -> list[Planted]:
    return [
        sample.unit(kind, themes)
        for kind in KINDS
        for themes in range(1, SEQUENCES + 1)
        for _ in range(EACH)
    ]


def _agreement(units: Sequence[Planted], judge: WordJudge) -> dict[str, Any]:
    """Return Spearman's ρ of found with planted figures for each kind, and mean errors."""
    judged = judge.judge([unit.passages for unit in units])
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        pairs = [(u, j) for u, j in zip(units, judged, strict=True) if u.kind == kind and j]
        truth = np.array([(u.themes, u.coverage, u.coverage) for u, _ in pairs], dtype=float)
        found = np.array([(j.themes, j.coverage, j.disentanglement) for _, j in pairs], dtype=float)
        rho = [spearman(truth[:, i], found[:, i]).rho for i in range(3)]
        error = np.abs(truth - found).mean(0).tolist()
        kinds[kind] = {
            "themes": {"rho": rho[0], "error": error[0]},
            "coverage": {"rho": rho[1], "error": error[1]},
            "disentanglement": {"rho": rho[2]},
        }
    rhos = [one[figure]["rho"] for one in kinds.values() for figure in ("themes", "coverage")]
    return {"kinds": kinds, "mean_rho": float(np.mean(rhos))}


def _by_themes(units: Sequence[Planted], judge: WordJudge) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        for themes in range(1, SEQUENCES + 1):
            own = [unit for unit in units if (unit.kind, unit.themes) == (kind, themes)]
            found = _means(judge.judge([unit.passages for unit in own]))
            planted = float(np.mean([unit.coverage for unit in own]))
            rows.append({"kind": kind, "planted": themes, "planted_coverage": planted, **found})
    return rows


def _means(judged: Sequence[Judgement | None]) -> dict[str, float]:
    return {
        figure: float(np.mean([getattr(one, figure) for one in judged]))
        for figure in ("themes", "coverage", "disentanglement")
    }


def units(given: Any) -> dict[str, Any]:
    """Return the themes of a model's units, of which some are kept."""
    report = read_report(
        given.model, given.of, corpus=given.corpus, tokens=given.tokens, units=given.units
    )
    rows, figures = report["units"].rows, {}
    for row in report["figures"].rows:
        interval = row["difference"]
        ends = {"difference": interval.value, "low": interval.low, "high": interval.high}
        figures[row["figure"]] = {k: v for k, v in row.items() if k != "figure"} | ends
    drawn = np.random.default_rng(0).choice(len(rows), DRAWN, replace=False)
    by_mark = sum(row.get("theme", "").startswith("“") for row in rows)
    return {
        "called": given.called,
        "said": given.said,
        "of": given.of,
        "judge": report.facts["judge"],
        "units": len(rows),
        "left_out": report.facts["left_out_units"],
        "of_marked_words": by_mark,
        "documents": float(np.mean([row["documents"] for row in rows])),
        "figures": figures,
        "drawn": [rows[i] for i in sorted(drawn.tolist())],
        "environment": environment(),
    }


if __name__ == "__main__":
    main()
