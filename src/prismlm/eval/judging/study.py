"""The study: a judge is examined, models continue prompts, BLEU, verdicts of pairs, ratings.

Each model's continuations are kept, and every verdict of an endpoint, so that the same command
resumes, and models or judges that are added later are asked alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from prismlm import fingerprints
from prismlm.errors import InputError
from prismlm.eval.judging.continuations import Prompt, Writing, bleu_figures, continue_prompts
from prismlm.eval.judging.judges import (
    Judge,
    Judged,
    Pair,
    examination_pairs,
    examine,
    order_figures,
)
from prismlm.eval.judging.ratings import rate
from prismlm.eval.runs import make_parts, read_part
from prismlm.files import keep_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.outputs import write_table
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import begin, keeping, writing
from prismlm.statistics import Interval, bootstrap

FORMAT_VERSION = 1
RESULT_FILE = "judge.json"
CONTINUATIONS, VERDICTS = "continuations", "verdicts.jsonl"
CONTINUATIONS_TABLE, VERDICTS_TABLE = "continuations.parquet", "verdicts.parquet"
PACKAGES = ("prismlm", "torch", "transformers", "tokenizers", "sacrebleu")
Announce = Callable[[str, int, int], object]


def named(models: Sequence[Path]) -> dict[str, Path]:
    """Return directories by name, or by path where names are alike."""
    real = [path.resolve() for path in models]
    for path in models:
        if real.count(path.resolve()) > 1:
            raise InputError(f"{path} is given twice: give each model once.")
        if not path.is_dir():
            raise InputError(f"there is no model directory {path}.")
    # As they are called here, links too.
    names = [os.path.basename(os.path.abspath(path)) for path in models]
    keys = [n if names.count(n) == 1 else str(p) for n, p in zip(names, models, strict=True)]
    return dict(zip(keys, models, strict=True))


def run_judging(
    models: Mapping[str, Path],
    prompts: Sequence[Prompt],
    how: Writing,
    out: Path,
    judge: Callable[[Path], Judge] | None = None,
    *,
    progress: Reporter = SILENT,
    announce: Announce = lambda what, asked, tokens: None,
) -> dict[str, Any]:
    """Make what is not kept yet, write the tables and ``judge.json``, and return what it holds.

    Args:
        models: their directories, by the name that tells them apart.
        prompts: that all of them continue.
        how: they do.
        out: the directory that everything is kept in.
        judge: opens the judge, given the file of an endpoint's verdicts; None for BLEU alone.
        progress: shows the steps.
        announce: is told before an endpoint is asked: about what, how many questions, tokens.
    """
    digest = fingerprints.of_json([asdict(one) for one in prompts])
    note = {"format_version": FORMAT_VERSION, "prompts": digest, **asdict(how)}
    with writing(out / RESULT_FILE):
        opened = None if judge is None else judge(out / VERDICTS)
        made = (out / VERDICTS).is_file() or any(out.glob(f"{CONTINUATIONS}/*.json"))
        begin(out, note, made=made)
        with keeping(lambda: f"Continuations and verdicts so far are kept in {out}."):
            examined = ratings = None
            if opened is not None:
                pairs = examination_pairs(prompts, how.seed)
                questions = [one for control in pairs.values() for one in control]
                announce("the judge's examination", *opened.left(questions))
                examined = examine(opened, prompts, how.seed, progress)
                examined = {"source": opened.source, **examined}
            texts = {
                name: _continuations(name, directory, prompts, how, out, note, progress)
                for name, directory in models.items()
            }
            _write_continuations(out, prompts, texts)
            if opened is not None and examined is not None:
                if len(texts) > 1:
                    judged = _judged(opened, prompts, texts, progress, announce)
                    _write_verdicts(out, prompts, list(texts), judged)
                    figures = _ratings(judged, list(texts), len(prompts), how.seed)
                    ratings = {"readable": examined["usable"], **figures}
                examined["asked"] = opened.asked()
        result = {
            "format_version": FORMAT_VERSION,
            "models": list(texts),
            "prompts": len(prompts),
            "settings": asdict(how),
            "bleu": bleu_figures(prompts, texts, how.seed),
            "judge": examined,
            "ratings": ratings,
            "versions": {package: version(package) for package in PACKAGES},
        }
        keep_json(out / RESULT_FILE, result)
    return result


def _continuations(
    name: str,
    directory: Path,
    prompts: Sequence[Prompt],
    how: Writing,
    out: Path,
    note: Mapping[str, Any],
    progress: Reporter,
) -> list[str]:
    """Return what a model writes after the prompts, which is kept under its fingerprint."""
    model, tokenizer = read_checkpoint(directory)
    key = fingerprints.of_model(model)
    write = partial(continue_prompts, name, model, tokenizer, prompts, how, progress)
    make_parts(out, CONTINUATIONS, note, {key: write})
    return read_part(out / CONTINUATIONS / f"{key}.json", lambda texts: [str(t) for t in texts])


def _write_continuations(
    out: Path, prompts: Sequence[Prompt], texts: Mapping[str, list[str]]
) -> None:
    rows = [
        {"model": name, **asdict(prompt), "continuation": text}
        for name, written in texts.items()
        for prompt, text in zip(prompts, written, strict=True)
    ]
    if rows:
        write_table(out / CONTINUATIONS_TABLE, pa.Table.from_pylist(rows))


def _judged(
    judge: Judge,
    prompts: Sequence[Prompt],
    texts: Mapping[str, list[str]],
    progress: Reporter,
    announce: Announce,
) -> list[Judged]:
    """Return the verdicts of each two models, prompt by prompt."""
    pairs = [
        Pair(prompt.text, *both)
        for prompt, *written in zip(prompts, *texts.values(), strict=True)
        for both in combinations(written, 2)
    ]
    announce("models", *judge.left(pairs))
    return judge.judge(pairs, "models", progress)


def _write_verdicts(
    out: Path, prompts: Sequence[Prompt], models: Sequence[str], judged: Sequence[Judged]
) -> None:
    games = [(prompt.id, *pair) for prompt in prompts for pair in combinations(models, 2)]
    rows = [(*game, *one, one.score) for game, one in zip(games, judged, strict=True)]
    names = ("id", "a", "b", "verdict_ab", "verdict_ba", "score_a")
    table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows])
    write_table(out / VERDICTS_TABLE, table)


def _ratings(
    judged: Sequence[Judged], models: Sequence[str], prompts: int, seed: int
) -> dict[str, Any]:
    """Return ratings of the models and figures of their pairs; verdicts prompt by prompt."""
    given = [np.nan if one.score is None else one.score for one in judged]
    scores = np.array(given).reshape(prompts, -1)
    pairs: list[dict[str, Any]] = []
    for (first, second), column in zip(combinations(models, 2), scores.T, strict=True):
        own = column[~np.isnan(column)]
        mean = bootstrap(own, seed=seed) if len(own) else Interval(np.nan, np.nan, np.nan)
        count = {"won": int((own > 0.5).sum()), "lost": int((own < 0.5).sum())}
        pair = {"first": first, "second": second, "games": len(own)}
        pairs.append(pair | count | {"score": asdict(mean)})
    rated = [
        {"model": name, **{kind: asdict(one) for kind, one in rating.items()}}
        for name, rating in zip(models, rate(scores, len(models), seed), strict=True)
    ]
    return {"models": rated, "pairs": pairs, "order": order_figures(judged)}
