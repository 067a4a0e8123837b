"""prismlm inspect prototypes: a list to search, and the card of one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli.options import flag, load_with_lens, option
from prismlm.cli.output import console_for_reading, print_facts, print_json, say, show_rows
from prismlm.errors import InputError, suggest

CONTEXTS_SHOWN = 5
CARD = (
    *("category", "role", "tags", "description", "usage", "positions", "score", "nearest_cosine"),
)
SORT_HELP = "text: positions that it is the nearest to; score: of the name."
SortBy = Annotated[Literal["text", "usage", "score", "name", "id"], option(None, SORT_HELP)]


def prototypes(
    model: opt.Model,
    prototype: Annotated[
        int | None, typer.Argument(metavar="ID", help="Show all of this one.")
    ] = None,
    search: Annotated[str, option("WORDS", "In names, tokens and contexts.", "--search")] = "",
    category: Annotated[str | None, option("NAME", "Only those of a category.")] = None,
    sort: SortBy = "text",
    limit: Annotated[int, option("N", "Prototypes listed.", least=1)] = 20,
    everything: Annotated[bool, flag("--all", "Also those nearest at few positions.")] = False,
    lens: opt.Lens = None,
    as_json: opt.Json = False,
) -> None:
    """List the prototypes of a lens, or show all of one: name, tokens, where it fires."""
    from prismlm.lens.labels.catalogue import Catalogue

    _, opened = load_with_lens(model, lens)
    catalogue = Catalogue(opened)
    if prototype is not None:
        card = catalogue.card(prototype)
        print_json(card) if as_json else _print_card(card)
        return
    if category is not None and category not in opened.categories:
        known = sorted({one for one in opened.categories if one is not None})
        raise InputError(
            f"no prototype of {opened.path} has the category {category!r}: expected "
            f"{', '.join(known) or 'none, since `prismlm label` has not named them'}."
            f"{suggest(category, known)}"
        )
    matching = catalogue.search(search, sort, everything=True)
    whole = catalogue.of_category(matching, category or "")
    found = whole if everything else whole[opened.listed[whole]]
    rows = [catalogue.row(one) for one in found[:limit].tolist()]
    if as_json:
        print_json({"total": len(found), "items": rows})
        return
    columns = {"id": "", "name": "", "category": "", "positions": ",", "usage": ".2%"}
    show_rows("", columns | {"score": ".0%"}, rows)
    if len(found) > len(rows):
        say(f"… {len(found) - len(rows):,} more: --limit N", style="dim")
    if few := len(whole) - len(found):
        from prismlm.lens.lens import MIN_PLACES

        say(f"{few:,} with fewer than {MIN_PLACES} places are not listed: --all", style="dim")


def _print_card(card: dict[str, Any]) -> None:
    from prismlm.cli.trace import print_place
    from prismlm.lens.around import Around

    say(f"#{card['id']} {card['name']}", style="bold")
    print_facts({name: card[name] for name in CARD if card[name]})
    raised = "  ".join(f"{token!s} {value:+.2f}" for token, value in card["tokens"])
    say("\nRaises more than others do, the most distinctive first; in logits", style="bold")
    say(f"  {raised}")
    say("\nWhere it fires", style="bold")
    console = console_for_reading()
    for place in card["contexts"][:CONTEXTS_SHOWN]:
        around = Around(*(place[name] or "" for name in ("before", "token", "after")))
        print_place(console, around)
        origin = (place["doc_id"], place["source"], place["license"])
        say("         " + " · ".join(filter(None, origin)), style="dim")
