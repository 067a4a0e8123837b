"""prismlm compare: two models or checkpoints side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import option

NAME_WIDTH = 28
SharesBy = Annotated[Literal["source", "domain", "license"], option(None, "What shares are by.")]


def compare(
    model_a: Annotated[Path, typer.Argument(metavar="MODEL_A", help="A model or a checkpoint.")],
    model_b: Annotated[Path, typer.Argument(metavar="MODEL_B", help="Another, of one tokenizer.")],
    file: opt.TextFiles = None,
    lens_a: Annotated[str | None, option("NAME|DIR", "A's lens.")] = None,
    lens_b: Annotated[str | None, option("NAME|DIR", "B's lens.")] = None,
    by: SharesBy = "domain",
    window: opt.Window = None,
    stride: opt.Stride = None,
    parquet: Annotated[Path | None, option("FILE", "Write every pair of prototypes.")] = None,
    overwrite: opt.Overwrite = False,
    top: Annotated[int, option("N", "Pairs and shares shown.", least=0)] = 10,
    as_json: opt.Json = False,
) -> None:
    """Compare two models: losses and sources on the same texts, and which prototypes correspond."""
    from prismlm.explain.compare import check_comparable, compare_prototypes, compare_texts
    from prismlm.explain.language_model import load
    from prismlm.explain.rows import write_rows
    from prismlm.explain.texts import text_options

    read = (model_a, model_b, lens_a, lens_b, *(file or ()))
    opt.check_results(*read, overwrite=overwrite, parquet=parquet)
    a, b = load(model_a, lens=lens_a), load(model_b, lens=lens_b)
    check_comparable(a, b)
    value: dict[str, Any] = {
        name: {"model": str(path), "lens": None if lm.lens is None else str(lm.lens.path)}
        for name, path, lm in (("a", model_a, a), ("b", model_b, b))
    }
    value["texts"] = None
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
        output.wrote(parquet)
    value["prototypes"]["pairs"] = pairs[:top]
    output.print_json(value) if as_json else _print(value, by, top)


def _print(value: dict[str, Any], by: str, top: int) -> None:
    """Print what ``--json`` holds; ``top`` of the shares."""
    output.say(f"A  {value['a']['model']}", f"B  {value['b']['model']}\n", style="bold")
    if value["texts"] is not None:
        shares = value["texts"].pop("shares")
        output.print_facts(value["texts"])
        output.say("")
        if shares is not None:
            rest = shares[by]["unattributed"]
            rest = {"key": "unattributed", **rest, "difference": rest["b"] - rest["a"]}
            columns = {"key": "", "a": ".1%", "b": ".1%", "difference": "+.1%"}
            output.show_rows(f"Shares by {by}", columns, [*shares[by]["items"][:top], rest])
    pairs = value["prototypes"].pop("pairs")
    output.print_facts(value["prototypes"])
    output.say("")
    for pair in pairs:
        pair["mutual"] = "yes" if pair["mutual"] else "no"
        pair["in_common"] = pair["jaccard"] if pair["b_by_contexts"] == pair["b"] else None
        for name in ("a_name", "b_name"):
            pair[name] = output.fit_ends(pair[name] or "", NAME_WIDTH)
    columns = {"a": "", "b": "", "cosine": ".3f", "mutual": "", "in_common": ".0%"}
    output.show_rows("Pairs", columns | {"a_name": "", "b_name": ""}, pairs)
