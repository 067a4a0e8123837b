"""Measure edits on a demo model, beside their control and their cost: docs/results/edits.json.

    prismlm demo --train --no-serve --out prismlm-demo
    python -m benchmarks.edits.measure prismlm-demo
    python -m benchmarks.edits.render

Prototypes are drawn by seed from those in use, not selected. Groups are the prototypes that have
most of their activation in one domain, measured on prompts from that domain and from the others.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import prismlm
from benchmarks.attribution.judges.domain_share import GroupWeights
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.edits.steering_effects import measure_effects, perplexity_cost
from prismlm.edits.values import Edit
from prismlm.files import write_json
from prismlm.index.lens import Lens
from prismlm.models.sidecar import load_sidecar

SEED = 0
PROTOTYPES = 5
USED_BY = 0.005
DOMAINS = 3
OWN = 0.5
PROMPTS = 40
PROMPT_TOKENS = 24
HELD_OUT_TOKENS = 5_000
DRAWS = 8
COST_DRAWS = 4


def main() -> None:
    """Run the measurement."""
    parser = script_options(__doc__, RESULTS / "edits.json")
    parser.add_argument("demo", type=Path, help="the directory that prismlm demo built")
    arguments = parser.parse_args()
    lm = prismlm.load(arguments.demo / "model")
    corpus = Corpus.open(arguments.demo / "corpus")
    assert lm.lens is not None
    provenance = load_sidecar(lm.path).provenance
    write_json(
        arguments.out,
        {
            "environment": environment(),
            "parameters": sum(p.numel() for p in lm.model.parameters()),
            "steps": provenance["steps"],
            "head": {
                "prototypes": lm.head.num_prototypes,
                "prototypes_per_token": lm.head.prototypes_per_token,
                "scale": float(lm.head.scale),
            },
            "drawn": {
                "prompts": PROMPTS,
                "prompt_tokens": PROMPT_TOKENS,
                "draws": DRAWS,
                "cost_draws": COST_DRAWS,
                "used_by": USED_BY,
                "own": OWN,
                "seed": SEED,
            },
            "prototypes": prototypes(lm, lm.lens, corpus),
            "groups": groups(lm, lm.lens, corpus),
        },
    )
    print(f"wrote {arguments.out}")


def prototypes(lm: prismlm.PrismLM, lens: Lens, corpus: Corpus) -> list[dict[str, Any]]:
    """Return effects and costs of four edits of each drawn prototype."""
    usage = lens.prototypes["usage"].to_numpy()
    pool = np.flatnonzero(usage >= USED_BY)
    chosen = np.sort(np.random.default_rng(SEED).choice(pool, PROTOTYPES, replace=False)).tolist()
    prompts = starts(corpus, corpus.split("heldout"))
    measured: list[dict[str, Any]] = []
    for prototype in chosen:
        print(f"prototype {prototype}: {lens.names[prototype]}")
        edits: dict[str, Edit] = {
            "ablate": prismlm.Ablate(prototype),
            "scale 2": prismlm.Scale(prototype, 2.0),
            "clamp 0.2 at the signature's token": prismlm.Clamp(prototype, 0.2, "signature"),
            "clamp 0.2 at the top token": prismlm.Clamp(prototype, 0.2, "top"),
        }
        measured.append(
            {
                "prototype": prototype,
                "name": lens.names[prototype],
                "usage": float(usage[prototype]),
                "edits": {
                    name: measure(lm, corpus, edit, {"prompts": prompts})
                    for name, edit in edits.items()
                },
            }
        )
    return measured


def groups(lm: prismlm.PrismLM, lens: Lens, corpus: Corpus) -> list[dict[str, Any]]:
    """Return effects and costs of removing and doubling the prototypes of a domain."""
    keys, weights = GroupWeights.of(lens, "domain")
    sizes = (weights >= OWN).sum(0)
    chosen = np.argsort(-sizes, kind="stable")[:DOMAINS].tolist()
    held_out = corpus.split("heldout")
    names = np.array(corpus.column("domain"), dtype=object)[held_out]
    measured: list[dict[str, Any]] = []
    for column in chosen:
        print(f"domain {keys[column]}: {sizes[column]} prototypes")
        members = frozenset(np.flatnonzero(weights[:, column] >= OWN).tolist())
        prompts = {
            "own domain": starts(corpus, held_out[names == keys[column]]),
            "other domains": starts(corpus, held_out[names != keys[column]]),
        }
        measured.append(
            {
                "domain": keys[column],
                "prototypes": len(members),
                "edits": {
                    f"{strength:+.0%}": measure(
                        lm, corpus, prismlm.Group(strength, prototypes=members), prompts
                    )
                    for strength in (-1.0, 1.0)
                },
            }
        )
    return measured


def measure(
    lm: prismlm.PrismLM, corpus: Corpus, edit: Edit, prompts: dict[str, list[str]]
) -> dict[str, Any]:
    """Return the effects of an edit on each set of prompts, and its cost."""
    cost = perplexity_cost(lm, corpus, [edit], tokens=HELD_OUT_TOKENS, seed=SEED, draws=COST_DRAWS)
    effects = {
        name: measure_effects(lm, texts, [edit], seed=SEED, draws=DRAWS).to_dict()
        for name, texts in prompts.items()
    }
    return {"effects": effects, "cost": asdict(cost)}


def starts(corpus: Corpus, documents: np.ndarray) -> list[str]:
    """Return the first tokens of documents in a seeded order, as text."""
    long = documents[corpus.lengths[documents] > PROMPT_TOKENS]
    order = np.random.default_rng(SEED).permutation(long)[:PROMPTS]
    return [
        str(corpus.tokenizer.decode(corpus.tokens(int(corpus.starts[d]), PROMPT_TOKENS).tolist()))
        for d in order
    ]


if __name__ == "__main__":
    main()
