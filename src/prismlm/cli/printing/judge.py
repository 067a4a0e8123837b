"""What a judge is worth, ratings, BLEU and each model's best continuation, as tables."""

from __future__ import annotations

from math import isnan
from typing import Any

from rich.console import Console
from rich.text import Text

from prismlm.cli.output import console_for_reading, plain, table_of

NOT_TO_BE_READ = "Not to be read, since the judge is unusable:"


def print_judging(result: dict[str, Any]) -> None:
    """Print what a study found; the judge's own examination first."""
    console = console_for_reading()
    if result["judge"] is not None:
        _print_judge(console, result["judge"])
    if result["ratings"] is not None:
        _print_ratings(console, result["ratings"])
    if result["bleu"] is not None:
        _print_bleu(console, result["bleu"])
    models = len(result["models"])
    console.print(Text(f"\n{result['prompts']:,} prompts, {models} models", style="dim"))


def _print_judge(console: Console, judge: dict[str, Any]) -> None:
    name, order = plain(judge["source"]), judge["order"]
    if judge["usable"]:
        console.print(Text(f"The judge {name} is usable.", style="bold"))
    else:
        reasons = "; ".join(judge["reasons"])
        console.print(Text(f"The judge {name} is unusable: {reasons}.", style="bold red"))
    rows = (
        ("prefers real text to its words shuffled", judge["preferred"]["shuffled"]),
        ("prefers real text to that of another prompt", judge["preferred"]["elsewhere"]),
        ("changes its mind with the order", order["changed"]),
        ("prefers the same place in both orders", order["by_position"]),
        ("says A, of A and B", order["first"]),
    )
    table = table_of("", "*share", "*95 % interval")
    for label, found in rows:
        table.add_row(label, _share(found["value"]), _interval(found, ".0%"))
    console.print(table)
    failed = f"; {order['failed']:,} without an answer" if order["failed"] else ""
    note = f"{order['pairs']:,} pairs, each in both orders{failed}; no look at the texts: 50 %"
    console.print(Text(note, style="dim"))


def _print_ratings(console: Console, ratings: dict[str, Any]) -> None:
    console.print()
    if not ratings["readable"]:
        console.print(Text(NOT_TO_BE_READ, style="bold red"))
    table = table_of("model", "*Elo", "*95 % interval", "*Bradley-Terry", "*95 % interval")
    for one in sorted(ratings["models"], key=lambda one: -one["bradley_terry"]["value"]):
        elo, fitted = one["elo"], one["bradley_terry"]
        figures = f"{elo['value']:.0f}", _interval(elo, ".0f"), f"{fitted['value']:.0f}"
        table.add_row(Text(plain(one["model"])), *figures, _interval(fitted, ".0f"))
    console.print(table)
    order = ratings["order"]
    note = (
        f"{order['pairs']:,} pairs; {_share(order['changed']['value'])} change with the order, "
        f"{_share(order['ties'])} of the verdicts are ties, {order['failed']:,} failed"
    )
    console.print(Text(note, style="dim"))


def _print_bleu(console: Console, bleu: dict[str, Any]) -> None:
    console.print()
    table = table_of("model", "*BLEU", "*95 % interval", "*of another prompt", "*difference")
    for name, one in bleu["models"].items():
        mean, other, gap = (one[key] for key in ("mean", "other_prompt", "difference"))
        difference = f"{gap['value']:+.2f} ({gap['low']:+.2f} to {gap['high']:+.2f})"
        figures = f"{mean['value']:.2f}", _interval(mean, ".2f"), f"{other['value']:.2f}"
        table.add_row(Text(plain(name)), *figures, difference)
    console.print(table)
    for sample in bleu["samples"]:
        console.print(Text(f"\nBest of {plain(sample['best'])}", style="bold"))
        for label, text in (("prompt", sample["text"]), ("reference", sample["reference"])):
            console.print(Text(f"{label}: {_line(text)}", style="dim"))
        for one in sample["texts"]:
            console.print(Text(f"{plain(one['model'])} ({one['bleu']:.1f}): {_line(one['text'])}"))


def _line(text: str) -> str:
    return plain(" ".join(text.split()))


def _share(value: float) -> str:
    return "–" if isnan(value) else f"{value:.0%}"


def _interval(found: dict[str, Any], form: str) -> str:
    return "–" if isnan(found["low"]) else f"{found['low']:{form}} to {found['high']:{form}}"
