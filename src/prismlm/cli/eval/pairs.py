"""prismlm eval pairs: sentences and their perturbed forms, for studies of robustness."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prismlm.cli.options import Json, Overwrite, number, option
from prismlm.cli.output import console_for_reading, print_json, table_of
from prismlm.outputs import check_outputs


def pairs(
    out: Annotated[Path, option("DIR", "Where the two files of pairs go.")],
    data: Annotated[
        Path | None, option("DIR", "Holds wikitext2, dailydialog and ag_news; else from the hub.")
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
