"""prismlm inspect prototypes: a list to search, and the card of one."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.text import Text

from prismlm.cli.options import Json, Lens, Model, choice, flag, load_with_lens, number, option
from prismlm.cli.output import console_for_reading, plain, print_json, table_of
from prismlm.errors import InputError, suggest

SORTS = ("text", "usage", "score", "name", "id")
CONTEXTS, BEFORE, AFTER = 5, 100, 50

BY = "text (positions that it is the nearest to), usage, score (of the name), name or id."


def prototypes(
    model: Model,
    prototype: Annotated[
        int | None, typer.Argument(metavar="ID", help="Show all of this one.")
    ] = None,
    search: Annotated[str, option("WORDS", "In names, tokens and contexts.", "--search")] = "",
    category: Annotated[str | None, option("NAME", "Only those of a category.")] = None,
    sort: Annotated[str, choice("BY", BY, SORTS)] = "text",
    limit: Annotated[int, number("N", "Prototypes listed.", 1)] = 20,
    everything: Annotated[
        bool, flag("--all", "Also those that are nearest at fewer than ten positions.")
    ] = False,
    lens: Lens = None,
    as_json: Json = False,
) -> None:
    """List the prototypes of a lens, or show all of one: name, tokens, where it fires."""
    from prismlm.labels.catalogue import Catalogue, Sort

    _, opened = load_with_lens(model, lens)
    catalogue = Catalogue(opened)
    if prototype is not None:
        card = catalogue.card(prototype)
        print_json(card) if as_json else _print_card(console_for_reading(), card)
        return
    if category is not None and category not in opened.categories:
        known = sorted({one for one in opened.categories if one is not None})
        raise InputError(
            f"no prototype of {opened.path} has the category {category!r}: expected "
            f"{', '.join(known) or 'none, since `prismlm label` has not named them'}."
            f"{suggest(category, known)}"
        )
    matching = catalogue.search(search, cast("Sort", sort), everything=True)
    whole = catalogue.of_category(matching, category or "")
    found = whole if everything else whole[opened.listed[whole]]
    rows = [catalogue.row(one) for one in found[:limit].tolist()]
    if as_json:
        print_json({"total": len(found), "items": rows})
    else:
        _print_list(console_for_reading(), rows, len(found), len(whole) - len(found))


def _print_list(console: Console, rows: list[dict[str, Any]], total: int, few: int) -> None:
    table = table_of("*prototype", "name", "category", "*nearest at", "*used at", "*name tells")
    for column in table.columns[1:3]:
        column.no_wrap = False
    for row in rows:
        score = row["score"]
        table.add_row(
            str(row["id"]),
            Text(plain(row["name"])),
            Text(plain(row["category"] or "")),
            "" if row["positions"] is None else f"{row['positions']:,}",
            f"{row['usage']:.2%}",
            "" if score is None else f"{score:.0%}",
        )
    console.print(table)
    if total > len(rows):
        console.print(f"… {total - len(rows):,} more: --limit N", style="dim")
    if few:
        from prismlm.index.lens import MIN_PLACES

        console.print(
            f"{few:,} with fewer than {MIN_PLACES} places are not listed: --all", style="dim"
        )


def _print_card(console: Console, card: dict[str, Any]) -> None:
    console.print(plain(f"#{card['id']} {card['name']}"), style="bold")
    facts = [card["category"], card["role"], *card["tags"]]
    console.print(plain(" · ".join(filter(None, facts))), style="dim")
    if card["description"]:
        console.print(plain(card["description"]))
    figures = [f"used at {card['usage']:.2%} of positions"]
    if card["positions"] is not None:
        figures.insert(0, f"nearest of all at {card['positions']:,} positions")
    if card["score"] is not None:
        figures.append(f"name tells its passages from others: {card['score']:.0%}")
    if card["nearest_cosine"] is not None:
        figures.append(f"nearest training text at cosine {card['nearest_cosine']:.2f}")
    console.print(" · ".join(figures), style="dim")
    raised = "  ".join(f"{plain(token)!s} {value:+.2f}" for token, value in card["tokens"])
    console.print(
        "\nRaises more than others do, the most distinctive first; in logits", style="bold"
    )
    console.print(f"  {raised}")
    console.print("\nWhere it fires", style="bold")
    for place in card["contexts"][:CONTEXTS]:
        flat = ((place[name] or "").replace("\n", "↵ ") for name in ("before", "token", "after"))
        before, token, after = map(plain, flat)
        text = Text(f"  …{before[-BEFORE:]}{' ' if token[:1] == ' ' else ''}")
        text.append(f"[{token.strip()}]", style="bold").append(f"{after[:AFTER]}…")
        console.print(text)
        origin = " · ".join(filter(None, (place["doc_id"], place["source"], place["license"])))
        console.print(f"    {plain(origin)}", style="dim")
