"""Train ProtoT, LLaMA, Mamba 2 and DeltaNet of one size, for longer than the tables' models.

    python -m benchmarks.prototype_mixer.four_models corpus-mixed corpus --texts DIR
    python -m benchmarks.prototype_mixer.four_models corpus-mixed rates --only llama
    python -m benchmarks.prototype_mixer.four_models corpus-mixed train --only llama
    python -m benchmarks.prototype_mixer.four_models corpus-mixed train --only llama --steps 1500
    python -m benchmarks.prototype_mixer.four_models corpus-mixed long --only llama
    python -m benchmarks.render prototype_mixer

Texts are Parquet files with ``text`` and ``domain``; each gives documents drawn by a seed up to
``--most`` characters, so that no set outweighs the others. Every model sees the same rows in the
same order, once, and has the same number of parameters beside its embeddings within 2 %. Each is
trained at the rate of least perplexity among short runs; `long` trains it at three rates, weight
decay sparing embeddings and prototypes (A.4). A part that was stopped resumes. Runs of
another length than ``STEPS`` are written to a folder ``steps_N``. The models stay in ``--work``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F

from benchmarks.prototype_mixer.measure import Settings, measure, padded_recipe
from benchmarks.shared.options import RESULTS, training_options
from prismlm.corpus import Corpus, build_corpus
from prismlm.files import atomic_file, read_json, write_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.training.evaluation import HeldOut

PARTS = ["corpus", "rates", "train", "long"]
MOST, VOCABULARY, HELD_OUT = 9_000_000, 8192, 0.02
LENGTH = 256
SHORT, STEPS = 300, 11_000
"""Steps of a short run, and of a long one: 20 million tokens beside the padding."""
HALF = 200_000  # tokens of a half of the held-out documents
WARMUP = 0.02  # of a long run's steps, as the source's
MODELS: dict[str, Settings] = {
    "protot": {"preset": "protot", "num_hidden_layers": 8, "intermediate_size": 728},
    "llama": {"preset": "llama", "num_hidden_layers": 7},
    # It has no feed-forward network, and so more layers.
    "mamba2": {
        "preset": "mamba-laptop",
        "hidden_size": 256,
        "num_heads": 16,
        "num_hidden_layers": 13,
        "chunk_size": 16,
    },
    "deltanet": {"preset": "deltanet", "num_hidden_layers": 7},
}
# Once over the text needs no dropout.
WITHOUT_DROPOUT = {
    "protot": {"dropout": 0.0},
    "llama": {"attention_dropout": 0.0},
    "deltanet": {"dropout": 0.0},
}
# Without their kernels for a GPU, these two are faster compiled.
COMPILED = ("deltanet", "mamba2")
RATES = {
    "protot": (2e-3, 4e-3, 8e-3, 1.6e-2),
    "llama": (0.8e-3, 1.6e-3, 3.2e-3, 6.4e-3),
    "mamba2": (1.9e-3, 3.8e-3, 7.6e-3, 1.52e-2, 3.04e-2),
    "deltanet": (1.7e-3, 3.4e-3, 6.8e-3, 1.36e-2),
}
# Of long runs: the source's (A.2) and two more.
LONG_RATES = {
    "protot": (2e-3, 4e-3, 8e-3),
    "llama": (0.8e-3, 1.6e-3, 3.2e-3),
    "mamba2": (3.8e-3, 7.6e-3, 1.52e-2),
    "deltanet": (3.4e-3, 6.8e-3, 1.36e-2),
}


def main() -> None:
    """Build the corpus, or make every run of a part that has no result yet."""
    parser = training_options(
        __doc__, PARTS, work="four-models", out=RESULTS / "prototype_mixer" / "four_models"
    )
    parser.add_argument("--texts", type=Path, help="for `corpus`: a directory of Parquet files")
    parser.add_argument("--most", type=int, default=MOST, help="characters of a file")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a long run")
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rate", type=float, help="of a long run, in place of the three")
    args = parser.parse_args()
    if args.part == "corpus":
        build_mixed_corpus(args.texts, args.corpus, args.most)
        return
    short, long = args.part == "rates", args.part == "long"
    folder = "long" if long else "" if short or args.steps == STEPS else f"steps_{args.steps}"
    torch.set_num_threads(args.threads)
    for model in args.only:
        if long:
            rates = (args.rate,) if args.rate else LONG_RATES[model]
        else:
            rates = RATES[model] if short else (best_rate(args.out, model),)
        for rate in rates:
            name = f"{model}-{rate:g}" if short or long else model
            lasting = (SHORT, 0.1) if short else (args.steps, WARMUP)
            settings = recipe_of(model, rate, *lasting, args.corpus) | {"seed": args.seed}
            if long:
                del settings["optimizer"]["weight_decay_exempt"]
            run = {"model": model, "rate": rate, "steps": settings["steps"]}
            result = args.out / folder / f"{name}.json"
            measure(run, settings, args.work / folder / name, result, keep=not short)
            if long and "halves" not in (row := read_json(result)):
                found = on_halves(args.work / folder / name, Corpus.open(args.corpus))
                write_json(result, row | {"halves": found})


def build_mixed_corpus(texts: Path, out: Path, most: int = MOST) -> None:
    """Write a corpus of documents drawn from every file of a directory."""
    drawn = out.with_name(f"{out.name}-texts")
    drawn.mkdir(exist_ok=True)
    for path in sorted(texts.glob("*.parquet")):
        table = pq.read_table(path)
        order = np.random.default_rng(0).permutation(len(table))
        # PyArrow's functions are made while it is imported, and unknown to a type checker.
        sizes = getattr(pc, "utf8_length")(table["text"]).to_numpy()[order]  # noqa: B009
        chosen = np.sort(order[np.cumsum(sizes) <= most])
        with atomic_file(drawn / path.name) as temporary:
            pq.write_table(table.take(chosen), temporary)
    build_corpus(drawn, out, vocab_size=VOCABULARY, heldout_fraction=HELD_OUT, skip_bad_rows=True)
    shutil.rmtree(drawn)


@torch.no_grad()
def on_halves(directory: Path, corpus: Corpus) -> dict[str, float]:
    """Return a model's losses on two halves of the held-out documents.

    A rate is chosen by one and reported by the other.
    """
    model, _ = read_checkpoint(directory)
    heldout, losses = corpus.split("heldout"), dict[str, float]()
    for name, left_out in (("choice", heldout[::2]), ("report", heldout[1::2])):
        total, count = 0.0, 0
        for batch in HeldOut(corpus.without(left_out), LENGTH, 0).batches(HALF):
            ids, mask, scored = batch.scored_on(model.device)
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1][scored]
            total += F.cross_entropy(logits.float(), ids[:, 1:][scored], reduction="sum").item()
            count += len(logits)
        losses[name] = total / count
    return losses


def best_rate(results: Path, model: str) -> float:
    """Return the rate of least perplexity among the short runs of a model."""
    runs = [json.loads(path.read_text()) for path in results.glob(f"{model}-*.json")]
    if not runs:
        raise SystemExit(f"{results} has no short runs of {model}: run the part `rates` first")
    return min(runs, key=lambda run: run["perplexity"])["rate"]


def recipe_of(model: str, rate: float, steps: int, warmup: float, corpus: Path) -> Settings:
    """Return the recipe of a run, but for its seed and where it is written."""
    short = steps == SHORT
    return padded_recipe(
        corpus,
        MODELS[model] | WITHOUT_DROPOUT.get(model, {}),
        LENGTH,
        {"learning_rate": rate, "warmup": warmup, "final_learning_rate_share": 0.1},
        steps=steps,
        compile=model in COMPILED,
        precision="bf16",
        evaluation={
            "every": 0 if short else min(500, steps // 6),
            "tokens": 20_000,
            "final_tokens": 200_000,
        },
        checkpoint={"every": 100 if short else 250, "keep": 1},
    )


if __name__ == "__main__":
    main()
