"""prismlm generate, steer, calibrate, suppress and what-if: text written under other conditions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.explain import read_texts
from prismlm.cli.options import argument, flag, option
from prismlm.errors import FormatError, InputError
from prismlm.probes.results import Table, text_of
from prismlm.probes.results import as_json as json_values

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
Generate = Annotated[int, option("N", "Tokens to write; 0 scores the prompt.", min=0)]
Kind = Annotated[Literal["clamp", "scale", "ablate"], option(None, "Edit of the prototype.")]
Only = Annotated[Literal["prototypes", "residual"] | None, option(None, "Only this part of z.")]
HeldOut = Annotated[Path | None, option("DIR", "Held-out text for the cost (default: the lens's).")]
TASK_HELP = "Rows of context, choices and label, or prompt, chosen and rejected."
Out = Annotated[Path, option("FILE", "The controller to write, .safetensors.", "--out")]
SHOWN = 12
EXAMPLES_HELP = "Texts or chats with the behaviour; lines, json, jsonl, csv, parquet."
KEEP_HELP = "Text to leave as it is (default: the lens's held-out text)."
PHRASE_HELP = "Writing this is the behaviour; repeatable (default: the examples' topic)."
WITHIN_HELP = "If the target is out of reach, take the strongest within --max-cost."
QUESTIONS_HELP = "Questions of each of PRISM's eight tasks to ask before and after."
WITHOUT_HELP = "Leave out a document, or source=, domain=, license=VALUE; repeatable."
RETRAIN_HELP = "Also train again without them; this can take long."
NO_SCALES = (
    "No scale of a prototype lowers the loss on held-out examples, so the controller changes "
    "nothing: give more examples, or take it that prototypes do not tell here."
)
CALIBRATED = (
    "The intervals are calibrated on SmolLM2-135M, fine-tuned with LoRA, on answers of {} "
    "nats a token, without up to {:.0%} of the text."
)
OTHERWISE = (
    " This model, answer or removal is not like that, and they may not hold: an answer that is "
    "known by heart may lose much more."
)


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
    from prismlm.interventions.plan import Controller, install
    from prismlm.lens.opened_model import OpenedModel, settings_not_applied
    from prismlm.models.checkpoint import load_checkpoint

    directory = model_directory(model)
    with output.spinner("Opening the model"):
        loaded, tokenizer, sidecar = load_checkpoint(directory)
    # prismlm.load would refuse a stale lens, or several; no lens is needed here.
    lm = OpenedModel(directory, loaded, tokenizer, sidecar.head, sidecar.logit_map, lens=None)
    install(lm, [Controller.load(controller)] if controller else [])
    write = partial(lm.generate, model_input, tokens=tokens, temperature=temperature, seed=seed)
    note = settings_not_applied(loaded, temperature)
    if as_json:
        notes = {"notes": [note]} if note else {}
        return output.show({"model": str(model), "prompt": prompt, "text": write(), **notes}, True)
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
    generate: Generate = 20,
    temperature: opt.Temperature = 0.0,
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
    if file is not None:
        written = {"generate": generate != 20, "temperature": temperature != 0}
        opt.check_unused("--file writes no text", **written)
    edits = _edits(controller, prototype, category, edit, strength, optional=only is not None)
    texts = read_texts(model, prompt, file, lines=file is not None)
    prompts = opt.build_prompts(texts, chat, system)
    import prismlm
    from prismlm.interventions import steering
    from prismlm.interventions.steering_effects import measure_effects

    searchable = (prismlm.Clamp, prismlm.Group)
    search = strength is None and bool(edits) and isinstance(edits[0], searchable)
    if search and file is not None:
        raise InputError("give --strength S: it is searched for one prompt only, not for a file.")
    lm = opt.open_model(model, lens, device=device)
    scope: dict[str, Any] = {"only": only, "seed": seed}
    sampling = {"generate": generate, "temperature": temperature}
    if file is not None:
        progress = output.progress()
        result: Any = measure_effects(lm, prompts, edits, **scope, draws=draws, progress=progress)
    else:
        if search:
            edits = [steering.strongest(lm, prompts[0], edits[0], **sampling, seed=seed)]
        result = steering.steer(lm, prompts[0], edits, **scope, **sampling, draws=draws)
    cost, note = _measure_cost(lm, corpus, edits, heldout, scope)
    description = _describe(edits[0]) if edits else None
    figures = result if file is not None else asdict(result)
    value = {"model": str(model), "lens": lm.lens and lm.lens.name, "edit": description}
    value |= {"only": only} | figures | {"cost": cost and asdict(cost), "cost_note": note}
    words = " ".join(f"{name} {value}" for name, value in (description or {}).items())
    title = ", ".join(filter(None, (words.removeprefix("kind "), only and f"{only} only")))
    parts = _text_parts(result, edits, chat and generate != 0) if file is None else _effects(result)
    output.show(value, as_json, output.heading(f"{title}\n"), parts, _cost_line(cost, note))


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
    from prismlm import Ablate, Clamp, Controller, Group, Scale

    targets = {"--prototype": prototype, "--category": category, "--controller": controller}
    given = [name for name, target in targets.items() if target is not None]
    if len(given) > 1 or not (given or optional):
        raise InputError(f"expected {TARGETS}, got {' and '.join(given) or 'none'}.")
    opt.check_unused("--edit is for --prototype", edit=prototype is None and kind != "clamp")
    has_strength = category is not None or (prototype is not None and kind != "ablate")
    if strength is not None and not has_strength:
        raise InputError("--strength is for --category, and --edit clamp or scale: leave it out.")
    if prototype is not None and kind == "scale" and strength is None:
        raise InputError("give --strength S: the factor of --edit scale.")
    amount = 1.0 if strength is None else strength
    if controller is not None:
        return [Controller.load(controller)]
    if category is not None:
        return [Group(amount, category=category)]
    if prototype is None:
        return []
    kinds = {"clamp": Clamp, "scale": Scale}
    return [Ablate(prototype) if kind == "ablate" else kinds[kind](prototype, amount)]


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
        reporter = output.progress()
        return perplexity_cost(lm, text, edits, tokens=tokens, **scope, progress=reporter), ""
    except (InputError, FormatError) as error:
        # Only a corpus on the command line must be usable; that of the lens may have changed.
        if corpus is not None:
            raise
        return None, str(error)


def _text_parts(steering: Any, edited: list[Any], answer: bool) -> Iterator[Any]:
    from prismlm.interventions.steering import cautions

    tokens = steering.tokens
    # Of a chat the answers alone, without the marks of its template.
    prompt = steering.prompt if answer else ""
    yield f"with     {steering.text.removeprefix(prompt)}"
    if steering.unedited != steering.text:
        yield output.dim(f"without  {steering.unedited.removeprefix(prompt)}")
    yield from map(output.warning, cautions(steering))
    yield ""
    if edited and tokens and not any(token.changed for token in tokens):
        leading = list(dict.fromkeys(_leading_name(token.leading_before) for token in tokens))
        yield (
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
    yield output.table(title, columns, rows, **facts)


def _leading_name(leading: Any) -> str:
    if leading is None:
        return "–"
    name = leading.category or output.shorten(leading.name or "prototype", 24)
    return f"{output.sanitize(name)} #{leading.prototype}"


def _effects(effects: dict[str, Any]) -> Table:
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
    return output.table("Effects, with 95 % intervals over prompts", columns, rows, **facts)


def _cost_line(cost: Any, note: str) -> Any:
    if cost is None:
        return output.dim(f"cost on held-out text: {note}")
    control = "" if cost.control is None else f", control {cost.control:.2f}"
    return (
        f"perplexity on held-out text: {cost.perplexity:.2f} → {cost.edited:.2f}{control} "
        f"({output.format_count(cost.tokens)} tokens of {cost.corpus}, {cost.changed:.0%} changed)"
    )


def calibrate(
    model: opt.Model,
    task: Annotated[Path, option("FILE", TASK_HELP, "--task")],
    out: Out,
    test: Annotated[Path | None, option("FILE", "Test on these (default: a fifth of it).")] = None,
    lens: opt.Lens = None,
    device: opt.Device = "cpu",
    seed: opt.Seed = 0,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Fit a controller, scales of a few prototypes, to labelled examples; test it on others."""
    opt.check_output_files(model, task, test, overwrite=overwrite, safetensors=out)
    from prismlm.interventions import calibration

    examples = calibration.read_examples(task)
    tested = None if test is None else calibration.read_examples(test)
    lm = opt.open_model(model, lens, device=device)
    how: dict[str, Any] = {"seed": seed, "description": task.name, "progress": output.progress()}
    controller, report = calibration.calibrate(lm, examples, tested, **how)
    output.write(out, controller.save)
    parts: list[Any] = [_scales(lm, controller, examples_fitted=report["fitted"])]
    if not controller.scales:
        parts.insert(0, NO_SCALES)
    change, *ends = (100 * share for share in vars(report["change"]).values())
    parts.append(
        "right on {tested} other examples: {before:.1%} → {after:.1%}, ".format(**report)
        + f"a change of {text_of(change, '+.1f')} points ({_span(ends, '+.1f')})"
    )
    output.show({"model": str(model), "task": str(task), **report}, as_json, *parts)


