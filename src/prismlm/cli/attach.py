"""prismlm attach: a prototype head and a lens for a model that exists."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from prismlm.cli.format import count, duration
from prismlm.cli.index import CodesOfStates, Contexts, PositionShare
from prismlm.cli.options import Device, DryRun, Json, Precision, SkipBadRows, flag, needs, option
from prismlm.cli.output import print_cost, print_json, print_rows, quality_rows

if TYPE_CHECKING:
    from prismlm.layers.prototype_head import Weights
    from prismlm.training import AttachOptions, AttachResult

Base = Annotated[
    str, typer.Argument(metavar="MODEL", help="A directory, a GGUF file or a name on the hub.")
]
Files = Annotated[
    list[Path], option("DIR|FILE", "A corpus, or text to build one of; may be repeated.")
]
Revision = Annotated[
    str | None, typer.Option(help="Of a model on the hub: a branch, tag or commit.")
]
HeadPrototypes = Annotated[
    int | None, option("K", "How many prototypes (default: 8192, or one for 16 positions).")
]
HeadWeights = Annotated[
    str,
    option("HOW", "How a token's prototypes are chosen and weighed: by cosines, or fitted."),
]
Rate = Annotated[float, typer.Option(help="Learning rate, in units of the prototypes' elements.")]
Lora = Annotated[bool, flag("--lora", "Fine-tune the model on the text first. Extra: lora.")]
Uncertainty = Annotated[
    bool, flag("--uncertainty", "Train a table that feeds the entropy of predictions back.")
]


def attach(
    model: Base,
    corpus: Files,
    out: Annotated[Path, option("DIR", "The model directory to write.")],
    skip_bad_rows: SkipBadRows = False,
    revision: Revision = None,
    prototypes: HeadPrototypes = None,
    prototypes_per_token: Annotated[int, option("k", "How many a token may rely on.")] = 64,
    weights: HeadWeights = "fitted",
    epochs: Annotated[float, typer.Option(help="How often the head sees every state.")] = 4.0,
    batch: Annotated[int, option("N", "States of a step.")] = 256,
    rate: Rate = 0.03,
    states_gb: Annotated[float, option("GB", "The most disk for hidden states.")] = 4.0,
    keep_states: Annotated[bool, flag("--keep-states", "Leave them there at the end.")] = False,
    window: Annotated[int | None, option("N", "Tokens read at once (default: 512).")] = None,
    contexts: Contexts = 64,
    positions: PositionShare = 1.0,
    codes: CodesOfStates = "int8",
    device: Device = "auto",
    precision: Precision = "auto",
    lora: Lora = False,
    lora_epochs: Annotated[float, typer.Option(help="How often it reads the text then.")] = 1.0,
    uncertainty: Uncertainty = False,
    uncertainty_epochs: Annotated[float, typer.Option(help="How often it reads the text.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Attach prototypes to any Hugging Face model, and index text with them.

    The model's weights stay as they are: DIR holds them beside the head, and opens as any
    checkpoint does. With --lora they are fine-tuned on the text first. With --uncertainty a table
    of 64 rows, which codes are interpolated between, is trained to feed the entropy of each
    prediction back to the next input, by two passes over each text. The source's own form, 65,536
    independent rows and one pass, is left to Python (prismlm.attach_uncertainty): rounding alone
    changes its vector by 130 %, and one pass trains a single row. Run the same command again to
    resume.
    """
    from prismlm.index.build import check_share
    from prismlm.index.codes import check_codes
    from prismlm.training import AttachOptions, FitOptions, LoraOptions, TableOptions

    sizes = (prototypes, prototypes_per_token, epochs, batch, rate)
    fit = FitOptions(*sizes, weights=cast("Weights", weights), seed=seed)
    options = AttachOptions(
        fit=fit,
        window=window,
        states_gb=states_gb,
        keep_states=keep_states,
        contexts=contexts,
        positions=check_share(positions),
        codes=check_codes(codes),
        device=device,
        precision=precision,
        revision=revision,
        skip_bad_rows=skip_bad_rows,
        lora=LoraOptions(lora_epochs, seed=seed) if lora else None,
        uncertainty=TableOptions(uncertainty_epochs, seed=seed) if uncertainty else None,
    )
    _run(model, corpus, out, options, dry_run=dry_run, as_json=as_json)


def _run(
    model: str,
    corpus: list[Path],
    out: Path,
    options: AttachOptions,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.training import attach as run
    from prismlm.training import estimate_attach

    if options.lora:
        needs("peft")
    if dry_run:
        print_cost(estimate_attach(model, corpus, options), as_json=as_json)
        return
    began = time.monotonic()
    result = run(model, corpus, out, options, progress=ConsoleReporter())
    print_json(result.to_dict()) if as_json else _print_result(result, time.monotonic() - began)


def _print_result(result: AttachResult, seconds: float) -> None:
    quality = result.quality
    rows = [
        ("fitted to", f"{count(result.states)} states"),
        ("CE of the model", f"{quality.ce:.3f}"),
        *quality_rows(quality),
        ("measured on", f"{count(quality.tokens)} held-out tokens"),
        *_effect_rows(result.uncertainty or {}),
        ("lens", str(result.lens)),
        ("time", duration(seconds)),
    ]
    print_rows(rows, last=str(result.directory))


def _effect_rows(effect: dict[str, float]) -> list[tuple[str, str]]:
    names = {
        "ce": "CE, uncertainty fed back",
        "ce_without": "CE, nothing fed back",
        "ce_shuffled": "CE, shuffled codes (control)",
    }
    return [(title, f"{effect[name]:.3f}") for name, title in names.items() if name in effect]
