"""prismlm calibrate, suppress and what-if: what is written under other scales or other text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.explain import read_texts
from prismlm.cli.options import argument, flag, option
from prismlm.cli.progress import ConsoleReporter, spinner
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.explain.what_if import WhatIf
    from prismlm.interventions.controller import Controller
    from prismlm.interventions.suppression import Suppression
    from prismlm.lens.opened_model import OpenedModel

TASK_HELP = "Rows of context, choices and label, or prompt, chosen and rejected."
Task = Annotated[Path, option("FILE", TASK_HELP, "--task")]
Test = Annotated[Path | None, option("FILE", "Test on these (default: a fifth of the task).")]
Out = Annotated[Path, option("FILE", "The controller to write, .safetensors.", "--out")]
SHOWN = 12
EXAMPLES_HELP = "Texts or chats with the behaviour; lines, json, jsonl, csv, parquet."
KEEP_HELP = "Text to leave as it is (default: the lens's held-out text)."
PHRASE_HELP = "Writing this is the behaviour; repeatable (default: the examples' topic)."
WITHIN_HELP = "If the target is out of reach, take the strongest within --max-cost."
Examples = Annotated[str, option("FILE", EXAMPLES_HELP)]
Keep = Annotated[str | None, option("FILE", KEEP_HELP)]
Phrases = Annotated[list[str] | None, option("WORDS", PHRASE_HELP, "--phrase")]
Target = Annotated[float, option("SHARE", "Share of the behaviour to remove.")]
MaxCost = Annotated[float, option("SHARE", "Allowed growth of perplexity.", min=0)]
WithinCost = Annotated[bool, flag("--within-cost", WITHIN_HELP)]
Tokens = Annotated[int, option("N", "Tokens of each sampled text.", min=1)]
Samples = Annotated[int, option("N", "Texts to sample for the report.", min=1)]
WITHOUT_HELP = "Leave out a document, or source=, domain=, license=VALUE; repeatable."
RETRAIN_HELP = "Also train again without them; this can take long."
CALIBRATED = (
    "The intervals are calibrated on SmolLM2-135M, fine-tuned with LoRA, on answers of {} to {} "
    "nats a token, without up to {:.0%} of the text."
)
OTHERWISE = (
    " This model, answer or removal is not like that, and they may not hold: an answer that is "
    "known by heart may lose much more."
)


def calibrate(
    model: opt.Model,
    task: Task,
    out: Out,
    test: Test = None,
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
    result = calibration.calibrate(lm, examples, tested, **how)
    output.write(out, result.controller.save)
    value = {"model": str(model), "task": str(task)} | result.to_dict()
    if as_json:
        return output.print_json(value)
    if not result.controller.scales:
        output.say(
            "No scale of a prototype lowers the loss on held-out examples, so the controller "
            "changes nothing: give more examples, or take it that prototypes do not tell here."
        )
    print_scales(lm, result.controller, examples_fitted=result.fitted)
    points = [100 * share for share in vars(result.change).values()]
    output.say(
        f"right on {result.tested} other examples: {result.before:.1%} → {result.after:.1%}, "
        "a change of {:+.1f} points ({:+.1f} to {:+.1f})".format(*points)
    )


def print_scales(lm: OpenedModel, controller: Controller, **facts: Any) -> None:
    """Print the prototypes that are turned most."""
    rows = [
        {"prototype": i, "scale": s, "name": "" if lm.lens is None else lm.lens.names[i]}
        for i, s in sorted(controller.scales, key=lambda pair: -abs(pair[1] - 1))[:SHOWN]
    ]
    facts = {"prototypes_turned": len(controller.scales)} | facts
    output.print_rows("", "prototype scale:.2f name", rows, **facts)


def suppress(
    model: opt.Model,
    examples: Examples,
    out: Out,
    keep: Keep = None,
    phrases: Phrases = None,
    target: Target = 0.9,
    max_cost: MaxCost = 0.02,
    within_cost: WithinCost = False,
    tokens: Tokens = 40,
    samples: Samples = 64,
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
    split = suppression.Examples.split(read_texts(model, None, examples, None), seed)
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
    result = suppression.suppress(lm, split, kept, options, **how)
    value = {"model": str(model), "out": str(out), **result.to_dict()}
    output.show(value, as_json, lambda: _print_suppression(lm, result))
    if result.controller is None:
        raise InputError(
            f"no strength removes {target:.0%} of the behaviour at {max_cost:.1%} of perplexity, "
            "and nothing was written. Lower --target, raise --max-cost, or take the strongest "
            "within it by --within-cost."
        )
    output.write(out, result.controller.save)


def _print_suppression(lm: OpenedModel, result: Suppression) -> None:
    output.say(f"Behaviour: {result.judge.description}.")
    marked = " ".join(map(output.token_text, result.marked[:SHOWN]))
    output.say(f"Marked tokens: {marked}. {result.candidates} prototypes mark them.\n", style="dim")
    title = "Strengths λ, on texts for choosing (–: all removed)"
    columns = "weight turned:.1f behaviour:.1% cost:+.2%"
    output.print_rows(title, columns, result.frontier, behaviour_before=f"{result.before:.1%}")
    if result.controller is None:
        return
    print_scales(lm, result.controller)
    title = "On texts that had no part in choosing, with 95 % intervals"
    columns = "name behaviour:.1% perplexity:.2f cost:+.2%"
    output.print_rows(title, columns, result.outcomes)
    if not result.reached:
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
    output.show(value | result.to_dict(), as_json, lambda: _print_what_if(result))


def _print_what_if(result: WhatIf) -> None:
    """Print the answer, and a row for each estimate and for training again."""
    output.say(result.answer.strip() + "\n")
    documents = f"{result.documents:,} document{'s' * (result.documents != 1)}"
    every = [*result.estimates, *filter(None, [result.retrained])]
    rows = [
        {"by": one.method, "change": one.change}
        | {"log-probability": result.log_probability + one.change}
        | {"interval": "" if one.low is None else f"{one.low:+.1f} to {one.high:+.1f}"}
        for one in every
    ]
    output.print_rows(
        f"Without {documents} ({result.share:.1%} of the text)",
        "by log-probability:.1f change:+.1f interval",
        rows,
        tokens=result.tokens,
        **{"log-probability now": result.log_probability},
    )
    for one in every:
        words = "the answer stays the same" if one.text is None else f"“{one.text.strip()}”"
        output.say(f"By {one.method}: {words}")
    from prismlm.explain.what_if import calibration

    ends = (f"{end:.1f}".replace("-", "−") for end in calibration()["nats_per_token"])
    words = CALIBRATED.format(*ends, calibration()["largest_share"])
    output.say(f"\n{words}{OTHERWISE * (not result.calibrated)}", style="dim")
