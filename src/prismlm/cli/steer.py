"""prismlm generate and steer: write text, also under an edit of the prototypes."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.explain import read_texts
from prismlm.cli.options import argument, option
from prismlm.cli.progress import ConsoleReporter, spinner
from prismlm.errors import FormatError, InputError

TARGETS = "one of --prototype, --category and --controller"
MAX_LEADING = 8
MEASURES = {
    "signature": "signature's top tokens, Δ log p",
    "text": "text's own next token, Δ log p",
    "divergence": "KL (before ‖ after)",
}
STRENGTH_HELP = (
    "Clamp: fraction of the top logit, up to 1. Scale: factor. Groups: -1 to 1. (Default: the "
    "largest without repetition.)"
)
GENERATE_HELP = "Tokens to write; 0 scores the prompt (default: 20)."
Generate = Annotated[int | None, option("N", GENERATE_HELP, min=0)]
TEMPERATURE_HELP = "0 takes the top token (default: 0)."
Kind = Annotated[Literal["clamp", "scale", "ablate"], option(None, "Edit of the prototype.")]
Only = Annotated[Literal["prototypes", "residual"] | None, option(None, "Only this part of z.")]
HeldOut = Annotated[Path | None, option("DIR", "Held-out text for the cost (default: the lens's).")]


def generate(
    model: opt.Model,
    prompt: Annotated[str, argument("PROMPT", "Text to continue; with --chat, to answer.")],
    chat: opt.Chat = False,
    system: opt.System = None,
    tokens: Annotated[int, option("N", "Maximum number of tokens.", min=0)] = 50,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    controller: opt.Controller = None,
    as_json: opt.Json = False,
) -> None:
    """Continue a prompt, and print both.

    The model stops at the end of a document. With --chat, only its answer is printed. On
    a terminal, words appear as they are written.
    """
    model_input = opt.build_prompt(prompt, chat, system)
    from prismlm.hub import model_directory
    from prismlm.interventions.plan import install, plan_for
    from prismlm.lens.opened_model import OpenedModel, settings_not_applied
    from prismlm.models.checkpoint import load_checkpoint

    with spinner("Opening the model"):
        directory = model_directory(model)
        loaded, tokenizer, sidecar = load_checkpoint(directory)
    # prismlm.load would refuse a stale lens, or several; no lens is needed here.
    lm = OpenedModel(directory, loaded, tokenizer, sidecar.head, sidecar.logit_map, lens=None)
    if edits := opt.load_controller(controller):
        install(plan_for(lm, edits))
    write = partial(lm.generate, model_input, tokens=tokens, temperature=temperature, seed=seed)
    note = settings_not_applied(loaded, temperature)
    if as_json:
        notes = {"notes": [note]} if note else {}
        output.print_json({"model": str(model), "prompt": prompt, "text": write(), **notes})
        return
    if note:
        typer.echo(note, err=True)
    console = output.stdout_console()
    if not console.is_terminal:
        typer.echo(write())
        return
    writer = output.Writer(console)
    writer.write(prompt if isinstance(model_input, str) else "")
    try:
        write(on_text=writer.write)
    finally:
        # An error message starts on a new line.
        writer.write("", end=True)


def steer(
    model: opt.Model,
    prompt: Annotated[str | None, argument("PROMPT", "Text to continue, or use --file.")] = None,
    chat: opt.Chat = False,
    system: opt.System = None,
    prototype: Annotated[int | None, option("ID", "Edit this prototype.")] = None,
    category: Annotated[str | None, option("NAME", "Edit the prototypes of this category.")] = None,
    controller: opt.Controller = None,
    strength: Annotated[float | None, option("S", STRENGTH_HELP)] = None,
    edit: Kind = "clamp",
    only: Only = None,
    generate: Generate = None,
    temperature: Annotated[float | None, option("T", TEMPERATURE_HELP, min=0)] = None,
    seed: opt.Seed = 0,
    draws: Annotated[int, option("N", "Random prototypes of the control.", min=0)] = 8,
    file: Annotated[str | None, option("FILE", "Measure effects over its lines.")] = None,
    lens: opt.Lens = None,
    device: opt.Device = "cpu",
    corpus: HeldOut = None,
    heldout: Annotated[int, option("N", "Held-out tokens for the cost.", min=0)] = 10_000,
    as_json: opt.Json = False,
) -> None:
    """Generate text under an edit of prototypes; show its effect, a control and its cost."""
    if file is not None and (generate is not None or temperature is not None):
        raise InputError("--file writes no text: leave out --generate and --temperature.")
    target = (controller, prototype, category)
    edits = _edits(*target, edit, strength, optional=only is not None)
    texts = read_texts(model, prompt, file, lines=file is not None)
    prompts = [opt.build_prompt(str(text), chat, system) for text in texts]
    import prismlm
    from prismlm.interventions import steering
    from prismlm.interventions.steering_effects import measure_effects

    searchable = (prismlm.Clamp, prismlm.Group)
    search = strength is None and bool(edits) and isinstance(edits[0], searchable)
    if search and file is not None:
        raise InputError("give --strength S: it is searched for one prompt only, not for a file.")
    lm = prismlm.load(model, lens=lens, device=device)
    scope: dict[str, Any] = {"only": only, "seed": seed}
    sampling = {"generate": 20 if generate is None else generate, "temperature": temperature or 0.0}
    if file is not None:
        progress = ConsoleReporter()
        result: Any = measure_effects(lm, prompts, edits, **scope, draws=draws, progress=progress)
    else:
        if search:
            edits = [steering.strongest(lm, prompts[0], edits[0], **sampling, seed=seed)]
        result = steering.steer(lm, prompts[0], edits, **scope, **sampling, draws=draws)
    cost, note = _measure_cost(lm, corpus, edits, heldout, scope)
    description = _describe(edits[0]) if edits else None
    if as_json:
        head = {"model": str(model), "lens": lm.lens and lm.lens.name, "edit": description}
        costs = {"cost": cost and asdict(cost), "cost_note": note}
        figures = result if file is not None else asdict(result)
        output.print_json(head | {"only": only} | figures | costs)
        return
    words = " ".join(f"{name} {value}" for name, value in (description or {}).items())
    title = filter(None, (words.removeprefix("kind "), only and f"{only} only"))
    output.say(", ".join(title) + "\n", style="bold")
    _print_effects(result) if file is not None else _print_text(result, edited=bool(edits))
    _print_cost(cost, note)


def _edits(
    controller: Path | None,
    prototype: int | None,
    category: str | None,
    kind: str,
    strength: float | None,
    *,
    optional: bool,
) -> list[Any]:
    """Return the edit that the options describe, in a list; with --only there may be none."""
    from prismlm import Ablate, Clamp, Group, Scale

    if controller is not None and not (strength is prototype is category is None):
        raise InputError(f"--controller has its own strengths: expected {TARGETS}, alone.")
    if controller is not None:
        return opt.load_controller(controller)
    if optional and prototype is category is None:
        if strength is not None:
            raise InputError(f"--strength belongs to an edit: name {TARGETS}, or leave it out.")
        return []
    if (prototype is None) == (category is None):
        got = "none" if prototype is None else "--prototype and --category"
        raise InputError(f"expected {TARGETS}, got {got}.")
    if category is not None and kind != "clamp":
        raise InputError(f"--edit {kind} is for --prototype: a group only has a strength.")
    if kind == "ablate" and strength is not None:
        raise InputError("--edit ablate removes the prototype completely: leave out --strength.")
    if kind == "scale" and strength is None:
        raise InputError("give --strength S: the factor of --edit scale.")
    amount = 1.0 if strength is None else strength
    if category is not None:
        return [Group(amount, category=category)]
    assert prototype is not None
    if kind == "ablate":
        return [Ablate(prototype)]
    return [(Scale if kind == "scale" else Clamp)(prototype, amount)]


def _describe(edit: Any) -> dict[str, Any]:
    fields = {name: value for name, value in vars(edit).items() if value is not None}
    if "scales" in fields:
        return {"kind": "controller", "prototypes": len(edit.scales), "of": edit.description}
    return {"kind": type(edit).__name__.lower()} | fields


def _measure_cost(
    lm: Any, corpus: Path | None, edits: list[Any], tokens: int, scope: dict[str, Any]
) -> tuple[Any, str]:
    """Return the cost on held-out text, or None and the reason."""
    if tokens == 0:
        return None, "not measured."
    from prismlm.interventions.steering_effects import corpus_of, perplexity_cost

    try:
        text, note = corpus_of(lm, corpus)
        if text is None:
            return None, note
        reporter = ConsoleReporter()
        return perplexity_cost(lm, text, edits, tokens=tokens, **scope, progress=reporter), ""
    except (InputError, FormatError) as error:
        # Only a corpus on the command line must be usable; that of the lens may have changed.
        if corpus is not None:
            raise
        return None, str(error)


def _print_text(steering: Any, *, edited: bool) -> None:
    from prismlm.interventions.steering import cautions

    tokens = steering.tokens
    output.say(f"with     {steering.text}")
    if steering.unedited != steering.text:
        output.say(f"without  {steering.unedited}", style="dim")
    output.say(*cautions(steering), style="yellow")
    output.say("")
    if edited and tokens and not any(token.changed for token in tokens):
        leading = list(dict.fromkeys(_leading_name(token.leading_before) for token in tokens))
        output.say(
            f"Nothing changed: the edited prototypes are not active at any of the {len(tokens)} "
            f"tokens. The strongest there: {', '.join(leading[:MAX_LEADING])}.\n"
        )
        return
    rows = [
        vars(token)
        | {
            "token": output.token_text(token.token),
            "points": 100 * (token.after - token.before),
            "leads_before": _leading_name(token.leading_before),
            "leads_after": _leading_name(token.leading_after),
        }
        for token in tokens
    ]
    columns = "token before:.1% after:.1% points:+.1f control:.1% leads_before leads_after"
    facts = {"mean change of log p": steering.change, "of the control": steering.control_change}
    facts |= {"draws of the control": steering.draws}
    title = "" if rows else "The document ends here: nothing was written."
    output.print_rows(title, columns, rows, **facts)


def _leading_name(leading: Any) -> str:
    if leading is None:
        return "–"
    name = leading.category or output.shorten(leading.name or "prototype", 24)
    return f"{output.sanitize(name)} #{leading.prototype}"


def _print_effects(effects: dict[str, Any]) -> None:
    from prismlm.statistics import Interval

    rows: list[dict[str, Any]] = []
    for name, effect in effects["measures"].items():
        row = {"nats_per_prediction": MEASURES[name]} | effect
        if effect["difference_interval"] is not None:
            row["difference"] = Interval(effect["difference"], *effect["difference_interval"])
        rows.append(row)
    columns = "nats_per_prediction prompts edit:+.3f control:+.3f difference:+.3f"
    facts = {
        "predictions": effects["predictions"],
        "changed": f"{effects['changed']:.0%}",
        "draws of the control": effects["draws"],
        "signature's top tokens": " ".join(map(output.token_text, effects["signature_tokens"])),
    }
    output.print_rows("Effects, with 95 % intervals over prompts", columns, rows, **facts)


def _print_cost(cost: Any, note: str) -> None:
    if cost is None:
        output.say(f"cost on held-out text: {note}", style="dim")
        return
    control = "" if cost.control is None else f", control {cost.control:.2f}"
    output.say(
        f"perplexity on held-out text: {cost.perplexity:.2f} → {cost.edited:.2f}{control} "
        f"({output.format_count(cost.tokens)} tokens of {cost.corpus}, {cost.changed:.0%} changed)"
    )
