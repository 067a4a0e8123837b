"""prismlm inspect heads: how far attention heads look, and what at."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from prismlm.cli.inspect.corpus_to_read import CorpusToRead, Length, open_both
from prismlm.cli.options import Json, Models, Overwrite, Split, number, option
from prismlm.cli.output import print_json
from prismlm.outputs import check_ending, check_outputs


def heads(
    models: Models,
    corpus: CorpusToRead = None,
    split: Split = "heldout",
    tokens: Annotated[
        int, number("N", "Tokens to read, from all over the corpus; 0 for all.")
    ] = 20_000,
    length: Length = None,
    layer: Annotated[int | None, option("N", "Only this layer.")] = None,
    least_visible: Annotated[
        int, option("N", "Only queries that see so many tokens of their window.")
    ] = 16,
    out: Annotated[Path | None, option("FILE.csv", "Write a row a head.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Show how far each head looks and what at; signal heads beside noise heads.

    Of several models, such as seeds, it shows each one's comparison and whether they agree.
    """
    check_ending(out, ".csv")
    check_outputs(out, inputs=(*models, corpus), overwrite=overwrite)
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.instruments.heads import HeadReport, across_models, head_report, write_heads

    reports: list[HeadReport] = []
    for path in models:
        model, sequences = open_both(path, corpus, split, tokens, length)
        name, layers = path.resolve().name, None if layer is None else (layer,)
        options: dict[str, Any] = {"layers": layers, "least_visible": least_visible}
        found = head_report(model, sequences, name=name, **options, progress=ConsoleReporter())
        reports.append(found)
    compared = [report.comparison for report in reports if report.comparison is not None]
    across = across_models(compared) if len(compared) > 1 else None
    if out is not None:
        write_heads(reports, out)
        typer.echo(f"wrote {out}", err=True)
    if as_json:
        value = {
            "models": [report.to_dict() for report in reports],
            "across": None if across is None else [asdict(one) for one in across],
        }
        print_json(value)
        return
    from prismlm.cli.printing.heads import print_across, print_heads

    for report in reports:
        print_heads(report, table=len(reports) == 1)
    if across is not None:
        print_across(across)
