"""prismlm steer: write under an edit of the prototypes, and say what it did and what it costs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli.options import option, prompt_of
from prismlm.cli.output import count, fit_ends, plain, print_json, say, show_rows, token_text
from prismlm.errors import FormatError, InputError
from prismlm.files import read_text

if TYPE_CHECKING:
    from prismlm.explain.language_model import PrismLM
    from prismlm.interventions.steering import Leading, Steering
    from prismlm.interventions.steering_effects import Cost, SteeringEffects
    from prismlm.interventions.values import Edit

ONE_OF = "one of --prototype, --category and --document"
LEADING_SHOWN = 8
MEASURED = {
    "signature": "signature's top tokens, Δ log p",
    "text": "text's own next token, Δ log p",
    "divergence": "KL (before ‖ after)",
}
Category = Annotated[str | None, option("NAME", "Edit the prototypes of this category.")]
DocumentId = Annotated[str | None, option("ID", "Edit those with contexts in this document.")]
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
Prompts = Annotated[Path | None, option("FILE", "Effect sizes over a prompt a line.")]
HeldOutCorpus = Annotated[Path | None, option("DIR", "For the cost (default: the lens's).")]


def steer(
    model: opt.Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to write on from, or use --file.")
    ] = None,
    chat: opt.Chat = False,
    system: opt.System = None,
    prototype: Annotated[int | None, option("ID", "Edit this prototype.")] = None,
    category: Category = None,
    document: DocumentId = None,
    strength: Strength = None,
    edit: Kind = "clamp",
    only: Only = None,
    generate: Annotated[int, option("N", "Tokens to write; 0: read the prompt's.", least=0)] = 20,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    draws: Annotated[int, option("N", "Random prototypes of the control.", least=0)] = 8,
    file: Prompts = None,
    lens: opt.Lens = None,
    corpus: HeldOutCorpus = None,
    heldout: Annotated[int, option("N", "Held-out tokens for the cost.", least=0)] = 10_000,
    as_json: opt.Json = False,
) -> None:
    """Write under an edit of one prototype or a group; show its effect, a control and its cost."""
    if (prompt is None) == (file is None):
        had = "neither" if prompt is None else "both"
        raise InputError(f"expected a prompt or --file with prompts, got {had}.")
    edits = _edits(prototype, category, document, edit, strength, alone=only is not None)
    prompts = [prompt_of(one, chat, system) for one in (_prompts(file) if file else [prompt or ""])]
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.explain.language_model import load
    from prismlm.interventions.steering import steer as write
    from prismlm.interventions.steering_effects import measure_effects
    from prismlm.interventions.strength import strongest
    from prismlm.interventions.values import Clamp, Group

    if strength is None and file and edits and isinstance(edits[0], (Clamp, Group)):
        raise InputError("give --strength S: over many prompts there is no one to find it for.")
    lm = load(model, lens=lens)
    how: dict[str, Any] = {"only": only, "seed": seed}
    drawn = {"generate": generate, "temperature": temperature}
    if file is None:
        if strength is None and edits and isinstance(edits[0], (Clamp, Group)):
            edits[0] = strongest(lm, prompts[0], edits[0], **drawn, seed=seed)
        result = write(lm, prompts[0], edits, **how, **drawn, draws=draws)
    else:
        result = measure_effects(lm, prompts, edits, **how, draws=draws, progress=ConsoleReporter())
    cost, note = _cost(lm, corpus, edits, heldout, how)
    described = _describe(edits)
    if as_json:
        head = {"model": str(model), "lens": None if lm.lens is None else lm.lens.name}
        spent = {"cost": None if cost is None else asdict(cost), "cost_note": note}
        print_json(head | {"edit": described, "only": only} | result.to_dict() | spent)
        return
    words = [" ".join(f"{name} {value}" for name, value in described.items())] if described else []
    words += [f"{only} only"] if only else []
    say(", ".join(words).removeprefix("kind ") + "\n", style="bold")
    if file is None:
        _print_text(result, edited=bool(edits))  # pyright: ignore[reportArgumentType]
    else:
        _print_effects(result)  # pyright: ignore[reportArgumentType]
    _print_cost(cost, note)


def _edits(
    prototype: int | None,
    category: str | None,
    document: str | None,
    kind: str,
    strength: float | None,
    *,
    alone: bool,
) -> list[Edit]:
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
    amount = 1.0 if strength is None else strength
    if prototype is None:
        if kind != "clamp":
            raise InputError(f"--edit {kind} is for --prototype: a group has a strength alone.")
        return [Group(amount, category=category, document=document)]
    if kind == "ablate":
        return [Ablate(prototype)]
    return [(Scale if kind == "scale" else Clamp)(prototype, amount)]


def _describe(edits: list[Edit]) -> dict[str, Any] | None:
    if not edits:
        return None
    fields = {name: value for name, value in vars(edits[0]).items() if value is not None}
    return {"kind": type(edits[0]).__name__.lower()} | fields


def _prompts(path: Path) -> list[str]:
    prompts = [line for line in read_text(path).splitlines() if line.strip()]
    if not prompts:
        raise InputError(f"{path} holds no prompts: expected one a line.")
    return prompts


def _cost(
    lm: PrismLM, corpus: Path | None, edits: list[Edit], tokens: int, how: dict[str, Any]
) -> tuple[Cost | None, str]:
    if tokens == 0:
        return None, "not asked for."
    from prismlm.cli.progress import ConsoleReporter
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


def _print_text(steering: Steering, *, edited: bool) -> None:
    from prismlm.interventions.steering import cautions

    say(f"with     {steering.text}")
    if steering.unedited != steering.text:
        say(f"without  {steering.unedited}", style="dim")
    say(*cautions(steering), style="yellow")
    say("")
    if edited and steering.tokens and not any(token.changed for token in steering.tokens):
        leading = dict.fromkeys(_leader(one.leading_before) for one in steering.tokens)
        say(
            "Nothing changed: what is edited is not active at any of the "
            f"{len(steering.tokens)} tokens. The strongest there: "
            f"{', '.join(list(leading)[:LEADING_SHOWN])}.\n"
        )
        return
    rows = [
        {
            "token": token_text(token.token),
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
    show_rows(
        "" if rows else "The document ends here: nothing was written.", columns, rows, **facts
    )


def _leader(leading: Leading | None) -> str:
    """Return the name and number of the leading prototype, below its category if it has one."""
    if leading is None:
        return "–"
    if leading.category is not None:
        return f"{plain(leading.category)} #{leading.prototype}"
    return f"{fit_ends(leading.name or 'prototype', 24)} #{leading.prototype}"


def _print_effects(effects: SteeringEffects) -> None:
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
        "signature's top tokens": " ".join(map(token_text, effects.signature_tokens)),
    }
    show_rows("Effects, with 95 % intervals over prompts", columns, rows, **facts)


def _print_cost(cost: Cost | None, note: str) -> None:
    if cost is None:
        say(f"cost on held-out text: {note}", style="dim")
        return
    control = "" if cost.control is None else f", control {cost.control:.2f}"
    say(
        f"perplexity on held-out text: {cost.perplexity:.2f} → {cost.edited:.2f}{control} "
        f"({count(cost.tokens)} tokens of {cost.corpus}, {cost.changed:.0%} changed)"
    )
