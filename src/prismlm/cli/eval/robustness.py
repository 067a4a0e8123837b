"""prismlm eval robustness, clamping and pairs: what becomes of predictions where a text changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.options import Json, Model, Overwrite, number, option
from prismlm.cli.output import console_for_reading, print_json
from prismlm.cli.printing.tables import show
from prismlm.files import json_text
from prismlm.instruments.results import Row, Table
from prismlm.instruments.results import as_json as as_values
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
        number(
            "E", "Nats that mean entropies are matched to (default: the lowest of the models')."
        ),
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Compare predictions after texts and their variants: Jensen-Shannon divergence and ranks."""
    check_outputs(out, inputs=(*models, pairs), overwrite=overwrite)
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.eval.robustness import measure_robustness
    from prismlm.run_state import orderly_end

    with orderly_end():
        drawn = _drawn(pairs, limit, seed)
        found = measure_robustness(
            _opened(models), drawn, entropy=entropy, seed=seed, progress=ConsoleReporter()
        )
    _show(found, print_robustness, {"pairs": str(pairs), "limit": limit}, out, as_json)


def clamping(
    model: Model,
    pairs: Pairs,
    limit: Limit = None,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Read variants with the routing of their originals: does it bring predictions back?"""
    check_outputs(out, inputs=(model, pairs), overwrite=overwrite)
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.eval.clamping import measure_clamping
    from prismlm.run_state import orderly_end

    with orderly_end():
        drawn = _drawn(pairs, limit, seed)
        (opened,) = _opened([model])
        found = measure_clamping(opened, drawn, seed=seed, progress=ConsoleReporter())
    _show(found, print_clamping, {"pairs": str(pairs), "limit": limit}, out, as_json)


def pairs(
    out: Annotated[Path, option("DIR", "Where the two files of pairs go.")],
    data: Annotated[
        Path | None,
        option("DIR", "Holds wikitext2, dailydialog and ag_news (default: from the hub)."),
    ] = None,
    per_slice: Annotated[int, number("N", "Pairs of each slice.", 1)] = 500,
    seed: Annotated[int, number("S", "Of what is drawn.")] = 0,
    similarity: Annotated[
        float, number("C", "The least cosine of a pair, by all-MiniLM-L6-v2.", -1, 1)
    ] = 0.75,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Make pairs of sentences that mean the same, and of sentences that do not.

    The pairs are of the corpora's licences, AG News for research only: they do not ship.
    """
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.eval.perturbations.generate import FILES, PairOptions, write_pairs
    from prismlm.run_state import orderly_end

    check_outputs(*(out / name for name in FILES), inputs=(data,), overwrite=overwrite)
    options = PairOptions(per_slice=per_slice, seed=seed, similarity=similarity)
    with orderly_end():
        result = write_pairs(out, data, options, ConsoleReporter())
    for name in FILES:
        typer.echo(f"wrote {out / name}", err=True)
    print_json(result) if as_json else print_pairs(result)


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


def _show(
    found: Row, print_it: Callable[[Row], None], head: Row, out: Path | None, as_json: bool
) -> None:
    """Write figures as JSON where that is asked for, and print them."""
    value = head | as_values(found)
    if out is not None:
        write_text(out, json_text(value, indent=2) + "\n")
        typer.echo(f"wrote {out}", err=True)
    print_json(value) if as_json else print_it(found)


def print_robustness(found: Row) -> None:
    """Print each slice and model with intervals, then differences to the first model."""
    console = console_for_reading()
    facts = {
        "mean entropy matched to": found["target"],
        "pairs empty or too long for a model": found["left_out"],
        "JS comparable, over one vocabulary": found["comparable"],
    }
    named = {"name": "", "entropy": ".3f", "temperature": ".3f"}
    show(console, Table("Models", named, tuple(found["models"]), facts))
    first = found["models"][0]["name"]
    rows = [
        {"slice": part["name"], "pairs": part["pairs"], "model": name} | figures
        for part in found["slices"]
        for name, figures in [
            *part["models"].items(),
            *((f"first − {d['of'][1]}", d) for d in part["differences"] if d["of"][0] == first),
        ]
    ]
    columns: dict[str, str] = dict.fromkeys(["slice", "pairs", "model"], "")
    columns |= {"js": ".3f", "js_matched": ".3f"}
    columns |= dict.fromkeys(["overlap.value", "spearman.value", "same_top.value"], ".3f")
    title = "JS in bits, plain and at matched entropies; 95 % intervals over pairs"
    show(console, Table(title, columns, tuple(rows)))


def print_clamping(found: Row) -> None:
    """Print PMR of each slice with the original's routing and with a random text's."""
    rows = [
        {"slice": part["name"], "routing_of": of} | (part[key] or {"pairs": 0})
        for part in found["slices"]
        for of, key in (("original", "clamped"), ("random text", "control"))
    ]
    columns = {"slice": "", "routing_of": "", "mean": "+.3f", "deviation": ".3f",
               "share_positive": ".3f", "pooled.value": "+.3f", "base.value": ".4f",
               "js.value": ".4f", "pairs": "", "unmoved": ""}  # fmt: skip
    console = console_for_reading()
    title = f"PMR: {found['name']}, {found['routing']} clamped"
    show(console, Table(title, columns, tuple(rows)))
    columns = {"name": "", "of_equal_length": "", "unaligned": "", "below_floor": "",
               "gain": "+.3f"}  # fmt: skip
    title = "Pairs left out; gain: JS with random routing minus the original's"
    show(console, Table(title, columns, tuple(found["slices"])))


def print_pairs(result: dict[str, Any]) -> None:
    """Print of each slice how alike its pairs are, where they come from and what was filtered."""
    parts = {name: "" for row in result["slices"] for name in (*row["sources"], *row["left_out"])}
    columns = {"slice": "", "pairs": ",", "similarity": ".3f", "distance": ".2f",
               "candidates": ","} | dict.fromkeys(sorted(parts), ",")  # fmt: skip
    rows = tuple(row | row["sources"] | row["left_out"] for row in result["slices"])
    show(console_for_reading(), Table("Pairs", columns, rows))
