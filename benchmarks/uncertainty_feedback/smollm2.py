"""Uncertainty feedback put into a model that predicts well already, and fine-tuned for a while.

    python -m benchmarks.uncertainty_feedback.smollm2 MODEL CORPUS --device cuda
    python -m benchmarks.uncertainty_feedback.smollm2 MODEL CORPUS --table-alone --steps 60
    python -m benchmarks.render uncertainty_feedback

MODEL is a checkpoint and CORPUS one of its tokenizer. The first command trains 300 steps of three
seeds and three arms: the table and adapters in the last third of the blocks, with the codes of two
passes; the same with those codes permuted over all positions of a step; and adapters alone. The
table starts at zero, so every arm begins as the model that was given. With ``--table-alone`` the
model is frozen, and without feedback there is nothing to train.

Runs are kept one by one in one JSON file; those that are there, with the same settings, are not
made again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, add_numbers, script_options
from prismlm.cli.output import ConsoleReporter
from prismlm.corpus import Corpus
from prismlm.corpus.windows import (
    PackedDataset,
    WindowBatch,
    document_windows,
    pack,
    window_batches,
)
from prismlm.files import read_json, write_json
from prismlm.models.device import uses_bf16
from prismlm.models.uncertainty_feedback import UncertaintyFeedback, attach_uncertainty
from prismlm.ops.uncertainty_feedback import shuffle_codes
from prismlm.training.fit import Loop
from prismlm.training.tuning import LoraOptions, Tuning, TuningOptions, with_adapters

NONE, OWN, SHUFFLED = "no feedback", "own", "shuffled"
ARMS = (NONE, OWN, SHUFFLED)
LEVELS = 65536
TOKENS_AT_ONCE = 512
# What makes two runs comparable.
SETTINGS = (
    "steps", "batch", "length", "table_alone", "table_rows", "table_rate", "adapter_rate",
    "documents",
)  # fmt: skip


class Arm(NamedTuple):
    """A model of one arm before its first step."""

    model: PreTrainedModel
    feedback: UncertaintyFeedback | None
    groups: list[dict[str, Any]]


def main() -> None:
    """Make every run that is not in the file yet."""
    args = options().parse_args()
    corpus = Corpus.open(args.corpus)
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings |= {"model": args.model.name, "corpus": corpus.fingerprint}
    result = read_json(args.out) if args.out.is_file() else {"runs": []}
    for seed in args.seeds:
        for arm in args.arms:
            # Without anything to train every seed would be the same.
            untrained = arm == NONE and args.table_alone
            wanted = {"arm": arm, "seed": args.seeds[0] if untrained else seed}
            wanted["settings"] = settings
            if any(wanted.items() <= run.items() for run in result["runs"]):
                continue
            began = time.perf_counter()
            run = wanted | measured(args, corpus, arm, wanted["seed"])
            run["seconds"] = time.perf_counter() - began
            run["environment"] = environment() | {"device": args.device}
            result["runs"].append(run)
            write_json(args.out, result)
            print(f"{arm}, seed {seed}: {said(run)}", flush=True)


def options() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = script_options(__doc__, RESULTS / "smollm2_feedback.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    # Rows of a step and tokens of a row; held-out documents to measure on.
    add_numbers(parser, steps=300, batch=8, length=256, documents=269)
    parser.add_argument("--table-alone", action="store_true", help="train no adapters")
    # Rows of the table, between which codes are interpolated.
    add_numbers(parser, table_rows=64, table_rate=3e-3, adapter_rate=5e-4)
    return parser


def said(run: dict[str, Any]) -> str:
    """Return the losses of a run, nats per token."""
    tokens = sum(run["tokens"])
    return ", ".join(f"{name} {sum(sums) / tokens:.4f}" for name, sums in run["losses"].items())


def measured(args: argparse.Namespace, corpus: Corpus, arm: str, seed: int) -> dict[str, Any]:
    """Train one arm with one seed; return its held-out losses."""
    torch.manual_seed(seed)
    begun = prepared(args, arm, seed)
    if begun.groups:
        train(args, corpus, begun, arm, seed)
    windows = heldout_windows(corpus, args.length, args.documents)
    return judged(begun.model, begun.feedback, windows, seed)


def prepared(args: argparse.Namespace, arm: str, seed: int) -> Arm:
    """Return the model with what an arm trains in it; every arm predicts as the model does."""
    model: Any = AutoModelForCausalLM.from_pretrained(args.model).float().to(args.device)
    model.requires_grad_(False)
    feedback, groups = None, list[dict[str, Any]]()
    table = list[nn.Parameter]()
    if arm != NONE:
        feedback = attach_uncertainty(model, LEVELS, rows=args.table_rows, deviation=0.0, passes=2)
        table = list(feedback.embedding.parameters())
        groups.append({"params": table, "lr": args.table_rate})
    if not args.table_alone:
        with_adapters(model, LoraOptions(learning_rate=args.adapter_rate, seed=seed))
        adapters = [one for one in model.parameters() if one.requires_grad]
        held = set(map(id, table))
        own = [one for one in adapters if id(one) not in held]
        groups.append({"params": own, "lr": args.adapter_rate})
    return Arm(model, feedback, groups)


def train(args: argparse.Namespace, corpus: Corpus, begun: Arm, arm: str, seed: int) -> None:
    """Train on rows of the corpus."""
    rows = pack(corpus, corpus.split("train"), args.length, seed)
    settings = {name: getattr(args, name) for name in SETTINGS} | {"arm": arm, "seed": seed}
    Training(begun, rows, settings).run_all(f"{arm}, seed {seed}", ConsoleReporter())


class Training(Tuning):
    """The table, adapters or both, each with its learning rate."""

    def __init__(self, begun: Arm, rows: PackedDataset, settings: dict[str, Any]) -> None:
        options = TuningOptions(batch=settings["batch"], seed=settings["seed"])
        bf16 = uses_bf16("auto", begun.model.device.type)
        super().__init__(begun.model.train(), rows, options, bf16=bf16)
        Loop.__init__(self, begun.groups, settings["steps"])
        if settings["arm"] == SHUFFLED:
            assert begun.feedback is not None
            begun.feedback.rearrange = self._shuffled

    def _shuffled(self, codes: Tensor) -> Tensor:
        seeds = np.random.SeedSequence([self._options.seed, self.step])
        generator = torch.Generator().manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        return shuffle_codes(codes, generator)


def heldout_windows(corpus: Corpus, length: int, documents: int) -> list[WindowBatch]:
    """Return the first window of so many held-out documents, the same for every run."""
    every = corpus.split("heldout")
    chosen = np.random.default_rng(0).permutation(every[corpus.lengths[every] > 1])[:documents]
    first = np.minimum(corpus.lengths, length)
    grid = document_windows(chosen, corpus.starts, first, length, length)
    return list(window_batches(grid, corpus, TOKENS_AT_ONCE))


@torch.no_grad()
def judged(
    model: PreTrainedModel,
    feedback: UncertaintyFeedback | None,
    windows: list[WindowBatch],
    seed: int,
) -> dict[str, Any]:
    """Return the summed losses of each document by signal, in nats, and its predictions.

    Shuffled are the model's own codes of two passes, permuted over all positions of all windows.
    """
    model.eval()
    codes: list[Tensor] = []
    losses: dict[str, dict[int, tuple[float, int]]] = {}
    for batch in windows:
        output = _run(model, batch)
        _add(losses.setdefault(NONE if feedback is None else OWN, {}), batch, output.logits)
        if feedback is not None:
            codes.append(output.uncertainty_codes.cpu())
    if feedback is not None:
        generator = torch.Generator().manual_seed(seed)
        pool = shuffle_codes(torch.cat([own.flatten() for own in codes]), generator)
        parts = pool.split([own.numel() for own in codes])
        for batch, part in zip(windows, parts, strict=True):
            shuffled = part.view(batch.input_ids.shape).to(model.device)
            logits = _run(model, batch, uncertainty_codes=shuffled).logits
            _add(losses.setdefault(SHUFFLED, {}), batch, logits)
    some = next(iter(losses.values()))
    documents = sorted(some)
    return {
        "tokens": [some[document][1] for document in documents],
        "losses": {
            name: [round(of[document][0], 3) for document in documents]
            for name, of in losses.items()
        },
    }


def _run(model: Any, batch: WindowBatch, **more: Tensor) -> Any:
    ids, mask = batch.input_ids.to(model.device), batch.attention_mask.long().to(model.device)
    return model(input_ids=ids, attention_mask=mask, use_cache=False, **more)


def _add(of: dict[int, tuple[float, int]], batch: WindowBatch, logits: Tensor) -> None:
    """Add the losses of a batch, one window a document."""
    for row, document in enumerate(batch.document.tolist()):
        length = int(batch.attention_mask[row].sum())
        targets = batch.input_ids[row, 1:length].to(logits.device)
        losses = F.cross_entropy(logits[row, : length - 1].float(), targets, reduction="sum")
        of[document] = float(losses), length - 1


if __name__ == "__main__":
    main()
