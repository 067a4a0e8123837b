"""The bench of attribution on a pretrained model that was taught invented facts.

    python -m benchmarks.attribution.smollm2_facts SMOLLM2 WORK

SMOLLM2 is the directory of a Llama's checkpoint. Facts are planted in short documents among short
real ones (``corpus``), the model is taught them through adapters in its last blocks (``teach``), a
head and a lens are attached to it (``attach``), and what is named for the facts is judged: whether
it is the documents that hold them (``recall``), what the answers lose where the model is taught
without it (``forgetting``), and, for other predictions, whether a step on it makes them likelier
(``patch``). ``before`` attaches to the model that was not taught, and judges recall there. Each
part is kept in WORK, as is each prediction and each training within one, so that a stopped run goes
on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.attribution.forgetting import kept_file
from benchmarks.attribution.judges.passages import Prediction
from benchmarks.attribution.small_models import log_probabilities
from benchmarks.attribution.smollm2_judges import FORGETTING, forgetting_part, judged, patch_part
from benchmarks.attribution.smollm2_setting import (
    BEFORE,
    COPIES,
    TAUGHT,
    WINDOW,
    attached,
    build_facts_corpus,
    first_tokens,
    opened,
    teaching_of,
)
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.files import atomic_directory, read_json, write_json
from prismlm.models.base import put_adapted
from prismlm.models.checkpoint import read_checkpoint
from prismlm.training import AttachOptions, FitOptions, attach


def main() -> None:
    """Do what is asked for and not there, and write what is there."""
    parser = script_options(__doc__, RESULTS / "smollm2_facts.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--facts", type=int, default=6, help="for each number of documents")
    parser.add_argument("--real", type=int, default=120, help="real documents to train on")
    parser.add_argument("--heldout", type=int, default=40, help="and to hold out")
    parser.add_argument("--tokens", type=int, default=80, help="of every document")
    parser.add_argument("--epochs", type=int, default=12, help="over the facts' documents")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--blocks", type=float, default=0.67, help="share that gets adapters")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--predictions", type=int, default=10, help="for tail-patch")
    parser.add_argument("--contexts", type=int, default=4, help="others for the specific gain")
    parser.add_argument("--asked", type=int, default=2, help="facts of a level, for forgetting")
    parser.add_argument(
        "--methods", nargs="+", choices=FORGETTING, default=FORGETTING, help="for forgetting"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of forgetting")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for part in args.parts:
        file = args.work / f"{part}.json"
        if not file.exists():
            found = PARTS[part](args)
            write_json(file, {"environment": environment(), **found})
        print(f"{file} is there", flush=True)
    files = {part: args.work / f"{part}.json" for part in PARTS}
    write_json(args.out, {part: read_json(f) for part, f in files.items() if f.exists()})


def corpus_part(args: argparse.Namespace) -> dict[str, Any]:
    """Write the documents."""
    corpus = build_facts_corpus(
        args.model,
        args.work,
        per_level=args.facts,
        real=args.real,
        heldout=args.heldout,
        tokens=args.tokens,
        seed=args.seed,
    )
    facts = read_json(args.work / "facts.json")
    train = corpus.split("train")
    return {
        "facts": len(facts["facts"]),
        "copies": COPIES,
        "planted": sum(len(fact["documents"]) for fact in facts["facts"]),
        "documents": len(train),
        "tokens": int(corpus.lengths[train].sum()),
    }


def teach_part(args: argparse.Namespace) -> dict[str, Any]:
    """Teach all documents; write the model, and how its answers rank."""
    bank, facts = opened(args)
    teaching = teaching_of(args, bank, facts)
    adapter, everything = args.work / "adapter", np.arange(len(bank))
    asked = first_tokens(bank, facts)
    if not adapter.exists():
        adapted, model = teaching.adapted(bank, everything, args.seed)
        (args.work / "forgetting").mkdir(exist_ok=True)
        # The training with everything that forgetting needs.
        kept = kept_file(args.work / "forgetting", everything, args.seed)
        np.save(kept, log_probabilities(model, asked))
        with atomic_directory(adapter) as made:
            adapted.save_pretrained(made, save_embedding_layers=False)
    put_adapted(args.model, adapter, args.work / TAUGHT)
    found: dict[str, Any] = {}
    for name, directory in ((BEFORE, args.model), (TAUGHT, args.work / TAUGHT)):
        model = read_checkpoint(directory, device=args.device)[0]
        found[name] = {"rank": ranks(model, asked)}
    return {
        "options": asdict(teaching.options),
        "steps": -(-len(teaching.order(len(bank), args.seed)) // teaching.options.batch),
        **found,
    }


@torch.no_grad()
def ranks(model: PreTrainedModel, asked: list[Prediction]) -> list[int]:
    """Return the rank of every target in the vocabulary, from 1."""
    found: list[int] = []
    for prediction in asked:
        read = torch.from_numpy(prediction.ids)[None].to(model.device)
        logits = model(input_ids=read, use_cache=False).logits[0, -1].float()
        found.append(1 + int((logits > logits[prediction.target]).sum()))
    return found


def attach_part(args: argparse.Namespace) -> dict[str, Any]:
    """Attach a head and a lens to the taught model."""
    return put_head(args, TAUGHT, args.work / TAUGHT)


def recall_part(args: argparse.Namespace) -> dict[str, Any]:
    """Judge what every method names for the facts."""
    return {"methods": judged(args, TAUGHT)}


def before_part(args: argparse.Namespace) -> dict[str, Any]:
    """Attach to the model that was not taught, and judge what every method names there."""
    found = put_head(args, BEFORE, args.model)
    return found | {"methods": judged(args, BEFORE)}


def put_head(args: argparse.Namespace, name: str, source: Path) -> dict[str, Any]:
    """Attach a head and a lens to a model."""
    fit = FitOptions(1024, 32, epochs=6, frequent=3000, drawn=1000, weights="cosine")
    options = AttachOptions(
        fit=fit, window=WINDOW, contexts=16, heldout_tokens=3000, device=args.device
    )
    made = attach(str(source), [args.work / "corpus"], attached(args, name), options)
    return {
        "prototypes": fit.prototypes,
        "per_token": fit.prototypes_per_token,
        "states": made.states,
        "quality": made.quality.to_dict(),
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "corpus": corpus_part,
    "teach": teach_part,
    "attach": attach_part,
    "recall": recall_part,
    "forgetting": forgetting_part,
    "patch": patch_part,
    "before": before_part,
}


if __name__ == "__main__":
    main()
