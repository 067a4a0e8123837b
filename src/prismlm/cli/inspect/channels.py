"""prismlm inspect channels: what the channels of prototype mixers carry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from prismlm.cli.inspect.corpus_to_read import corpus_of
from prismlm.cli.options import Json, Model, Overwrite, Page, Split, choice, number, option
from prismlm.cli.output import print_json
from prismlm.errors import InputError
from prismlm.outputs import check_ending, check_outputs, output_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.sequences import Sequences
    from prismlm.corpus.store import Split as SplitName
    from prismlm.instruments.channels.report import ChannelReport

FORMATS = ("svg", "png")
DOTS_PER_INCH = 160
CorpusToRead = Annotated[
    Path | None,
    option(
        "DIR", "The corpus to read (default: what the model was trained on, or none with --text)."
    ),
]
SecondModel = Annotated[
    Path | None,
    option("MODEL", "Metrics of a second model on the same text."),
]


def channels(
    model: Model,
    corpus: CorpusToRead = None,
    split: Split = "heldout",
    max_tokens: Annotated[
        int, number("N", "Tokens to read, from all over the corpus; 0 for all.")
    ] = 100_000,
    layer: Annotated[int | None, option("N", "Only this layer.")] = None,
    channel: Annotated[int | None, option("K", "Only this channel of --layer, in full.")] = None,
    text: Annotated[str | None, option("TEXT", "Show what this text writes and reads.")] = None,
    top: Annotated[int, option("N", "Sequences kept of each channel.")] = 10,
    beside: SecondModel = None,
    out: Annotated[Path | None, option("DIR", "Write plots; needs the extra plot.")] = None,
    image: Annotated[
        str, choice("FORMAT", "Of the plots: svg or png.", FORMATS, "--format")
    ] = "svg",
    html: Page = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Show what the channels of prototype mixers carry: figures, half-lives, tokens, sequences.

    Of a model whose layers are built as LLaMA's it shows the same figures of the norms of its
    value heads; it has no channels.
    """
    if channel is not None and layer is None:
        raise InputError("--channel needs the --layer that it is in.")
    check_outputs(html, directory=out, inputs=(model, corpus, beside), overwrite=overwrite)
    check_ending(html, ".html")
    if out is not None:
        # Said before minutes of reading, not after.
        import prismlm.pages.channel_plots  # noqa: F401
    from prismlm.models.checkpoint import read_checkpoint

    opened, tokenizer = read_checkpoint(model)
    if html is not None or channel is not None:
        _check_mixers(opened, layer, channel)
    sequences = None
    if corpus is not None or text is None or beside is not None:
        from prismlm.corpus.sequences import Sequences

        read, part = corpus_of(model, corpus), cast("SplitName", split)
        sequences = Sequences(read, part, max_tokens=max_tokens or None)
    layers = None if layer is None else (layer,)
    report = _report(model, opened, tokenizer, sequences, text, layers=layers, kept=top)
    other = None
    if beside is not None:
        # Of another depth it has other layers.
        other = _report(beside, *read_checkpoint(beside), sequences, kept=top)
    if html is not None:
        _write_page(report, opened, sequences, html)
    if out is not None:
        curve = None if layer is None or channel is None else (layer, channel)
        _draw(report, other, curve, out, image)
    if as_json:
        print_json(_value(report, other, channel))
        return
    from prismlm.cli.printing.channels import print_report

    print_report(report, other, layer=layer, channel=channel)


def _check_mixers(model: PreTrainedModel, layer: int | None, channel: int | None) -> None:
    from prismlm.models.decoders.mixers import check_channel, check_layer, mixers_of

    mixers = mixers_of(model)
    if layer is not None and channel is not None:
        check_layer(len(mixers), layer)
        check_channel(mixers[layer].channels, layer, channel)


def _report(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequences | None,
    text: str | None = None,
    **options: Any,
) -> ChannelReport:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.instruments.channels import ReportOptions, channel_report

    return channel_report(
        model,
        tokenizer,
        sequences,
        text=text,
        name=path.resolve().name,
        options=ReportOptions(**options),
        progress=ConsoleReporter(),
    )


def _write_page(
    report: ChannelReport, model: PreTrainedModel, sequences: Sequences | None, html: Path
) -> None:
    from prismlm.pages.channels import channel_page
    from prismlm.pages.frame import write_page

    write_page(channel_page(report, model, sequences.corpus if sequences else None), html)
    typer.echo(f"wrote {html}", err=True)


def _draw(
    report: ChannelReport,
    beside: ChannelReport | None,
    curve: tuple[int, int] | None,
    out: Path,
    image: str,
) -> None:
    from prismlm.pages.channel_plots import figures

    for name, figure in figures(report, beside, curve).items():
        path = out / f"{name}.{image}"
        with output_file(path) as temporary:
            # No date in it: the same report is the same file but for ids.
            metadata: dict[str, Any] = {"Date": None} if image == "svg" else {}
            figure.savefig(temporary, format=image, dpi=DOTS_PER_INCH, metadata=metadata)
        typer.echo(f"wrote {path}", err=True)


def _value(
    report: ChannelReport, beside: ChannelReport | None, channel: int | None
) -> dict[str, Any]:
    value = report.to_dict()
    if channel is not None:
        for layer in value["layers"]:
            layer["channels"] = [c for c in layer["channels"] if c["channel"] == channel]
    value["beside"] = None
    if beside is not None:
        other = beside.to_dict()
        layers = [
            {key: layer[key] for key in ("layer", "shared_gates", "metrics")}
            for layer in other["layers"]
        ]
        value["beside"] = {"model": other["model"], "of": other["of"], "layers": layers}
    return value
