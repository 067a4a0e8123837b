"""prismlm compare: two models or checkpoints side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prismlm.cli.options import (
    BY,
    Json,
    Overwrite,
    Stride,
    TextFiles,
    Window,
    choice,
    number,
    option,
)
from prismlm.cli.output import print_json
from prismlm.outputs import check_ending, check_outputs

PAIRS_SHOWN = 10


def compare(
    model_a: Annotated[Path, typer.Argument(metavar="MODEL_A", help="A model or a checkpoint.")],
    model_b: Annotated[Path, typer.Argument(metavar="MODEL_B", help="Another, of one tokenizer.")],
    file: TextFiles = None,
    lens_a: Annotated[str | None, option("NAME|DIR", "A's lens.")] = None,
    lens_b: Annotated[str | None, option("NAME|DIR", "B's lens.")] = None,
    by: Annotated[str, choice("COLUMN", "Shares by source, domain or license.", BY[1:])] = "domain",
    window: Window = None,
    stride: Stride = None,
    parquet: Annotated[Path | None, option("FILE", "Write every pair of prototypes.")] = None,
    overwrite: Overwrite = False,
    top: Annotated[int, number("N", "Pairs and shares shown.")] = PAIRS_SHOWN,
    as_json: Json = False,
) -> None:
    """Compare two models: losses and sources on the same texts, and which prototypes correspond."""
    from prismlm.explain.compare import check_comparable, compare_prototypes, compare_texts
    from prismlm.explain.language_model import load
    from prismlm.explain.rows import write_rows
    from prismlm.explain.texts import text_options

    check_ending(parquet, ".parquet")
    read = (model_a, model_b, lens_a, lens_b, *(file or ()))
    check_outputs(parquet, inputs=read, overwrite=overwrite)
    a, b = load(model_a, lens=lens_a), load(model_b, lens=lens_b)
    check_comparable(a, b)
    value: dict[str, Any] = {
        "a": {"model": str(model_a), "lens": None if a.lens is None else str(a.lens.path)},
        "b": {"model": str(model_b), "lens": None if b.lens is None else str(b.lens.path)},
        "texts": None,
    }
    if file:
        from prismlm.corpus.read import DocumentReader

        options = text_options([a, b], window, stride)
        value["texts"] = compare_texts(a, b, DocumentReader(list(file)), options)
    value["prototypes"] = compare_prototypes(a, b)
    pairs = value["prototypes"]["pairs"]
    if parquet is not None:
        write_rows(pairs, parquet)
        typer.echo(f"wrote {parquet}", err=True)
    value["prototypes"]["pairs"] = pairs[:top]
    if as_json:
        print_json(value)
    else:
        from prismlm.cli.printing.compare import print_comparison

        print_comparison(value, by, top)
