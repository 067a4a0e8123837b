"""Measure a demo model beside its controls and write docs/results/first_light.json.

    prismlm demo --train --no-serve --out prismlm-demo
    python -m benchmarks.first_light.measure prismlm-demo
    python -m benchmarks.first_light.render

Controls: K random training hidden states as prototypes, untrained, with an index of their own; and
the trained head with its prototype → domain map shuffled.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import prismlm
from benchmarks.attribution.domain_prompts import against_controls
from benchmarks.attribution.judges.domain_share import (
    DocumentEvidence,
    GroupWeights,
    document_evidence,
)
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus, document_windows, pack, window_batches
from prismlm.explain.quality import HeadQuality, measure_quality
from prismlm.files import write_json
from prismlm.index.build import IndexOptions, build_index
from prismlm.index.lens import Lens
from prismlm.layers import PrototypeHead
from prismlm.models.sidecar import load_sidecar
from prismlm.training.prototypes import sample_states

HELD_OUT_TOKENS = 100_000
DRAWN = 10
SEED = 0
SHUFFLES = 20


def main() -> None:
    """Run the measurement."""
    parser = script_options(__doc__, RESULTS / "first_light.json")
    parser.add_argument("demo", type=Path, help="the directory that prismlm demo built")
    arguments = parser.parse_args()
    lm = prismlm.load(arguments.demo / "model")
    corpus = Corpus.open(arguments.demo / "corpus")
    assert lm.lens is not None
    control = random_states_head(lm, corpus)
    options = IndexOptions(
        contexts=lm.lens.meta.contexts, window=lm.lens.meta.window, stride=lm.lens.meta.stride
    )
    with tempfile.TemporaryDirectory() as directory:
        print("indexing the control's prototypes")
        path = build_index(lm.model, control, corpus, Path(directory) / "control", options)
        assert path is not None
        control_lens = Lens.open(path, lm.model, control)
        domains = domain_figures(lm, control, control_lens, corpus)
    print("measuring quality")
    provenance = load_sidecar(lm.path).provenance
    write_json(
        arguments.out,
        {
            "environment": environment(),
            # Where corpus and model lay says nothing.
            "recipe": provenance["recipe"]
            | {key: Path(provenance["recipe"][key]).name for key in ("corpus", "out")},
            "steps": provenance["steps"],
            "training_tokens": provenance["tokens"],
            "corpus": corpus.meta["counts"] | {"heldout": corpus.meta["heldout"]},
            "parameters": sum(p.numel() for p in lm.model.parameters()),
            "head_parameters": lm.head.prototypes.numel() + 1,
            "quality": {
                "trained": quality(lm, lm.head, corpus).to_dict(),
                "random_states": quality(lm, control, corpus).to_dict(),
            },
            "domain_share": domains,
            "prototypes": drawn_prototypes(lm.lens),
        },
    )
    print(f"wrote {arguments.out}")


def random_states_head(lm: prismlm.PrismLM, corpus: Corpus) -> PrototypeHead:
    """Return the control: as many random training states, never trained."""
    head = PrototypeHead(lm.head.width, lm.head.num_prototypes, lm.head.prototypes_per_token)
    assert lm.lens is not None
    rows = pack(corpus, corpus.split("train"), lm.lens.meta.window, SEED)
    generator = torch.Generator().manual_seed(SEED)
    head.place_on(sample_states(lm.model, rows, head.num_prototypes, generator))
    return head.eval().requires_grad_(False)


def quality(lm: prismlm.PrismLM, head: PrototypeHead, corpus: Corpus) -> HeadQuality:
    """Measure a head on held-out text, whole documents in a seeded order."""
    assert lm.lens is not None
    documents = np.random.default_rng(SEED).permutation(corpus.split("heldout"))
    enough = np.searchsorted(np.cumsum(corpus.lengths[documents]), HELD_OUT_TOKENS) + 1
    meta = lm.lens.meta
    grid = document_windows(
        documents[:enough], corpus.starts, corpus.lengths, meta.window, meta.stride
    )
    batches = window_batches(grid, corpus, 4096, corpus.eos_token_id)
    return measure_quality(lm.model, head, lm.logit_map, batches)


def domain_figures(
    lm: prismlm.PrismLM, control: PrototypeHead, control_lens: Lens, corpus: Corpus
) -> dict[str, Any]:
    """Return the domain shares of the head, of both controls, and chance beside them."""
    assert lm.lens is not None
    documents = corpus.split("heldout")
    names = corpus.column("domain")
    domains = [names[d] or "" for d in documents]
    meta = lm.lens.meta

    def evidence(head: PrototypeHead) -> DocumentEvidence:
        return document_evidence(
            lm.model, head, lm.logit_map, corpus, documents, window=meta.window, stride=meta.stride
        )

    print("tracing held-out documents to domains")
    trained = evidence(lm.head), GroupWeights.of(lm.lens, "domain")
    states = evidence(control), GroupWeights.of(control_lens, "domain")
    return against_controls(trained, states, domains, SHUFFLES)


def drawn_prototypes(lens: Lens) -> list[dict[str, Any]]:
    """Return ten prototypes from a seeded draw over all of them, used or not."""
    chosen = np.random.default_rng(SEED).choice(lens.num_prototypes, DRAWN, replace=False)
    drawn: list[dict[str, Any]] = []
    for prototype in sorted(chosen.tolist()):
        row = lens.prototypes.slice(prototype, 1).to_pylist()[0]
        contexts = lens.index.slice(lens.rows_of(prototype).start, 5).to_pylist()
        drawn.append(
            {
                "prototype": prototype,
                "name": row["name"],
                "top_tokens": row["top_tokens"],
                "top_values": [round(value, 3) for value in row["top_values"]],
                "usage": row["usage"],
                "contexts": [
                    {
                        "cosine": round(context["cosine"], 4),
                        "source": context["source"],
                        "domain": context["domain"],
                        "before": context["before"][-60:],
                        "token": context["token"],
                        "after": context["after"][:24],
                    }
                    for context in contexts
                ],
            }
        )
    return drawn


if __name__ == "__main__":
    main()
