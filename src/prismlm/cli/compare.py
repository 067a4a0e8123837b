"""prismlm compare: two models or checkpoints side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli.options import option
from prismlm.cli.output import fit_ends, print_facts, print_json, say, show_rows, wrote
from prismlm.outputs import check_ending, check_outputs

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
        wrote(parquet)
    value["prototypes"]["pairs"] = pairs[:top]
    if as_json:
        print_json(value)
        return
    say(f"A  {model_a}", f"B  {model_b}\n", style="bold")
    if value["texts"] is not None:
        _print_texts(value["texts"], by, top)
    _print_prototypes(value["prototypes"])


def _print_texts(texts: dict[str, Any], by: str, top: int) -> None:
    from prismlm.corpus.read import counted
    from prismlm.explain.support import levels_in_words

    ce = texts["ce"]
    left_out = f", left out: {counted(texts['left_out'])}" if texts["left_out"] else ""
    say(
        f"{texts['texts']:,} texts, {texts['predictions']:,} predictions{left_out}",
        f"cross-entropy  A {ce['a']:.4f}  B {ce['b']:.4f}  B − A {ce['difference']:+.4f} nats",
    )
    for side, support in (texts["support"] or {}).items():
        say(f"support  {side.upper()}  {levels_in_words(support['levels'])}")
    say("")
    if texts["shares"] is not None:
        shares = texts["shares"][by]
        rows = [*shares["items"][:top], {"key": "unattributed", **shares["unattributed"]}]
        rows = [
            one | {"key": fit_ends(one["key"], 40), "b − a": one["b"] - one["a"]} for one in rows
        ]
        columns = {"key": "", "a": ".1%", "b": ".1%", "b − a": "+.1%"}
        show_rows(f"Shares by {by}", columns, rows)


def _print_prototypes(value: dict[str, Any]) -> None:
    """Print how alike prototypes are by the tokens they raise and by documents, and the pairs."""
    print_facts({name: value[name] for name in ("prototypes", "by_signature", "by_contexts")})
    say("")
    columns = {"a": "", "b": "", "mutual": "", "cosine": ".3f", "in_common": ".0%", "names": ""}
    rows = [
        pair
        | {
            "mutual": "yes" if pair["mutual"] else "no",
            "in_common": pair["jaccard"] if pair["b_by_contexts"] == pair["b"] else None,
            "names": " = ".join(fit_ends(pair[key] or "–", 24) for key in ("a_name", "b_name")),
        }
        for pair in value["pairs"]
    ]
    show_rows("", columns, rows)
