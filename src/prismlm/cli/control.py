"""prismlm calibrate, suppress and what-if: what is written under other scales or other text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.explain import read_texts
from prismlm.cli.options import argument, flag, option
from prismlm.cli.progress import ConsoleReporter, spinner
from prismlm.errors import InputError
from prismlm.probes.results import as_json as json_values
from prismlm.probes.results import text_of

if TYPE_CHECKING:
    from prismlm.explain.what_if import WhatIf
    from prismlm.interventions.controller import Controller
    from prismlm.lens.opened_model import OpenedModel

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
CALIBRATED = (
    "The intervals are calibrated on SmolLM2-135M, fine-tuned with LoRA, on answers of {} "
    "nats a token, without up to {:.0%} of the text."
)
OTHERWISE = (
    " This model, answer or removal is not like that, and they may not hold: an answer that is "
    "known by heart may lose much more."
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
    import prismlm

    with spinner("Opening the model"):
        lm = prismlm.load(model, lens=lens, device=device)
    how: dict[str, Any] = {"seed": seed, "description": task.name, "progress": ConsoleReporter()}
    controller, report = calibration.calibrate(lm, examples, tested, **how)
    output.write(out, controller.save)
    if as_json:
        value = {"model": str(model), "task": str(task), **report}
        return output.print_json(json_values(value))
    if not controller.scales:
        output.say(
            "No scale of a prototype lowers the loss on held-out examples, so the controller "
            "changes nothing: give more examples, or take it that prototypes do not tell here."
        )
    print_scales(lm, controller, examples_fitted=report["fitted"])
    change, *ends = (100 * share for share in vars(report["change"]).values())
    output.say(
        "right on {tested} other examples: {before:.1%} → {after:.1%}, ".format(**report)
        + f"a change of {text_of(change, '+.1f')} points ({_span(ends, '+.1f')})"
    )


def _span(ends: Iterable[float | None], form: str) -> str:
    return " to ".join(text_of(end, form) for end in ends)


def print_scales(lm: OpenedModel, controller: Controller, **facts: Any) -> None:
    """Print the prototypes that are turned most."""
    rows = [
        {"prototype": i, "scale": s, "name": "" if lm.lens is None else lm.lens.names[i]}
        for i, s in sorted(controller.scales, key=lambda pair: -abs(pair[1] - 1))[:SHOWN]
    ]
    turned = len(controller.scales)
    output.print_rows("", "prototype scale:.2f name", rows, prototypes_turned=turned, **facts)


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
    import prismlm
    from prismlm.interventions import suppression
    from prismlm.interventions.steering_effects import corpus_of

    options = opt.fill(suppression.SuppressOptions, locals(), phrases=tuple(phrases or ()))
    split = suppression.split_examples(read_texts(model, None, examples, None), seed)
    ask = _task_asker(questions, opt.split_names(tasks), data, seed)
    lm = prismlm.load(model, lens=lens, device=device)
    if keep is not None:
        texts = [suppression.encoded(lm, text) for text in read_texts(model, None, keep, None)]
        kept = [text for text in texts if len(text.ids) > text.start]
    else:
        corpus, reason = corpus_of(lm, None)
        if corpus is None:
            raise InputError(f"no text to keep: {reason.replace('--corpus DIR', '--keep FILE')}")
        kept = suppression.held_out(lm, corpus, 2 * options.heldout, seed)
    how: dict[str, Any] = {"within_cost": within_cost, "progress": ConsoleReporter()}
    controller, report = suppression.suppress(lm, split, kept, options, **how)
    report["tasks"] = None
    if controller is not None:
        output.write(out, controller.save)
    if ask is not None and controller is not None:
        # Questions have no words before them.
        ways = {n.replace(" ", "_"): way for n, way in report["ways"].items() if not way.words}
        del ways["before"]
        report["tasks"] = ask(lm, ways)
    value = json_values({"model": str(model), "out": str(out), **report})
    output.show(value, as_json, lambda: _print_suppression(lm, controller, report))
    if controller is None:
        raise InputError(
            f"no strength removes {target:.0%} of the behaviour at {max_cost:.1%} of perplexity, "
            "and nothing was written. Lower --target, raise --max-cost, or take the strongest "
            "within it by --within-cost."
        )


def _task_asker(count: int, names: list[str] | None, data: Path | None, seed: int) -> Any:
    """Return what asks ``count`` questions of each task, which are read now; None for 0."""
    if not count:
        if names or data:
            raise InputError(
                "--tasks and --data are for --questions N: give it, or leave them out."
            )
        return None
    opt.require_packages("lm_eval")
    from prismlm.eval import suite

    selected = suite.selected_tasks(names, suite.SuiteOptions(data=data, limit=count, seed=seed))
    return partial(suite.ask_ways, selected=selected, progress=ConsoleReporter())


def _print_suppression(lm: OpenedModel, controller: Controller | None, report: Any) -> None:
    output.say(f"Behaviour: {report['judge']}.")
    marked = " ".join(map(output.token_text, report["marked"][:SHOWN]))
    output.say(
        f"Marked tokens: {marked}. {report['candidates']} prototypes mark them.\n", style="dim"
    )
    title = "Strengths λ, on texts for choosing (–: all removed)"
    columns, before = "weight turned:.1f behaviour:.1% cost:+.2%", f"{report['before']:.1%}"
    output.print_rows(title, columns, report["frontier"], behaviour_before=before)
    if controller is None:
        return
    print_scales(lm, controller)
    title = "On texts that had no part in choosing, with 95 % intervals"
    output.print_rows(title, "name behaviour:.1% perplexity:.2f cost:+.2%", report["outcomes"])
    if tasks := report["tasks"]:
        columns = "task questions:, plain.value:.1% suppressed.value:.1% suppressed.points:+.1f"
        columns += " random_prototypes.value:.1% logit_bias.value:.1%"
        output.print_rows(
            "Right answers, and the change in points with 95 % intervals", columns, tasks
        )
    if not report["reached"]:
        output.say("The target is out of reach: this is the strongest within the cost.")


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
    import prismlm
    from prismlm.explain.what_if import what_if as estimate

    with spinner("Opening the model"):
        lm = prismlm.load(model, lens=lens, corpus=corpus, device=device)
    how: dict[str, Any] = {"generate": generate}
    if retrain:
        from prismlm.training.without import train_without

        how["retrain"] = partial(train_without, lm, progress=ConsoleReporter())
    result = estimate(lm, text, without, **how)
    value = {"model": str(model), "lens": lm.lens and lm.lens.name, "prompt": prompt}
    output.show(value | json_values(result), as_json, lambda: _print_what_if(result))


def _print_what_if(result: WhatIf) -> None:
    """Print the answer, and a row for each estimate and for training again."""
    from prismlm.explain.what_if import calibration

    output.say(result.answer.strip() + "\n")
    documents = f"{result.documents:,} document{'s' * (result.documents != 1)}"
    every = [*result.estimates, *filter(None, [result.retrained])]
    rows = [
        {"by": one.method, "logprob": result.log_probability + one.change, "change": one.change}
        | {"interval": "" if one.low is None else _span((one.low, one.high), "+.1f")}
        for one in every
    ]
    title = f"Without {documents} ({result.share:.1%} of the text)"
    facts = {"tokens": result.tokens, "logprob now": result.log_probability}
    output.print_rows(title, "by logprob:.1f change:+.1f interval", rows, **facts)
    for one in every:
        words = "the answer stays the same" if one.text is None else f"“{one.text.strip()}”"
        output.say(f"By {one.method}: {words}")
    likely = _span(calibration()["nats_per_token"], ".1f")
    words = CALIBRATED.format(likely, calibration()["largest_share"])
    output.say(f"\n{words}{OTHERWISE * (not result.calibrated)}", style="dim")
