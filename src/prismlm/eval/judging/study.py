"""The study: a judge is examined, models continue prompts, BLEU, verdicts of pairs, ratings.

Continuations and verdicts are kept one by one, so that a run that was stopped goes on, and models
or judges that are added later are asked alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from prismlm import fingerprints
from prismlm.cost import Cost, peak_memory, seconds_of
from prismlm.errors import InputError
from prismlm.eval.judging.bleu import bleu_figures
from prismlm.eval.judging.continuations import Prompt, Writer, Writing
from prismlm.eval.judging.examination import examination_pairs, examine, order_figures
from prismlm.eval.judging.judges import CHARACTERS_PER_TOKEN, Judge, Judged, LocalJudge, Pair
from prismlm.eval.judging.ratings import rate
from prismlm.files import keep_json
from prismlm.outputs import write_table
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, begin, keeping, writing
from prismlm.statistics import Interval, bootstrap

FORMAT_VERSION = 1
RESULT_FILE = "judge.json"
CONTINUATIONS, VERDICTS = "continuations.jsonl", "verdicts.jsonl"
CONTINUATIONS_TABLE, VERDICTS_TABLE = "continuations.parquet", "verdicts.parquet"
BYTES_PER_TOKEN, BYTES_PER_VERDICT = 12, 110
PACKAGES = ("prismlm", "torch", "transformers", "tokenizers", "sacrebleu")
Announce = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Study:
    """What is judged.

    Attributes:
        models: their directories, by the name that tells them apart.
        prompts: that all of them continue.
        how: they do.
        out: the directory that everything is kept in.
        judge: opens the judge, given the file of its verdicts; None for BLEU alone.
    """

    models: Mapping[str, Path]
    prompts: Sequence[Prompt]
    how: Writing
    out: Path
    judge: Callable[[Path], Judge] | None = None

    def writer(self, name: str) -> Writer:
        """Open a model."""
        return Writer(name, self.models[name], self.how, self.out / CONTINUATIONS)

    def open_judge(self) -> Judge | None:
        """Open the judge, if there is one."""
        return None if self.judge is None else self.judge(self.out / VERDICTS)


def named(models: Sequence[Path]) -> dict[str, Path]:
    """Return directories by name, or by path where names are alike.

    Raises:
        InputError: one is given twice, or is no directory.
    """
    places = [path.resolve() for path in models]
    twice = [str(path) for path in places if places.count(path) > 1]
    if twice:
        raise InputError(f"{twice[0]} is given twice: give each model once.")
    for path in models:
        if not path.is_dir():
            raise InputError(f"there is no model directory {path}.")
    # As they are called here, links too.
    names = [os.path.basename(os.path.abspath(path)) for path in models]
    keys = [n if names.count(n) == 1 else str(p) for n, p in zip(names, models, strict=True)]
    return dict(zip(keys, models, strict=True))


def run_judging(
    study: Study, progress: Reporter = SILENT, announce: Announce = lambda what, asked, tokens: None
) -> dict[str, Any]:
    """Make what is not kept yet, write the tables and ``judge.json``, and return what it holds.

    Args:
        study: what is judged.
        progress: shows the steps.
        announce: is told before a judge is asked: about what, how many questions, tokens in all.

    Raises:
        InputError: other prompts than ``out`` was begun with, a model or a judge that cannot be
            used, or another process that writes there.
        Interrupted: Ctrl-C; what was made is kept.
    """
    with writing(study.out / RESULT_FILE):
        _begin(study)
        try:
            with keeping(lambda: f"Continuations and verdicts so far are kept in {study.out}."):
                result = _run(study, progress, announce)
        finally:
            # What ended before its first answer binds nobody, and leaves nothing behind.
            if not _begun(study):
                (study.out / RUN_FILE).unlink()
        keep_json(study.out / RESULT_FILE, result)
    return result


def _run(study: Study, progress: Reporter, announce: Announce) -> dict[str, Any]:
    judge, prompts, seed = study.open_judge(), study.prompts, study.how.seed
    examined = None
    if judge is not None:
        asked = [one for some in examination_pairs(prompts, seed).values() for one in some]
        announce("the judge's examination", *judge.left(asked))
        examined = {"source": judge.source, **examine(judge, prompts, seed, progress)}
    texts = {name: study.writer(name).texts(prompts, progress) for name in study.models}
    if texts:
        rows = [
            {"model": name, **asdict(prompt), "continuation": text}
            for name, written in texts.items()
            for prompt, text in zip(prompts, written, strict=True)
        ]
        write_table(study.out / CONTINUATIONS_TABLE, pa.Table.from_pylist(rows))
    ratings = None
    if judge is not None and examined is not None:
        if len(texts) > 1:
            pairs = [
                Pair(prompt.text, *both)
                for prompt, *written in zip(prompts, *texts.values(), strict=True)
                for both in combinations(written, 2)
            ]
            announce("models", *judge.left(pairs))
            judged = judge.judge(pairs, "models", progress)
            write_table(study.out / VERDICTS_TABLE, _verdicts(prompts, list(texts), judged))
            ratings = {
                "readable": examined["usable"],
                **_ratings(judged, list(texts), len(prompts), seed),
            }
        examined["asked"] = judge.asked()
    return {
        "format_version": FORMAT_VERSION,
        "models": list(texts),
        "prompts": len(prompts),
        "settings": asdict(study.how),
        "bleu": bleu_figures(prompts, texts, seed),
        "judge": examined,
        "ratings": ratings,
        "versions": {package: version(package) for package in PACKAGES},
    }


def _ratings(
    judged: Sequence[Judged], models: Sequence[str], prompts: int, seed: int
) -> dict[str, Any]:
    """Return ratings of the models and figures of their pairs; verdicts prompt by prompt."""
    given = [np.nan if one.score is None else one.score for one in judged]
    scores = np.array(given).reshape(prompts, -1)
    columns = zip(combinations(models, 2), scores.T, strict=True)
    rated = zip(models, rate(scores, len(models), seed), strict=True)
    return {
        "models": [
            {"model": name, **{kind: asdict(one) for kind, one in rating._asdict().items()}}
            for name, rating in rated
        ],
        "pairs": [_pair(*pair, own[~np.isnan(own)], seed) for pair, own in columns],
        "order": order_figures(judged),
    }


def _pair(first: str, second: str, scores: np.ndarray, seed: int) -> dict[str, Any]:
    """Return the mean score of the first, with its bootstrap interval over prompts."""
    none = Interval(np.nan, np.nan, np.nan)
    score = asdict(bootstrap(scores, seed=seed) if len(scores) else none)
    count = {"won": int((scores > 0.5).sum()), "lost": int((scores < 0.5).sum())}
    return {"first": first, "second": second, "games": len(scores), **count, "score": score}


def _verdicts(
    prompts: Sequence[Prompt], models: Sequence[str], judged: Sequence[Judged]
) -> pa.Table:
    games = [(prompt.id, *pair) for prompt in prompts for pair in combinations(models, 2)]
    rows = [(*game, *one, one.score) for game, one in zip(games, judged, strict=True)]
    names = ("id", "a", "b", "verdict_ab", "verdict_ba", "score_a")
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows])


def _begun(study: Study) -> bool:
    return any(study.out.glob("*.jsonl"))


def _begin(study: Study) -> None:
    """Note what is continued, or check that it is what was begun here."""
    prompts = fingerprints.of_json([asdict(one) for one in study.prompts])
    run = {"format_version": FORMAT_VERSION, "prompts": prompts, **asdict(study.how)}
    begin(study.out, run, made=_begun(study))


def estimate_judging(study: Study) -> Cost:
    """Return what :func:`prismlm.eval.judging.study.run_judging` would take; writes nothing.

    Questions about models are counted as if none had been asked and no two texts were alike.

    Raises:
        InputError, FormatError: as it.
    """
    seconds, new = 0.0, 0
    for name in study.models:
        writer = study.writer(name)
        left = writer.left(study.prompts)
        new += len(left)
        if left:
            seconds += len(left) * seconds_of(lambda w=writer, p=left[0]: w.write(p), warm=False)
    figures, unknown = {"continuations": new}, tuple[str, ...]()
    disk, judge = new * study.how.tokens * BYTES_PER_TOKEN, study.open_judge()
    if judge is not None:
        examined = examination_pairs(study.prompts, study.how.seed)
        pairs = [one for some in examined.values() for one in some]
        # Of a continuation nothing is known but how long it may be.
        texts = [letter * study.how.tokens * CHARACTERS_PER_TOKEN for letter in "xy"]
        games = list(combinations(study.models, 2))
        pairs += [Pair(prompt.text, *texts) for prompt in study.prompts for _ in games]
        asked, tokens = judge.left(pairs)
        figures |= {"questions": asked, "tokens_in": tokens}
        disk += asked * BYTES_PER_VERDICT
        if isinstance(judge, LocalJudge) and asked:
            question = judge.question(pairs[0])
            seconds += asked * seconds_of(lambda: judge.log_probabilities(question), warm=False)
        elif asked:
            unknown = ("how fast the endpoint is, and whether it thinks before it answers.",)
    return Cost(
        None if unknown else seconds,
        peak_memory(),
        disk,
        figures,
        basis="What is kept is not made again. Tokens are taken to have four characters each.",
        unknown=unknown,
    )
