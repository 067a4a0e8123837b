"""The source's Tables 1 and 15 to 20 at a laptop's size: contexts, sizes and ablations.

    python -m benchmarks.prototype_mixer.tables corpus-rows corpus --texts DIR
    python -m benchmarks.prototype_mixer.tables corpus-rows contexts
    python -m benchmarks.prototype_mixer.tables corpus-rows ablations
    python -m benchmarks.render prototype_mixer

Texts are Parquet files with ``text``. The corpus has ``EACH`` documents of every file that has as
many long ones, and of each the first 2,048 tokens: at every context all positions of all rows are
text, a row is of one document, and every model reads the same tokens once. Ablations are those of
``recipes/prototype_mixer/ablations`` in models of a laptop's size; they read ``DOCUMENTS`` of the
documents ten times.

Seed 0 is run at each of several rates, at longer contexts than the shortest at the one that was
best there and half of it; other seeds at the best of these, which have to be there. One JSON file
per run; a run whose file is there is not run again, and one that was cut short goes on from its
last checkpoint in ``--work``.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import yaml

from benchmarks.prototype_mixer.measure import (
    ALL_OF_IT,
    CONTEXTS,
    HEADS,
    LAYERS,
    MODELS,
    POSITIONS,
    VOCABULARY,
    WIDTH,
    Settings,
    measure,
    padded_recipe,
)
from benchmarks.prototype_mixer.measure import RATES as SOURCE_RATES
from benchmarks.shared.options import RESULTS, training_options
from prismlm.corpus import Corpus, build_corpus
from prismlm.files import read_json

PARTS = ["corpus", "contexts", "ablations"]
SOURCE = read_json(Path(__file__).with_name("source_tables.json"))
"""What the source reports: Table 1 at four contexts, Tables 15 to 20 by the names of our runs."""
COMMON: Settings = {"precision": "bf16", "checkpoint": {"every": 250, "keep": 1}}
RECIPES = Path("recipes/prototype_mixer")
EACH, LONG, READ = 80, 10_000, 16_000
"""Documents of a file, of so many characters or more, and how many of these are read."""
HELD_OUT = 0.1
ROW = CONTEXTS[-1]
# The last three rows of Table 1: twice the width, the layers, the channels.
TABLE_1 = {name: (name, settings) for name, settings in MODELS.items()} | {
    "protot-wide": ("protot", MODELS["protot"] | {"hidden_size": 2 * WIDTH}),
    "protot-deep": ("protot", MODELS["protot"] | {"num_hidden_layers": 2 * LAYERS}),
    "protot-channels": ("protot", MODELS["protot"] | {"num_channels": 64}),
}
# Times the source's rates, of a model or of one of its rows.
TABLE_1_FACTORS = {
    "protot": (2, 4, 8),
    "protot-wide": (0.5, 1, 2, 4),
    "protot-deep": (2, 4, 8, 16),
    "llama": (1, 2, 4),
    "mamba": (1, 2, 4, 8),
    "deltanet": (0.5, 1, 2, 4),
}
# What is read ten times is best at a lower rate than what is read once.
FACTORS = {
    "protot": (0.5, 1, 2),
    "llama": (0.5, 1, 2),
    "mamba": (0.5, 1, 2, 4, 8),
    "deltanet": (0.25, 0.5, 1, 2),
}
DOCUMENTS, EPOCHS, DEV = 64, 10, 20_000
"""What ablations are trained on, how often, and the held-out tokens read after every time."""
SMALL: dict[str, Settings] = {
    "protot": {"hidden_size": WIDTH, "num_hidden_layers": LAYERS},
    "llama": {
        "hidden_size": WIDTH,
        "intermediate_size": 432,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
    },
    "deltanet": {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_heads": HEADS},
    # Without a GPU's kernels a step of the first Mamba takes a minute.
    "mamba": MODELS["mamba"],
}


class Case(NamedTuple):
    """One row of a table at one context; ``name`` is that of its files, without rate and seed.

    Seed 0 is run at ``rates`` if ``rate_of`` is the case itself; else at the best rate of the case
    ``rate_of`` and at half of it.
    """

    name: str
    model: str
    settings: Settings
    rates: tuple[float, ...]
    rate_of: str


def main() -> None:
    """Build the corpus, or make every run of a part that has no result yet."""
    parser = training_options(
        __doc__, PARTS, work="table-runs", out=RESULTS / "prototype_mixer" / "tables"
    )
    parser.add_argument("--texts", type=Path, help="for `corpus`: a directory of Parquet files")
    parser.add_argument("--only", nargs="*", help="rows, such as protot or table-16-kernel-4")
    args = parser.parse_args()
    if args.part == "corpus":
        build_corpus_of_rows(args.texts, args.corpus)
        return
    torch.set_num_threads(args.threads)
    for case in (contexts if args.part == "contexts" else ablations)(args.corpus):
        if not args.only or case.name.partition("-at-")[0] in args.only:
            run(case, args.seed, args.work, args.out / args.part)


def run(case: Case, seed: int, work: Path, out: Path) -> None:
    """Make the runs of a case that have no result yet."""
    for rate in rates_of(case, seed, out):
        result = out / f"{case.name}-{rate:g}-{seed}.json"
        optimizer = case.settings["optimizer"] | {"learning_rate": rate}
        settings: Settings = case.settings | {"seed": seed, "optimizer": optimizer}
        row = {"row": case.name, "model": case.model, "rate": rate, "rate_of": case.rate_of}
        measure(row, settings, work / result.stem, result, keep=False)


def rates_of(case: Case, seed: int, out: Path) -> tuple[float, ...]:
    """Return what a seed is run at: the first at several rates, others at the best of these."""
    own = case.rate_of == case.name
    if seed:
        return (best_rate(out, case.name, len(case.rates) if own else 2),)
    if own:
        return case.rates
    best = best_rate(out, case.rate_of, len(case.rates))
    return best, best / 2


def best_rate(out: Path, name: str, least: int) -> float:
    """Return the rate of least perplexity of a case with seed 0, of so many rates or more."""
    runs = [row for row in map(read_json, out.glob(f"{name}-*-0.json")) if row["row"] == name]
    if len(runs) < least:
        raise SystemExit(f"{out} lacks runs of {name} with seed 0: make them first")
    return min(runs, key=dev_ce)["rate"]


def dev_ce(row: dict[str, Any]) -> float:
    """Return a run's cross-entropy: the least on the way or at its end, as the source has it."""
    return min([row["ce"], *(point["ce"] for point in row.get("curve", ()))])


