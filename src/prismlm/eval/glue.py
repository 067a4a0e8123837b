"""GLUE: a decoder fine-tuned as a classifier on nine tasks of sentences and pairs of sentences.

Rows come from the hub (Wang et al. 2018), or from a copy of its Parquet files, ``TASK/SPLIT*``. A
linear layer reads the state of a row's last token. Rows are ``sentence EOS`` or ``first EOS second
EOS``, after a BOS if the tokenizer adds one, so that the last token sees the complete row and is
the same in all rows.

AdamW with linear warm-up and decay; embeddings, norms and biases are not decayed. Rows of a batch
are of similar length, which halves the padding. Training stops early by the dev metric. Every task
and seed starts from the same weights.

A directory holds ``run.json`` (the settings), ``runs/TASK-SEED.json`` of each finished run, and
``glue.json``, the figures; its ``search`` holds such a directory for each rate and warm-up, and
``search/search.json`` the choice.

Source: ProtoT, A.4, which leaves weight decay, clipping, patience and batching by length open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from scipy.stats import rankdata
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import get_length_grouped_indices

from prismlm import fingerprints
from prismlm.corpus.encode import around_text, check_fast, text_encoder
from prismlm.errors import DivergenceError, FormatError, InputError, check_choice, shown
from prismlm.eval.runs import read_columns, run_study, sample_rows
from prismlm.files import keep_json, read_json
from prismlm.hub import fetching
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.device import learned_positions, uses_bf16
from prismlm.models.presets import build_model
from prismlm.models.seam import last_states, output_embedding
from prismlm.models.watch import evaluating
from prismlm.progress import SILENT, Reporter
from prismlm.progress import Task as Progress
from prismlm.run_state import read_note, writing
from prismlm.statistics import interval_of
from prismlm.training.setup import decayed_names

HUB = "nyu-mll/glue"
MAX_SCORE = 5.0  # of STS-B, from 0
MISMATCHED = "dev_mismatched"  # only MNLI has it


class Task(NamedTuple):
    """A task; tables show the first of its official metrics."""

    title: str
    columns: tuple[str, ...]  # of its sentences
    classes: int  # 0 for scores from 0 to 5
    metrics: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name on the command line and on the hub."""
        return self.title.lower().replace("-", "")

    @property
    def splits(self) -> dict[str, str]:
        """The hub's names of the splits."""
        if self.name != "mnli":
            return {"train": "train", "dev": "validation"}
        dev = {"dev": "validation_matched", MISMATCHED: "validation_mismatched"}
        return {"train": "train"} | dev


ONE, TWO = ("sentence",), ("sentence1", "sentence2")
# In the order of ProtoT's tables (A.4, Table 10), with the metrics of these.
TASKS = (
    Task("CoLA", ONE, 2, ("matthews",)),
    Task("SST-2", ONE, 2, ("accuracy",)),
    Task("MRPC", TWO, 2, ("f1", "accuracy")),
    Task("STS-B", TWO, 0, ("pearson", "spearman")),
    Task("RTE", TWO, 2, ("accuracy",)),
    Task("WNLI", TWO, 2, ("accuracy",)),
    Task("QQP", ("question1", "question2"), 2, ("f1", "accuracy")),
    Task("QNLI", ("question", "sentence"), 2, ("accuracy",)),
    Task("MNLI", ("premise", "hypothesis"), 3, ("accuracy",)),
)


def select_tasks(names: Sequence[str] | None = None) -> tuple[Task, ...]:
    """Return all tasks, or the named ones, in the order of ProtoT's tables."""
    for name in names or ():
        known = [task.name for task in TASKS]
        check_choice("a task of GLUE (MNLI-MM is measured with mnli)", name, known)
    return tuple(task for task in TASKS if not names or task.name in names)


class Rows(NamedTuple):
    """Rows of a split, each one or two sentences, or their tokens."""

    inputs: list[Any]
    labels: np.ndarray


