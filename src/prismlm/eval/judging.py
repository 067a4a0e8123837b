"""Judges of two continuations, and their examination.

A judge is a language model, local or at an endpoint. Both get the prompt ``better`` of
``labels/prompts.md``: which is better by coherence, relevance, fluency and correctness, A, B or Tie
(ProtoT, B.1). Each pair is judged in both orders; the score is the mean, so that a judge that
follows positions alone gets exactly a half.

The judge is examined first: does it prefer text to its words shuffled, or to repetition? One that
ignores the texts prefers the real one half of the time.

Prompts are continued one at a time, so that the result does not depend on a batch. Each model's
continuations and every verdict of an endpoint are stored, so that the same command resumes.

With E_ij = 1 / (1 + 10^((R_j − R_i) / 400)), and a game of i against j that scores s for i, ratings
are the R of mean 1,000 that maximise Σ s log E_ij + (1 − s) log E_ji over all games, a tie being
half a win each: Elo's model by Bradley and Terry, a logistic regression that does not depend on the
order of games, as online Elo does (Chiang et al. 2024). Games of a prompt are resampled together.

BLEU is by ``sacrebleu`` (ProtoT, B.3); its control is the BLEU against the reference of another
prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm import fingerprints
from prismlm.corpus.chat import as_chat, encode_chat
from prismlm.corpus.encode import encode_text
from prismlm.corpus.store import Corpus
from prismlm.errors import InputError
from prismlm.eval.runs import make_parts
from prismlm.files import keep_json, read_json, read_text
from prismlm.lens.labels.endpoint import Endpoint, Question, Session, fenced, one_line
from prismlm.lens.labels.endpoint import prompt as fill_template
from prismlm.lens.opened_model import MAX_SEED, write_after
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.seam import last_logits
from prismlm.outputs import write_table
from prismlm.progress import SILENT, Reporter, Task
from prismlm.run_state import begin, writing
from prismlm.statistics import Interval, bootstrap, wilson
from prismlm.training.setup import versions

# Score of A for each verdict.
SCORES = {"A": 1.0, "B": 0.0, "Tie": 0.5}
AS_JSON = 'Answer as {"verdict": "..."}, with "A", "B" or "Tie".'
AS_TOKEN = "Reply with a single token: A, B or Tie."
NAME_LENGTH = 48
# The interval of text against shuffled text must lie above; maximum share decided by position.
BAR, MAX_BY_POSITION = 0.75, 0.5
CONTROLS = ("shuffled", "elsewhere", "repeated")
# Last words of a prompt that a control repeats.
WORDS_REPEATED = 6


class Prompt(NamedTuple):
    """The first words of a text, and its reference: the words that follow, empty if too few.

    Its ``id`` is the document's, or the number of the line.
    """

    id: str
    text: str
    reference: str


class Pair(NamedTuple):
    """A text and two responses to it."""

    text: str
    a: str
    b: str


# On a pair in the order (a, b) and in the order (b, a); None: no valid answer.
Verdicts = tuple[str | None, str | None]


def score_of(verdicts: Verdicts) -> float:
    """Return the score of a, the mean of both orders: 1 for a win, 0.5 for a tie, NaN for none."""
    first, second = (SCORES.get(verdict or "", np.nan) for verdict in verdicts)
    return (first + 1 - second) / 2


def question(pair: Pair, answer: str) -> str:
    """Return the question about a pair; ``answer`` describes the form of the answer."""
    data = {name: fenced(text) for name, text in pair._asdict().items()}
    return fill_template("better", **data, answer=answer)


class EndpointJudge:
    """A language model at an endpoint, which answers by a schema; its verdicts are stored."""

    def __init__(self, endpoint: Endpoint, file: Path) -> None:
        self.session = Session(endpoint, file)
        self.source = self.session.source

    def verdicts(self, pairs: Sequence[Pair], task: Task) -> list[str | None]:
        """Return A, B or Tie for each pair; questions are sent concurrently."""
        messages = ({"role": "user", "content": question(pair, AS_JSON)} for pair in pairs)
        questions = [Question((message,), {"verdict": tuple(SCORES)}) for message in messages]
        answers = self.session.answers(questions, task)
        return [None if answer is None else answer["verdict"] for answer in answers]


class LocalJudge:
    """A causal language model; its verdict is the most probable answer.

    The score of an answer is log P(answer | question), the sum over its tokens, after the model's
    chat template if it has one.
    """

    def __init__(self, directory: Path) -> None:
        opened: tuple[Any, Any] = read_checkpoint(directory)
        self.model, self.tokenizer = opened
        self.source = one_line(directory.resolve().name, NAME_LENGTH)

    def verdicts(self, pairs: Sequence[Pair], task: Task) -> list[str | None]:
        """Return the most probable answer for each pair."""
        verdicts: list[str | None] = []
        for scores in map(self.answers, pairs):
            verdicts.append(max(scores, key=lambda name: scores[name]))
            task.advance()
        return verdicts

    def answers(self, pair: Pair) -> dict[str, float]:
        """Return log P of each answer."""
        text, encode = question(pair, AS_TOKEN), partial(encode_text, self.tokenizer, end=False)
        if self.tokenizer.chat_template is not None:
            start, space = encode_chat(self.tokenizer, as_chat(text)), ""
        else:
            start, space = encode(f"{text}\n\nAnswer:", start=True), " "
        answers = {name: tuple(encode(f"{space}{name}", start=False)) for name in SCORES}
        # One row for all answers of a single token.
        rows = {ids[:n]: [*start, *ids[:n]] for ids in answers.values() for n in range(len(ids))}
        longest = max(map(len, rows.values()))
        check_length(self.model, longest, f"a question to the judge {self.source}")
        logits = last_logits(self.model, [*rows.values()])
        log_p = dict(zip(rows, logits.log_softmax(-1), strict=True))
        return {
            name: sum(float(log_p[ids[:n]][token]) for n, token in enumerate(ids))
            for name, ids in answers.items()
        }


Judge = EndpointJudge | LocalJudge


def check_length(model: PreTrainedModel, tokens: int, what: str) -> None:
    """Raise InputError for more tokens than a model reads."""
    longest = getattr(model.config, "max_position_embeddings", None) or tokens
    if tokens > longest:
        raise InputError(
            f"{what} has {tokens} tokens, and the model reads {longest}: give shorter prompts with "
            "--prompt-words, or another model."
        )


def open_judge(directory: Path | None, endpoint: Endpoint | None, out: Path) -> Judge | None:
    """Open the judge that is given, whose verdicts are stored in ``out``; None without one."""
    if directory is not None and endpoint is not None:
        raise InputError("--judge and --endpoint are two judges: give one.")
    if endpoint is not None:
        return EndpointJudge(endpoint, out / VERDICTS)
    return None if directory is None else LocalJudge(directory)


def judge_pairs(
    judge: Judge, pairs: Sequence[Pair], subject: str = "pairs", progress: Reporter = SILENT
) -> list[Verdicts]:
    """Return the verdicts on each pair in both orders; equal responses are tied."""
    different = [pair for pair in pairs if pair.a != pair.b]
    orders = [order for p in different for order in (p, Pair(p.text, p.b, p.a))]
    with progress.task(f"Judging {subject}", len(orders), "questions") as task:
        verdicts = iter(judge.verdicts(orders, task))
    tied = ("Tie", "Tie")
    return [tied if pair.a == pair.b else (next(verdicts), next(verdicts)) for pair in pairs]


def examination_pairs(prompts: Sequence[Prompt], seed: int = 0) -> dict[str, list[Pair]]:
    """Return the pairs of an examination by control, the real continuation first.

    ``shuffled`` has the same words in another order, ``elsewhere`` the continuation of another
    prompt, ``repeated`` as many words: the prompt's last six again and again. Prompts without a
    reference are left out, and controls that equal the real words.
    """
    usable = [prompt for prompt in prompts if prompt.reference]
    real = [" ".join(prompt.reference.split()) for prompt in usable]
    pairs: dict[str, list[Pair]] = {name: [] for name in CONTROLS}
    for number, prompt in enumerate(usable):
        words = np.array(real[number].split(), dtype=object)
        shuffled = " ".join(np.random.default_rng([seed, number]).permutation(words))
        last = prompt.text.split()[-WORDS_REPEATED:]
        repeated = " ".join(islice(cycle(last), len(words)))
        controls = (shuffled, real[number - 1], repeated)
        for name, control in zip(CONTROLS, controls, strict=True):
            if control != real[number]:
                pairs[name].append(Pair(prompt.text, real[number], control))
    return pairs


def examine(
    judge: Judge, prompts: Sequence[Prompt], seed: int = 0, progress: Reporter = SILENT
) -> dict[str, Any]:
    """Return how often a judge prefers real text or follows the order, and if it is usable."""
    pairs = examination_pairs(prompts, seed)
    judged = {n: judge_pairs(judge, pairs[n], f"{n} text", progress) for n in CONTROLS}
    shares: dict[str, dict[str, Any]] = {}
    for name, verdicts in judged.items():
        scores = [score_of(pair) for pair in verdicts if None not in pair]
        shares[name] = {"count": len(scores), **asdict(wilson(sum(scores), len(scores)))}
    order = order_figures([pair for verdicts in judged.values() for pair in verdicts])
    reasons: list[str] = []
    for name, bar, alternative in (
        ("shuffled", BAR, f"the same words shuffled in more than {BAR:.0%}"),
        ("repeated", 0.5, "the prompt's last words again and again more often than not"),
    ):
        if not shares[name]["low"] > bar:
            figure = f"its 95 % interval begins at {shares[name]['low']:.0%}"
            reasons.append(f"it must prefer real text to {alternative}: {figure}")
    if (by_position := order["by_position"]["value"]) > MAX_BY_POSITION:
        reasons.append(f"it follows the position, not the text, in {by_position:.0%} of the pairs")
    return {"preferred": shares, "order": order, "usable": not reasons, "reasons": reasons}


def order_figures(judged: Sequence[Verdicts]) -> dict[str, Any]:
    """Return how many pairs have verdicts, and how often these follow the position."""
    valid = [pair for pair in judged if None not in pair]
    by_position = sum(pair in (("A", "A"), ("B", "B")) for pair in valid)
    share = asdict(wilson(by_position, len(valid)))
    return {"pairs": len(valid), "failed": len(judged) - len(valid), "by_position": share}


FORMAT_VERSION = 1
RESULT_FILE = "judge.json"
CONTINUATIONS, VERDICTS = "continuations", "verdicts.jsonl"
CONTINUATIONS_TABLE, VERDICTS_TABLE = "continuations.parquet", "verdicts.parquet"
WORD = re.compile(r"\S+")
# Words of a reference per token of a continuation: about the same length in English.
WORDS_PER_TOKEN = 0.75
MIN_PROMPTS = 2
START, SCALE = 1000.0, 400 / np.log(10)
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
    ends = [word.end() for word in islice(WORD.finditer(text), count)]
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
    lines = enumerate(read_text(path).splitlines(), 1)
    prompts = (cut(str(number), line, settings) for number, line in lines)
    return _first((prompt for prompt in prompts if prompt.text), count, str(path), settings)


def _first(prompts: Iterable[Prompt], count: int, source: str, settings: Writing) -> list[Prompt]:
    chosen = list(islice(prompts, count))
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
    if model.generation_config.eos_token_id is None:  # pyright: ignore
        model.generation_config.eos_token_id = tokenizer.eos_token_id  # pyright: ignore
    texts: list[str] = []
    with progress.task(f"{name} writes", len(prompts), "prompts") as task:
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([encode_text(tokenizer, prompt.text)], device=model.device)
            length = ids.shape[1]
            what = f"prompt {prompt.id!r} with what {name} writes"
            check_length(model, length + settings.tokens, what)
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
    pairs = list(zip(references, [*references[1:], references[0]], strict=True))
    models: dict[str, Any] = {}
    for name, continuations in texts.items():
        answers = [continuations[row] for row in rows]
        both = np.array(
            [
                [sacrebleu.sentence_bleu(text, [reference]).score for reference in pair]
                for text, pair in zip(answers, pairs, strict=True)
            ]
        )
        models[name] = {
            "mean": asdict(bootstrap(both[:, 0], seed=seed)),
            "other_prompt": asdict(bootstrap(both[:, 1], seed=seed)),
            "difference": asdict(bootstrap(both, coefficients=(1, -1), seed=seed)),
            "corpus": sacrebleu.corpus_bleu(answers, [references]).score,
        }
    return {"prompts": len(rows), "models": models}


def run_judging(
    models: Mapping[str, Path],
    prompts: Sequence[Prompt],
    settings: Writing,
    out: Path,
    judge: Judge | None = None,
    *,
    progress: Reporter = SILENT,
) -> dict[str, Any]:
    """Compute what ``out`` lacks, write the tables and ``judge.json``, and return its content.

    Without a judge there is BLEU alone.
    """
    digest = fingerprints.of_json([prompt._asdict() for prompt in prompts])
    note = {"format_version": FORMAT_VERSION, "prompts": digest, **asdict(settings)}
    with writing(out / RESULT_FILE):
        started = (out / VERDICTS).is_file() or any(out.glob(f"{CONTINUATIONS}/*.json"))
        begin(out, note, made=started)
        examined = ratings = None
        if judge is not None:
            figures = examine(judge, prompts, settings.seed, progress)
            examined = {"source": judge.source, **figures}
        texts = _continue_all(models, prompts, settings, out, note, progress)
        if judge is not None and examined is not None and len(texts) > 1:
            figures = _compare(judge, prompts, texts, out, settings.seed, progress)
            ratings = {"readable": examined["usable"], **figures}
        if isinstance(judge, EndpointJudge) and examined is not None:
            examined["asked"] = judge.session.usage()
        result = {
            "models": list(texts),
            "prompts": len(prompts),
            "settings": asdict(settings),
            "bleu": bleu_figures(prompts, texts, settings.seed),
            "judge": examined,
            "ratings": ratings,
            "versions": versions("torch", "transformers", "sacrebleu"),
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
        texts[name] = read_json(out / CONTINUATIONS / f"{key}.json")
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
    couples = list(combinations(texts, 2))
    games = [(row, *couple) for row in range(len(prompts)) for couple in couples]
    pairs = [Pair(prompts[row].text, texts[a][row], texts[b][row]) for row, a, b in games]
    judged = judge_pairs(judge, pairs, "models", progress)
    verdicts = [
        {"id": prompts[row].id, "a": a, "b": b}
        | {"verdict_ab": pair[0], "verdict_ba": pair[1], "score_a": score_of(pair)}
        for (row, a, b), pair in zip(games, judged, strict=True)
    ]
    write_table(out / VERDICTS_TABLE, pa.Table.from_pylist(verdicts))
    scores = np.array([*map(score_of, judged)]).reshape(len(prompts), -1)
    figures: list[dict[str, Any]] = []
    for (a, b), column in zip(couples, scores.T, strict=True):
        valid = column[~np.isnan(column)]
        mean = bootstrap(valid, seed=seed) if len(valid) else Interval(np.nan, np.nan, np.nan)
        figures.append({"first": a, "second": b, "games": len(valid), "score": asdict(mean)})
    ratings = zip(texts, rate(scores, len(texts), seed), strict=True)
    return {
        "models": [{"model": name, "rating": asdict(rating)} for name, rating in ratings],
        "pairs": figures,
        "order": order_figures(judged),
    }


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


def rate(scores: np.ndarray, players: int, seed: int = 0) -> list[Interval]:
    """Return the ratings of all players, with 95 % intervals over resampled prompts.

    ``scores`` [prompts, pairs] are of the first of each two players in order; NaN: no game.
    """
    generator = np.random.default_rng(seed)
    resampled = scores[generator.integers(len(scores), size=(ROUNDS, len(scores)))]
    ratings = bradley_terry(total_wins(scores, players))
    ends = np.percentile(bradley_terry(total_wins(resampled, players)), (2.5, 97.5), axis=0)
    return [Interval(*row) for row in np.stack([ratings, *ends], 1).tolist()]
