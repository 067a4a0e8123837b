"""prismlm inspect heads, inspect spectra: what attention heads look at, and Prism's claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismlm.cli.options import Json, Model
from prismlm.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.sequences import Sequences
    from prismlm.instruments.heads import HeadReport

# Of a model whose training rows are not known.
LENGTH = 256
Models = Annotated[
    list[Path], typer.Argument(metavar="MODEL...", help="Model directories, such as seeds.")
]
CorpusToRead = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The corpus to read; else what the model was trained on."),
]
SplitToRead = Annotated[
    str, typer.Option(metavar="SPLIT", help="Documents to read: train, heldout or all.")
]
Length = Annotated[
    int | None,
    typer.Option(metavar="T", help="Tokens of a window; else of a training row, or 256."),
]


def heads(
    models: Models,
    corpus: CorpusToRead = None,
    split: SplitToRead = "heldout",
    tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens to read, from all over the corpus; 0 for all.")
    ] = 20_000,
    length: Length = None,
    layer: Annotated[int | None, typer.Option(metavar="N", help="Only this layer.")] = None,
    least_visible: Annotated[
        int, typer.Option(metavar="N", help="Only queries that see so many tokens of their window.")
    ] = 16,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Write a row a head.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how far each head looks and what at; signal heads beside noise heads.

    Of several models, such as seeds, it shows each one's comparison and whether they agree.
    """
    if out is not None and out.suffix != ".csv":
        raise InputError(f"--out is {out}: expected a file that ends in .csv.")
    from prismlm.instruments.heads import across_models, write_heads

    reports = [
        _heads_of(path, corpus, split, tokens, length, layer, least_visible) for path in models
    ]
    compared = [report.comparison for report in reports if report.comparison is not None]
    across = across_models(compared) if len(compared) > 1 else None
    if out is not None:
        write_heads(reports, out)
        typer.echo(f"wrote {out}", err=True)
    if as_json:
        from dataclasses import asdict

        value = {
            "models": [report.to_dict() for report in reports],
            "across": None if across is None else [asdict(one) for one in across],
        }
        typer.echo(json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False))
        return
    from prismlm.cli.printing.heads import print_across, print_heads

    for report in reports:
        print_heads(report, table=len(reports) == 1)
    if across is not None:
        print_across(across)


def spectra(
    model: Model,
    corpus: CorpusToRead = None,
    split: SplitToRead = "heldout",
    tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens that positions are drawn from; 0 for all.")
    ] = 50_000,
    length: Length = None,
    positions: Annotated[
        int, typer.Option(metavar="N", help="Positions of coding rates and of content.")
    ] = 2048,
    distortion: Annotated[
        float, typer.Option(metavar="EPSILON", help="Of coding rates; the source leaves it open.")
    ] = 0.5,
    order: Annotated[
        int, typer.Option(metavar="N", help="Of small denominators: n and m from 1 to this.")
    ] = 22,
    context: Annotated[
        int | None,
        typer.Option(metavar="T", help="Tokens of a window of the loss; else twice a row's."),
    ] = None,
    documents: Annotated[
        int, typer.Option(metavar="N", help="Documents that the loss is read of.")
    ] = 32,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of positions, documents and controls.")
    ] = 0,
    loss_only: Annotated[
        bool, typer.Option("--loss-only", help="Only the loss by length; of any decoder.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show coding rates, incoherence, cross terms, and the loss beyond the trained length."""
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.index.training_corpus import trained_length
    from prismlm.instruments.heads import SpectraOptions, spectra_report

    opened, sequences = _open(model, corpus, split, tokens, length)
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
    if as_json:
        value = report.to_dict()
        typer.echo(json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False))
        return
    from prismlm.cli.printing.spectra import print_spectra

    print_spectra(report)


def _heads_of(
    path: Path,
    corpus: Path | None,
    split: str,
    tokens: int,
    length: int | None,
    layer: int | None,
    least_visible: int,
) -> HeadReport:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.instruments.heads import head_report

    model, sequences = _open(path, corpus, split, tokens, length)
    return head_report(
        model,
        sequences,
        name=path.resolve().name,
        layers=None if layer is None else (layer,),
        least_visible=least_visible,
        progress=ConsoleReporter(),
    )


def _open(
    path: Path, corpus: Path | None, split: str, tokens: int, length: int | None
) -> tuple[PreTrainedModel, Sequences]:
    """Open a model and say what is to be read of which corpus."""
    from typing import cast

    from prismlm.corpus import Corpus
    from prismlm.corpus.sequences import Sequences
    from prismlm.corpus.store import Split
    from prismlm.corpus.tokenizer import check_tokenizer_of
    from prismlm.index.training_corpus import trained_length, training_corpus
    from prismlm.models.checkpoint import read_checkpoint

    if tokens < 0:
        raise InputError(f"--tokens is {tokens}: expected at least 1, or 0 for all.")
    model, tokenizer = read_checkpoint(path)
    opened = training_corpus(path) if corpus is None else Corpus.open(corpus)
    check_tokenizer_of(opened, tokenizer, path.resolve().name)
    row = trained_length(path) or LENGTH if length is None else length
    sequences = Sequences(opened, cast("Split", split), row, tokens or None)
    return model, sequences