def read_split(task: Task, split: str, data: Path | None) -> Rows:
    """Return a split of a task; ``data`` is a copy of the hub's files, None for the hub."""
    hub, columns = task.splits[split], (*task.columns, "label")
    if data is None:
        from datasets import load_dataset

        source = f"{HUB} {task.name} {hub}"
        with fetching(f"the {split} set of {task.title}", "a copy of its files"):
            dataset: Any = load_dataset(HUB, task.name, split=hub)
        table = dataset.with_format("arrow")[:]
    else:
        source = data / task.name / f"{hub}*.parquet"
        files = sorted(source.parent.glob(source.name))
        if not files:
            raise InputError(
                f"{source.parent} has no {source.name}, which {task.title} needs: expected a copy "
                f"of {HUB}. Leave the task out with --tasks, or leave --data out to read from the "
                "hub."
            )
        table = pa.concat_tables([read_columns(path, columns) for path in files])
    texts = list(zip(*(table[name].to_pylist() for name in task.columns), strict=True))
    labels, most = table["label"].to_pylist(), task.classes - 1 if task.classes else MAX_SCORE
    for number, (row, label) in enumerate(zip(texts, labels, strict=True)):
        known = isinstance(label, (int, float)) and 0 <= label <= most
        if not known or not all(isinstance(text, str) for text in row):
            raise FormatError(
                f"row {number} of {source} is {shown(row)} with the label {shown(label)}: expected "
                f"text and a label from 0 to {most:g}. Copy the file from {HUB} again; the labels "
                "of its test split, -1, are not published."
            )
    return Rows(texts, np.array(labels))


MAX_LENGTH = 512  # tokens per row
DEVIATION = 0.02  # of the new layer's initial weights, as in Hugging Face's classifiers
WEIGHT_DECAY, MAX_NORM = 0.1, 1.0
EVALUATIONS = 2  # per epoch, on dev
PATIENCE = 2  # evaluations without improvement before a run stops, at the end of an epoch
REMEDY = "give a smaller rate by --learning-rate, or let --search choose one."


@dataclass(frozen=True)
class GlueOptions:
    """Settings of every run."""

    data: Path | None = None  # a copy of the hub's files; None for the hub
    limit: int | None = None  # training rows, drawn by a run's seed; None for all
    dev_limit: int | None = None  # rows of each dev set, drawn by seed 0; None for all
    learning_rate: float | None = None  # the maximum; None for a search's, by default ProtoT's
    warmup: float | None = None  # fraction of all steps over which it rises, likewise
    epochs: int = 3  # at most
    batch_size: int = 16

    def note(self, lm: GlueModel) -> dict[str, Any]:
        """Return the settings that must not change when a study is resumed."""
        data = "hub" if self.data is None else str(self.data.resolve())
        return asdict(self) | {"format_version": 1, "model": lm.identity, "data": data}


class GlueModel:
    """A model, and a copy of its weights, which every run starts from."""

    def __init__(self, path: Path | str, *, device: str = "cpu") -> None:
        self.name = Path(path).name
        self.model, self.tokenizer = read_checkpoint(path, device=device)
        self.model.float()
        self.identity = fingerprints.of_model(self.model)
        self.length = min(MAX_LENGTH, learned_positions(self.model) or MAX_LENGTH)
        self._weights = _copy_weights(self.model)
        # A search reads two tasks in turn.
        self.read_task = lru_cache(maxsize=2)(self._read_task)

    def classifier(self, task: Task, seed: int, *, from_scratch: bool = False) -> Classifier:
        """Return the model under a new layer, with its weights or freshly initialised."""
        torch.manual_seed(seed)
        if from_scratch:
            fresh = build_model(self.model.config).to(self.model.device)  # pyright: ignore
            return Classifier(fresh.float(), task.classes or 1)
        self.model.load_state_dict(self._weights)
        return Classifier(self.model, task.classes or 1)

    def _read_task(self, task: Task, data: Path | None, dev_limit: int | None) -> dict[str, Rows]:
        """Return the tokens and labels of the splits of a task."""
        splits: dict[str, Rows] = {}
        for split in task.splits:
            texts, labels = read_split(task, split, data)
            chosen = sample_rows(len(texts), None if split == "train" else dev_limit, 0)
            tokens = encode(self.tokenizer, [texts[row] for row in chosen], self.length)
            splits[split] = Rows(tokens, labels[chosen])
        return splits


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Sequence[str]], length: int
) -> list[list[int]]:
    """Return the tokens of rows; in rows that are too long, the longer sentence is cut."""
    check_fast(tokenizer, tokenizer.name_or_path)
    fast: Any = tokenizer
    encoder: Any = text_encoder(fast.backend_tokenizer, fast.eos_token)
    eos = tokenizer.eos_token_id
    end = encoder.encode("\n").ids if eos is None else [eos]
    marks = {"begin": around_text(tokenizer)[0], "end": end}
    templates = ("begin", "$A", "end"), ("begin", "$A", "end", "$B", "end")
    single, pair = ([name for name in names if marks.get(name) != []] for names in templates)
    special: Any = [{"id": k, "ids": v, "tokens": [k] * len(v)} for k, v in marks.items() if v]
    encoder.post_processor = TemplateProcessing(single, pair, special)
    encoder.enable_truncation(length)
    rows = encoder.encode_batch([row if len(row) > 1 else row[0] for row in texts])
    return [row.ids for row in rows]


