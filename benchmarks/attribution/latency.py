"""How long attribution takes: one token from a warm lens, and beside generation.

    python -m benchmarks.attribution.latency MODEL [--synthetic DIR]

The lens of the first part is synthetic, K = 16384 prototypes with L = 64 contexts of width 768, and
lies on disk as any other; it is built in a temporary directory unless one is named. MODEL, a model
directory with a lens, is for the second part.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.explain.attribution import attribute
from prismlm.explain.evidence import EvidenceTable
from prismlm.index import layout
from prismlm.index.lens import Lens
from prismlm.layers import PrototypeHead
from prismlm.ops.decomposition import decompose
from prismlm.ops.prototype_head.routing import inverse_norms

PROTOTYPES, CONTEXTS, WIDTH, VOCABULARY = 16_384, 64, 768, 50_257
PER_TOKEN = 16
DOCUMENTS, SOURCES, DOMAINS, LICENSES = 200_000, 60, 12, 8
TOKENS_TIMED = 400
GENERATED, PROMPTS_PER_ARM, SAMPLES = 50, 1, 60
PROMPT = "Once upon a time there was a little girl who lived"


def build_lens(directory: Path, seed: int = 0) -> None:
    """Write a lens of the published size with random contents; nothing in it repeats for speed."""
    generator = np.random.default_rng(seed)
    rows = PROTOTYPES * CONTEXTS
    prototype = np.repeat(np.arange(PROTOTYPES, dtype=np.int32), CONTEXTS)
    document = generator.integers(DOCUMENTS, size=rows)
    names = pa.array([f"collection/{n % 997}/document-{n}" for n in range(DOCUMENTS)])
    groups = {
        column: pa.array([f"{column}-{n}" for n in range(count)])
        for column, count in (("source", SOURCES), ("domain", DOMAINS), ("license", LICENSES))
    }
    of_document = {c: generator.integers(len(v), size=DOCUMENTS) for c, v in groups.items()}
    text = pa.array(["some forty characters of text around it. " * 4] * rows)
    table = pa.table(
        {
            "prototype": prototype,
            "rank": np.tile(np.arange(CONTEXTS, dtype=np.int32), PROTOTYPES),
            "cosine": np.full(rows, 0.9, dtype=np.float32),
            "activation": np.full(rows, 0.9, dtype=np.float32),
            "routed": np.ones(rows, dtype=bool),
            "position": generator.integers(2**40, size=rows),
            "doc_id": names.take(pa.array(document)),
            **{c: v.take(pa.array(of_document[c][document])) for c, v in groups.items()},
            "title": pa.nulls(rows, pa.string()),
            "url": pa.nulls(rows, pa.string()),
            "before": text,
            "token": pa.array(["token"] * rows),
            "after": text,
        },
        schema=layout.INDEX_SCHEMA,
    )
    pq.write_table(table, directory / layout.INDEX_FILE, compression="zstd", row_group_size=8192)
    states = torch.nn.functional.normalize(
        torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16(), dim=-1
    )
    save_file({"states": states}, str(directory / layout.CONTEXTS_FILE))
    mass = np.repeat(np.arange(PROTOTYPES, dtype=np.int32), SOURCES)
    of_source = {c: generator.integers(len(v), size=SOURCES) for c, v in groups.items()}
    of_source["source"] = np.arange(SOURCES)
    pq.write_table(
        pa.table(
            {
                "prototype": mass,
                **{
                    c: v.take(pa.array(np.tile(of_source[c], PROTOTYPES)))
                    for c, v in groups.items()
                },
                "tokens": generator.integers(1, 10_000, size=len(mass)),
                "activation_sum": generator.random(len(mass)) * 1_000,
            },
            schema=layout.MASS_SCHEMA,
        ),
        directory / layout.MASS_FILE,
    )


def time_tokens(lens: Lens, seed: int = 1) -> dict[str, Any]:
    """Time single tokens: attribution alone, and with routing and decomposition before it."""
    generator = torch.Generator().manual_seed(seed)
    head = PrototypeHead(WIDTH, PROTOTYPES, PER_TOKEN)
    head.reset_parameters(generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) / WIDTH**0.5
    mean = weight.mean(0)
    names = ("attribution", "from_state", "attribution_cpu", "from_state_cpu")
    times: dict[str, list[float]] = {name: [] for name in names}
    warm = 20
    # A warm lens has been read: states are mapped from the file and come from disk at first.
    for part in lens.states.split(2**16):
        part.sum()
    for number in range(TOKENS_TIMED + warm):
        state = torch.randn(1, WIDTH, generator=generator)
        target = torch.randint(VOCABULARY, (1,), generator=generator)
        began, began_cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            routing = head.nearest(state)
            parts = decompose(
                state,
                routing.indices,
                routing.activations,
                head.prototypes,
                weight,
                target,
                weight_mean=mean,
            )
        # Every prototype counts: random states would leave half of the evidence negative.
        table = EvidenceTable(
            routing.indices,
            parts.evidence.abs(),
            parts.residual_evidence,
            parts.bias_evidence,
            state * inverse_norms(state),
            target,
            routing.activations,
        )
        routed, routed_cpu = time.perf_counter(), time.process_time()
        found = attribute(table, lens)
        found.sources("source")
        found.documents(10)
        ended, ended_cpu = time.perf_counter(), time.process_time()
        if number >= warm:
            times["attribution_cpu"].append(ended_cpu - routed_cpu)
            times["from_state_cpu"].append(ended_cpu - began_cpu)
            times["attribution"].append(ended - routed)
            times["from_state"].append(ended - began)
    return {name: percentiles(values) for name, values in times.items()}


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return p50, p99 and the largest, in milliseconds."""
    ms = 1000 * np.array(seconds)
    return {
        "p50_ms": float(np.percentile(ms, 50)),
        "p99_ms": float(np.percentile(ms, 99)),
        "max_ms": float(ms.max()),
    }


