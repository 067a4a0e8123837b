"""Two models side by side, on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from prismlm.cli.format import points
from prismlm.cli.output import console_for_reading, fit_ends, plain, table_of
from prismlm.explain.support import levels_in_words

NAMES_WIDTH = 40


def print_comparison(value: dict[str, Any], by: str, top: int) -> None:
    """Print what ``prismlm compare --json`` holds; ``top`` of the shares."""
    console = console_for_reading()
    for side in ("a", "b"):
        console.print(Text(f"{side.upper()}  {plain(value[side]['model'])}", style="bold"))
    console.print()
    if value["texts"] is not None:
        _print_texts(console, value["texts"], by, top)
    _print_prototypes(console, value["prototypes"])


def _print_texts(console: Console, texts: dict[str, Any], by: str, top: int) -> None:
    ce = texts["ce"]
    console.print(f"{texts['texts']:,} texts, {texts['predictions']:,} predictions")
    console.print(
        f"cross-entropy  A {ce['a']:.4f}  B {ce['b']:.4f}  B − A {ce['difference']:+.4f} nats"
    )
    console.print()
    for side, support in (texts["support"] or {}).items():
        words = levels_in_words(support["levels"])
        console.print(f"support  {side.upper()}  {words}; mean score {support['score']:.2f}")
    if texts["shares"] is not None:
        shares = texts["shares"][by]
        rest = shares["unattributed"]
        rest = {"key": "unattributed", **rest, "difference": rest["b"] - rest["a"]}
        table = table_of(f"by {by}", "*A", "*B", "*B − A")
        for item in (*shares["items"][:top], rest):
            key = Text(fit_ends(plain(item["key"]), max(12, console.width - 40)))
            shown = f"{item['a']:.1%}", f"{item['b']:.1%}", points(item["difference"])
            table.add_row(key, *shown)
        console.print(table)
    console.print()


def _print_prototypes(console: Console, value: dict[str, Any]) -> None:
    signature, contexts = value["by_signature"], value["by_contexts"]
    chance = signature["chance"]
    console.print(f"prototypes  A {value['prototypes']['a']:,}  B {value['prototypes']['b']:,}")
    console.print(
        f"by the tokens they raise: cosine to the most similar {signature['median']:.3f} at the "
        f"median (chance {chance['median']:.3f}); {signature['mutual']:.1%} choose each other "
        f"(chance {chance['mutual']:.1%})"
    )
    if contexts is not None:
        console.print(
            f"by their nearest documents: {contexts['median']:.1%} in common at the median; "
            f"{contexts['mutual']:.1%} choose each other, {contexts['same_as_by_signature']:.1%} "
            "the same one as by tokens"
        )
    console.print()
    table = table_of("*A", "*B", "*cosine", "*in common", "names")
    for pair in value["pairs"]:
        common = pair["jaccard"] if pair["b_by_contexts"] == pair["b"] else None
        names = " = ".join(plain(pair[key] or "–") for key in ("a_name", "b_name"))
        table.add_row(
            str(pair["a"]),
            str(pair["b"]) + ("" if pair["mutual"] else "*"),
            f"{pair['cosine']:.3f}",
            "–" if common is None else f"{common:.0%}",
            Text(fit_ends(names, NAMES_WIDTH)),
        )
    console.print(table)
    if not all(pair["mutual"] for pair in value["pairs"]):
        console.print(Text("* is more similar to another prototype of A", style="dim"))
