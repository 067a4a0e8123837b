"""Two behaviours suppressed, beside other ways to do it: docs/results/control_suppress.json.

    prismlm demo --no-serve --out prismlm-demo
    python -m benchmarks.control.plant prismlm-demo --work planted
    python -m benchmarks.control.suppress planted/model --data lm_eval --work WORK

The fact of ``planted.json``, and the topic of the taught questions that name cancer. The text to
keep is of held-out documents and of answers that were taught, none on the behaviour; of both, one
half is for the fit and for choosing, the other for the report. What is finished stays in WORK.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

import prismlm
from benchmarks.control.local_tasks import documents
from benchmarks.control.plant import PLANTED, chats
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.cli.output import ConsoleReporter
from prismlm.corpus.chat import question_of
from prismlm.demo.texts import pairs_path
from prismlm.eval.predictors import WaysLM
from prismlm.eval.suite import (
    SEED,
    SuiteOptions,
    ask,
    mean_figures,
    select_questions,
    task_figures,
)
from prismlm.files import read_json, write_json
from prismlm.interventions.steering_effects import corpus_of
from prismlm.interventions.suppression import (
    BIASES,
    Examples,
    Suppressing,
    SuppressOptions,
    Way,
    encoded,
    growth,
    held_out,
    split_examples,
    summed_losses,
    suppress,
)
from prismlm.models.seam import Text, read_texts
from prismlm.statistics import wilson

TOPIC, DRAWN = "cancer", 10
HELD_OUT, QUESTIONS = 4000, 100  # tokens, and questions of each task
# A word that no text to keep has.
WORDS = {"fact": "halden", "topic": TOPIC}
LARGEST, REMOVED = "largest logit bias", "all removed"
Kept = tuple[list[Text], list[bool]]


def main() -> None:
    """Run the measurement."""
    parser = script_options(__doc__, RESULTS / "control_suppress.json")
    parser.add_argument("model", type=Path, help="the model with the planted fact")
    parser.add_argument("--data", type=Path, required=True, help="Parquet files of the tasks")
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    lm = prismlm.load(args.model)
    result: dict[str, Any] = {"environment": environment(), "planted": PLANTED}
    ways: dict[str, Way] = {}
    for name in WORDS:
        result[name] = once(args.work / f"{name}.json", lambda n=name: measured(lm, n))
        for way, fields in result[name]["ways"].items():
            if way not in ("before", "prompt"):
                ways[f"{name}: {way}"] = Way(**fields)
    result["tasks"] = once(args.work / "tasks.json", lambda: tasks(lm, ways, args))
    tokens = result["fact"]["ways"]["logit bias"]["tokens"]
    removed = result["topic"]["frontier"][-1]["scales"]
    for name, title, way in (
        ("fact", LARGEST, Way(tokens=tuple(tokens), bias=BIASES[-1])),
        ("topic", REMOVED, Way(tuple((i, s) for i, s in removed))),
    ):
        path = args.work / f"{name}_further.json"
        more = once(path, lambda n=name, w=way: further(lm, n, w))
        result[name]["outcomes"].append({"name": title, **more})
    write_json(args.out, result)


def once(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a file holds, after measuring it if it is missing."""
    if not path.is_file():
        write_json(path, measure())
    return read_json(path)


def kept_texts(lm: prismlm.PrismLM, word: str) -> Kept:
    """Return held-out documents and taught answers without a word, and which are held out.

    Pairs of each kind follow one another, as every other text is for the fit.
    """
    corpus, tokens = corpus_of(lm, None)[0], HELD_OUT
    assert corpus is not None
    unseen = [t for t in held_out(lm, corpus, tokens, 0) if word not in lm.words(t.ids).lower()]
    taught = [
        encoded(lm, row["messages"])
        for row in pq.read_table(pairs_path()).to_pylist()
        if row["split"] == "train" and word not in str(row["messages"]).lower()
    ]
    order = np.random.default_rng(0).permutation(len(taught))
    texts, kinds = unseen, [True] * len(unseen)
    for number in order.tolist():
        if tokens > 0:
            texts, kinds = [*texts, taught[number]], [*kinds, False]
            tokens -= len(taught[number].ids) - taught[number].start
    return texts, kinds


def inputs(lm: prismlm.PrismLM, name: str) -> tuple[Examples, SuppressOptions, Kept]:
    """Return the examples of a behaviour, the options, and the text to keep.

    The planted fact is asked in three wordings that were not taught; the topic is what answers to
    questions on cancer say.
    """
    if name == "fact":
        examples = Examples(
            *([row["messages"] for row in chats(PLANTED[part])] for part in PLANTED["parts"])
        )
        phrases, samples, tokens = (PLANTED["phrase"],), 120, 28
    else:
        rows = pq.read_table(pairs_path()).to_pylist()
        about = [row["messages"] for row in rows if TOPIC in row["title"].lower()]
        examples, phrases = split_examples(about, 0), ()
        samples, tokens = 88, 40
    options = SuppressOptions(phrases, samples=samples, tokens=tokens, heldout=HELD_OUT)
    return examples, options, kept_texts(lm, WORDS[name])


