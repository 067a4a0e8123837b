"""The study: a judge is examined; models continue prompts and are compared by BLEU and ratings.

A prompt is a text cut at the end of a word; each model's own tokenizer encodes it. Prompts are
continued one at a time, so that the result does not depend on a batch. Each model's continuations
and every verdict of an endpoint are stored, so that the same command resumes.

With E_ij = 1 / (1 + 10^((R_j − R_i) / 400)), and a game of i against j that scores s for i:

- *online Elo*: R_i ← R_i + 4 (s − E_ij), R_j ← R_j − 4 (s − E_ij), from 1,000 each, game after
  game; the mean over shuffled resamples of prompts, since it depends on the order of games.
- *Bradley–Terry*: the R of mean 1,000 that maximise Σ s log E_ij + (1 − s) log E_ji over all games,
  a tie being half a win each: a logistic regression, independent of the order.

Chiang et al. 2024; games of a prompt are resampled together. BLEU is by ``sacrebleu`` (ProtoT,
B.3); its control is the BLEU against the reference of another prompt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm import fingerprints
from prismlm.corpus.encode import encode_text
from prismlm.corpus.store import Corpus
from prismlm.errors import InputError, check_whole
from prismlm.eval.judging.judges import Judge, Judged, Pair, Prompt, examine, order_figures
from prismlm.eval.runs import make_parts, read_part
from prismlm.files import keep_json, read_text
from prismlm.lens.opened_model import MAX_SEED, write_after
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
WORD = re.compile(r"\S+")
# Words of a reference per token of a continuation: about the same length in English.
WORDS_PER_TOKEN = 0.75
MIN_PROMPTS = 2
START, STEP, SCALE = 1000.0, 4.0, 400 / np.log(10)
ROUNDS = 1000
# The likelihood of a player that never loses has no maximum: ratings end so far from their mean.
MAX_DISTANCE = 2000.0
NEWTON_STEPS, MAX_NEWTON_STEP = 200, 1.0


@dataclass(frozen=True)
class Writing:
    """How texts are cut and continued."""

    words: int = 64  # per prompt
    tokens: int = 50  # maximum per continuation
    temperature: float = 0.0  # 0 takes the top token; otherwise tokens are sampled
    seed: int = 0  # of sampled texts and tokens

    @property
    def reference_words(self) -> int:
        """The number of words of the reference."""
        return max(1, round(WORDS_PER_TOKEN * self.tokens))


def cut(id: str, text: str, settings: Writing) -> Prompt:
    """Cut a text after the last word of the prompt and of the reference."""
    count = settings.words + settings.reference_words
    ends = [word.end() for _, word in zip(range(count), WORD.finditer(text), strict=False)]
    if not ends:
        return Prompt(id, "", "")
    middle = ends[min(settings.words, len(ends)) - 1]
    reference = text[middle : ends[-1]].strip() if len(ends) == count else ""
    return Prompt(id, text[:middle].strip(), reference)


def corpus_prompts(corpus: Corpus, count: int, settings: Writing) -> list[Prompt]:
    """Return the beginnings of held-out documents, drawn by the seed, without too short ones."""
    numbers = np.random.default_rng(settings.seed).permutation(corpus.split("heldout")).tolist()
    ids = corpus.doc_ids
    prompts = (cut(ids[number], corpus.text(number), settings) for number in numbers)
    usable = (prompt for prompt in prompts if prompt.reference)
    return _first(usable, count, f"{corpus.path}, held out,", settings)


def file_prompts(path: Path, count: int, settings: Writing) -> list[Prompt]:
    """Return the beginnings of a file's first lines; a short line has no reference."""
    if not path.is_file():
        raise InputError(f"there is no file {path}: expected a text with a prompt on each line.")
    lines = enumerate(read_text(path).splitlines(), 1)
    prompts = (cut(str(number), line, settings) for number, line in lines)
    return _first((prompt for prompt in prompts if prompt.text), count, str(path), settings)


