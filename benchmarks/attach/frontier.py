"""Heads of several sizes on a real model, fitted to stored hidden states.

    python -m benchmarks.attach.frontier states MODEL CORPUS --work DIR --gb 3
    python -m benchmarks.attach.frontier fit MODEL --work DIR --prototypes 8192 --per-token 32
    python -m benchmarks.attach.frontier control MODEL --work DIR --prototypes 8192 --per-token 32

``states`` reads the states of a corpus's training and held-out text once; ``fit`` fits one head and
``control`` measures random training states as prototypes, which were not trained. Each writes one
JSON file of docs/results/attach/, with the figures of the head every so many steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.stored_states import measure_states
from prismlm.cli.progress import ConsoleReporter
from prismlm.corpus import Corpus
from prismlm.corpus.store import Split
from prismlm.explain.quality import HeadQuality
from prismlm.files import write_json
from prismlm.layers import PrototypeHead
from prismlm.layers.prototype_head import Weights
from prismlm.lens.options import IndexOptions
from prismlm.lens.states import HiddenStates, read_states
from prismlm.models.device import uses_bf16
from prismlm.training.fit import FitOptions, Fitting, batches, init_prototypes

MEASURED_TOGETHER = 500


def main() -> None:
    """Read states, fit a head or measure the control."""
    parser = script_options(__doc__, RESULTS / "attach")
    parser.add_argument("part", choices=["states", "fit", "control"])
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, required=True, help="where states and fits are kept")
    parser.add_argument("--gb", type=float, default=3.0, help="of training states")
    parser.add_argument("--states", type=int, help="fit to about the first so many; else all")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--prototypes", type=int, default=8192)
    parser.add_argument("--per-token", type=int, default=32)
    parser.add_argument("--weights", choices=get_args(Weights), default="cosine")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.03)
    parser.add_argument("--frequent", type=int, default=6000)
    parser.add_argument("--drawn", type=int, default=2000)
    parser.add_argument("--points", type=int, default=6, help="of the curve over steps")
    parser.add_argument("--heldout", type=int, default=10_000, help="states to measure on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(given.model).eval().requires_grad_(False)
    model.to(given.device)
    if given.part == "states":
        _read(given, model)
        return
    train, heldout = opened(given.work / "train", given.states), opened(given.work / "heldout")
    points = control(given, model, train, heldout)
    if given.part == "fit":
        points = fitted(given, model, train, heldout)
    sizes = (given.prototypes, given.per_token, given.steps, len(train), given.seed)
    how = [] if given.weights == "cosine" else [given.weights]
    name = "-".join([given.part, *how, *map(str, sizes)])
    given.out.mkdir(exist_ok=True)
    settings = (
        "prototypes",
        "per_token",
        "weights",
        "steps",
        "batch",
        "rate",
        "frequent",
        "drawn",
        "seed",
    )
    result = {
        "part": given.part,
        "model": given.model.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "width": train.width,
        "states": len(train),
        **{name: getattr(given, name) for name in settings},
        "points": points,
        "environment": environment(given.device) | {"device": given.device},
    }
    write_json(given.out / f"{name}.json", result)
    print(f"wrote {given.out / name}.json")


def _read(given: argparse.Namespace, model: Any) -> None:
    corpus = Corpus.open(given.corpus)
    limits: dict[Split, float] = {"heldout": given.gb / 20, "train": given.gb}
    for split, limit in limits.items():
        read_states(
            model,
            corpus,
            given.work / split,
            IndexOptions(
                window=given.window,
                stride=given.window * 7 // 8,
                split=split,
                bf16=uses_bf16("auto", given.device),
            ),
            limit_bytes=limit * 1e9,
            progress=ConsoleReporter(),
        )


def opened(directory: Path, at_most: int | None = None) -> HiddenStates:
    """Open stored states, the first blocks of them alone where there is a limit.

    The first blocks are spread over the corpus, so fewer of them are as even a sample of it.
    """
    states = HiddenStates.open(directory)
    if at_most is None:
        return states
    return replace(states, ends=[end for end in states.ends if end <= at_most])


def options_of(given: argparse.Namespace, states: int) -> FitOptions:
    """Return how a head is fitted in so many steps."""
    return FitOptions(
        prototypes=given.prototypes,
        prototypes_per_token=given.per_token,
        epochs=given.steps / (states // given.batch),
        batch=given.batch,
        learning_rate=given.rate,
        frequent=given.frequent,
        drawn=given.drawn,
        weights=given.weights,
        seed=given.seed,
    )


def fitted(
    given: argparse.Namespace, model: Any, train: HiddenStates, heldout: HiddenStates
) -> list[dict[str, Any]]:
    """Fit one head; return its figures along the way, with the seconds of a step."""
    options = options_of(given, len(train))
    head = options.head(train.width).to(given.device)
    init_prototypes(head, train, given.seed)
    fitting = Fitting(model, train, options, head)
    points = [measured(given, model, head, heldout, 0)]
    at = set(np.geomspace(100, fitting.steps, given.points).round().astype(int).tolist())
    seconds = 0.0
    for rows in batches(len(train), given.batch, fitting.steps, given.seed):
        began = time.perf_counter()
        fitting.take(rows)
        seconds += time.perf_counter() - began
        if fitting.step in at or fitting.step == fitting.steps:
            points.append(measured(given, model, head, heldout, fitting.step))
            points[-1]["seconds_per_step"] = seconds / fitting.step
            print(points[-1], flush=True)
    torch.save(head.state_dict(), given.work / f"head-{given.prototypes}-{given.per_token}.pt")
    return points


def control(
    given: argparse.Namespace, model: Any, train: HiddenStates, heldout: HiddenStates
) -> list[dict[str, Any]]:
    """Return the figures of random training states as prototypes, untrained."""
    if given.part != "control":
        return []
    rows = np.random.default_rng(given.seed).choice(len(train), given.prototypes, replace=False)
    head = options_of(given, len(train)).head(train.width)
    head.place_on(train.states(np.sort(rows)))
    return [measured(given, model, head.to(given.device), heldout, 0)]


def measured(
    given: argparse.Namespace, model: Any, head: PrototypeHead, heldout: HiddenStates, step: int
) -> dict[str, Any]:
    """Return the figures of a head after a step."""
    count = min(given.heldout, len(heldout))
    rows = np.sort(np.random.default_rng(0).choice(len(heldout), count, replace=False))

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, count, MEASURED_TOGETHER):
            part = rows[first : first + MEASURED_TOGETHER]
            yield heldout.states(part), heldout.tokens(part)

    found: HeadQuality = measure_states(model, head, parts())
    return {"step": step, **found.to_dict(), "recovered": found.recovered}


if __name__ == "__main__":
    main()
