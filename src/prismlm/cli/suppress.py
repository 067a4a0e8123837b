"""prismlm suppress: turn down the prototypes behind a behaviour, and write a controller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.explain import read_texts
from prismlm.cli.options import flag, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.corpus.chat import Messages
    from prismlm.explain.language_model import PrismLM
    from prismlm.interventions.behaviour import Text
    from prismlm.interventions.suppression import Suppression

LISTED = 12
EXAMPLES_HELP = "Texts or chats with the behaviour; lines, json, jsonl, csv, parquet."
KEEP_HELP = "Text to leave as it is (default: the lens's held-out text)."
PHRASE_HELP = "Writing this is the behaviour; repeatable (default: the examples' topic)."
WITHIN_HELP = "If the target is out of reach, take the strongest within --max-cost."
Examples = Annotated[str, option("FILE", EXAMPLES_HELP)]
Keep = Annotated[str | None, option("FILE", KEEP_HELP)]
Out = Annotated[Path, option("FILE", "The controller to write, .safetensors.")]
Phrases = Annotated[list[str] | None, option("WORDS", PHRASE_HELP, "--phrase")]
Target = Annotated[float, option("SHARE", "Share of the behaviour to remove.")]
MaxCost = Annotated[float, option("SHARE", "Allowed growth of perplexity.", min=0)]
WithinCost = Annotated[bool, flag("--within-cost", WITHIN_HELP)]
Tokens = Annotated[int, option("N", "Tokens of each sampled text.", min=1)]
Samples = Annotated[int, option("N", "Texts to sample for the report.", min=1)]
HeldOut = Annotated[int, option("N", "Tokens of text to keep: for the fit, and to report.", min=1)]


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
    temperature: opt.Temperature = 0.7,
    heldout: HeldOut = 6000,
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
    from prismlm.interventions.behaviour import Examples as Split
    from prismlm.interventions.behaviour import SuppressOptions
    from prismlm.interventions.suppression import suppress as run

    options = opt.fill(SuppressOptions, locals(), phrases=tuple(phrases or ()))
    split = Split.split(_texts(model, examples), seed)
    lm = prismlm.load(model, lens=lens, device=device)
    kept = _kept(lm, keep, heldout, seed)
    reporter = ConsoleReporter()
    result = run(lm, split, kept, options, within_cost=within_cost, progress=reporter)
    if as_json:
        output.print_json({"model": str(model), "out": str(out), **result.to_dict()})
    else:
        _print(lm, result)
    if result.controller is None:
        raise InputError(
            f"no strength removes {target:.0%} of the behaviour at {max_cost:.1%} of perplexity, "
            "and nothing was written. Lower --target, raise --max-cost, or take the strongest "
            "within it by --within-cost."
        )
    result.controller.save(out)
    output.report_written(out)


def _texts(model: Path, file: str) -> list[str | Messages]:
    """Return the records of a file, or its lines."""
    from prismlm.corpus.formats import WHOLE_FILES, extension

    lines = extension(Path(file)) in (None, *WHOLE_FILES)
    return [*read_texts(model, None, file, lines)]


def _kept(lm: PrismLM, file: str | None, tokens: int, seed: int) -> list[Text]:
    """Return texts to keep of twice as many tokens, from a file or the lens's held-out text."""
    from prismlm.interventions.behaviour import encoded, held_out
    from prismlm.interventions.steering_effects import corpus_of

    if file is not None:
        texts = [encoded(lm, text) for text in _texts(lm.path, file)]
        return [text for text in texts if len(text.ids) > text.start]
    corpus, reason = corpus_of(lm, None)
    if corpus is None:
        raise InputError(f"no text to keep: {reason.replace('--corpus DIR', '--keep FILE')}")
    return held_out(corpus, 2 * tokens, seed)


def _print(lm: PrismLM, result: Suppression) -> None:
    output.say(f"Behaviour: {result.judge.description}.")
    marked = " ".join(map(output.token_text, result.marked[:LISTED]))
    output.say(f"Marked tokens: {marked}. {result.candidates} prototypes mark them.\n", style="dim")
    rows: list[dict[str, Any]] = [
        {"λ": "removed" if point.weight is None else f"{point.weight:g}"}
        | {"prototypes": len(point.scales), "turned_down": point.turned}
        | {"behaviour": point.behaviour, "perplexity": point.cost}
        for point in result.frontier
    ]
    columns = "λ prototypes turned_down:.1f behaviour:.1% perplexity:+.2%"
    facts = {"behaviour before": f"{result.before:.1%}"}
    output.print_rows("Strengths, on texts for choosing", columns, rows, **facts)
    if result.chosen is None:
        return
    names = lm.lens.names if lm.lens is not None else None
    turned = [
        {"prototype": i, "scale": s, "name": "" if names is None else names[i] or ""}
        for i, s in sorted(result.chosen.scales, key=lambda pair: pair[1])[:LISTED]
    ]
    output.print_rows("Turned down most", "prototype scale:.2f name", turned)
    rows = [
        {"way": one.name, "behaviour": one.behaviour, "perplexity": one.perplexity}
        | {"change": one.cost}
        for one in result.outcomes
    ]
    columns = "way behaviour:.1% perplexity:.2f change:+.2%"
    output.print_rows("On texts that had no part in choosing, with 95 % intervals", columns, rows)
    if not result.reached:
        output.say("The target is out of reach: this is the strongest within the cost.")
