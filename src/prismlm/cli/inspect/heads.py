"""prismlm inspect heads and spectra: what attention heads do, and what their design leads to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli.inspect.corpus_to_read import Length, Tokens, open_both
from prismlm.cli.options import flag, option
from prismlm.cli.output import print_json, print_report, show, wrote
from prismlm.outputs import check_ending, check_outputs

if TYPE_CHECKING:
    from prismlm.probes.results import Report

LeastVisible = Annotated[int, option("N", "Only queries that see so many tokens of their window.")]
LossContext = Annotated[int | None, option("T", "Of the loss (default: twice a row's).")]


def heads(
    models: opt.Models,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    tokens: Tokens = 20_000,
    length: Length = None,
    layer: opt.Layer = None,
    least_visible: LeastVisible = 16,
    out: Annotated[Path | None, option("FILE.csv", "Write a row a head.")] = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Show how far each head looks and what at; signal heads beside noise heads.

    Of several models, such as seeds, it shows each one's comparison and whether they agree.
    """
    check_ending(out, ".csv")
    check_outputs(out, inputs=(*models, corpus), overwrite=overwrite)
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.probes.heads import across_models, head_report, write_heads

    layers = None if layer is None else (layer,)
    options: dict[str, Any] = {"layers": layers, "least_visible": least_visible}
    reports: list[Report] = []
    for path in models:
        model, sequences = open_both(path, corpus, split, tokens, length)
        name, progress = path.resolve().name, ConsoleReporter()
        reports.append(head_report(model, sequences, name=name, **options, progress=progress))
    compared = [report["comparison"] for report in reports if "comparison" in report.tables]
    across = across_models(compared) if len(compared) > 1 else None
    if out is not None:
        write_heads(reports, out)
        wrote(out)
    if as_json:
        shown = [report.to_dict() for report in reports]
        print_json({"models": shown, "across": across and across.to_dict()})
        return
    for report in reports:
        # Of several models, what is compared.
        left_out = {"heads"} if len(reports) > 1 else set[str]()
        tables = {name: one for name, one in report.tables.items() if name not in left_out}
        print_report(replace(report, tables=tables))
    if across is not None:
        show(across)


def spectra(
    model: opt.Model,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    tokens: Tokens = 50_000,
    length: Length = None,
    positions: Annotated[int, option("N", "Positions of coding rates and of content.")] = 2048,
    distortion: Annotated[float, option("EPSILON", "Of coding rates.")] = 0.5,
    order: Annotated[int, option("N", "Of small denominators: n and m from 1 to this.")] = 22,
    context: LossContext = None,
    documents: Annotated[int, option("N", "Documents that the loss is read of.")] = 32,
    seed: opt.Seed = 0,
    loss_only: Annotated[bool, flag("--loss-only", "Only the loss by length.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show coding rates, incoherence, cross terms, and the loss beyond the trained length."""
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.lens.training_corpus import trained_length
    from prismlm.probes.heads import SpectraOptions, spectra_report

    opened, sequences = open_both(model, corpus, split, tokens, length)
    trained = trained_length(model)
    report = spectra_report(
        opened,
        sequences,
        name=model.resolve().name,
        options=SpectraOptions(positions, distortion, order, context, trained, documents, seed),
        loss_only=loss_only,
        progress=ConsoleReporter(),
    )
    print_json(report.to_dict()) if as_json else print_report(report)
