"""Token → channel → prototype on a terminal, one line for each prediction."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from prismlm.cli.output import (
    NARROW_TOKEN_WIDTH,
    TOKEN_WIDTH,
    WIDTH_WHERE_PIPED,
    fit,
    plain,
    table_of,
)
from prismlm.explain.chain import ChannelUse, PrototypeChain
from prismlm.explain.steps import Step
from prismlm.pages.trace_data import visible

ROOM_FOR_HALF_LIFE = 60


def print_chains(console: Console, steps: Sequence[Step]) -> None:
    """Print what each prediction's leading prototype had directly through channels."""
    longest = TOKEN_WIDTH if console.width >= WIDTH_WHERE_PIPED else NARROW_TOKEN_WIDTH
    targets = [fit(visible(plain(step.pieces[1].label)), longest) for step in steps]
    widths = [max(6, *map(cell_len, targets)), 9, 8]
    room = max(20, console.width - sum(widths) - 2 * len(widths) - 1)
    console.print(
        Text("Through channels", style="bold").append(
            "  share of the leading prototype's activation, direct path only", "dim"
        )
    )
    headings = ("target", "*prototype", "*channels", "the largest ← tokens")
    table = table_of(*headings, widths=(*widths, room))
    for step, target in zip(steps, targets, strict=True):
        for chain in (step.chains or ())[:1]:
            through = sum(chain.mixers) / chain.activation
            table.add_row(
                Text(target, style="bold"),
                Text(f"#{chain.prototype}"),
                f"{through:+.1%}",
                _leading(chain, room),
            )
    console.print(table)
    console.print()


def _leading(chain: PrototypeChain, room: int) -> Text:
    """Return the channel with the largest part, and as many of its tokens as fit."""
    if not chain.channels:
        return Text("nothing was written before", style="dim")
    use = chain.channels[0]
    line = Text(f"L{use.layer} channel {use.channel}")
    if room >= ROOM_FOR_HALF_LIFE:
        line.append(f" (half-life {use.half_life:.1f})", "dim")
    line.append(f" {use.share:+.1%}")
    for number, item in enumerate(_tokens(chain, use)):
        more = number + 1 < len(use.tokens)
        item = Text(", " if number else " ← ").append_text(item)
        if line.cell_len + item.cell_len + (2 if more else 0) > room:
            return line.append(" …", "dim")
        line.append_text(item)
    return line


def _tokens(chain: PrototypeChain, use: ChannelUse) -> list[Text]:
    return [
        Text(f'"{fit(visible(plain(source.token)))}"')
        .append(f" {source.part / chain.activation:+.1%}")
        .append(f" at {source.position}", "dim")
        for source in use.tokens
    ]
