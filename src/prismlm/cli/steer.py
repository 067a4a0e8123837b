"""prismlm steer: write under an edit of the prototypes, and say what it did and what it costs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.text import Text

from prismlm.cli.format import count, points
from prismlm.cli.options import (
    Chat,
    Json,
    Lens,
    Model,
    System,
    Temperature,
    choice,
    number,
    option,
    put,
)
from prismlm.cli.output import console_for_reading, fit, fit_name, plain, print_json, table_of
from prismlm.errors import FormatError, InputError
from prismlm.files import read_text

if TYPE_CHECKING:
    from prismlm.edits.steering import Leading, SteeredToken, Steering
    from prismlm.edits.steering_effects import Cost, SteeringEffects
    from prismlm.edits.values import Edit, Only
    from prismlm.explain.language_model import PrismLM

ONE_OF = "one of --prototype, --category and --document"
KINDS = ["clamp", "scale", "ablate"]
PARTS = ["prototypes", "residual"]
TOKEN_WIDTH, NAME_WIDTH, LEADING_SHOWN = 16, 24, 8
MEASURED = {
    "signature": "signature's top tokens, Δ log p",
    "text": "text's own next token, Δ log p",
    "divergence": "KL (before ‖ after)",
}

Category = Annotated[
    str | None, option("NAME", "Edit the prototypes that `prismlm label` gave this category.")
]
DocumentId = Annotated[str | None, option("ID", "Edit those with contexts in this document.")]
Strength = Annotated[
    float | None,
    number(
        "S",
        "Clamp: fraction of the top logit, up to 1. Scale: factor. Groups: -1 to 1. (Default of a "
        "clamp or group: the largest at which the text does not begin to repeat.)",
        None,
    ),
]
OnlyPart = Annotated[
    str | None,
    choice("PART", "Predict from the prototypes or the residual alone.", PARTS),
]
Prompts = Annotated[
    Path | None, option("FILE", "File with one prompt per line; report effect sizes over them.")
]
HeldOutCorpus = Annotated[
    Path | None,
    option("DIR", "Held-out corpus for the perplexity cost (default: the lens's corpus)."),
]


def steer(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to write on from, or use --file.")
    ] = None,
    chat: Chat = False,
    system: System = None,
    prototype: Annotated[int | None, option("ID", "Edit this prototype.")] = None,
    category: Category = None,
    document: DocumentId = None,
    strength: Strength = None,
    edit: Annotated[
        str, choice("KIND", "Of a prototype: clamp, scale or ablate.", KINDS)
    ] = "clamp",
    only: OnlyPart = None,
    generate: Annotated[int, number("N", "Tokens to write; 0 reads the prompt's own.")] = 20,
    temperature: Temperature = 0.0,
    seed: Annotated[int, option("S", "Of sampling and control.")] = 0,
    draws: Annotated[int, number("N", "Random prototypes that the control is the mean of.")] = 8,
    file: Prompts = None,
    lens: Lens = None,
    corpus: HeldOutCorpus = None,
    heldout: Annotated[int, number("N", "Held-out tokens for the cost; 0 for none.")] = 10_000,
    as_json: Json = False,
) -> None:
    """Write under an edit of one prototype or a group; show its effect, a control and its cost."""
    if (prompt is None) == (file is None):
        had = "neither" if prompt is None else "both"
        raise InputError(f"expected a prompt or --file with prompts, got {had}.")
    named = {"prototype": prototype, "category": category, "document": document}
    edits = _edits(named, only, edit, strength)
    prompts = [put(one, chat, system) for one in (_prompts(file) if file else [prompt or ""])]
    from prismlm.edits.values import Clamp, Group
    from prismlm.explain.language_model import load

    if strength is None and file is not None and edits and isinstance(edits[0], (Clamp, Group)):
        raise InputError("give --strength S: over many prompts there is no one to find it for.")
    lm = load(model, lens=lens)
    how: dict[str, Any] = {"only": cast("Only | None", only), "seed": seed}
    drawn = {"generate": generate, "temperature": temperature}
    if file is None:
        from prismlm.edits.steering import steer as write
        from prismlm.edits.strength import strongest

        if strength is None and edits and isinstance(edits[0], (Clamp, Group)):
            edits[0] = strongest(lm, prompts[0], edits[0], **drawn, seed=seed)
        result = write(lm, prompts[0], edits, **how, **drawn, draws=draws)
    else:
        from prismlm.cli.progress import ConsoleReporter
        from prismlm.edits.steering_effects import measure_effects

        result = measure_effects(lm, prompts, edits, **how, draws=draws, progress=ConsoleReporter())
    cost, note = _cost(lm, corpus, edits, heldout, how)
    if as_json:
        head = {"model": str(model), "lens": None if lm.lens is None else lm.lens.name}
        asked = {"edit": _describe(edits), "only": only}
        spent = {"cost": None if cost is None else asdict(cost), "cost_note": note}
        print_json(head | asked | result.to_dict() | spent)
    else:
        print_steering(_describe(edits), only, result, cost, note)


def _edits(
    named: dict[str, Any], only: str | None, kind: str, strength: float | None
) -> list[Edit]:
    """Return the edit that the options ask for; none where a part alone is all that is asked.

    Args:
        named: prototype, category and document, one of which is to be edited.
        only: the part that is asked for.
        kind: of the edit of a prototype.
        strength: of an edit; None where it is still to be found.
    """
    from prismlm.edits.values import Ablate, Clamp, Group, Scale

    given = [f"--{name}" for name, value in named.items() if value is not None]
    if only is not None and not given:
        if strength is not None:
            raise InputError(f"--strength belongs to an edit: name {ONE_OF}, or leave it out.")
        return []
    if len(given) != 1:
        raise InputError(f"expected {ONE_OF}, got {' and '.join(given) or 'none'}.")
    prototype = named.pop("prototype")
    if kind == "ablate" and prototype is not None:
        if strength is not None:
            raise InputError("--edit ablate removes the prototype whole: leave out --strength.")
        return [Ablate(prototype)]
    if strength is None:
        if kind == "scale":
            raise InputError("give --strength S: the factor of --edit scale.")
        strength = 1.0
    if prototype is None:
        if kind != KINDS[0]:
            raise InputError(f"--edit {kind} is for --prototype: a group has a strength alone.")
        return [Group(strength, **named)]
    return [(Scale if kind == "scale" else Clamp)(prototype, strength)]


def _describe(edits: list[Edit]) -> dict[str, Any] | None:
    if not edits:
        return None
    edit = edits[0]
    fields = {k: v for k, v in vars(edit).items() if v is not None}
    return {"kind": type(edit).__name__.lower()} | fields


def _prompts(path: Path) -> list[str]:
    lines = read_text(path).splitlines()
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{path} holds no prompts: expected one a line.")
    return prompts


def _cost(
    lm: PrismLM, corpus: Path | None, edits: list[Edit], tokens: int, how: dict[str, Any]
) -> tuple[Cost | None, str]:
    if tokens == 0:
        return None, "not asked for."
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.edits.steering_effects import corpus_of, perplexity_cost

    try:
        found, note = corpus_of(lm, corpus)
        if found is None:
            return None, note
        reporter = ConsoleReporter()
        cost = perplexity_cost(lm, found, edits, tokens=tokens, **how, progress=reporter)
    except (InputError, FormatError) as error:
        # A corpus that was asked for must serve; one that the lens remembers may have changed.
        if corpus is not None:
            raise
        return None, str(error)
    return cost, ""


def print_steering(
    edit: dict[str, Any] | None,
    only: str | None,
    result: Steering | SteeringEffects,
    cost: Cost | None,
    note: str,
) -> None:
    """Print what an edit did; a pipe gets the same text without colour, 100 columns wide."""
    from prismlm.edits.steering import Steering

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
    from prismlm.edits.steering import cautions
    from prismlm.pages.trace_data import visible

    console.print(Text("with     ", style="dim").append(plain(steering.text), "default"))
    if steering.unedited != steering.text:
        console.print(Text("without  ", style="dim").append(plain(steering.unedited), "default"))
    for line in cautions(steering):
        console.print(line, style="yellow")
    console.print()
    if steering.tokens and not any(token.changed for token in steering.tokens):
        leading = [one.leading_before for one in steering.tokens if one.leading_before]
        named = (_leader(replace(one, category=None)) for one in leading)
        active = ", ".join(list(dict.fromkeys(named))[:LEADING_SHOWN])
        console.print(
            f"Nothing changed: what is edited is not active at any of the {len(steering.tokens)} "
            f"tokens. The strongest there: {active}."
        )
        return
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


def _after(token: SteeredToken) -> Text:
    change = token.after - token.before
    style = "green" if change > 0.005 else "red" if change < -0.005 else "default"
    return Text(f"{token.after:.1%} ({points(change)})", style)


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
    from prismlm.pages.trace_data import visible

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
        f"{effects.changed:.0%} of {count(effects.predictions)} predictions changed; {control}",
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
    console.print(
        f"perplexity on held-out text: {cost.perplexity:.2f} → {cost.edited:.2f}{control} "
        f"({count(cost.tokens)} tokens of {plain(cost.corpus)}, {cost.changed:.0%} changed)"
    )
