"""What becomes of predictions where a text is changed: models compared, and their routing clamped.

    prismlm eval pairs --out pairs
    python -m benchmarks.prototype_mixer.robustness compare --pairs pairs --model protot=DIR …
    python -m benchmarks.prototype_mixer.robustness clamp --pairs pairs --model protot=DIR …

`compare` reads both files of pairs with all models at once, since entropies are matched between
them; `clamp` reads perturbations with one model after another, and passes over those whose result
is there. Models that the page's claims are about are called protot, llama, mamba2 and deltanet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.cli.output import ConsoleReporter
from prismlm.errors import InputError
from prismlm.eval.robustness import (
    OpenedModel,
    measure_clamping,
    measure_robustness,
    read_pairs,
    routing_of,
)
from prismlm.files import write_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.probes.results import as_json

OUT = RESULTS / "prototype_mixer" / "robustness"
FILES, SEED = ("perturbations", "interventions"), 0


def main() -> None:
    """Measure a part and write it."""
    parser = script_options(__doc__, OUT)
    parser.add_argument("part", choices=["compare", "clamp"])
    parser.add_argument("--pairs", type=Path, required=True, help="what `prismlm eval pairs` wrote")
    parser.add_argument("--model", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--limit", type=int, help="pairs of each slice")
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"limit": given.limit, "seed": SEED}
    where = {"environment": environment(), **settings}
    pairs = {name: read_pairs(given.pairs / f"{name}.parquet", **settings) for name in FILES}
    given.out.mkdir(parents=True, exist_ok=True)
    for name, drawn in pairs.items():
        if given.part == "compare":
            models = opened(given.model)
            found = measure_robustness(models, drawn, seed=SEED, progress=ConsoleReporter())
            write_json(given.out / f"{name}.json", where | as_json(found))
        elif name == FILES[0]:
            for one in opened(given.model):
                path = given.out / f"clamping-{one.name}.json"
                if path.is_file():
                    print(f"{path.name} is there")
                    continue
                write_json(path, where | clamped(one, drawn))


def clamped(one: OpenedModel, drawn: list[Any]) -> dict[str, Any]:
    """Return the figures of one model, or why it has none."""
    try:
        routing_of(one.model)
    except InputError as error:
        return {"name": one.name, "said": str(error)}
    return as_json(measure_clamping(one, drawn, seed=SEED, progress=ConsoleReporter()))


def opened(named: list[str]) -> Iterator[OpenedModel]:
    """Yield the models of NAME=DIR, in float32."""
    for text in named:
        name, _, path = text.partition("=")
        model, tokenizer = read_checkpoint(Path(path))
        yield OpenedModel(name, model.float(), tokenizer)


if __name__ == "__main__":
    main()
