"""prismlm compare: two models or checkpoints side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from prismlm.cli.format import points
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
from prismlm.cli.output import console_for_reading, fit_ends, plain, print_json, table_of
from prismlm.outputs import check_ending, check_outputs

NAMES_WIDTH = 40
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
        reader = DocumentReader(list(file), tokenizer=a.tokenizer, answered_chats="last")
        value["texts"] = compare_texts(a, b, reader, options)
        value["texts"]["left_out"] = dict(reader.left_out)
    value["prototypes"] = compare_prototypes(a, b)
    pairs = value["prototypes"]["pairs"]
    if parquet is not None:
        write_rows(pairs, parquet)
        typer.echo(f"wrote {parquet}", err=True)
    value["prototypes"]["pairs"] = pairs[:top]
    print_json(value) if as_json else print_comparison(value, by, top)


def print_comparison(value: dict[str, Any], by: str, top: int) -> None:
    """Print what ``prismlm compare --json`` holds; ``top`` of the shares."""
    console = console_for_reading()
    for side in ("a", "b"):
        console.print(f"{side.upper()}  {plain(value[side]['model'])}", style="bold")
    console.print()
    if value["texts"] is not None:
        _print_texts(console, value["texts"], by, top)
    _print_prototypes(console, value["prototypes"])


def _print_texts(console: Console, texts: dict[str, Any], by: str, top: int) -> None:
    from prismlm.corpus.read import counted
    from prismlm.explain.support import levels_in_words

    ce = texts["ce"]
    left_out = f", left out: {counted(texts['left_out'])}" if texts["left_out"] else ""
    console.print(f"{texts['texts']:,} texts, {texts['predictions']:,} predictions{left_out}")
    console.print(
        f"cross-entropy  A {ce['a']:.4f}  B {ce['b']:.4f}  B − A {ce['difference']:+.4f} nats"
    )
    console.print()
    for side, support in (texts["support"] or {}).items():
        console.print(f"support  {side.upper()}  {levels_in_words(support['levels'])}")
    if texts["shares"] is not None:
        shares = texts["shares"][by]
        rest = shares["unattributed"]
        rest = {"key": "unattributed", **rest, "difference": rest["b"] - rest["a"]}
        table = table_of(f"by {by}", "*A", "*B", "*B − A")
        for item in (*shares["items"][:top], rest):
            key = Text(fit_ends(plain(item["key"]), max(12, console.width - 40)))
            shown = f"{item['a']:.1%}", f"{item['b']:.1%}", points(item["difference"])
            table.add_row(key, *shown)
        console.print(table)
    console.print()


def _print_prototypes(console: Console, value: dict[str, Any]) -> None:
    signature, contexts = value["by_signature"], value["by_contexts"]
    chance = signature["chance"]
    console.print(f"prototypes  A {value['prototypes']['a']:,}  B {value['prototypes']['b']:,}")
    console.print(
        f"by the tokens they raise: cosine to the most similar {signature['median']:.3f} at the "
        f"median (chance {chance['median']:.3f}); {signature['mutual']:.1%} choose each other "
        f"(chance {chance['mutual']:.1%})"
    )
    if contexts is not None:
        console.print(
            f"by their nearest documents: {contexts['median']:.1%} in common at the median; "
            f"{contexts['mutual']:.1%} choose each other, {contexts['same_as_by_signature']:.1%} "
            "the same one as by tokens"
        )
    console.print()
    table = table_of("*A", "*B", "*cosine", "*in common", "names")
    for pair in value["pairs"]:
        common = pair["jaccard"] if pair["b_by_contexts"] == pair["b"] else None
        names = " = ".join(plain(pair[key] or "–") for key in ("a_name", "b_name"))
        table.add_row(
            str(pair["a"]),
            str(pair["b"]) + ("" if pair["mutual"] else "*"),
            f"{pair['cosine']:.3f}",
            "–" if common is None else f"{common:.0%}",
            Text(fit_ends(names, NAMES_WIDTH)),
        )
    console.print(table)
    if not all(pair["mutual"] for pair in value["pairs"]):
        console.print("* is more similar to another prototype of A", style="dim")
