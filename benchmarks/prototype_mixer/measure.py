"""Train ProtoT, LLaMA, Mamba and DeltaNet of a laptop's size; write docs/results/prototype_mixer/.

    python -m benchmarks.prototype_mixer.measure corpus-long corpus   # documents of the sample
    python -m benchmarks.prototype_mixer.measure corpus-long compare --seed 0  # and 1, 2
    python -m benchmarks.prototype_mixer.measure corpus-long improve --seed 0
    python -m benchmarks.prototype_mixer.measure corpus-long rates --seed 0
    python -m benchmarks.prototype_mixer.measure corpus-long longer --seed 0 --keep
    python -m benchmarks.prototype_mixer.render

Any corpus will do; documents shorter than a row are filled up with padding, and say nothing of
long contexts. Every model sees the same rows in the same order, a piece of one document each
(Mamba keeps no two documents of a row apart), for as many steps; a step takes as many positions at
every context. Rates are the source's (A.2), warmed up over 10 % of the steps and falling to a
tenth. The source warms up over 2 %, which is 113 of its steps and would be 15 of these.

One JSON file per run. A run whose file is there is not run again, and one that was cut short goes
on from its last checkpoint in ``--work``. Mamba 2 adds up its chunks as ``mamba2_scan`` does, which
takes a processor less time.
"""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from benchmarks.prototype_mixer.mamba2_scan import shared_scans
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, training_options
from prismlm.corpus import build_corpus, sample_path
from prismlm.files import atomic_file, write_json
from prismlm.models.device import device_named
from prismlm.training import build_recipe, train
from prismlm.training.setup import prepare

