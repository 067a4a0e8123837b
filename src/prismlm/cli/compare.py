"""prismlm compare: two models or checkpoints side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import option

NAME_WIDTH = 28
SharesBy = Annotated[Literal["source", "domain", "license"], option(None, "Group shares by this.")]


def compare(
    model_a: Annotated[Path, typer.Argument(metavar="MODEL_A", help="A model or a checkpoint.")],
    model_b: Annotated[Path, typer.Argument(metavar="MODEL_B", help="Another, same tokenizer.")],
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

    inputs = (model_a, model_b, lens_a, lens_b, *(file or ()))
    opt.check_results(*inputs, overwrite=overwrite, parquet=parquet)
    a, b = load(model_a, lens=lens_a), load(model_b, lens=lens_b)
    check_comparable(a, b)
    texts = None
    if file:
        from prismlm.corpus.read import DocumentReader

        options = text_options([a, b], window, stride)
        reader = DocumentReader(list(file), tokenizer=a.tokenizer, answered_chats="last")
        texts = compare_texts(a, b, reader, options) | {"left_out": dict(reader.left_out)}
    prototypes = compare_prototypes(a, b)
    if parquet is not None:
        write_rows(prototypes["pairs"], parquet)
        output.wrote(parquet)
    del prototypes["pairs"][top:]
    value: dict[str, Any] = {
        name: {"model": str(path), "lens": None if lm.lens is None else str(lm.lens.path)}
        for name, path, lm in (("a", model_a, a), ("b", model_b, b))
    }
    value |= {"texts": texts, "prototypes": prototypes}
    output.print_json(value) if as_json else _print(value, by, top)


def _print(value: dict[str, Any], by: str, top: int) -> None:
    """Print the JSON document; of the shares by ``by`` only the ``top`` largest."""
    output.say(f"A  {value['a']['model']}", f"B  {value['b']['model']}\n", style="bold")
    if value["texts"] is not None:
        shares = value["texts"].pop("shares")
        output.print_facts(value["texts"])
        output.say("")
        if shares is not None:
            rest = shares[by]["unattributed"]
            last = {"key": "unattributed", **rest, "difference": rest["b"] - rest["a"]}
            columns = {"key": "", "a": ".1%", "b": ".1%", "difference": "+.1%"}
            output.show_rows(f"Shares by {by}", columns, [*shares[by]["items"][:top], last])
    pairs = value["prototypes"].pop("pairs")
    output.print_facts(value["prototypes"])
    output.say("")
    columns = {"a": "", "b": "", "cosine": ".3f", "mutual": "", "in_common": ".0%"}
    columns |= {"a_name": "", "b_name": ""}
    output.show_rows("Pairs", columns, list(map(_pair_cells, pairs)))


def _pair_cells(pair: dict[str, Any]) -> dict[str, Any]:
    # The Jaccard similarity is of A's best match by contexts, which may be another prototype.
    jaccard = pair["jaccard"] if pair["b_by_contexts"] == pair["b"] else None
    cells = {"mutual": "yes" if pair["mutual"] else "no", "in_common": jaccard}
    for key in ("a_name", "b_name"):
        cells[key] = output.fit_ends(pair[key], NAME_WIDTH) if pair[key] else None
    return pair | cells
