"""prismlm inspect attention: what heads look at along a text, and which look for a role."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli.options import flag, option
from prismlm.cli.output import print_json, say, show, show_rows, token_text, wrote
from prismlm.errors import InputError
from prismlm.outputs import check_ending, check_outputs

if TYPE_CHECKING:
    from prismlm.explain.attention_maps import AttentionMap

Roles = Annotated[bool, flag("--roles", "Which heads look for subjects, objects, verbs.")]
CasesFile = Annotated[Path | None, option("FILE", "Sentences for --roles, as JSON lines.")]
Draws = Annotated[int | None, option("N", "Of random words, for --roles.", least=1)]
Untrained = Annotated[bool, flag("--untrained/--no-untrained", "Of --roles: random weights too.")]


def attention(
    model: opt.Model,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Of at least two tokens.")
    ] = None,
    layer: opt.Layer = None,
    head: Annotated[int | None, option("H", "Only this head of a layer, or of --group.")] = None,
    group: Annotated[str | None, option("GROUP", "Only signal or only noise heads.")] = None,
    top: Annotated[int, option("K", "Strongest weights shown of a head.", least=0)] = 3,
    out: Annotated[Path | None, option("FILE", "Write a PNG; needs the extra plot.")] = None,
    overwrite: opt.Overwrite = False,
    roles: Roles = False,
    cases: CasesFile = None,
    draws: Draws = None,
    seed: opt.Seed = 0,
    untrained: Untrained = True,
    as_json: opt.Json = False,
) -> None:
    """Show what attention heads look at along a text, or which of them look for a role.

    Heads may be those of signal/noise attention or of any Hugging Face decoder.
    """
    if (text is None) != roles:
        raise InputError(
            f"expected either a text or --roles, got {'both' if roles else 'neither'}."
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
        read = (opened, tokenizer, heads, cases)
        value = _roles(*read, draws=draws, seed=seed, untrained=untrained, as_json=as_json)
    else:
        maps = read_maps(opened, tokenizer, text, heads)
        value = {"text": text, "maps": [_map(one, top) for one in maps]}
        if out is not None:
            from prismlm.pages.attention_plots import save_maps

            save_maps(maps, out)
            wrote(out)
        if not as_json:
            say(text + "\n")
            columns = {"head": "", "itself": ".2f", "strongest on others: from → to": ""}
            show_rows("", columns, [_row(one, top) for one in maps])
    if as_json:
        print_json({"model": str(model), **value})


def _map(one: AttentionMap, top: int) -> dict[str, Any]:
    strongest = [link._asdict() for link in one.strongest(top)]
    return one.to_dict() | {"on_itself": one.on_itself(), "strongest": strongest}


def _row(one: AttentionMap, top: int) -> dict[str, Any]:
    """Return the strongest weights of a head on other tokens, and the mean weight on itself."""
    links = [
        f"{token_text(one.tokens[link.source])} → {token_text(one.tokens[link.target])} "
        f"{link.weight:.2f}"
        for link in one.strongest(top)
    ]
    return {
        "head": one.head.title,
        "itself": one.on_itself(),
        "strongest on others: from → to": "   ".join(links),
    }


def _roles(
    model: Any,
    tokenizer: Any,
    heads: Any,
    path: Path | None,
    *,
    untrained: bool,
    as_json: bool,
    **options: Any,
) -> dict[str, Any]:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.probes.heads import roles

    cases = roles.load_role_cases(path)
    options["progress"] = ConsoleReporter()
    found = roles.search_roles(model, tokenizer, cases, heads, **options)
    other = None
    if untrained:
        random = roles.untrained(model, options["seed"])
        other = roles.search_roles(random, tokenizer, cases, heads, **options)["roles"]
    if not as_json:
        table = roles.best_of_roles(found)
        if other is not None:
            table.facts["with_random_weights"] = other
        show(table)
    source = None if path is None else str(path)
    return {"cases": source, **found.to_dict(), "untrained": other}