def _span(ends: Iterable[float | None], form: str) -> str:
    return " to ".join(text_of(end, form) for end in ends)


def _scales(lm: Any, controller: Any, **facts: Any) -> Table:
    """Return the prototypes that are turned most."""
    rows = [
        {"prototype": i, "scale": s, "name": "" if lm.lens is None else lm.lens.names[i]}
        for i, s in sorted(controller.scales, key=lambda pair: -abs(pair[1] - 1))[:SHOWN]
    ]
    turned = len(controller.scales)
    return output.table("", "prototype scale:.2f name", rows, prototypes_turned=turned, **facts)


def suppress(
    model: opt.Model,
    examples: Annotated[str, option("FILE", EXAMPLES_HELP)],
    out: Out,
    keep: Annotated[str | None, option("FILE", KEEP_HELP)] = None,
    phrases: Annotated[list[str] | None, option("WORDS", PHRASE_HELP, "--phrase")] = None,
    target: Annotated[float, option("SHARE", "Share of the behaviour to remove.")] = 0.9,
    max_cost: Annotated[float, option("SHARE", "Allowed growth of perplexity.", min=0)] = 0.02,
    within_cost: Annotated[bool, flag("--within-cost", WITHIN_HELP)] = False,
    tokens: Annotated[int, option("N", "Tokens of each sampled text.", min=1)] = 40,
    samples: Annotated[int, option("N", "Texts to sample for the report.", min=1)] = 64,
    questions: Annotated[int, option("N", QUESTIONS_HELP, min=0)] = 0,
    tasks: opt.Tasks = None,
    data: opt.Data = None,
    seed: opt.Seed = 0,
    lens: opt.Lens = None,
    device: opt.Device = "cpu",
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Make a behaviour rare by turning down the prototypes behind it.

    Half of the examples find the prototypes, a quarter chooses how far they are turned; the rest is
    for the report, beside random prototypes, a prompt and a bias of logits.
    """
    opt.check_output_files(model, lens, examples, keep, overwrite=overwrite, safetensors=out)
    from prismlm.interventions import suppression
    from prismlm.interventions.steering_effects import corpus_of

    options = opt.fill(suppression.SuppressOptions, locals(), phrases=tuple(phrases or ()))
    split = suppression.split_examples(read_texts(model, None, examples, lines=True), seed)
    ask = _task_asker(questions, opt.split_names(tasks), data, seed)
    lm = opt.open_model(model, lens, device=device)
    if keep is not None:
        texts = read_texts(model, None, keep, lines=True)
        texts = [suppression.encoded(lm, text) for text in texts]
        kept = [text for text in texts if len(text.ids) > text.start]
    else:
        corpus, reason = corpus_of(lm, None)
        if corpus is None:
            raise InputError(f"no text to keep: {reason.replace('--corpus DIR', '--keep FILE')}")
        kept = suppression.held_out(lm, corpus, 2 * options.heldout, seed)
    how: dict[str, Any] = {"within_cost": within_cost, "progress": output.progress()}
    controller, report = suppression.suppress(lm, split, kept, options, **how)
    report["tasks"] = None
    if controller is not None:
        output.write(out, controller.save)
    if ask is not None and controller is not None:
        # Questions have no words before them.
        ways = {n.replace(" ", "_"): way for n, way in report["ways"].items() if not way.words}
        del ways["before"]
        report["tasks"] = ask(lm, ways)
    value = {"model": str(model), "out": str(out), **report}
    output.show(value, as_json, _suppression_parts(lm, controller, report))
    if controller is None:
        raise InputError(
            f"no strength removes {target:.0%} of the behaviour at {max_cost:.1%} of perplexity, "
            "and nothing was written. Lower --target, raise --max-cost, or take the strongest "
            "within it by --within-cost."
        )


def _task_asker(count: int, names: list[str] | None, data: Path | None, seed: int) -> Any:
    """Return what asks ``count`` questions of each task, which are read now; None for 0."""
    if count:
        opt.require_packages("lm_eval")
        from prismlm.eval import suite

        asked = suite.selected_tasks(names, suite.SuiteOptions(data=data, limit=count, seed=seed))
        return partial(suite.ask_ways, selected=asked, progress=output.progress())
    opt.check_unused("these choose the questions of --questions N", tasks=names, data=data)
    return None


def _suppression_parts(lm: Any, controller: Any, report: Any) -> Iterator[Any]:
    yield f"Behaviour: {report['judge']}."
    marked = " ".join(map(output.token_text, report["marked"][:SHOWN]))
    yield output.dim(f"Marked tokens: {marked}. {report['candidates']} prototypes mark them.\n")
    title = "Strengths λ, on texts for choosing (–: all removed)"
    columns, before = "weight turned:.1f behaviour:.1% cost:+.2%", f"{report['before']:.1%}"
    yield output.table(title, columns, report["frontier"], behaviour_before=before)
    if controller is None:
        return
    yield _scales(lm, controller)
    title = "On texts that had no part in choosing, with 95 % intervals"
    yield output.table(title, "name behaviour:.1% perplexity:.2f cost:+.2%", report["outcomes"])
    if tasks := report["tasks"]:
        columns = "task questions:, plain.value:.1% suppressed.value:.1% suppressed.points:+.1f"
        columns += " random_prototypes.value:.1% logit_bias.value:.1%"
        title = "Right answers, and the change in points with 95 % intervals"
        yield output.table(title, columns, tasks)
    if not report["reached"]:
        yield "The target is out of reach: this is the strongest within the cost."


def what_if(
    model: opt.Model,
    prompt: Annotated[str, argument("PROMPT", "Text to continue; with --chat, a question.")],
    without: Annotated[list[str], option("ID|COLUMN=VALUE", WITHOUT_HELP)],
    chat: opt.Chat = False,
    system: opt.System = None,
    generate: Annotated[int, option("N", "The most tokens of the answer.", min=1)] = 50,
    retrain: Annotated[bool, flag("--retrain", RETRAIN_HELP)] = False,
    lens: opt.Lens = None,
    corpus: opt.CorpusLocation = None,
    device: opt.Device = "cpu",
    as_json: opt.Json = False,
) -> None:
    """Estimate an answer without some documents: its log-probability, and where it would change."""
    text = opt.build_prompt(prompt, chat, system)
    from prismlm.explain.what_if import calibration
    from prismlm.explain.what_if import what_if as estimate

    lm = opt.open_model(model, lens, corpus, device)
    how: dict[str, Any] = {"generate": generate}
    if retrain:
        from prismlm.training.tuning import train_without

        how["retrain"] = partial(train_without, lm, progress=output.progress())
    result = estimate(lm, text, without, **how)
    every = [*result.estimates, *filter(None, [result.retrained])]
    rows = [
        {"by": one.method, "logprob": result.log_probability + one.change, "change": one.change}
        | {"interval": "" if one.low is None else _span((one.low, one.high), "+.1f")}
        for one in every
    ]
    documents = f"{result.documents:,} document{'s' * (result.documents != 1)}"
    title = f"Without {documents} ({result.share:.1%} of the text)"
    facts = {"tokens": result.tokens, "logprob now": result.log_probability}
    table = output.table(title, "by logprob:.1f change:+.1f interval", rows, **facts)
    answers = [
        f"By {one.method}: "
        + ("the answer stays the same" if one.text is None else f"“{one.text.strip()}”")
        for one in every
    ]
    known = calibration()
    limits = CALIBRATED.format(_span(known["nats_per_token"], ".1f"), known["largest_share"])
    limits = output.dim(f"\n{limits}{OTHERWISE * (not result.calibrated)}")
    value = {"model": str(model), "lens": lm.lens and lm.lens.name, "prompt": prompt}
    parts = (f"{result.answer.strip()}\n", table, *answers, limits)
    output.show(value | json_values(result), as_json, *parts)
