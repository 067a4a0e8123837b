"""Read what `measure.py` trained: heads, coding rates, cross terms, loss by length.

    python -m benchmarks.signal_noise_attention.read stories signal-noise-runs
    python -m benchmarks.render signal_noise_attention

Writes one JSON file per model to docs/results/signal_noise_readings/. A model whose file is there
is not read again. Heads, roles and the loss by length are read of every decoder that has them;
rates and cross terms of those with signal and noise heads, rates also with random weights, which
are drawn from the model's seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.signal_noise_attention.measure import LENGTH, VARIANTS, describe, slug
from prismlm.corpus import Corpus
from prismlm.corpus.windows import Sequences
from prismlm.files import write_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.probes.heads import head_report
from prismlm.probes.heads.roles import load_role_cases, random_model, search_roles
from prismlm.probes.heads.spectra import layer_rates, read_states, spectra_report
from prismlm.probes.results import Report, as_json

HEAD_TOKENS = 100_000


def main() -> None:
    """Read every model that has no file yet."""
    parser = script_options(__doc__, RESULTS / "signal_noise_readings")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("models", type=Path, help="--work of the training script")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    corpus = Corpus.open(args.corpus)
    for variant in VARIANTS:
        for seed in args.seeds:
            name = f"{slug(variant)}-{seed}"
            result = args.out / f"{name}.json"
            if result.is_file():
                print(f"{result.name} is there")
            elif not (args.models / name / "model.safetensors").is_file():
                print(f"{args.models / name} holds no trained model: train it first")
            else:
                row = {"variant": variant, "seed": seed} | read(args.models / name, corpus, seed)
                write_json(result, row | {"environment": environment()})
                print(f"wrote {result}", flush=True)


def read(directory: Path, corpus: Corpus, seed: int) -> dict[str, Any]:
    """Return what probes say of one model, and of random weights drawn from ``seed``."""
    model, tokenizer = read_checkpoint(directory)
    heldout = Sequences(corpus, "heldout", length=LENGTH, max_tokens=HEAD_TOKENS)
    heads = _heads(head_report(model, heldout, name=directory.name))
    plain = model.config.model_type != "prismlm_signal_noise"
    learned = model.config.model_type == "gpt2"
    # Learned positions end where they end, and beyond the trained length they are as drawn.
    spectra = (
        {}
        if learned
        else _spectra(
            spectra_report(
                model, heldout, name=directory.name, trained_length=LENGTH, loss_only=plain
            )
        )
    )
    for report in (heads, spectra):
        if report:
            report["corpus"]["path"] = corpus.name
    row: dict[str, Any] = {
        "heads": heads,
        "spectra": spectra,
        "roles": roles(model, tokenizer, seed),
        "corpus": describe(corpus),
    }
    if not plain:
        random = read_states(random_model(model, seed), heldout.batches())
        row["untrained"] = {"rates": as_json(layer_rates(random).rows)}
    return row


def _heads(report: Report) -> dict[str, Any]:
    value = report.to_dict()
    uniform, *heads = value["heads"].pop("rows")
    comparison = value["comparison"] and value["comparison"]["rows"]
    uses = value["heads"] | {"uniform": uniform, "heads": heads}
    return {"model": report.model, "corpus": value["corpus"], "uses": uses,
            "comparison": comparison}  # fmt: skip


def _spectra(report: Report) -> dict[str, Any]:
    value = report.to_dict()
    value["rates"] = value["rates"]["rows"] if "rates" in report.tables else []
    cross = value["cross_terms"] if "cross_terms" in report.tables else None
    value["cross_terms"] = [{"ratio": "own", "normalised": cross["normalised"]}] if cross else []
    if value["loss"]:
        value["loss"]["buckets"] = value["loss"].pop("rows")
    return value


def roles(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> dict[str, Any]:
    """Return how many heads look for each role, in the model and in random weights."""
    cases = load_role_cases()
    trained, control = (
        search_roles(one, tokenizer, cases) for one in (model, random_model(model, seed))
    )
    return {"sentences": len(cases), "heads": trained["heads"], "level": trained["level"]} | {
        "roles": [
            {"role": role, **facts, "untrained": control["roles"][role]["found"]}
            for role, facts in trained["roles"].items()
        ]
    }


if __name__ == "__main__":
    main()