def _first(prompts: Iterable[Prompt], count: int, source: str, settings: Writing) -> list[Prompt]:
    check_whole("the number of prompts", count, MIN_PROMPTS)
    chosen = [prompt for _, prompt in zip(range(count), prompts, strict=False)]
    if len(chosen) < MIN_PROMPTS:
        raise InputError(
            f"{source} has {len(chosen)} texts to continue: expected {MIN_PROMPTS} or more, of "
            f"{settings.words} words and {settings.reference_words} that follow. Give other text "
            "or shorter prompts with --prompt-words."
        )
    return chosen


def continue_prompts(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: Writing,
    progress: Reporter = SILENT,
) -> list[str]:
    """Return a model's continuation of each prompt; seeds differ by prompt."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if model.generation_config.eos_token_id is None:  # pyright: ignore
        model.generation_config.eos_token_id = tokenizer.eos_token_id  # pyright: ignore
    texts: list[str] = []
    with progress.task(f"{name} writes", len(prompts), "prompts") as task:
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([encode_text(tokenizer, prompt.text)], device=model.device)
            length = ids.shape[1]
            if not length or (limit and length + settings.tokens > limit):
                raise InputError(
                    f"prompt {prompt.id!r} has {length} tokens and {settings.tokens} are to "
                    f"follow: {name} reads 1 to {limit}. Give fewer --prompt-words."
                )
            seed = (settings.seed + number) % MAX_SEED
            output = write_after(model, tokenizer, ids, settings.tokens, settings.temperature, seed)
            new = output[0, length:].tolist()
            texts.append(str(tokenizer.decode(new, skip_special_tokens=True)).strip())
            task.advance()
    return texts


def bleu_figures(
    prompts: Sequence[Prompt], texts: Mapping[str, Sequence[str]], seed: int = 0
) -> dict[str, Any] | None:
    """Return the mean BLEU of each model and of the control, smoothed, 0 to 100.

    Prompts without a reference are left out; None if fewer than two remain.
    """
    import sacrebleu

    rows = [number for number, prompt in enumerate(prompts) if prompt.reference]
    if len(rows) < 2 or not texts:
        return None
    references = [prompts[row].reference for row in rows]

    def scores(answers: Sequence[str], references: Sequence[str]) -> list[float]:
        pairs = zip(answers, references, strict=True)
        return [sacrebleu.sentence_bleu(text, [reference]).score for text, reference in pairs]

    models: dict[str, Any] = {}
    for name, continuations in texts.items():
        answers = [continuations[row] for row in rows]
        others = [*references[1:], references[0]]
        both = np.array([scores(answers, references), scores(answers, others)]).T
        models[name] = {
            "mean": asdict(bootstrap(both[:, 0], seed=seed)),
            "other_prompt": asdict(bootstrap(both[:, 1], seed=seed)),
            "difference": asdict(bootstrap(both, coefficients=(1, -1), seed=seed)),
            "corpus": sacrebleu.corpus_bleu(answers, [references]).score,
        }
    return {"prompts": len(rows), "models": models}


def unique_names(models: Sequence[Path]) -> dict[str, Path]:
    """Return directories by name, or by path where names are the same."""
    resolved = [path.resolve() for path in models]
    for path in models:
        if resolved.count(path.resolve()) > 1:
            raise InputError(f"{path} is given twice: give each model once.")
        if not path.is_dir():
            raise InputError(f"there is no model directory {path}.")
    # A link has its own name.
    names = [os.path.basename(os.path.abspath(path)) for path in models]
    keys = [n if names.count(n) == 1 else str(p) for n, p in zip(names, models, strict=True)]
    return dict(zip(keys, models, strict=True))


def run_judging(
    models: Mapping[str, Path],
    prompts: Sequence[Prompt],
    settings: Writing,
    out: Path,
    judge: Callable[[Path], Judge] | None = None,
    *,
    progress: Reporter = SILENT,
) -> dict[str, Any]:
    """Compute what ``out`` lacks, write the tables and ``judge.json``, and return its content.

    ``judge`` opens the judge, given the file of an endpoint's verdicts; None for BLEU alone.
    """
    digest = fingerprints.of_json([prompt._asdict() for prompt in prompts])
    note = {"format_version": FORMAT_VERSION, "prompts": digest, **asdict(settings)}
    with writing(out / RESULT_FILE):
        opened = None if judge is None else judge(out / VERDICTS)
        started = (out / VERDICTS).is_file() or any(out.glob(f"{CONTINUATIONS}/*.json"))
        begin(out, note, made=started)
        with keeping(lambda: f"Continuations and verdicts so far are kept in {out}."):
            examined = ratings = None
            if opened is not None:
                figures = examine(opened, prompts, settings.seed, progress)
                examined = {"source": opened.source, **figures}
            texts = _continue_all(models, prompts, settings, out, note, progress)
            if opened is not None and examined is not None:
                if len(texts) > 1:
                    figures = _compare(opened, prompts, texts, out, settings.seed, progress)
                    ratings = {"readable": examined["usable"], **figures}
                examined["asked"] = opened.usage()
        result = {
            "format_version": FORMAT_VERSION,
            "models": list(texts),
            "prompts": len(prompts),
            "settings": asdict(settings),
            "bleu": bleu_figures(prompts, texts, settings.seed),
            "judge": examined,
            "ratings": ratings,
            "versions": {package: version(package) for package in PACKAGES},
        }
        keep_json(out / RESULT_FILE, result)
    return result


def _continue_all(
    models: Mapping[str, Path],
    prompts: Sequence[Prompt],
    settings: Writing,
    out: Path,
    note: Mapping[str, Any],
    progress: Reporter,
) -> dict[str, list[str]]:
    """Return and write the continuations by each model, stored under its fingerprint."""
    texts: dict[str, list[str]] = {}
    for name, directory in models.items():
        model, tokenizer = read_checkpoint(directory)
        key = fingerprints.of_model(model)
        job = partial(continue_prompts, name, model, tokenizer, prompts, settings, progress)
        make_parts(out, CONTINUATIONS, note, {key: job})
        path = out / CONTINUATIONS / f"{key}.json"
        texts[name] = read_part(path, lambda part: [str(text) for text in part])
    rows = [
        {"model": name, **prompt._asdict(), "continuation": text}
        for name, continuations in texts.items()
        for prompt, text in zip(prompts, continuations, strict=True)
    ]
    if rows:
        write_table(out / CONTINUATIONS_TABLE, pa.Table.from_pylist(rows))
    return texts


def _compare(
    judge: Judge,
    prompts: Sequence[Prompt],
    texts: Mapping[str, Sequence[str]],
    out: Path,
    seed: int,
    progress: Reporter,
) -> dict[str, Any]:
    """Have each two continuations of a prompt judged; write the verdicts and return ratings."""
    games = [
        (prompt, first, second, Pair(prompt.text, texts[first][row], texts[second][row]))
        for row, prompt in enumerate(prompts)
        for first, second in combinations(texts, 2)
    ]
    judged = judge.judge([pair for *_, pair in games], "models", progress)
    rows = [
        {"id": prompt.id, "a": first, "b": second}
        | {"verdict_ab": pair.first, "verdict_ba": pair.second, "score_a": pair.score}
        for (prompt, first, second, _), pair in zip(games, judged, strict=True)
    ]
    write_table(out / VERDICTS_TABLE, pa.Table.from_pylist(rows))
    return rating_figures(judged, list(texts), len(prompts), seed)


def rating_figures(
    judged: Sequence[Judged], models: Sequence[str], prompts: int, seed: int
) -> dict[str, Any]:
    """Return ratings of the models and figures of their pairs, from verdicts prompt by prompt."""
    values = [np.nan if pair.score is None else pair.score for pair in judged]
    scores = np.array(values).reshape(prompts, -1)
    pairs: list[dict[str, Any]] = []
    for (first, second), column in zip(combinations(models, 2), scores.T, strict=True):
        games = column[~np.isnan(column)]
        mean = bootstrap(games, seed=seed) if len(games) else Interval(np.nan, np.nan, np.nan)
        count = {"won": int((games > 0.5).sum()), "lost": int((games < 0.5).sum())}
        pair = {"first": first, "second": second, "games": len(games)}
        pairs.append(pair | count | {"score": asdict(mean)})
    rated = [
        {"model": name, **{kind: asdict(interval) for kind, interval in rating.items()}}
        for name, rating in zip(models, rate(scores, len(models), seed), strict=True)
    ]
    return {"models": rated, "pairs": pairs, "order": order_figures(judged)}


def online_elo(
    first: np.ndarray, second: np.ndarray, score: np.ndarray, players: int
) -> np.ndarray:
    """Return the ratings [rounds, players] after games in order.

    ``first`` and ``second`` are the players of each game, [rounds, games]; ``score`` is that of the
    first, from 0 to 1, NaN for a game that is skipped.
    """
    ratings, rounds = np.full((len(first), players), START), np.arange(len(first))
    for i, j, points in zip(first.T, second.T, score.T, strict=True):
        gap = (ratings[rounds, j] - ratings[rounds, i]) / SCALE
        gain = np.nan_to_num(STEP * (points - 1 / (1 + np.exp(gap))))
        ratings[rounds, i] += gain
        ratings[rounds, j] -= gain
    return ratings


def bradley_terry(wins: np.ndarray) -> np.ndarray:
    """Return the maximum-likelihood ratings [..., players], by Newton's method.

    ``wins`` [..., players, players] is the total score of i against j.
    """
    games = wins + wins.swapaxes(-1, -2)
    strength = np.zeros(wins.shape[:-1])
    for _ in range(NEWTON_STEPS):
        expected = 1 / (1 + np.exp(strength[..., None, :] - strength[..., :, None]))
        gradient = (wins - games * expected).sum(-1)
        variance = games * expected * (1 - expected)
        # The ones fix the mean, and 1e-9 on the diagonal players without games.
        hessian = np.eye(wins.shape[-1]) * (variance.sum(-1)[..., None] + 1e-9) - variance + 1
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        step = step.clip(-MAX_NEWTON_STEP, MAX_NEWTON_STEP)
        strength = (strength + step).clip(-MAX_DISTANCE / SCALE, MAX_DISTANCE / SCALE)
        strength -= strength.mean(-1, keepdims=True)
        if np.abs(step).max() < 1e-10:
            break
    return START + SCALE * strength


def total_wins(scores: np.ndarray, players: int) -> np.ndarray:
    """Return total scores [..., players, players] of ``scores`` [..., prompts, pairs]."""
    wins = np.zeros((*scores.shape[:-2], players, players))
    for column, (i, j) in enumerate(combinations(range(players), 2)):
        wins[..., i, j] = np.nansum(scores[..., column], -1)
        wins[..., j, i] = np.nansum(1 - scores[..., column], -1)
    return wins


def rate(scores: np.ndarray, players: int, seed: int = 0) -> list[dict[str, Interval]]:
    """Return the ratings ``elo`` and ``bradley_terry`` of all players, with 95 % intervals.

    ``scores`` [prompts, pairs] are of the first of each two players in order; NaN: no game.
    """
    generator, pairs = np.random.default_rng(seed), np.array([*combinations(range(players), 2)])
    resampled = scores[generator.integers(len(scores), size=(ROUNDS, len(scores)))]
    games = np.broadcast_to(np.arange(scores.size), (ROUNDS, scores.size))
    order = generator.permuted(games, axis=1)
    shuffled = np.take_along_axis(resampled.reshape(ROUNDS, -1), order, 1)
    opponents = pairs[order % len(pairs)]
    online = online_elo(opponents[..., 0], opponents[..., 1], shuffled, players)
    rounds = {"elo": online, "bradley_terry": bradley_terry(total_wins(resampled, players))}
    values = {"elo": online.mean(0), "bradley_terry": bradley_terry(total_wins(scores, players))}
    ends = {name: np.percentile(r, (2.5, 97.5), axis=0).T for name, r in rounds.items()}
    return [
        {name: Interval(float(values[name][i]), *ends[name][i].tolist()) for name in values}
        for i in range(players)
    ]
