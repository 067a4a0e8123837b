"""A steering on a terminal: the text, a table of its tokens or of effects, and the cost."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from prismlm.cli.format import count, points
from prismlm.cli.output import console_for_reading, fit, fit_name, plain, table_of
from prismlm.edits.steering import Leading, SteeredToken, Steering
from prismlm.edits.steering_effects import Cost, SteeringEffects
from prismlm.pages.trace_data import visible

TOKEN_WIDTH, NAME_WIDTH = 16, 24
MEASURED = {
    "signature": "signature's top tokens, Δ log p",
    "text": "text's own next token, Δ log p",
    "divergence": "KL (before ‖ after)",
}


def print_steering(
    edit: dict[str, Any] | None,
    only: str | None,
    result: Steering | SteeringEffects,
    cost: Cost | None,
    note: str,
) -> None:
    """Print what an edit did; a pipe gets the same text without colour, 100 columns wide."""
    console = console_for_reading()
    console.print(_described(edit, only), style="bold")
    console.print()
    if isinstance(result, Steering):
        _print_text(console, result)
    else:
        _print_effects(console, result)
    console.print()
    _print_cost(console, cost, note)


def _described(edit: dict[str, Any] | None, only: str | None) -> str:
    words = [] if only is None else [f"{only} only"]
    if edit is not None:
        values = (f"{name} {value}" for name, value in edit.items() if name != "kind")
        words.insert(0, " ".join([edit["kind"], *values]))
    return ", ".join(words)


def _print_text(console: Console, steering: Steering) -> None:
    console.print(Text("with     ", style="dim").append(plain(steering.text), "default"))
    if steering.unedited != steering.text:
        console.print(Text("without  ", style="dim").append(plain(steering.unedited), "default"))
    console.print()
    table = table_of("token", "*before", "*after", "*control")
    table.add_column("leads before → after")
    for token in steering.tokens:
        table.add_row(
            Text(fit(visible(plain(token.token)), TOKEN_WIDTH), style="bold"),
            f"{token.before:.1%}",
            _after(token),
            "–" if token.control is None else f"{token.control:.1%}",
            _leads(token),
        )
    console.print(table)
    if not steering.tokens:
        console.print("The document ends here: nothing was written.", style="dim")
    if steering.change is not None:
        control = steering.control_change
        beside = "" if control is None else f", of the control {control:+.3f}"
        console.print(f"mean change of log p: {steering.change:+.3f}{beside}")
    if steering.draws:
        console.print(
            f"control: the same change of activation on random prototypes of equal "
            f"activation, mean of {steering.draws} draws",
            style="dim",
        )
    left = sum(token.left for token in steering.tokens)
    if left:
        console.print(
            f"The clamp is undefined at {left} of {len(steering.tokens)} tokens (marked ·) "
            "and left out there: the prototype's signature is not positive.",
            style="yellow",
        )


def _after(token: SteeredToken) -> Text:
    change = token.after - token.before
    style = "green" if change > 0.005 else "red" if change < -0.005 else "default"
    mark = " ·" if token.left else ""
    return Text(f"{token.after:.1%} ({points(change)}){mark}", style)


def _leads(token: SteeredToken) -> Text:
    before, after = _leader(token.leading_before), _leader(token.leading_after)
    return Text(before) if before == after else Text(f"{before} → ", "dim").append(after, "default")


def _leader(leading: Leading | None) -> str:
    if leading is None:
        return "–"
    if leading.category is not None:
        return plain(leading.category)
    return f"{fit_name(plain(leading.name or 'prototype'), NAME_WIDTH)} #{leading.prototype}"


def _print_effects(console: Console, effects: SteeringEffects) -> None:
    headings = ("prompts", "edit (95 %)", "control", "difference (95 %)", "d")
    table = table_of("nats per prediction", *(f"*{heading}" for heading in headings))
    table.columns[0].no_wrap = False
    for name, effect in effects.measures.items():
        table.add_row(
            MEASURED[name],
            str(effect.prompts),
            _with_interval(effect.edit, effect.edit_interval),
            "–" if effect.control is None else f"{effect.control:+.3f}",
            _with_interval(effect.difference, effect.difference_interval),
            "–" if effect.d is None else f"{effect.d:+.2f}",
        )
    console.print(table)
    if effects.signature_tokens:
        tokens = " ".join(visible(plain(token)) for token in effects.signature_tokens)
        console.print(f"signature's top tokens: {tokens}", style="dim")
    control = f"control: mean of {effects.draws} draws" if effects.draws else "without a control"
    console.print(
        f"{effects.changed:.0%} of {count(effects.predictions)} predictions changed, "
        f"{effects.left:.0%} left because the clamp is undefined there, {effects.capped:.0%} "
        f"held at the cap; {control}",
        style="dim",
    )


def _with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None:
        return "–"
    return f"{value:+.3f}" + (f" ({interval[0]:+.3f} to {interval[1]:+.3f})" if interval else "")


def _print_cost(console: Console, cost: Cost | None, note: str) -> None:
    if cost is None:
        console.print(f"cost on held-out text: {note}", style="dim")
        return
    control = "" if cost.control is None else f", control {cost.control:.2f}"
    left = f", the clamp undefined at {cost.left:.0%}" if cost.left else ""
    console.print(
        f"perplexity on held-out text: {cost.perplexity:.2f} → {cost.edited:.2f}{control} "
        f"({count(cost.tokens)} tokens of {plain(cost.corpus)}, {cost.changed:.0%} changed{left})"
    )
