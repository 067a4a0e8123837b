"""Compare a ProtoPNet-style head with PRISM's and write docs/results/protopnet.json.

    prismlm corpus build tinystories.parquet --out tinystories --vocab-size 4096
    OMP_NUM_THREADS=1 python -m benchmarks.prototype_head.protopnet --corpus tinystories
    python -m benchmarks.prototype_head.render_protopnet

The claim (PRISM, "Architecture"): "On toy experiments with the TinyStories dataset, the ProtoPNet
style head required up to 3× longer wallclock time to reach the same perplexity."

Variants, from the same backbone weights, on the same rows in the same order:

    plain      ℓ = W z
    prism      ℓ = W z, trained with R1, R2 and RES of the prototypes beside it
    through    ℓ = W ẑ, k prototypes per token: the mixer M = W P, reparameterised
    dense      ℓ = M ReLU(τ c), all K prototypes
    dense-k    the same with the k largest

All run in one process and one thread, a few steps each in turn, so that whatever else the machine
does slows them alike. Without --corpus the bundled sample is used.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from benchmarks.prototype_head.protopnet_contest import (
    SEARCHED,
    VARIANTS,
    Contestant,
    Settings,
    build,
    scored,
)
from benchmarks.prototype_head.protopnet_levels import compare
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus, PackedDataset, WindowBatch, build_corpus, pack, sample_path
from prismlm.errors import InputError
from prismlm.files import read_json, write_json
from prismlm.models.device import uses_bf16
from prismlm.models.presets import build_config, build_model
from prismlm.training.evaluation import HeldOut

VOCABULARY = 4096
ROUND = 20


def main() -> None:
    """Run the comparison."""
    arguments = parse()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        corpus = open_corpus(arguments.corpus, Path(directory))
        heldout = list(HeldOut(corpus, arguments.length, 0).batches(arguments.heldout_tokens))
        if arguments.resume:
            result = read_result(arguments, corpus)
        else:
            result = prepare(arguments, corpus, heldout)
        shared = {k: v for k, v in result["settings"].items() if k not in ("seeds", "round")}
        settings, best, runs = Settings(**shared), result["search"]["best"], result["runs"]
        for seed in arguments.seeds:
            if any(run["seed"] == seed for run in runs):
                continue
            print(f"seed {seed}", flush=True)
            contestants = start(
                corpus,
                [(name, settings, best[name] if name in SEARCHED else None) for name in VARIANTS],
                seed,
            )
            race(contestants, corpus, settings, seed, heldout, every=ROUND)
            runs += [report(contestant, seed) for contestant in contestants]
            # After every seed, so that a run that is cut short leaves whole seeds to go on from.
            write_json(arguments.out, result | {"comparison": compare(runs)})
        write_json(arguments.out, result | {"comparison": compare(runs)})
    print(f"wrote {arguments.out}")


def read_result(arguments: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """Return what a run of the same command has left, for the seeds that it did not come to.

    Raises:
        FileNotFoundError: there is none.
        InputError: it is of another command or corpus.
    """
    result = read_json(arguments.out)
    if result["command"] != command(arguments):
        raise InputError(
            f"{arguments.out} was begun with another command: {result['command']}. Give the same "
            "with --resume, or start anew without it."
        )
    if result["corpus"]["fingerprint"] != corpus.fingerprint:
        raise InputError(f"{arguments.out} was begun with another corpus than {corpus.path}.")
    return result


def prepare(
    arguments: argparse.Namespace, corpus: Corpus, heldout: list[WindowBatch]
) -> dict[str, Any]:
    """Choose the peak rates; return what the result holds before its runs."""
    settings = Settings(
        preset=arguments.preset,
        prototypes=arguments.prototypes,
        prototypes_per_token=arguments.prototypes_per_token,
        steps=arguments.steps,
        rows=arguments.rows,
        length=arguments.length,
        bf16=uses_bf16(arguments.precision, "cpu"),
    )
    # Another seed than the final runs: rates are not chosen on the runs they are judged by.
    seed = max(arguments.seeds) + 1
    short = replace(settings, steps=arguments.search_steps)
    found: dict[str, dict[float, float]] = {}
    # The plain decoder chooses the backbone's rate for all, so that W has its tries as M has.
    tried = [replace(short, learning_rate=rate) for rate in arguments.backbone_rates]
    ces = search(corpus, "plain", [(one, None) for one in tried], seed, heldout)
    found["plain"] = dict(zip(arguments.backbone_rates, ces, strict=True))
    rate = min(found["plain"], key=lambda rate: found["plain"][rate])
    settings, short = (replace(s, learning_rate=rate) for s in (settings, short))
    for name in SEARCHED:
        entries: list[tuple[Settings, float | None]] = [(short, r) for r in arguments.rates]
        ces = search(corpus, name, entries, seed, heldout)
        found[name] = dict(zip(arguments.rates, ces, strict=True))
    return {
        "environment": environment(),
        "command": command(arguments),
        "settings": asdict(settings) | {"seeds": arguments.seeds, "round": ROUND},
        "corpus": {
            "fingerprint": corpus.fingerprint,
            "vocabulary": len(corpus.tokenizer),
            **corpus.meta["counts"],
            "heldout": corpus.meta["heldout"],
        },
        "heldout_predictions": sum(int(scored(batch).sum()) for batch in heldout),
        "search": {
            "steps": short.steps,
            "seed": seed,
            "ce": {n: {f"{r:g}": ce for r, ce in ces.items()} for n, ces in found.items()},
            "best": {name: min(ces, key=lambda rate: ces[rate]) for name, ces in found.items()},
        },
        "runs": [],
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = script_options(__doc__, RESULTS / "protopnet.json")
    parser.add_argument("--corpus", type=Path, help="a directory of prismlm corpus build")
    parser.add_argument("--preset", default="llama-tiny")
    parser.add_argument("--prototypes", type=int, default=1024)
    parser.add_argument("--prototypes-per-token", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--search-steps", type=int, default=60)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 1e-2, 3e-2])
    parser.add_argument("--backbone-rates", type=float, nargs="+", default=[2e-3, 5e-3, 1e-2])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--heldout-tokens", type=int, default=8000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--precision", choices=("auto", "float32", "bf16"), default="auto")
    parser.add_argument("--resume", action="store_true", help="run the seeds that --out lacks")
    return parser.parse_args()


def command(arguments: argparse.Namespace) -> str:
    """Return the command that gives these figures, without where the files lie."""
    parts = ["OMP_NUM_THREADS=1 python -m benchmarks.prototype_head.protopnet"]
    for name, value in vars(arguments).items():
        if name in ("out", "resume") or value is None:
            continue
        shown = value.name if isinstance(value, Path) else value
        flat = " ".join(f"{v:g}" for v in shown) if isinstance(shown, list) else str(shown)
        parts.append(f"--{name.replace('_', '-')} {flat}")
    return " ".join(parts)


def open_corpus(path: Path | None, scratch: Path) -> Corpus:
    """Open a corpus, or build one from the bundled sample."""
    if path is None:
        path = scratch / "sample"
        print("building a corpus from the bundled sample", flush=True)
        build_corpus([sample_path()], path, vocab_size=VOCABULARY)
    return Corpus.open(path)


def start(
    corpus: Corpus, entries: list[tuple[str, Settings, float | None]], seed: int
) -> list[Contestant]:
    """Return variants with their settings and heads' peak rates, on one draw of weights."""
    settings = entries[0][1]
    config = build_config({"preset": settings.preset}, len(corpus.tokenizer), corpus.eos_token_id)
    torch.manual_seed(seed)
    initial = build_model(config)
    rows = pack(corpus, corpus.split("train"), settings.length, seed)
    return [
        build(name, initial, rows, own, rate or own.prism_head_rate, seed)
        for name, own, rate in entries
    ]


