"""prismlm inspect attention: what heads look at along a text, and which look for a role."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from prismlm.cli.options import Json, Model, Overwrite, flag, number, option
from prismlm.cli.output import console_for_reading, fit, plain, print_json, table_of
from prismlm.errors import InputError
from prismlm.outputs import check_ending, check_outputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.explain.attention_maps import AttentionMap, Head, Link

TOKEN_WIDTH = 12
Roles = Annotated[
    bool,
    flag(
        "--roles", "In place of a text: which heads look for subject, object, determiners or verbs."
    ),
]
CasesFile = Annotated[
    Path | None,
    option("FILE", "Sentences for --roles, JSON lines with marked words (default: bundled)."),
]
Draws = Annotated[
    int | None,
    number("N", "Of random words, for --roles (default: as many as p needs).", 1),
]
Untrained = Annotated[
    bool,
    flag(
        "--untrained/--no-untrained", "With --roles, search the same model with random weights too."
    ),
]


def attention(
    model: Model,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Of at least two tokens.")
    ] = None,
    layer: Annotated[int | None, option("N", "Only this layer.")] = None,
    head: Annotated[int | None, option("H", "Only this head of a layer, or of --group.")] = None,
    group: Annotated[str | None, option("GROUP", "Only signal or only noise heads.")] = None,
    top: Annotated[int, number("K", "Strongest weights shown of a head.")] = 3,
    out: Annotated[Path | None, option("FILE", "Write a PNG; needs the extra plot.")] = None,
    overwrite: Overwrite = False,
    roles: Roles = False,
    cases: CasesFile = None,
    draws: Draws = None,
    seed: Annotated[int, option("S", "Of the draws.")] = 0,
    beside_untrained: Untrained = True,
    as_json: Json = False,
) -> None:
    """Show what attention heads look at along a text, or which of them look for a role.

    Heads may be those of signal/noise attention or of any Hugging Face decoder.
    """
    if (text is None) != roles:
        raise InputError(
            f"expected either a text or --roles, got {'both' if roles else 'neither'}: prismlm "
            'inspect attention MODEL "text", or prismlm inspect attention MODEL --roles.'
        )
    if roles and out is not None:
        raise InputError("--out is a picture of one text: give a text in place of --roles.")
    if not roles and (cases is not None or draws is not None):
        raise InputError("--cases and --draws are for --roles: add it, in place of a text.")
    check_ending(out, ".png")
    check_outputs(out, inputs=(model, cases), overwrite=overwrite)
    if out is not None:
        # Said before the model is read, not after.
        import prismlm.pages.attention_plots  # noqa: F401
    from prismlm.explain.attention_maps import heads_of, read_maps
    from prismlm.models.checkpoint import read_checkpoint

    opened, tokenizer = read_checkpoint(model)
    heads = heads_of(opened, layer=layer, head=head, group=group)
    if text is None:
        value = _roles(opened, tokenizer, heads, cases, draws, seed, beside_untrained, as_json)
    else:
        maps = read_maps(opened, tokenizer, text, heads)
        value = {"text": text, "maps": [_map(one, top) for one in maps]}
        if out is not None:
            from prismlm.pages.attention_plots import save_maps

            save_maps(maps, out)
            typer.echo(f"wrote {out}", err=True)
        if not as_json:
            print_maps(maps, top)
    if as_json:
        print_json({"model": str(model), **value})


def _map(one: AttentionMap, top: int) -> dict[str, Any]:
    strongest = [link._asdict() for link in one.strongest(top)]
    return one.to_dict() | {"on_itself": one.on_itself(), "strongest": strongest}


def _roles(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    heads: tuple[Head, ...],
    path: Path | None,
    draws: int | None,
    seed: int,
    beside_untrained: bool,
    as_json: bool,
) -> dict[str, Any]:
    from prismlm.cli.printing.tables import show
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.instruments.heads.roles import (
        best_of_roles,
        load_role_cases,
        search_roles,
        untrained,
    )

    cases = load_role_cases(path)
    options: dict[str, Any] = {"draws": draws, "seed": seed, "progress": ConsoleReporter()}
    found = search_roles(model, tokenizer, cases, heads, **options)
    other = None
    if beside_untrained:
        other = search_roles(untrained(model, seed), tokenizer, cases, heads, **options)
    if not as_json:
        shown = best_of_roles(found)
        if other is not None:
            shown.facts["with_random_weights"] = other["roles"]
        show(console_for_reading(), shown)
    source = None if path is None else str(path)
    return {"cases": source, **found.to_dict(), "untrained": other and other["roles"]}


def print_maps(maps: Sequence[AttentionMap], top: int) -> None:
    """Print the strongest weights of each head on other tokens, and the mean weight on itself."""
    from prismlm.corpus.words import DITTO

    console = console_for_reading()
    tokens = maps[0].tokens
    text = "".join(plain(token) for token in tokens if token != DITTO)
    console.print(text, soft_wrap=True)
    console.print()
    table = table_of("head", "*itself")
    table.add_column("strongest on others: from → to")
    for one in maps:
        links = Text("   ").join(_link(link, one.tokens) for link in one.strongest(top))
        table.add_row(one.head.title, f"{one.on_itself():.2f}", links)
    console.print(table)


def _link(link: Link, tokens: Sequence[str]) -> Text:
    from prismlm.pages.trace_data import visible

    source, target = (
        fit(plain(visible(tokens[place])).strip("·") or "·", TOKEN_WIDTH)
        for place in (link.source, link.target)
    )
    return Text(f"{source} → {target} ").append(f"{link.weight:.2f}", "bold")
