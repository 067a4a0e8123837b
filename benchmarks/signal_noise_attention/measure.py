"""Train decoders of signal/noise attention and GPT-2 of a laptop's size on stories.

    python -m benchmarks.signal_noise_attention.measure stories corpus TEXTS.parquet …
    python -m benchmarks.signal_noise_attention.measure stories describe
    python -m benchmarks.signal_noise_attention.measure stories train --seed 0        # and 1, 2
    python -m benchmarks.render signal_noise_attention

The source trains on TinyStories; any stories will do, and the page names the corpus. Every model
sees the same rows in the same order, documents kept apart, for as many steps, with the same peak
rate, warmed up over 5 % of the steps (the source's 1,000 of 20,000) and falling along a cosine.

One JSON file per run in docs/results/signal_noise_attention/. A run whose file is there is not run
again, and one that was cut short goes on from its last checkpoint in ``--work``, where the trained
models stay.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.prototype_mixer.measure import Settings, measure
from benchmarks.shared.options import RESULTS, training_options
from prismlm.corpus import Corpus, build_corpus
from prismlm.files import write_json

PARTS = ["corpus", "describe", "train"]
VOCABULARY = 4096
HELD_OUT = 0.05
GOLDEN = (1 + math.sqrt(5)) / 2
RATE = 2e-3
STEPS, LENGTH, ROWS = 750, 256, 8
OWN: Settings = {"preset": "signal-noise-laptop"}
LAMBDA: Settings = {"initial": 0.01, "final": 0.1}


class Variant(NamedTuple):
    """A model, and λ while it trains; None for a model without noise heads."""

    model: Settings
    noise_weight: Settings | None = LAMBDA


DEFAULT = "ratio π"
VARIANTS: dict[str, Variant] = {
    DEFAULT: Variant(OWN),
    "ratio 3": Variant(OWN | {"frequency_ratio": 3.0}),
    "ratio 22/7": Variant(OWN | {"frequency_ratio": 22 / 7}),
    "golden ratio": Variant(OWN | {"frequency_ratio": GOLDEN}),
    "ratio 2": Variant(OWN | {"frequency_ratio": 2.0}),
    "ratio 1": Variant(OWN | {"frequency_ratio": 1.0}),
    "λ = 0": Variant(OWN, {"initial": 0.0, "final": 0.0}),
    "λ = 0.1": Variant(OWN, {"initial": 0.1, "final": 0.1}),
    "R = 4": Variant(OWN | {"expansion": 4}),
    "R = 2, untied": Variant(OWN | {"tied_output": False}),
    "GPT-2": Variant({"preset": "gpt2-laptop", "n_positions": 2 * LENGTH}, None),
}


def slug(variant: str) -> str:
    """Return a name for a variant's files."""
    spelled = {"π": "pi", "λ": "lambda", "=": "", ",": ""}
    words = "".join(spelled.get(letter, letter) for letter in variant)
    plain = "".join(letter if letter.isalnum() else " " for letter in words.lower())
    return "-".join(plain.split())


def main() -> None:
    """Build or describe the corpus, or train every variant that has no result yet."""
    parser = training_options(
        __doc__, PARTS, work="signal-noise-runs", out=RESULTS / "signal_noise_attention"
    )
    parser.add_argument("texts", type=Path, nargs="*", help="what the corpus is built from")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    if (args.part == "corpus") != bool(args.texts):
        parser.error("texts are given to build the corpus from, and only then")
    if args.part == "corpus":
        corpus = build_corpus(
            args.texts, args.corpus, vocab_size=VOCABULARY, heldout_fraction=HELD_OUT
        )
        print(f"wrote {args.corpus}: {len(corpus.doc_ids)} documents")
        return
    described = describe(Corpus.open(args.corpus))
    if args.part == "describe":
        write_json(args.out.with_name("stories.json"), described)
        return
    torch.set_num_threads(args.threads)
    for variant in VARIANTS:
        name = f"{slug(variant)}-{args.seed}"
        settings = recipe_of(variant, args.corpus, args.seed, args.steps)
        run = {"variant": variant, "corpus": described}
        measure(run, settings, args.work / name, args.out / f"{name}.json")


def describe(corpus: Corpus) -> dict[str, Any]:
    """Return the name, fingerprint and size of a corpus."""
    return {
        "name": corpus.name,
        "fingerprint": corpus.fingerprint,
        "documents": len(corpus),
        "tokens": corpus.num_tokens,
        "heldout": corpus.meta["heldout"],
    }


def recipe_of(variant: str, corpus: Path, seed: int, steps: int = STEPS) -> Settings:
    """Return the recipe of a variant, but for where it is written."""
    model, noise_weight = VARIANTS[variant]
    settings: Settings = {"corpus": str(corpus), "seed": seed, "model": model, "steps": steps}
    return on_stories(settings, LENGTH, noise_weight=noise_weight)


def on_stories(settings: Settings, length: int, **more: Any) -> Settings:
    """Return a recipe of corpus, seed, model and steps, with what all runs on stories have."""
    return {
        "corpus": settings["corpus"],
        "seed": settings["seed"],
        "model": settings["model"],
        "head": {"enabled": False},
        **more,
        "data": {"length": length},
        # Embeddings decayed too when the published runs were made, as in nanoGPT.
        "optimizer": {"learning_rate": RATE, "weight_decay_exempt": []},
        "steps": settings["steps"],
        "batch_size": ROWS,
        "evaluation": {"every": 0, "final_tokens": 200_000},
        "checkpoint": {"every": 250, "keep": 1},
        "logging": {"tensorboard": False},
    }


if __name__ == "__main__":
    main()