def time_generation(model: Path) -> dict[str, Any]:
    """Time generation with and without attribution, in turns, on the same prompts."""
    lm = prismlm.load(model)

    def plain() -> None:
        lm.generate(PROMPT, tokens=GENERATED)

    def attributed() -> None:
        trace = lm.explain(PROMPT, generate=GENERATED)
        trace.sources("source")
        trace.documents(10)

    def parts_alone() -> None:
        lm.explain(PROMPT, generate=GENERATED)

    def with_steps() -> None:
        trace = lm.explain(PROMPT, generate=GENERATED)
        trace.sources("source")
        trace.documents(10)
        # Steps are built when the first of them is looked at.
        _ = trace[0].prototypes

    arms: dict[str, Callable[[], None]] = {
        "plain": plain,
        "attributed": attributed,
        "parts_alone": parts_alone,
        "with_steps": with_steps,
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm()
    for sample in range(SAMPLES):
        # In turns, and the order itself turns, so that what else runs here meets all alike.
        first = sample % len(arms)
        names = list(arms)[first:] + list(arms)[:first]
        for name in names:
            began = time.perf_counter()
            for _ in range(PROMPTS_PER_ARM):
                arms[name]()
            times[name].append((time.perf_counter() - began) / PROMPTS_PER_ARM)
    ratios = {
        name: [a / b for a, b in zip(times[name], times["plain"], strict=True)]
        for name in arms
        if name != "plain"
    }
    return {
        "model_type": lm.model.config.model_type,
        "parameters": sum(p.numel() for p in lm.model.parameters()),
        "prototypes": lm.head.num_prototypes,
        "prototypes_per_token": lm.head.prototypes_per_token,
        "contexts": 0 if lm.lens is None else lm.lens.meta.contexts,
        "tokens": GENERATED,
        "samples": SAMPLES,
        "milliseconds": {k: 1000 * statistics.median(v) for k, v in times.items()},
        "ratio": {
            k: {"median": statistics.median(v), "least": min(v), "most": max(v)}
            for k, v in ratios.items()
        },
    }


def measure(model: Path, synthetic: Path) -> dict[str, Any]:
    """Measure both parts."""
    if not (synthetic / layout.MASS_FILE).is_file():
        build_lens(synthetic)
    meta = layout.LensMeta(
        "", "", "", "", "synthetic", "", "train", None, 1, 1, CONTEXTS, 0, 0, with_text=True
    )
    token = time_tokens(Lens(synthetic, meta, PROTOTYPES))
    return {
        "environment": environment(),
        "lens": {
            "prototypes": PROTOTYPES,
            "contexts": CONTEXTS,
            "width": WIDTH,
            "prototypes_per_token": PER_TOKEN,
            "documents": DOCUMENTS,
            "sources": SOURCES,
            "tokens_timed": TOKENS_TIMED,
        },
        "token": token,
        "generation": time_generation(model),
    }


def main() -> None:
    """Measure and write the result."""
    parser = script_options(__doc__, RESULTS / "attribution_latency.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("--synthetic", type=Path, help="keep the synthetic lens here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = arguments.synthetic or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        result = measure(arguments.model, place)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