class Classifier(nn.Module):
    """y = W z_T + b, with z_T [d] the last hidden state of the last token."""

    def __init__(self, model: PreTrainedModel, outputs: int) -> None:
        super().__init__()
        weight: Any = output_embedding(model).weight
        self.model, self.out = model, nn.Linear(weight.shape[1], outputs)
        nn.init.normal_(self.out.weight, std=DEVIATION)
        nn.init.zeros_(self.out.bias)
        self.out.to(weight.device)
        self.bf16 = uses_bf16("auto", weight.device.type)

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return y [B, C], float32, for rows of tokens of any length."""
        with torch.autocast(self.out.weight.device.type, torch.bfloat16, enabled=self.bf16):
            last = last_states(self.model, rows, [1] * len(rows))
        return self.out(last.float())

    def predict(self, rows: Sequence[Sequence[int]], batch_size: int = 32) -> np.ndarray:
        """Return y [N, C] in evaluation mode."""
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        outputs = np.zeros((len(rows), self.out.out_features), np.float32)
        with evaluating(self):
            for first in range(0, len(order), batch_size):
                batch = order[first : first + batch_size]
                outputs[batch] = self([rows[row] for row in batch]).cpu().numpy()
        if not np.isfinite(outputs).all():
            raise DivergenceError(f"the classifier's outputs are not finite: {REMEDY}")
        return outputs

    def loss(self, rows: Sequence[Sequence[int]], labels: Sequence[float]) -> Tensor:
        """Return the mean squared error of scores, or the cross-entropy of classes."""
        outputs = self(rows)
        target = torch.tensor(labels, device=outputs.device)
        if outputs.shape[1] == 1:
            return F.mse_loss(outputs[:, 0], target.float())
        return F.cross_entropy(outputs, target.long())


def fine_tune(
    classifier: Classifier,
    rows: Sequence[list[int]],
    labels: Sequence[float],
    evaluate: Callable[[], float],
    options: GlueOptions,
    seed: int,
    progress: Progress,
) -> list[float]:
    """Train, restore the weights with the best dev metric, and return the history of that metric.

    ``labels`` are class numbers or scores; ``evaluate`` returns the dev metric, larger is better.
    """
    rate, warmup = options.learning_rate or 0.0, options.warmup or 0.0
    steps = options.epochs * math.ceil(len(rows) / options.batch_size)
    optimizer = torch.optim.AdamW(parameter_groups(classifier), lr=rate, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, round(warmup * steps), steps)
    torch.manual_seed(seed)
    generator, lengths = torch.Generator().manual_seed(seed), [len(row) for row in rows]
    history: list[float] = []
    best: dict[str, Tensor] = {}
    for _ in range(options.epochs):
        order = get_length_grouped_indices(lengths, options.batch_size, generator=generator)
        batches = [batch.tolist() for batch in torch.tensor(order).split(options.batch_size)]
        stops = {math.ceil(len(batches) * (k + 1) / EVALUATIONS) for k in range(EVALUATIONS)}
        for number, batch in enumerate(batches, start=1):
            classifier.train()
            loss = classifier.loss([rows[row] for row in batch], [labels[row] for row in batch])
            if not bool(torch.isfinite(loss)):
                raise DivergenceError(f"the loss is {loss.item()} at the rate {rate:g}: {REMEDY}")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(classifier.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            progress.advance(1)
            if number in stops:
                history.append(evaluate())
                progress.note(f"dev {history[-1]:.3f}")
                if history[-1] > max(history[:-1], default=-math.inf):
                    best = _copy_weights(classifier)
        if len(history) - 1 - history.index(max(history)) >= PATIENCE:
            break
    classifier.load_state_dict(best)
    return history


def _copy_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in module.state_dict().items()}


def parameter_groups(classifier: Classifier) -> list[dict[str, Any]]:
    """Return parameters with and without weight decay, tied ones once."""
    decayed = decayed_names(classifier)
    groups: dict[float, list[nn.Parameter]] = {WEIGHT_DECAY: [], 0.0: []}
    for name, parameter in classifier.named_parameters():
        groups[WEIGHT_DECAY if name in decayed else 0.0].append(parameter)
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items()]


RUNS, RESULT_FILE, SEARCH, SEARCH_FILE = "runs", "glue.json", "search", "search.json"
RATES = (2.5e-5, 3.5e-5, 5.5e-5, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 7e-4, 8.5e-4, 1e-3)
WARMUPS = (0.06, 0.1)
SEARCH_TASKS = ("sst2", "mnli")
# Rate and warm-up of ProtoT's authors by model_type; llama's for all others.
SOURCE_SETTINGS = {
    "prismlm_protot": (3.5e-5, 0.06),
    "mamba": (1e-4, 0.1),
    "mamba2": (1e-4, 0.1),
    "prismlm_deltanet": (7e-4, 0.1),
    "llama": (5.5e-5, 0.1),
}


def run_glue(
    lm: GlueModel,
    out: Path,
    options: GlueOptions,
    tasks: Sequence[str] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    from_scratch: bool = False,
    progress: Reporter = SILENT,
) -> dict[str, Any]:
    """Make the runs that ``out`` lacks, and return the figures of all its runs.

    A seed determines the new layer, the training rows, their order and dropout. With
    ``from_scratch``, a freshly initialised model of the same configuration is trained as well.
    Model and options must be those that ``out`` was started with.
    """
    options, rate_from = with_rate(lm, out, options)
    parts: dict[str, Callable[[], Any]] = {}
    for task, fresh, seed in product(select_tasks(tasks), {False, from_scratch}, seeds):
        name = f"{task.name}-{seed}{'-from-scratch' if fresh else ''}"
        parts[name] = partial(_run, lm, task, options, seed, progress, from_scratch=fresh)
    note = options.note(lm)
    facts = {"name": lm.name, **note, "rate_from": rate_from}
    return run_study(out / RESULT_FILE, RUNS, note, parts, lambda: facts | {"tasks": figures(out)})


def with_rate(lm: GlueModel, out: Path, options: GlueOptions) -> tuple[GlueOptions, str]:
    """Return options with rate and warm-up, and the origin of these."""
    path = out / SEARCH / SEARCH_FILE
    rate, warmup = SOURCE_SETTINGS.get(lm.model.config.model_type, SOURCE_SETTINGS["llama"])
    default, rate_from = {"learning_rate": rate, "warmup": warmup}, "the source's"
    if path.is_file():
        choice = read_note(path, path.parent, model=lm.identity)
        default, rate_from = {name: choice[name] for name in default}, "searched"
    given = {name: getattr(options, name) for name in default if getattr(options, name) is not None}
    return replace(options, **(default | given)), "given" if given else rate_from


def search(
    lm: GlueModel,
    out: Path,
    options: GlueOptions,
    seed: int = 0,
    progress: Reporter = SILENT,
    rates: Sequence[float] = RATES,
) -> dict[str, Any]:
    """Choose rate and warm-up by the mean dev accuracy on SST-2 and MNLI, and store the choice.

    Each pair of the two is a study of its own in ``search``; one with a run that diverges counts
    as 0.
    """
    directory = out / SEARCH
    options = replace(options, learning_rate=None, warmup=None)
    tried: list[dict[str, Any]] = []
    with writing(directory / SEARCH_FILE):
        for rate, warmup in product(rates, WARMUPS):
            trial, place = {"learning_rate": rate, "warmup": warmup}, f"{rate:g}-{warmup:g}"
            accuracies = dict.fromkeys(SEARCH_TASKS, 0.0)
            with suppress(DivergenceError):
                settings = replace(options, **trial), SEARCH_TASKS, [seed]
                run_glue(lm, directory / place, *settings, progress=progress)
                for task in SEARCH_TASKS:
                    run = read_json(directory / place / RUNS / f"{task}-{seed}.json")
                    accuracies[task] = max(run["dev_history"])
            tried.append(trial | accuracies)
        best = max(tried, key=lambda row: sum(row[task] for task in SEARCH_TASKS))
        result = options.note(lm) | {"seed": seed} | best | {"tried": tried}
        keep_json(directory / SEARCH_FILE, result)
    return result


def _run(
    lm: GlueModel,
    task: Task,
    options: GlueOptions,
    seed: int,
    progress: Reporter,
    *,
    from_scratch: bool = False,
) -> dict[str, Any]:
    """Return the record of a run."""
    dev_splits = dict(lm.read_task(task, options.data, options.dev_limit))
    train, dev = dev_splits.pop("train"), dev_splits["dev"]
    chosen = sample_rows(len(train.inputs), options.limit, seed)
    rows, labels = [train.inputs[row] for row in chosen], train.labels[chosen].tolist()
    classifier = lm.classifier(task, seed, from_scratch=from_scratch)

    def predict(split: Rows) -> np.ndarray:
        return answers(task, classifier.predict(split.inputs))

    def evaluate() -> float:
        return measure(task, dev.labels, predict(dev))[task.metrics[0]]

    title = f"{task.title}, seed {seed}{', from scratch' if from_scratch else ''}"
    steps = options.epochs * -(-len(rows) // options.batch_size)
    with progress.task(title, steps, "steps") as progress_task:
        history = fine_tune(classifier, rows, labels, evaluate, options, seed, progress_task)
    return {
        "task": task.name,
        "seed": seed,
        "from_scratch": from_scratch,
        "dev_history": history,
        "train": {"rows": len(rows)},
        "measured": {
            name: {"gold": split.labels.tolist(), "given": predict(split).tolist()}
            for name, split in dev_splits.items()
        },
    }


def figures(out: Path) -> list[dict[str, Any]]:
    """Return the figures of all runs of a directory, by task and measured split."""
    runs = [read_json(path) for path in (out / RUNS).glob("*.json")]
    runs.sort(key=lambda run: run["seed"])
    rows: list[dict[str, Any]] = []
    for task, split in ((one, name) for one in TASKS for name in one.splits):
        matching = [r for r in runs if r["task"] == task.name and split in r["measured"]]
        if not matching:
            continue
        gold = np.array(matching[0]["measured"][split]["gold"])
        tuned, scratch = ([r for r in matching if r["from_scratch"] == x] for x in (False, True))
        rows.append(
            {
                "task": task.name,
                "title": "MNLI-MM" if split == MISMATCHED else task.title,
                "split": split,
                "metrics": list(task.metrics),
                "train": matching[0]["train"],
                "measured": {"rows": len(gold)},
                "constant": {name: constant(name, gold) for name in task.metrics},
                "fine_tuned": summarise(task, split, tuned),
                "from_scratch": summarise(task, split, scratch),
            }
        )
    return rows


def summarise(task: Task, split: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the metrics of runs that differ in their seed, and their means.

    ``low`` and ``high`` bound the mean of the first metric in 95 % of resamples of the dev rows,
    which are the same for all seeds.
    """
    if not runs:
        return None
    gold = np.array(runs[0]["measured"][split]["gold"])
    predicted = [np.array(run["measured"][split]["given"]) for run in runs]
    measured = [measure(task, gold, answer) for answer in predicted]
    values = {metric: [m[metric] for m in measured] for metric in task.metrics}
    first = METRICS[task.metrics[0]]
    spread = interval_of(
        lambda rows: np.mean([first(gold[rows], p[rows]) for p in predicted], axis=0), len(gold)
    )
    return {
        "seeds": [run["seed"] for run in runs],
        "values": values,
        "mean": {metric: float(np.mean(values[metric])) for metric in task.metrics},
        "low": spread.low,
        "high": spread.high,
    }


