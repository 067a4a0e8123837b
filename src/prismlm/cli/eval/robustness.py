"""prismlm eval robustness, clamping and pairs: what becomes of predictions where a text changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from prismlm.cli.options import DryRun, Json, Model, Overwrite, number, option
from prismlm.cli.output import (
    console_for_reading,
    fit_ends,
    plain,
    print_cost,
    print_json,
    table_of,
)
from prismlm.files import json_text
from prismlm.outputs import check_outputs, write_text

if TYPE_CHECKING:
    from prismlm.eval.clamping import Clamping, Mediation
    from prismlm.eval.robustness import OpenedModel, Pair, Robustness
    from prismlm.statistics import Interval

HEADINGS = ("*JS, bits", "*JS, matched", "*overlap", "*Spearman", "*same top")
NAME_WIDTH = 20
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
    _show(found, print_robustness, {"pairs": str(pairs), "limit": limit}, out, as_json)


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


def _cost(opened: OpenedModel, drawn: Sequence[Pair], times: float = 1) -> Any:
    from prismlm.eval.next_token import encode, reading_cost
    from prismlm.eval.robustness import texts_of

    rows = encode(opened.tokenizer, list(texts_of(drawn)))
    return reading_cost(opened.model, rows, opened.name, times)


def _show(
    found: Any, print_it: Callable[[Any], None], head: Any, out: Path | None, as_json: bool
) -> None:
    """Write figures as JSON where that is asked for, and print them."""
    value = head | found.to_dict()
    if out is not None:
        write_text(out, json_text(value, indent=2) + "\n")
        typer.echo(f"wrote {out}", err=True)
    print_json(value) if as_json else print_it(found)


def print_robustness(found: Robustness) -> None:
    """Print each slice and model with intervals, then differences to the first model."""
    console = console_for_reading()
    table = table_of("model", "*entropy, nats", "*temperature")
    for model in found.models:
        table.add_row(_name(model.name), f"{model.entropy:.3f}", f"{model.temperature:.3f}")
    console.print(table)
    said = f"matched: at the temperatures that give a mean entropy of {found.target:.3f} nats"
    if found.left_out:
        said += f" · {found.left_out:,} pairs left out, being empty or too long for a model"
    if not found.comparable:
        said += " · vocabularies differ, so JS must not be compared between these models"
    console.print(said, style="dim", soft_wrap=True)
    console.print()
    table = table_of("", *HEADINGS, gap=1)
    for part in found.slices:
        table.add_row(Text(f"{plain(part.name)}, {part.pairs} pairs", "bold"))
        for name, figures in part.models.items():
            table.add_row(_name(name), *_figures(figures))
        for (one, other), figures in part.differences.items():
            if one == found.models[0].name:
                table.add_row(_name(f"first − {other}"), *_figures(figures, sign="+"), style="dim")
    console.print(table)
    console.print("In brackets 95 % intervals, bootstrapped over pairs.", style="dim")


def print_clamping(found: Clamping) -> None:
    """Print PMR of each slice beside the control."""
    console = console_for_reading()
    console.print(f"{plain(found.name)}, {found.routing} clamped", style="bold")
    table = table_of(
        "slice", "routing of", "*PMR", "*std", "*> 0", "*pooled", "*JS base", "*JS clamped", "*n"
    )
    for part in found.slices:
        table.add_row(plain(part.name), "original", *_mediation(part.clamped))
        table.add_row("", Text("random text", "dim"), *_mediation(part.control))
    console.print(table)
    for part in found.slices:
        said = [
            f"{part.of_equal_length} pairs of equal length",
            f"{part.clamped.unmoved if part.clamped else 0} not moved",
            f"{part.unaligned} not aligned",
            f"{part.below_floor} of a JS too small to have a PMR",
        ]
        if part.gain is not None:
            gain = _interval(part.gain, "+")
            said.insert(0, f"JS with random routing minus the original's {gain}")
        console.print(f"{plain(part.name)}: {', '.join(said)}", style="dim", soft_wrap=True)


def _mediation(one: Mediation | None) -> tuple[str, ...]:
    if one is None:
        return ("–",) * 6 + ("0",)
    return (
        _interval(one.mean, "+"),
        f"{one.deviation:.3f}",
        f"{one.share_positive:.3f}",
        f"{one.pooled.value:+.3f}",
        f"{one.base.value:.4f}",
        f"{one.js.value:.4f}",
        str(one.pairs),
    )


def _figures(found: dict[str, Interval], sign: str = "") -> list[str]:
    from prismlm.eval.robustness import MEASURES

    divergences = [_interval(found[key], sign) for key in MEASURES[:2]]
    return divergences + [f"{found[key].value:{sign}.3f}" for key in MEASURES[2:]]


def _interval(one: Interval, sign: str = "") -> str:
    form = f"{sign}.3f"
    return f"{one.value:{form}} ({one.low:{form}} to {one.high:{form}})"


def _name(name: str) -> Text:
    return Text(fit_ends(plain(name), NAME_WIDTH))


def print_pairs(result: dict[str, Any]) -> None:
    """Print of each slice how alike its pairs are, where they come from and what was filtered."""
    parts = {
        part: sorted({name for row in result["slices"] for name in row[part]})
        for part in ("sources", "left_out")
    }
    headings = [f"*{name}" for names in parts.values() for name in names]
    table = table_of("slice", "*pairs", "*cosine", "*edits", "*candidates", *headings, gap=1)
    for row in result["slices"]:
        counts = (f"{row[part].get(name, 0):,}" for part, names in parts.items() for name in names)
        figures = (f"{row['pairs']:,}", f"{row['similarity']:.3f}", f"{row['distance']:.2f}")
        table.add_row(row["slice"], *figures, f"{row['candidates']:,}", *counts)
    console_for_reading().print(table)
