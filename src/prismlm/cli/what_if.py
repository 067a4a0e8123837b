"""prismlm what-if: an answer, and what it would be without some documents."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, flag, option
from prismlm.cli.progress import ConsoleReporter, spinner

if TYPE_CHECKING:
    from prismlm.explain.what_if import WhatIf

WITHOUT_HELP = "Leave out a document, or source=, domain=, license=VALUE; repeatable."
RETRAIN_HELP = "Also train again without them; this can take long."
CALIBRATED = (
    "Nats, with 90% intervals calibrated by training SmolLM2-135M again without documents, with "
    "LoRA, on answers of 11 to 36 tokens. They hold for such models; others may be off by more."
)
OTHERWISE = (
    "The intervals are calibrated on SmolLM2-135M, fine-tuned with LoRA, on answers of −1.7 to "
    "−0.1 nats a token. This model or answer is not like that, and they may not hold: an answer "
    "that is known by heart may lose much more."
)


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
    output.show(value | result.to_dict(), as_json, lambda: _print(result))


def _print(result: WhatIf) -> None:
    """Print the answer, and a row for each estimate and for training again."""
    output.say(output.sanitize(result.answer.strip()) + "\n")
    documents = f"{result.documents:,} document{'s' * (result.documents != 1)}"
    rows = [
        asdict(one)
        | {"log-probability": result.log_probability + one.change, "by": one.method}
        | {"interval": f"{one.low:+.1f} to {one.high:+.1f}"}
        for one in result.estimates
    ]
    if (again := result.retrained) is not None:
        now = result.log_probability + again.change
        rows.append({"by": "training again", "change": again.change, "log-probability": now})
    output.print_rows(
        f"Without {documents} ({result.share:.1%} of the text)",
        "by log-probability:.1f change:+.1f interval",
        rows,
        tokens=result.tokens,
        **{"log-probability now": result.log_probability},
    )
    for one in result.estimates:
        words = "the answer stays the same" if one.text is None else f"“{one.text.strip()}”"
        output.say(output.sanitize(f"By {one.method}: {words}"))
    if again is not None:
        output.say(output.sanitize(f"Trained again, it answers: “{again.text.strip()}”"))
    output.say("\n" + (CALIBRATED if result.calibrated else OTHERWISE), style="dim")