def answers(task: Task, outputs: np.ndarray) -> np.ndarray:
    """Return the answers of a classifier's outputs [N, C]: classes, or scores from 0 to 5."""
    return outputs.argmax(-1) if task.classes else outputs[:, 0].clip(0, MAX_SCORE)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    zeros = np.zeros(np.shape(denominator))
    return np.divide(numerator, denominator, out=zeros, where=denominator > 0)


def _pearson(gold: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    g, p = (values - values.mean(-1, keepdims=True) for values in (gold, predicted))
    return _ratio((g * p).sum(-1), np.sqrt((g * g).sum(-1) * (p * p).sum(-1)))


# Official metrics of resamples [..., N], 0 where they are undefined.
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "accuracy": lambda gold, predicted: (gold == predicted).mean(-1),
    "f1": lambda gold, predicted: _ratio(
        2 * (gold * predicted).sum(-1), (gold + predicted).sum(-1)
    ),
    # Matthews' correlation of the classes 0 and 1 is Pearson's.
    "matthews": _pearson,
    "pearson": _pearson,
    "spearman": lambda gold, predicted: _pearson(
        *(rankdata(v, axis=-1) for v in (gold, predicted))
    ),
}


def measure(task: Task, gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return the official metrics of a task's answers."""
    return {name: float(METRICS[name](gold, predicted)) for name in task.metrics}


def constant(metric: str, gold: np.ndarray) -> float:
    """Return the best metric of a constant answer: the majority's share for accuracy.

    F1 is best for the constant answer 1; correlations are 0.
    """
    if metric not in ("accuracy", "f1"):
        return 0.0
    return max(float(METRICS[metric](gold, np.full_like(gold, c))) for c in np.unique(gold))