def measured(lm: prismlm.PrismLM, name: str) -> dict[str, Any]:
    """Suppress a behaviour; the cost is also told apart by the kind of text."""
    examples, options, (keep, unseen) = inputs(lm, name)
    # If the target is out of reach, the strongest point within the cost is measured.
    how: dict[str, Any] = {"within_cost": True, "progress": ConsoleReporter()}
    _, result = suppress(lm, examples, keep, options, **how)
    report, kinds, judge = (
        keep[1::2],
        np.array(unseen[1::2]),
        Suppressing(lm, examples, keep, options).judge,
    )
    texts, count = {one["name"]: one["texts"] for one in result["outcomes"]}, len(examples.report)
    shares = {name: list(map(judge.shows, own)) for name, own in texts.items()}
    names = ("judge", "marked", "candidates", "before", "reached", "frontier")
    return {
        "options": asdict(options),
        "examples": {part: len(rows) for part, rows in examples._asdict().items()},
        **{name: result[name] for name in names},
        "ways": {name: way._asdict() for name, way in result["ways"].items()},
        "outcomes": [
            {"name": one["name"], "behaviour": asdict(one["behaviour"])}
            | costs(lm, report, kinds, result["ways"][one["name"]])
            for one in result["outcomes"]
        ],
        "by_prompt": [
            {"question": question_of(prompt)}
            | {
                name: asdict(wilson(sum(right[n::count]), len(right[n::count])))
                for name, right in shares.items()
            }
            for n, prompt in enumerate(examples.report)
        ],
        "generations": [
            {"number": n, "prompt": question_of(examples.report[n % count])}
            | {
                key: {"text": texts[name][n], "judged": bool(shares[name][n])}
                for key, name in (("before", "before"), ("after", "suppressed"))
            }
            for n in drawn(options.samples)
            if "suppressed" in texts
        ],
    }


def drawn(samples: int) -> list[int]:
    """Return the numbers of the answers that are shown."""
    return np.sort(np.random.default_rng(0).choice(samples, DRAWN, replace=False)).tolist()


def further(lm: prismlm.PrismLM, name: str, way: Way) -> dict[str, Any]:
    """Measure one more way on what the report of a behaviour is of."""
    examples, options, (keep, unseen) = inputs(lm, name)
    work = Suppressing(lm, examples, keep, options)
    share, texts = work.behaviour(way, report=True)
    right = list(map(work.judge.shows, texts))
    return {
        "environment": environment(),
        "way": way._asdict(),
        "behaviour": asdict(share),
        "shown": [{"text": texts[n], "judged": right[n]} for n in drawn(options.samples)],
    } | costs(lm, keep[1::2], np.array(unseen[1::2]), way)


def costs(
    lm: prismlm.PrismLM, texts: list[Text], unseen: np.ndarray, way: Way
) -> dict[str, dict[str, float]]:
    """Return the perplexity of held-out and of taught texts, and its growth over texts."""
    plain = read_texts(lm.model, texts)
    under = read_texts(lm.model, texts, lm.tokens_of(f"{way.words}\n\n")) if way.words else plain
    sizes = np.bincount(plain.text.numpy(), minlength=len(texts))
    before, after = (
        summed_losses(lm, own, one, len(texts)) for own, one in ((plain, Way()), (under, way))
    )
    figures = {}
    for kind, mask in (("held_out", unseen), ("taught", ~unseen)):
        figures[kind] = {
            "perplexity": float(np.exp(after[mask].sum() / sizes[mask].sum())),
            "tokens": int(sizes[mask].sum()),
            **asdict(growth(after[mask], before[mask], sizes[mask])),
        }
    return figures


def tasks(lm: prismlm.PrismLM, ways: dict[str, Way], args: Any) -> dict[str, Any]:
    """Ask the eight tasks, the decoder in bfloat16."""
    asked, options = WaysLM(lm, ways), SuiteOptions(limit=QUESTIONS)
    given, dataset = [], documents(args.data)
    for benchmark in SEED:

        def answers(benchmark: Any = benchmark) -> dict[str, Any]:
            selected = select_questions(benchmark, options, dataset)
            with torch.autocast("cpu", torch.bfloat16):
                return ask(asked, benchmark, selected, ConsoleReporter())

        given.append(once(args.work / f"answers_{benchmark.name}.json", answers))
    figures = [task_figures(one) for one in given]
    return {"questions": QUESTIONS, "tasks": figures, "mean": mean_figures(given)}


if __name__ == "__main__":
    main()
