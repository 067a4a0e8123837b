"""prismlm inspect attention: what heads look at along a text, and which look for a role."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.options import Json, Model, Overwrite, flag, number, option
from prismlm.cli.output import print_json
from prismlm.errors import InputError
from prismlm.outputs import check_ending, check_outputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.explain.attention_maps import Head

Roles = Annotated[
    bool,
    flag(
        "--roles", "In place of a text: which heads look for subject, object, determiners or verbs."
    ),
]
CasesFile = Annotated[
    Path | None,
    option("FILE", "Sentences for --roles, JSON lines with marked words; else bundled."),
]
Draws = Annotated[
    int | None,
    number("N", "Of random words, for --roles; else as many as p needs.", 1),
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
    from prismlm.explain.attention_maps import heads_of
    from prismlm.models.checkpoint import read_checkpoint

    opened, tokenizer = read_checkpoint(model)
    heads = heads_of(opened, layer=layer, head=head, group=group)
    if text is None:
        value = _roles(opened, tokenizer, heads, cases, draws, seed, beside_untrained, as_json)
    else:
        value = _maps(opened, tokenizer, text, heads, top, out, as_json=as_json)
    if as_json:
        print_json({"model": str(model), **value})


def _maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    heads: tuple[Head, ...],
    top: int,
    out: Path | None,
    *,
    as_json: bool,
) -> dict[str, Any]:
    from prismlm.explain.attention_maps import read_maps

    maps = read_maps(model, tokenizer, text, heads)
    if out is not None:
        from prismlm.pages.attention_plots import save_maps

        save_maps(maps, out)
        typer.echo(f"wrote {out}", err=True)
    if not as_json:
        from prismlm.cli.printing.attention import print_maps

        print_maps(maps, top)
    return {
        "text": text,
        "maps": [
            one.to_dict()
            | {
                "on_itself": one.on_itself(),
                "strongest": [link._asdict() for link in one.strongest(top)],
            }
            for one in maps
        ],
    }


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
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.instruments.heads.role_cases import load_role_cases
    from prismlm.instruments.heads.roles import search_roles, untrained

    cases = load_role_cases(path)
    options: dict[str, Any] = {"draws": draws, "seed": seed, "progress": ConsoleReporter()}
    found = search_roles(model, tokenizer, cases, heads, **options)
    other = None
    if beside_untrained:
        other = search_roles(untrained(model, seed), tokenizer, cases, heads, **options)
    if not as_json:
        from prismlm.cli.printing.attention import print_roles

        print_roles(found, other)
    source = None if path is None else str(path)
    counts = None if other is None else other.counts()
    return {"cases": source, **found.to_dict(), "untrained": counts}