def contexts(corpus: Path, lengths: Sequence[int] = CONTEXTS) -> list[Case]:
    """Return the rows of Table 1, context by context: as many steps as there are training rows."""
    opened = Corpus.open(corpus)
    steps = int(opened.lengths[opened.split("train")].sum()) // POSITIONS
    return [
        Case(
            f"{name}-at-{length}",
            model,
            padded_recipe(
                corpus,
                model_settings,
                length,
                {"warmup": 0.1, "final_learning_rate_share": 0.1},
                steps=steps,
                evaluation={"every": 0, "final_tokens": ALL_OF_IT},
                **COMMON,
            ),
            tuple(
                SOURCE_RATES[model] * factor
                for factor in TABLE_1_FACTORS.get(name, TABLE_1_FACTORS[model])
            ),
            # As many tokens a step at every context, but fewer documents: never a higher rate.
            f"{name}-at-{CONTEXTS[0]}",
        )
        for length in lengths
        for name, (model, model_settings) in TABLE_1.items()
    ]


def ablations(corpus: Path) -> list[Case]:
    """Return the rows of Tables 15 to 20 that have a recipe, the models' defaults before them."""
    cases: list[Case] = []
    paths = [RECIPES / f"{model}.yaml" for model in SMALL]
    for path in paths + sorted((RECIPES / "ablations").glob("*.yaml")):
        recipe = yaml.safe_load(path.read_text())
        model = recipe["model"]["preset"]
        optimizer = recipe["optimizer"]
        rate = optimizer.pop("learning_rate")
        settings = padded_recipe(
            corpus,
            recipe["model"] | SMALL[model],
            256,
            optimizer,
            steps=DOCUMENTS * ROW * EPOCHS // POSITIONS,
            evaluation={
                "every": DOCUMENTS * ROW // POSITIONS,
                "tokens": DEV,
                "final_tokens": DEV,
            },
            **COMMON,
        )
        if "value_width" in recipe["model"]:
            settings["model"]["value_width"] = WIDTH
        if "initial_temperatures" in recipe["model"]:
            temperatures = recipe["model"]["initial_temperatures"][:LAYERS]
            settings["model"]["initial_temperatures"] = temperatures
        if "dropout" in recipe:
            settings["dropout"] = recipe["dropout"]
        settings["data"]["documents"] = DOCUMENTS
        # The default in a table of its own is a second time the same runs.
        if settings not in [case.settings for case in cases]:
            rates = tuple(rate * factor for factor in FACTORS[model])
            cases.append(Case(path.stem, model, settings, rates, path.stem))
    return cases


def build_corpus_of_rows(texts: Path, out: Path) -> None:
    """Write a corpus of documents that have 2,048 tokens each, the end of text among them."""
    drawn, whole = (out.with_name(f"{out.name}-{part}") for part in ("drawn", "whole"))
    drawn.mkdir(exist_ok=True)
    for path in sorted(texts.glob("*.parquet")):
        table = pq.read_table(path)
        functions: Any = pc
        sizes = functions.utf8_length(table["text"]).to_numpy()
        long = np.random.default_rng(0).permutation(np.flatnonzero(sizes >= LONG))
        if len(long) >= EACH:
            chosen = table.take(np.sort(long[:EACH]))
            cut = functions.utf8_slice_codeunits(chosen["text"], 0, READ)
            at = chosen.column_names.index("text")
            pq.write_table(chosen.set_column(at, "text", cut), drawn / path.name)
    corpus = build_corpus(drawn, whole, vocab_size=VOCABULARY, heldout_fraction=HELD_OUT)
    rows: list[dict[str, Any]] = []
    for name in ("train", "heldout"):
        for document in corpus.split(name):
            text, spans = corpus.text(int(document)), corpus.spans(int(document))
            if len(spans) < ROW:
                continue
            text = text[: spans[ROW - 2][1]]
            # What is cut within a word may have other tokens at its end than the whole had.
            if len(corpus.tokenizer(text)["input_ids"]) == ROW - 1:
                rows.append({"text": text, "split": name})
    cut_path = drawn / "cut.parquet"
    pq.write_table(pa.Table.from_pylist(rows), cut_path)
    build_corpus(cut_path, out, tokenizer=whole / "tokenizer", heldout_fraction=HELD_OUT)
    for folder in (drawn, whole):
        shutil.rmtree(folder)
    print(f"wrote {out}: {len(rows)} documents of {ROW} tokens")


if __name__ == "__main__":
    main()
