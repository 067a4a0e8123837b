"""prismlm inspect heads and spectra: what attention heads do, and what their design leads to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.inspect.corpus_to_read import CorpusToRead, Length, open_both
from prismlm.cli.options import Json, Model, Models, Overwrite, Split, flag, number, option
from prismlm.cli.output import console_for_reading, print_json
from prismlm.outputs import check_ending, check_outputs

if TYPE_CHECKING:
    from prismlm.instruments.results import Report


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
    from prismlm.instruments.heads import across_models, head_report, write_heads

    reports: list[Report] = []
    for path in models:
        model, sequences = open_both(path, corpus, split, tokens, length)
        name, layers = path.resolve().name, None if layer is None else (layer,)
        options: dict[str, Any] = {"layers": layers, "least_visible": least_visible}
        found = head_report(model, sequences, name=name, **options, progress=ConsoleReporter())
        reports.append(found)
    compared = [report["comparison"] for report in reports if "comparison" in report.tables]
    across = across_models(compared) if len(compared) > 1 else None
    if out is not None:
        write_heads(reports, out)
        typer.echo(f"wrote {out}", err=True)
    if as_json:
        shown = [report.to_dict() for report in reports]
        print_json({"models": shown, "across": across and across.to_dict()})
        return
    from prismlm.cli.printing.tables import print_report, show

    for report in reports:
        tables = dict(report.tables)
        if len(reports) > 1:
            # Of several models, what is compared.
            del tables["heads"]
        print_report(replace(report, tables=tables))
    if across is not None:
        show(console_for_reading(), across)


def spectra(
    model: Model,
    corpus: CorpusToRead = None,
    split: Split = "heldout",
    tokens: Annotated[
        int, number("N", "Tokens that positions are drawn from; 0 for all.")
    ] = 50_000,
    length: Length = None,
    positions: Annotated[int, option("N", "Positions of coding rates and of content.")] = 2048,
    distortion: Annotated[
        float, option("EPSILON", "Of coding rates; the source leaves it open.")
    ] = 0.5,
    order: Annotated[int, option("N", "Of small denominators: n and m from 1 to this.")] = 22,
    context: Annotated[
        int | None,
        option("T", "Tokens of a window of the loss (default: twice a row's)."),
    ] = None,
    documents: Annotated[int, option("N", "Documents that the loss is read of.")] = 32,
    seed: Annotated[int, option("N", "Of positions, documents and controls.")] = 0,
    loss_only: Annotated[
        bool, flag("--loss-only", "Only the loss by length; of any decoder.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show coding rates, incoherence, cross terms, and the loss beyond the trained length."""
    from prismlm.cli.printing.tables import print_report
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.index.training_corpus import trained_length
    from prismlm.instruments.heads import SpectraOptions, spectra_report

    opened, sequences = open_both(model, corpus, split, tokens, length)
    report = spectra_report(
        opened,
        sequences,
        name=model.resolve().name,
        options=SpectraOptions(
            positions, distortion, order, context, trained_length(model), documents, seed
        ),
        loss_only=loss_only,
        progress=ConsoleReporter(),
    )
    print_json(report.to_dict()) if as_json else print_report(report)
