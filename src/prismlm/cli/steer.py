"""prismlm steer: write under an edit of the prototypes, and say what it did and what it costs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import FormatError, InputError
from prismlm.files import read_text

ONE_OF = "one of --prototype, --category and --document"
LEADING_SHOWN = 8
MEASURED = {
    "signature": "signature's top tokens, Δ log p",
    "text": "text's own next token, Δ log p",
    "divergence": "KL (before ‖ after)",
}
Strength = Annotated[
    float | None,
    option(
        "S",
        "Clamp: fraction of the top logit, up to 1. Scale: factor. Groups: -1 to 1. (Default of a "
        "clamp or group: the largest at which the text does not begin to repeat.)",
    ),
]
Kind = Annotated[Literal["clamp", "scale", "ablate"], option(None, "What is done to a prototype.")]
Only = Annotated[Literal["prototypes", "residual"] | None, option(None, "Of z, this part alone.")]
HeldOut = Annotated[Path | None, option("DIR", "Held-out text for the cost (default: the lens's).")]


def steer(
    model: opt.Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to write on from, or use --file.")
    ] = None,
    chat: opt.Chat = False,
    system: opt.System = None,
    prototype: Annotated[int | None, option("ID", "Edit this prototype.")] = None,
    category: Annotated[str | None, option("NAME", "Edit the prototypes of this category.")] = None,
    document: Annotated[str | None, option("ID", "Edit those with contexts in this text.")] = None,
    strength: Strength = None,
    edit: Kind = "clamp",
    only: Only = None,
    generate: Annotated[int, option("N", "Tokens to write; 0: read the prompt's.", least=0)] = 20,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    draws: Annotated[int, option("N", "Random prototypes of the control.", least=0)] = 8,
    file: Annotated[Path | None, option("FILE", "Effect sizes over a prompt a line.")] = None,
    lens: opt.Lens = None,
    corpus: HeldOut = None,
    heldout: Annotated[int, option("N", "Held-out tokens for the cost.", least=0)] = 10_000,
    as_json: opt.Json = False,
) -> None:
    """Write under an edit of one prototype or a group; show its effect, a control and its cost."""
    if (prompt is None) == (file is None):
        had = "neither" if prompt is None else "both"
        raise InputError(f"expected a prompt or --file with prompts, got {had}.")
    edits = _edits(prototype, category, document, edit, strength, alone=only is not None)
    given = [prompt or ""] if file is None else _prompts(file)
    prompts = [opt.prompt_of(one, chat, system) for one in given]
    from prismlm.explain.language_model import load
    from prismlm.interventions.steering import steer as write
    from prismlm.interventions.steering_effects import measure_effects
    from prismlm.interventions.strength import strongest
    from prismlm.interventions.values import Clamp, Group

    sought = strength is None and bool(edits) and isinstance(edits[0], (Clamp, Group))
    if sought and file is not None:
        raise InputError("give --strength S: over many prompts there is no one to find it for.")
    lm = load(model, lens=lens)
    how: dict[str, Any] = {"only": only, "seed": seed}
    drawn = {"generate": generate, "temperature": temperature}
    if file is not None:
        result = measure_effects(lm, prompts, edits, **how, draws=draws, progress=ConsoleReporter())
    else:
        if sought:
            edits = [strongest(lm, prompts[0], edits[0], **drawn, seed=seed)]
        result = write(lm, prompts[0], edits, **how, **drawn, draws=draws)
    cost, note = _cost(lm, corpus, edits, heldout, how)
    described = _described(edits)
    if as_json:
        head = {"model": str(model), "lens": lm.lens and lm.lens.name, "edit": described}
        spent = {"cost": cost and asdict(cost), "cost_note": note}
        output.print_json(head | {"only": only} | result.to_dict() | spent)
        return
    _print_edit(described, only)
    _print_effects(result) if file is not None else _print_text(result, edited=bool(edits))
    _print_cost(cost, note)


def _edits(
    prototype: int | None,
    category: str | None,
    document: str | None,
    kind: str,
    strength: float | None,
    *,
    alone: bool,
) -> list[Any]:
    """Return the edit that the options ask for; none where a part alone is all that is asked."""
    from prismlm.interventions.values import Ablate, Clamp, Group, Scale

    named = {"--prototype": prototype, "--category": category, "--document": document}
    given = [name for name, value in named.items() if value is not None]
    if alone and not given:
        if strength is not None:
            raise InputError(f"--strength belongs to an edit: name {ONE_OF}, or leave it out.")
        return []
    if len(given) != 1:
        raise InputError(f"expected {ONE_OF}, got {' and '.join(given) or 'none'}.")
    if kind == "ablate" and strength is not None:
        raise InputError("--edit ablate removes the prototype whole: leave out --strength.")
    if kind == "scale" and strength is None:
        raise InputError("give --strength S: the factor of --edit scale.")
    if prototype is None and kind != "clamp":
        raise InputError(f"--edit {kind} is for --prototype: a group has a strength alone.")
    amount = 1.0 if strength is None else strength
    if prototype is None:
        return [Group(amount, category=category, document=document)]
    if kind == "ablate":
        return [Ablate(prototype)]
    return [(Scale if kind == "scale" else Clamp)(prototype, amount)]


def _described(edits: list[Any]) -> dict[str, Any] | None:
    if not edits:
        return None
    fields = {name: value for name, value in vars(edits[0]).items() if value is not None}
    return {"kind": type(edits[0]).__name__.lower()} | fields


def _print_edit(described: dict[str, Any] | None, only: str | None) -> None:
    words = [" ".join(f"{name} {value}" for name, value in described.items())] if described else []
    words += [f"{only} only"] if only else []
    output.say(", ".join(words).removeprefix("kind ") + "\n", style="bold")


def _prompts(path: Path) -> list[str]:
    prompts = [line for line in read_text(path).splitlines() if line.strip()]
    if not prompts:
        raise InputError(f"{path} holds no prompts: expected one a line.")
    return prompts


def _cost(
    lm: Any, corpus: Path | None, edits: list[Any], tokens: int, how: dict[str, Any]
) -> tuple[Any, str]:
    """Return the cost on held-out text, or None and why there is none."""
    if tokens == 0:
        return None, "not asked for."
    from prismlm.interventions.steering_effects import corpus_of, perplexity_cost

    try:
        heldout, note = corpus_of(lm, corpus)
        if heldout is None:
            return None, note
        reporter = ConsoleReporter()
        return perplexity_cost(lm, heldout, edits, tokens=tokens, **how, progress=reporter), ""
    except (InputError, FormatError) as error:
        # A corpus that was asked for must serve; one that the lens remembers may have changed.
        if corpus is not None:
            raise
        return None, str(error)


def _print_text(steering: Any, *, edited: bool) -> None:
    from prismlm.interventions.steering import cautions

    output.say(f"with     {steering.text}")
    if steering.unedited != steering.text:
        output.say(f"without  {steering.unedited}", style="dim")
    output.say(*cautions(steering), style="yellow")
    output.say("")
    if edited and steering.tokens and not any(token.changed for token in steering.tokens):
        leading = dict.fromkeys(_leader(one.leading_before) for one in steering.tokens)
        output.say(
            "Nothing changed: what is edited is not active at any of the "
            f"{len(steering.tokens)} tokens. The strongest there: "
            f"{', '.join(list(leading)[:LEADING_SHOWN])}.\n"
        )
        return
    rows = [
        {
            "token": output.token_text(token.token),
            "before": token.before,
            "after": token.after,
            "points": 100 * (token.after - token.before),
            "control": token.control,
            "leads before": _leader(token.leading_before),
            "leads after": _leader(token.leading_after),
        }
        for token in steering.tokens
    ]
    shares = dict.fromkeys(("before", "after"), ".1%") | {"points": "+.1f", "control": ".1%"}
    facts = {"mean change of log p": steering.change, "of the control": steering.control_change}
    facts |= {"draws of the control": steering.draws}
    columns = {"token": "", **shares, "leads before": "", "leads after": ""}
    output.show_rows(
        "" if rows else "The document ends here: nothing was written.", columns, rows, **facts
    )


def _leader(leading: Any) -> str:
    """Return the name and number of the leading prototype, below its category if it has one."""
    if leading is None:
        return "–"
    if leading.category is not None:
        return f"{output.plain(leading.category)} #{leading.prototype}"
    return f"{output.fit_ends(leading.name or 'prototype', 24)} #{leading.prototype}"


def _print_effects(effects: Any) -> None:
    from prismlm.statistics import Interval

    def figure(value: float | None, interval: tuple[float, float] | None) -> Any:
        return value if value is None or interval is None else Interval(value, *interval)

    rows = [
        {
            "nats per prediction": MEASURED[name],
            "prompts": effect.prompts,
            "edit": figure(effect.edit, effect.edit_interval),
            "control": effect.control,
            "difference": figure(effect.difference, effect.difference_interval),
            "d": effect.d,
        }
        for name, effect in effects.measures.items()
    ]
    columns = {"nats per prediction": "", "prompts": "", "edit": "+.3f", "control": "+.3f"}
    columns |= {"difference": "+.3f", "d": "+.2f"}
    facts = {
        "predictions": effects.predictions,
        "changed": f"{effects.changed:.0%}",
        "draws of the control": effects.draws,
        "signature's top tokens": " ".join(map(output.token_text, effects.signature_tokens)),
    }
    output.show_rows("Effects, with 95 % intervals over prompts", columns, rows, **facts)


def _print_cost(cost: Any, note: str) -> None:
    if cost is None:
        output.say(f"cost on held-out text: {note}", style="dim")
        return
    control = "" if cost.control is None else f", control {cost.control:.2f}"
    output.say(
        f"perplexity on held-out text: {cost.perplexity:.2f} → {cost.edited:.2f}{control} "
        f"({output.count(cost.tokens)} tokens of {cost.corpus}, {cost.changed:.0%} changed)"
    )
