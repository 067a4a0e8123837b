"""Train a model from a recipe and write its figures; and the long runs on the bundled sample.

    python -m benchmarks.prototype_mixer.measure corpus-long corpus   # documents of the sample
    python -m benchmarks.prototype_mixer.measure corpus-long longer --seed 0 --keep  # and 1, 2
    python -m benchmarks.render prototype_mixer

ProtoT and LLaMA see the same rows of 256 tokens in the same order, a piece of one document each,
for 3,000 steps: about four times the whole text. Rates are the source's (A.2), warmed up over 10 %
of the steps and falling to a tenth. With ``--keep`` the models stay in ``--work``, where
``channels.py`` reads those of ProtoT.

One JSON file per run. A run whose file is there is not run again, and one that was cut short goes
on from its last checkpoint in ``--work``.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, training_options
from prismlm.corpus import build_corpus, sample_path
from prismlm.files import atomic_file, write_json
from prismlm.models.device import device_named
from prismlm.training import build_recipe, train
from prismlm.training.setup import prepare

PARTS = ["corpus", "longer"]
STEPS = 3000
LENGTH = 256
LONG = 7400
"""Characters, about 2,048 tokens of the sample's own tokenizer."""
VOCABULARY = 4096
HELD_OUT = 0.1
ALL_OF_IT = 10**9
CONTEXTS = (256, 512, 1024, 2048)
POSITIONS = 2048
"""Of a step: 8 rows of 256, 1 of 2,048."""
WIDTH, LAYERS, HEADS = 160, 3, 5
Settings = dict[str, Any]
MODELS: dict[str, Settings] = {
    "protot": {"preset": "protot-laptop"},
    "llama": {"preset": "llama-laptop", "max_position_embeddings": CONTEXTS[-1]},
    # Mamba 2, in two layers more: it has no SwiGLU.
    "mamba": {"preset": "mamba-laptop"},
    "deltanet": {
        "preset": "deltanet",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_heads": HEADS,
        "dropout": 0.0,
    },
}
RATES = {"protot": 2.0e-3, "llama": 1.6e-3, "mamba": 3.8e-3, "deltanet": 6.8e-3}
LONGER = ("protot", "llama")


def main() -> None:
    """Build the corpus, or make every run of a part that has no result yet."""
    parser = training_options(
        __doc__, PARTS, work="prototype-mixer-runs", out=RESULTS / "prototype_mixer"
    )
    parser.add_argument("--only", nargs="*", choices=LONGER, default=LONGER)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--keep", action="store_true", help="keep the trained models in --work")
    args = parser.parse_args()
    if args.part == "corpus":
        build_long_corpus(args.corpus)
        return
    torch.set_num_threads(args.threads)
    for model in args.only:
        result = args.out / f"longer-{model}-{LENGTH}-{args.seed}.json"
        settings = recipe_of(model, args.corpus, args.seed, args.steps)
        run = {"kind": args.part, "model": model}
        measure(run, settings, args.work / result.stem, result, keep=args.keep)


def build_long_corpus(out: Path) -> None:
    """Write a corpus of the bundled sample's documents that fill a row of the longest context."""
    table = pq.read_table(sample_path())
    source = out.with_name(f"{out.name}.parquet")
    with atomic_file(source) as temporary:
        functions: Any = pc
        long_enough = functions.utf8_length(pc.field("text")) >= LONG
        pq.write_table(table.filter(long_enough), temporary)
    corpus = build_corpus(source, out, vocab_size=VOCABULARY, heldout_fraction=HELD_OUT)
    source.unlink()
    print(f"wrote {out}: {len(corpus.doc_ids)} documents")


def recipe_of(model: str, corpus: Path, seed: int, steps: int = STEPS) -> Settings:
    """Return the recipe of a long run, but for where it is written."""
    return padded_recipe(
        corpus,
        MODELS[model],
        LENGTH,
        {"learning_rate": RATES[model], "warmup": 0.1, "final_learning_rate_share": 0.1},
        seed=seed,
        steps=steps,
        evaluation={"every": 0, "final_tokens": ALL_OF_IT},
        checkpoint={"every": 100, "keep": 1},
    )


def padded_recipe(
    corpus: Path, model: Settings, length: int, optimizer: Settings, **more: Any
) -> Settings:
    """Return a recipe of a decoder without a head, on rows of one document each."""
    return {
        "corpus": str(corpus),
        "model": model,
        "head": {"enabled": False},
        "data": {"length": length, "packing": "padded"},
        # Embeddings and prototypes decayed too when the published runs were made.
        "optimizer": optimizer | {"weight_decay_exempt": []},
        "batch_size": POSITIONS // length,
        "logging": {"tensorboard": False},
        **more,
    }


def measure(
    run: Settings, settings: Settings, work: Path, result: Path, *, keep: bool = True
) -> None:
    """Train, unless the result exists, and write what the run is with its figures."""
    if result.is_file():
        print(f"{result.name} is there")
        return
    resumed = work.exists()
    recipe = build_recipe(settings | {"out": str(work)})
    began = time.perf_counter()
    trained = train(recipe, resume=True)
    elapsed = time.perf_counter() - began
    figures = {
        "perplexity": math.exp(trained.ce),
        "ce": trained.ce,
        "tokens": trained.tokens,
        "parameters": parameters(settings | {"out": str(work)}),
        # Of a resumed run only the last part.
        "seconds": round(elapsed, 2),
        "resumed": resumed,
    }
    # The corpus's path says nothing; its name does.
    shown = settings | {"corpus": Path(settings["corpus"]).name}
    row = run | {"seed": settings["seed"], "settings": shown} | figures
    if settings["evaluation"]["every"]:
        row["curve"] = curve(work)
    result.parent.mkdir(parents=True, exist_ok=True)
    write_json(result, row | {"environment": environment(device_named("auto"))})
    print(f"{result.name}: perplexity {figures['perplexity']:.2f}, {elapsed:.0f} s", flush=True)
    if not keep:
        shutil.rmtree(work)


def curve(work: Path) -> list[dict[str, float]]:
    """Return tokens read and cross-entropy on held-out text at every evaluation of a run."""
    rows = [json.loads(line) for line in (work / "training.jsonl").read_text().splitlines()]
    points: list[dict[str, float]] = []
    tokens = 0
    for row in rows:
        tokens = row.get("tokens", tokens)
        if "eval_ce" in row:
            points.append({"step": row["step"], "tokens": tokens, "ce": row["eval_ce"]})
    return points


def parameters(settings: Settings) -> int:
    """Return how many parameters are trained."""
    model = prepare(build_recipe(settings)).model.model
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


if __name__ == "__main__":
    main()