def batches(rows: PackedDataset, settings: Settings, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of a run: every epoch in an order of its own, whole batches only."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for first in range(0, len(order) - settings.rows + 1, settings.rows):
            chosen = order[first : first + settings.rows]
            yield default_collate([rows[index] for index in chosen])


def race(
    contestants: list[Contestant],
    corpus: Corpus,
    settings: Settings,
    seed: int,
    heldout: list[WindowBatch],
    *,
    every: int,
) -> None:
    """Train all in turn, ``ROUND`` steps each; who begins changes from round to round."""
    rows = pack(corpus, corpus.split("train"), settings.length, seed)
    source = batches(rows, settings, seed)
    for contestant in contestants:
        contestant.evaluate(heldout)
    for number, done in enumerate(range(0, settings.steps, ROUND)):
        taken = [next(source) for _ in range(min(ROUND, settings.steps - done))]
        turn = number % len(contestants)
        for contestant in contestants[turn:] + contestants[:turn]:
            gc.collect()
            for batch in taken:
                contestant.train_on(batch)
        if (done + len(taken)) % every == 0 or done + len(taken) == settings.steps:
            for contestant in contestants:
                contestant.evaluate(heldout)
        shown = "  ".join(f"{c.name} {c.curve[-1]['ce']:.3f} {c.cpu:.0f}s" for c in contestants)
        print(f"{done + len(taken):5d}  {shown}", flush=True)


def search(
    corpus: Corpus,
    name: str,
    entries: list[tuple[Settings, float | None]],
    seed: int,
    heldout: list[WindowBatch],
) -> list[float]:
    """Return the final held-out CE of a short run for every setting and head rate of a variant."""
    print(f"peak rates of {name}", flush=True)
    settings = entries[0][0]
    contestants = start(corpus, [(name, own, rate) for own, rate in entries], seed)
    race(contestants, corpus, settings, seed, heldout, every=settings.steps)
    return [contestant.curve[-1]["ce"] for contestant in contestants]


def report(contestant: Contestant, seed: int) -> dict[str, Any]:
    """Return the figures of one run."""
    trained = {id(p): p.numel() for p in contestant.module.parameters()}
    plain = {id(p): p.numel() for p in contestant.backbone.parameters()}
    return {
        "variant": contestant.name,
        "seed": seed,
        "parameters": sum(trained.values()),
        "head_parameters": sum(trained.values()) - sum(plain.values()),
        "head_rate": contestant.optimizer.param_groups[-1]["initial_lr"],
        "cpu_ms_per_step": 1000 * contestant.cpu / contestant.step,
        "wall_ms_per_step": 1000 * contestant.wall / contestant.step,
        "curve": contestant.curve,
    }


if __name__ == "__main__":
    main()
