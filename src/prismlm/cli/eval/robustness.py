"""prismlm eval robustness and clamping: what becomes of predictions where a text is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.options import DryRun, Json, Model, Overwrite, number, option
from prismlm.cli.output import print_cost, print_json
from prismlm.files import json_text
from prismlm.outputs import check_outputs, write_text

if TYPE_CHECKING:
    from prismlm.eval.robustness import OpenedModel, Pair

Pairs = Annotated[Path, option("FILE", "Pairs of texts, as Parquet, of any slices.")]
Limit = Annotated[int | None, option("N", "Pairs of each slice, drawn by the seed.")]
Seed = Annotated[int, option("S", "Of what is drawn.")]
Out = Annotated[Path | None, option("FILE", "Write the figures as JSON.")]


def robustness(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", help="Model directories to compare.")
    ],
    pairs: Pairs,
    entropy: Annotated[
        float | None,
        number("E", "Nats that mean entropies are matched to; else the lowest of the models'."),
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Compare predictions after texts and their variants: Jensen-Shannon divergence and ranks."""
    check_outputs(out, inputs=(*models, pairs), overwrite=overwrite)
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.cost import Cost
    from prismlm.eval.robustness import measure_robustness
    from prismlm.run_state import orderly_end

    with orderly_end():
        drawn = _drawn(pairs, limit, seed)
        if dry_run:
            parts = tuple(_cost(opened, drawn) for opened in _opened(models))
            seconds = sum(part.seconds or 0.0 for part in parts)
            memory = max(part.memory_bytes for part in parts)
            print_cost(Cost(seconds, memory, 0, {"pairs": len(drawn)}, parts), as_json=as_json)
            return
        found = measure_robustness(
            _opened(models), drawn, entropy=entropy, seed=seed, progress=ConsoleReporter()
        )
    if _kept({"pairs": str(pairs), "limit": limit, **found.to_dict()}, out, as_json):
        return
    from prismlm.cli.printing.robustness import print_robustness

    print_robustness(found)


def clamping(
    model: Model,
    pairs: Pairs,
    limit: Limit = None,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Read variants with the routing of their originals: does it bring predictions back?"""
    check_outputs(out, inputs=(model, pairs), overwrite=overwrite)
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.eval.clamping import measure_clamping, routing_of
    from prismlm.run_state import orderly_end

    with orderly_end():
        drawn = _drawn(pairs, limit, seed)
        (opened,) = _opened([model])
        if dry_run:
            routing_of(opened.model)
            # Both texts, and the variant with two routings, each recorded before.
            print_cost(_cost(opened, drawn, times=3), as_json=as_json)
            return
        found = measure_clamping(opened, drawn, seed=seed, progress=ConsoleReporter())
    if _kept({"pairs": str(pairs), "limit": limit, **found.to_dict()}, out, as_json):
        return
    from prismlm.cli.printing.robustness import print_clamping

    print_clamping(found)


def _drawn(path: Path, limit: int | None, seed: int) -> list[Pair]:
    from prismlm.eval.pairs import read_pairs
    from prismlm.eval.robustness import drawn_pairs

    return drawn_pairs(read_pairs(path), limit, seed)


def _opened(paths: Sequence[Path]) -> Iterator[OpenedModel]:
    """Yield models in float32 under the shortest names that tell them apart."""
    from prismlm.eval.robustness import OpenedModel
    from prismlm.models.checkpoint import read_checkpoint

    names = [path.resolve().name for path in paths]
    for path, name in zip(paths, names, strict=True):
        model, tokenizer = read_checkpoint(path)
        unique = name if names.count(name) == 1 else str(path)
        yield OpenedModel(unique, model.float(), tokenizer)


def _cost(opened: OpenedModel, drawn: Sequence[Pair], times: float = 1) -> Any:
    from prismlm.eval.next_token import encode, reading_cost
    from prismlm.eval.robustness import texts_of

    rows = encode(opened.tokenizer, list(texts_of(drawn)))
    return reading_cost(opened.model, rows, opened.name, times)


def _kept(value: dict[str, Any], out: Path | None, as_json: bool) -> bool:
    """Write and print figures as JSON where that is asked for; say whether they were printed."""
    if out is not None:
        write_text(out, json_text(value, indent=2) + "\n")
        typer.echo(f"wrote {out}", err=True)
    if as_json:
        print_json(value)
    return as_json
