"""Plant invented facts in the bundled sample, train on it and index it: what the judges ask.

    python -m benchmarks.attribution.planted_model planted
    python -m benchmarks.attribution.judge_planted planted

A part that is there already is kept, so a stopped run goes on from its last whole part, training
from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.attribution.planted_facts import (
    ATTRIBUTES,
    DESCRIBED_ATTRIBUTES,
    Fact,
    Planted,
    Tell,
    describe,
    described_question,
    in_other_style,
    invent_facts,
    place_facts,
    plant_in_documents,
)
from benchmarks.shared.options import script_options
from prismlm.cli.output import ConsoleReporter
from prismlm.corpus import Corpus, build_corpus, pack, sample_path
from prismlm.corpus.documents import Document
from prismlm.corpus.layout import is_held_out
from prismlm.corpus.read import DocumentReader
from prismlm.files import atomic_file, write_json
from prismlm.lens.build import index
from prismlm.models.sidecar import has_sidecar
from prismlm.training import Recipe, load_recipe, train

RECIPE = Path(__file__).parents[2] / "recipes" / "laptop.yaml"
# As the demo has them: with so few tokens, more steps learn more than larger ones.
SETTINGS = ("batch_size=4", "optimizer.learning_rate=2e-3", "evaluation.every=1000")
HELDOUT_FRACTION = 0.05
FACTS_FILE = "facts.json"
TOLD = ("plain", "described", "other style")


def main() -> None:
    """Build what is missing."""
    parser = script_options(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--facts", type=int, default=32, help="for each number of documents")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--told", nargs="+", choices=TOLD, default=["plain"], help="kinds of facts")
    args = parser.parse_args()
    progress = ConsoleReporter()
    out = args.out
    if not (out / FACTS_FILE).exists():
        out.mkdir(parents=True, exist_ok=True)
        plant_facts(out, args.facts, args.seed, args.told)
    if not (out / "corpus").exists():
        sources, split = [sample_path(), out / "planted.parquet"], HELDOUT_FRACTION
        corpus = out / "corpus"
        build_corpus(sources, corpus, vocab_size=4096, heldout_fraction=split, progress=progress)
    if not has_sidecar(out / "model"):
        recipe = planted_recipe(out, args.epochs, args.seed)
        train(recipe, resume=(out / "model").exists(), progress=progress)
    if not (out / "model" / "lens" / "planted").exists():
        index(out / "model", out / "corpus", "planted", progress=progress)


def plant_facts(out: Path, per_level: int, seed: int, told: Sequence[str]) -> None:
    """Write ``planted.parquet`` and ``facts.json``: the documents, what each fact is and where.

    Each kind of facts, of :data:`TOLD`, has ``per_level`` for each number of copies, and its own
    part of the real documents of the bundled sample.
    """
    real = list(DocumentReader(sample_path()))
    training = [host for host in real if not is_held_out(host.doc_id, HELDOUT_FRACTION, host.split)]
    names: list[str] = []
    planted: list[Planted] = []
    described: list[dict[str, Any]] = []
    for number, kind in enumerate(told):
        known = [*(host.text for host in real), *names]
        attributes = DESCRIBED_ATTRIBUTES if kind == "described" else tuple(ATTRIBUTES)
        facts = invent_facts(per_level, seed + number, known=known, attributes=attributes)
        names += [fact.name for fact in facts]
        hosts = training[number :: len(told)]
        documents, facts_described = plant_kind(kind, facts, hosts, seed + number)
        planted += documents
        described += facts_described
    write_documents([item.document for item in planted], out / "planted.parquet")
    write_json(out / FACTS_FILE, {"facts": described})


def write_documents(documents: Sequence[Document], path: Path) -> None:
    """Write documents as a corpus is built from."""
    columns = {"id": "doc_id"}
    columns |= {name: name for name in ("text", "source", "domain", "license", "split")}
    values = {
        column: pa.array([getattr(one, attribute) for one in documents], pa.string())
        for column, attribute in columns.items()
    }
    with atomic_file(path) as temporary:
        pq.write_table(pa.table(values), temporary)


def plant_kind(
    kind: str, facts: Sequence[Fact], hosts: Sequence[Document], seed: int
) -> tuple[list[Planted], list[dict[str, Any]]]:
    """Plant facts that are told in one way; return the documents, and what each fact is."""
    prompts = [fact.prompt for fact in facts]
    tell: Tell | None = None
    if kind == "described":
        of_place = place_facts(facts, seed)
        tell = describe(facts, of_place)
        prompts = [described_question(*pair) for pair in zip(facts, of_place, strict=True)]
    elif kind == "other style":
        tell = in_other_style
    planted = plant_in_documents(facts, hosts, seed, heldout_fraction=HELDOUT_FRACTION, tell=tell)
    places: list[list[dict[str, str]]] = [[] for _ in facts]
    for item in planted:
        places[item.fact].append({"doc_id": item.document.doc_id, "prefix": item.prefix})
    return planted, [
        {**asdict(fact), "told": kind, "prompt": prompt, "documents": place}
        for fact, prompt, place in zip(facts, prompts, places, strict=True)
    ]


def planted_recipe(out: Path, epochs: int, seed: int) -> Recipe:
    """Return the laptop's recipe, with as many steps as the epochs take."""
    base = [f"corpus={out / 'corpus'}", f"out={out / 'model'}", f"seed={seed}", *SETTINGS]
    # As the published models were trained.
    base += ["optimizer.weight_decay_exempt=[]", "head.position_share=0.333"]
    base += ["losses.residual=0.1", "losses.kl_tokens=8192"]
    recipe = load_recipe(RECIPE, base)
    corpus = Corpus.open(out / "corpus")
    rows = len(pack(corpus, corpus.split("train"), recipe.data.length, seed))
    return load_recipe(RECIPE, [*base, f"steps={-(-rows // recipe.batch_size) * epochs}"])


if __name__ == "__main__":
    main()
