"""prismlm inspect spectra: coding rates, cross terms and the loss by length of context."""

from __future__ import annotations

from typing import Annotated

from prismlm.cli.inspect.corpus_to_read import CorpusToRead, Length, open_both
from prismlm.cli.options import Json, Model, Split, flag, number, option
from prismlm.cli.output import print_json


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
        option("T", "Tokens of a window of the loss; else twice a row's."),
    ] = None,
    documents: Annotated[int, option("N", "Documents that the loss is read of.")] = 32,
    seed: Annotated[int, option("N", "Of positions, documents and controls.")] = 0,
    loss_only: Annotated[
        bool, flag("--loss-only", "Only the loss by length; of any decoder.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show coding rates, incoherence, cross terms, and the loss beyond the trained length."""
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
    from prismlm.cli.printing.spectra import print_spectra

    print_json(report.to_dict()) if as_json else print_spectra(report)