PARTS = ["corpus", "compare", "improve", "rates", "longer"]
STEPS, LONGER = 750, 3000
"""About one pass over the sample's long documents, and four."""
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
FACTORS = (0.5, 2.0)
SPREAD = "half-lives from 1 to 256"
EVERYWHERE = list(range(LAYERS))
# What of ProtoT was varied, by its configuration.
IMPROVEMENTS: dict[str, Settings] = {
    "values as wide as the model": {"value_width": WIDTH},
    # V and U of width 3/2 d beside W: 4 d², as the projections of attention.
    "values 1.5 times as wide": {"value_width": 3 * WIDTH // 2},
    "values twice as wide": {"value_width": 2 * WIDTH},
    "convolution in every layer": {"convolution_layers": EVERYWHERE},
    "no convolution": {"convolution_layers": []},
    "64 channels": {"num_channels": 64},
    "decay from 0.99": {"decay": 0.99},
    "decay from 0.999": {"decay": 0.999},
    "4 groups": {"num_groups": 4},
    "4 groups, 64 channels": {"num_groups": 4, "num_channels": 64},
    SPREAD: {"decay_half_lives": (1.0, 256.0)},
    "decay by token": {"decay_mode": "token"},
    "4 groups, half-lives from 1 to 256": {"num_groups": 4, "decay_half_lives": (1.0, 256.0)},
    "4 groups, wide values, convolution everywhere, half-lives from 1 to 256": {
        "num_groups": 4,
        "value_width": WIDTH,
        "convolution_layers": EVERYWHERE,
        "decay_half_lives": (1.0, 256.0),
    },
    "own read gate in layer 0": {"shared_gate_layers": []},
    "scores times temperature": {"temperature_mode": "multiply"},
    "no mass normalisation": {"mass_normalisation": False},
    "wide values, convolution everywhere": {
        "value_width": 2 * WIDTH,
        "convolution_layers": EVERYWHERE,
    },
    "wide values, convolution everywhere, decay from 0.99": {
        "value_width": 2 * WIDTH,
        "convolution_layers": EVERYWHERE,
        "decay": 0.99,
    },
}


class Run(NamedTuple):
    """One model to train."""

    kind: str
    model: str
    variant: str
    context: int
    factor: float = 1.0
    steps: int = STEPS

    @property
    def slug(self) -> str:
        """A name for its files."""
        words = [self.kind, self.model, self.variant, str(self.context)]
        words += [f"{self.factor:g}"] if self.factor != 1 else []
        name = "-".join(word for word in words if word)
        return "".join(letter if letter.isalnum() else "-" for letter in name).replace("--", "-")


def main() -> None:
    """Build the corpus, or make every run of a part that has no result yet."""
    parser = training_options(
        __doc__, PARTS, work="prototype-mixer-runs", out=RESULTS / "prototype_mixer"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--only", nargs="*", help="models or variants")
    parser.add_argument("--steps", type=int, help=f"{STEPS}; of longer runs, {LONGER}")
    parser.add_argument("--factor", type=float, help="times the source's rate, for every run")
    parser.add_argument("--keep", action="store_true", help="keep the trained models in --work")
    given = parser.parse_args()
    if given.part == "corpus":
        build_long_corpus(given.corpus)
        return
    torch.set_num_threads(given.threads)
    for planned in runs(given.part, given.contexts):
        run = planned._replace(steps=given.steps or planned.steps)
        if given.factor is not None:
            run = run._replace(factor=given.factor)
        if given.only and run.model not in given.only and run.variant not in given.only:
            continue
        result = given.out / f"{run.slug}-{given.seed}.json"
        if result.is_file():
            print(f"{result.name} is there")
            continue
        settings = recipe_of(run, given.corpus, given.seed)
        work = given.work / f"{run.slug}-{given.seed}"
        measure(run._asdict(), settings, work, result)
        if not given.keep:
            shutil.rmtree(work)


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


def runs(part: str, contexts: list[int]) -> list[Run]:
    """Return the runs of a part."""
    if part == "compare":
        return [Run(part, model, "", context) for context in contexts for model in MODELS]
    if part == "improve":
        return [Run(part, "protot", name, context) for context in contexts for name in IMPROVEMENTS]
    if part == "longer":
        chosen = [("protot", ""), ("llama", ""), ("protot", SPREAD)]
        return [Run(part, *of, context, steps=LONGER) for context in contexts for of in chosen]
    return [
        Run(part, model, "", context, factor)
        for context in contexts
        for model in MODELS
        for factor in FACTORS
    ]


def recipe_of(run: Run, corpus: Path, seed: int) -> Settings:
    """Return the recipe of a run, but for where it is written."""
    return {
        "corpus": str(corpus),
        "seed": seed,
        "model": MODELS[run.model] | IMPROVEMENTS.get(run.variant, {}),
        "head": {"enabled": False},
        "data": {"length": run.context, "packing": "padded"},
        "optimizer": {
            "learning_rate": RATES[run.model] * run.factor,
            "warmup": 0.1,
            "final_learning_rate_share": 0.1,
        },
        "steps": run.steps,
        "batch_size": POSITIONS // run.context,
        # On all held-out text, so that every context is judged by the same tokens.
        "evaluation": {"every": 0, "final_tokens": ALL_OF_IT},
        "checkpoint": {"every": 100, "keep": 1},
        "logging": {"tensorboard": False},
    }


def measure(run: Settings, settings: Settings, work: Path, result: Path) -> None:
    """Train, and write what the run is with its figures."""
    resumed = work.exists()
    recipe = build_recipe(settings | {"out": str(work)})
    elapsed, processor = time.perf_counter(), time.process_time()
    with shared_scans():
        trained = train(recipe, resume=True)
    elapsed, processor = time.perf_counter() - elapsed, time.process_time() - processor
    # Where the corpus lay says nothing; its name does.
    shown = settings | {"corpus": Path(settings["corpus"]).name}
    figures = {
        "perplexity": math.exp(trained.ce),
        "ce": trained.ce,
        "tokens": trained.tokens,
        "parameters": parameters(settings | {"out": str(work)}),
        # Of what was run last: where a run was resumed, not of all of it.
        "seconds": round(elapsed, 2),
        "processor_seconds": round(processor, 2),
        "resumed": resumed,
    }
    row = run | {"seed": settings["seed"], "settings": shown} | figures
    write_json(result, row | {"environment": environment(device_named("auto"))})
    print(f"{result.name}: perplexity {figures['perplexity']:.2f}, {elapsed:.0f} s", flush=True)


def parameters(settings: Settings) -> int:
    """Return how many parameters are trained."""
    model = prepare(build_recipe(settings)).model.model
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


if __name__ == "__main__":
    main()
