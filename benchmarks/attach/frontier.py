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
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, add_numbers, script_options
from prismlm.cli.output import ConsoleReporter
from prismlm.corpus import Corpus
from prismlm.corpus.store import Split
from prismlm.explain.prediction import OutputLayer
from prismlm.explain.quality import quality_of
from prismlm.files import write_json
from prismlm.layers import PrototypeHead
from prismlm.layers.prototype_head import Weights
from prismlm.lens.options import IndexOptions
from prismlm.lens.scan import HiddenStates, read_states
from prismlm.models.device import uses_bf16
from prismlm.models.seam import LogitMap
from prismlm.training.fit import FitOptions, Fitting, batches, init_prototypes

WINDOW, BATCH, RATE = 512, 256, 0.03
FREQUENT, DRAWN = 6000, 2000
POINTS, MEASURED, MEASURED_TOGETHER = 6, 10_000, 500
"""Points of the curve over steps, and the held-out states that each is measured on."""


def main() -> None:
    """Read states, fit a head or measure the control."""
    parser = script_options(__doc__, RESULTS / "attach")
    parser.add_argument("part", choices=["states", "fit", "control"])
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, required=True, help="where states and fits are kept")
    parser.add_argument("--gb", type=float, default=3.0, help="of training states")
    parser.add_argument("--weights", choices=get_args(Weights), default="cosine")
    add_numbers(parser, prototypes=8192, per_token=32, steps=3000, seed=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model).eval().requires_grad_(False)
    model.to(args.device)
    if args.part == "states":
        read(args, model)
        return
    train, heldout = (HiddenStates.open(args.work / split) for split in ("train", "heldout"))
    options = FitOptions(
        prototypes=args.prototypes,
        prototypes_per_token=args.per_token,
        epochs=args.steps / (len(train) // BATCH),
        batch=BATCH,
        learning_rate=RATE,
        frequent=FREQUENT,
        drawn=DRAWN,
        weights=args.weights,
        seed=args.seed,
    )
    measure = fitted if args.part == "fit" else control
    points = measure(model, options, train, heldout)
    sizes = (args.prototypes, args.per_token, args.steps, len(train), args.seed)
    weights = [] if args.weights == "cosine" else [args.weights]
    path = args.out / f"{'-'.join([args.part, *weights, *map(str, sizes)])}.json"
    args.out.mkdir(exist_ok=True)
    result = {
        "part": args.part,
        "model": args.model.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "width": train.width,
        "states": len(train),
        **{n: getattr(args, n) for n in ("prototypes", "per_token", "weights", "steps", "seed")},
        **{"batch": BATCH, "rate": RATE, "frequent": FREQUENT, "drawn": DRAWN},
        "points": points,
        "environment": environment(args.device) | {"device": args.device},
    }
    write_json(path, result)
    print(f"wrote {path}")


def read(args: argparse.Namespace, model: Any) -> None:
    """Keep the states of a corpus's training and held-out text."""
    corpus, bf16 = Corpus.open(args.corpus), uses_bf16("auto", args.device)
    limits: dict[Split, float] = {"heldout": args.gb / 20, "train": args.gb}
    for split, limit in limits.items():
        options = IndexOptions(window=WINDOW, stride=WINDOW * 7 // 8, split=split, bf16=bf16)
        read_states(
            *(model, corpus, args.work / split, options),
            limit_bytes=limit * 1e9,
            progress=ConsoleReporter(),
        )


def fitted(
    model: Any, options: FitOptions, train: HiddenStates, heldout: HiddenStates
) -> list[dict[str, Any]]:
    """Fit one head; return its figures along the way, with the seconds of a step."""
    head = options.head(train.width).to(model.device)
    init_prototypes(head, train, options.seed)
    fitting = Fitting(model, train, options, head)
    points = [measured(model, head, heldout, 0)]
    at = set(np.geomspace(100, fitting.steps, POINTS).round().astype(int).tolist())
    seconds = 0.0
    for rows in batches(len(train), options.batch, fitting.steps, options.seed):
        began = time.perf_counter()
        fitting.take(rows)
        seconds += time.perf_counter() - began
        if fitting.step in at or fitting.step == fitting.steps:
            points.append(measured(model, head, heldout, fitting.step))
            points[-1]["seconds_per_step"] = seconds / fitting.step
            print(points[-1], flush=True)
    return points


def control(
    model: Any, options: FitOptions, train: HiddenStates, heldout: HiddenStates
) -> list[dict[str, Any]]:
    """Return the figures of random training states as prototypes, untrained."""
    rows = np.random.default_rng(options.seed).choice(len(train), options.prototypes, replace=False)
    head = options.head(train.width)
    head.place_on(train.states(np.sort(rows)))
    return [measured(model, head.to(model.device), heldout, 0)]


def measured(model: Any, head: PrototypeHead, heldout: HiddenStates, step: int) -> dict[str, Any]:
    """Return the figures of a head after a step."""
    count = min(MEASURED, len(heldout))
    rows = np.sort(np.random.default_rng(0).choice(len(heldout), count, replace=False))
    parts = (
        rows[first : first + MEASURED_TOGETHER] for first in range(0, count, MEASURED_TOGETHER)
    )
    # The model is not run: its logits are those of its output embedding.
    output = OutputLayer.from_model(model, LogitMap.of(model))
    device = output.weight.device
    states = (
        (heldout.states(part).to(device).float(), heldout.tokens(part).to(device)) for part in parts
    )
    quality = quality_of(output, head, ((z, output.logits(z), after) for z, after in states))
    return {"step": step, **quality.to_dict(), "recovered": quality.recovered}


if __name__ == "__main__":
    main()
