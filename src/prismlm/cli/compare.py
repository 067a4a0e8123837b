"""prismlm compare: two models or checkpoints side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prismlm.cli.options import By, Json, Overwrite, Stride, TextFiles, Window
from prismlm.cli.output import print_json
from prismlm.errors import InputError
from prismlm.outputs import check_outputs

PAIRS_SHOWN = 10


def compare(
    model_a: Annotated[Path, typer.Argument(metavar="MODEL_A", help="A model or a checkpoint.")],
    model_b: Annotated[Path, typer.Argument(metavar="MODEL_B", help="Another, of one tokenizer.")],
    file: TextFiles = None,
    lens_a: Annotated[str | None, typer.Option(metavar="NAME|DIR", help="A's lens.")] = None,
    lens_b: Annotated[str | None, typer.Option(metavar="NAME|DIR", help="B's lens.")] = None,
    by: By = "domain",
    window: Window = None,
    stride: Stride = None,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every pair of prototypes.")
    ] = None,
    overwrite: Overwrite = False,
    top: Annotated[int, typer.Option(metavar="N", help="Pairs and shares shown.")] = PAIRS_SHOWN,
    as_json: Json = False,
) -> None:
    """Compare two models: losses and sources on the same texts, and which prototypes correspond."""
    from prismlm.explain.audit_files import check_ending
    from prismlm.explain.compare import check_comparable, compare_prototypes, compare_texts
    from prismlm.explain.language_model import load
    from prismlm.explain.texts import text_options

    if by not in ("source", "domain", "license"):
        raise InputError(f"shares are compared by source, domain or license; not by {by!r}.")
    if top < 0:
        raise InputError(f"--top is {top}: expected 0 or more.")
    if parquet is not None:
        check_ending(parquet, [".parquet"])
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
        _write(parquet, pairs)
    value["prototypes"]["pairs"] = pairs[:top]
    if as_json:
        print_json(value)
    else:
        _print(value, by, top)


def _write(path: Path, pairs: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from prismlm.files import atomic_file
    from prismlm.locks import writing

    with writing(path), atomic_file(path) as temporary:
        pq.write_table(pa.Table.from_pylist(pairs), temporary)
    typer.echo(f"wrote {path}", err=True)


def _print(value: dict[str, Any], by: str, top: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from prismlm.cli.output import console_for_reading, plain
    from prismlm.explain.support import levels_in_words

    console = console_for_reading()
    for side in ("a", "b"):
        console.print(Text(f"{side.upper()}  {value[side]['model']}", style="bold"))
    console.print()
    texts = value["texts"]
    if texts is not None:
        ce = texts["ce"]
        console.print(f"{texts['texts']:,} texts, {texts['predictions']:,} predictions")
        console.print(
            f"cross-entropy  A {ce['a']:.4f}  B {ce['b']:.4f}  B − A {ce['difference']:+.4f}"
        )
        console.print()
    if texts is not None and texts["support"] is not None:
        for side, support in texts["support"].items():
            words = levels_in_words(support["levels"])
            console.print(f"support  {side.upper()}  {words}; mean score {support['score']:.2f}")
        console.print()
    if texts is not None and texts["shares"] is not None:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column(f"by {by}")
        for heading in ("A", "B", "B − A"):
            table.add_column(heading, justify="right")
        shares = texts["shares"][by]
        for item in shares["items"][:top]:
            row = (f"{item['a']:.1%}", f"{item['b']:.1%}", f"{item['difference']:+.1%}")
            table.add_row(Text(plain(item["key"])), *row)
        left, right = (shares["unattributed"][side] for side in ("a", "b"))
        table.add_row("unattributed", f"{left:.1%}", f"{right:.1%}", f"{right - left:+.1%}")
        console.print(table)
        console.print()
    _print_prototypes(value["prototypes"])


def _print_prototypes(value: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from prismlm.cli.output import console_for_reading, plain

    console = console_for_reading()
    signature, contexts = value["by_signature"], value["by_contexts"]
    chance = signature["chance"]
    console.print(f"prototypes     A {value['prototypes']['a']:,}  B {value['prototypes']['b']:,}")
    console.print(
        f"by signature   median cosine of the best {signature['median']:.3f} "
        f"(chance {chance['median']:.3f}), mutual {signature['mutual']:.1%} "
        f"(chance {chance['mutual']:.1%})"
    )
    if contexts is not None:
        console.print(
            f"by contexts    median Jaccard of the best {contexts['median']:.3f}, mutual "
            f"{contexts['mutual']:.1%}, the same as by signature "
            f"{contexts['same_as_by_signature']:.1%}"
        )
    console.print()
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("A", "B", "cosine", "Jaccard", "names"):
        table.add_column(heading, justify="left" if heading == "names" else "right")
    for pair in value["pairs"]:
        jaccard = pair["jaccard"] if pair["b_by_contexts"] == pair["b"] else None
        names = " = ".join(plain(pair[key] or "–") for key in ("a_name", "b_name"))
        table.add_row(
            str(pair["a"]),
            str(pair["b"]) + ("" if pair["mutual"] else "*"),
            f"{pair['cosine']:.3f}",
            "–" if jaccard is None else f"{jaccard:.2f}",
            Text(names),
        )
    console.print(table)
    if not all(pair["mutual"] for pair in value["pairs"]):
        console.print(Text("* is more similar to another prototype of A", style="dim"))
