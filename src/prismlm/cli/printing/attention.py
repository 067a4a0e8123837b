"""Attention maps and heads that look for a role, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from prismlm.cli.output import console_for_reading, fit, plain, table_of
from prismlm.corpus.words import DITTO
from prismlm.explain.attention_maps import AttentionMap, Link
from prismlm.instruments.heads.roles import RoleFinding, RoleSearch
from prismlm.pages.trace_data import visible

TOKEN_WIDTH = 12
ROLE_WORDS = {
    "subject": "whom the sentence is about",
    "object": "the thing that the last word needs, from the token that predicts that word",
    "structure": "determiners: a, an, the",
    "action": "verbs",
}


def print_maps(maps: Sequence[AttentionMap], top: int) -> None:
    """Print the strongest weights of each head on other tokens, and the mean weight on itself."""
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


def print_roles(found: RoleSearch, untrained: RoleSearch | None = None) -> None:
    """Print the heads that look for each role more than for random words, or none.

    Args:
        found: in the model.
        untrained: the same search with random weights, of which only the number is shown.
    """
    console = console_for_reading()
    others = {} if untrained is None else untrained.counts()
    for finding in found.findings:
        console.print(
            Text(finding.role, style="bold").append(f"  {ROLE_WORDS[finding.role]}", "dim")
        )
        _print_finding(console, finding)
        if finding.role in others:
            console.print(f"with random weights: {others[finding.role] or 'none'}")
        console.print()
    console.print(
        f"{found.heads} heads, {found.draws:,} draws; lift: weight on the role's words over "
        "that of uniform attention; excess: beyond the head's habit at those distances; q: p "
        f"corrected over all heads and roles, found at {found.level:g} or less.",
        style="dim",
    )


def _print_finding(console: Console, finding: RoleFinding) -> None:
    if not finding.scores:
        console.print("no sentence has it")
        return
    if not finding.beating_controls:
        best = finding.scores[0]
        console.print(
            f"none of {len(finding.scores)} heads, in {finding.sentences} sentences, is clear of "
            f"its controls; nearest {best.head.title}: lift {best.lift:.2f}, controls "
            f"{best.control:.2f}, q {best.q:.2g}"
        )
        return
    table = table_of("head", "*lift", "*controls", "*excess", "*rank", "*p", "*q")
    for score in finding.beating_controls:
        table.add_row(
            score.head.title,
            *(f"{figure:.2f}" for figure in (score.lift, score.control, score.excess)),
            f"{score.rank:,}",
            f"{score.p:.1g}",
            f"{score.q:.2g}",
        )
    console.print(table)


def _link(link: Link, tokens: Sequence[str]) -> Text:
    source, target = (
        fit(plain(visible(tokens[place])).strip("·") or "·", TOKEN_WIDTH)
        for place in (link.source, link.target)
    )
    return Text(f"{source} → {target} ").append(f"{link.weight:.2f}", "bold")
