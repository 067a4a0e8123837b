"""prismlm inspect channels: what the channels of prototype mixers carry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from prismlm.cli.options import Json, Model, Overwrite, Page, Split, option
from prismlm.cli.output import print_json
from prismlm.errors import InputError, suggest
from prismlm.outputs import check_outputs, output_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus import Corpus
    from prismlm.corpus.store import Split as SplitName
    from prismlm.instruments.channels.report import ChannelReport

FORMATS = ["svg", "png"]
DOTS_PER_INCH = 160
CorpusToRead = Annotated[
    Path | None,
    option("DIR", "The corpus to read; else what the model was trained on, or none with --text."),
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
        int, option("N", "Tokens to read, from all over the corpus; 0 for all.")
    ] = 100_000,
    layer: Annotated[int | None, option("N", "Only this layer.")] = None,
    channel: Annotated[int | None, option("K", "Only this channel of --layer, in full.")] = None,
    text: Annotated[str | None, option("TEXT", "Show what this text writes and reads.")] = None,
    top: Annotated[int, option("N", "Sequences kept of each channel.")] = 10,
    beside: SecondModel = None,
    out: Annotated[Path | None, option("DIR", "Write plots; needs the extra plot.")] = None,
    image: Annotated[str, option("FORMAT", "Of the plots: svg or png.", "--format")] = "svg",
    html: Page = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Show what the channels of prototype mixers carry: figures, half-lives, tokens, sequences.

    Of a model whose layers are built as LLaMA's it shows the same figures of the norms of its
    value heads; it has no channels.
    """
    _check(layer, channel, max_tokens, image)
    read = (model, corpus, beside)
    check_outputs(html, directory=out, inputs=read, overwrite=overwrite)
    if out is not None:
        # Said before minutes of reading, not after.
        import prismlm.pages.channel_plots  # noqa: F401
    asked = _Asked(layer, channel, text, top, split, max_tokens or None)
    found = _read(model, corpus, beside, asked, page=html is not None)
    if html is not None:
        from prismlm.pages.channels import channel_page
        from prismlm.pages.frame import write_page

        write_page(channel_page(found.report, found.model, found.corpus), html)
        typer.echo(f"wrote {html}", err=True)
    if out is not None:
        _draw(found, asked, out, image)
    if as_json:
        print_json(_value(found, channel))
        return
    from prismlm.cli.printing.channels import print_report

    print_report(found.report, found.beside, layer=layer, channel=channel)


class _Asked(NamedTuple):
    layer: int | None
    channel: int | None
    text: str | None
    top: int
    split: str
    max_tokens: int | None


class _Reports(NamedTuple):
    report: ChannelReport
    beside: ChannelReport | None
    model: PreTrainedModel
    corpus: Corpus | None


def _check(layer: int | None, channel: int | None, max_tokens: int, image: str) -> None:
    if channel is not None and layer is None:
        raise InputError("--channel needs the --layer that it is in.")
    if max_tokens < 0:
        raise InputError(f"--max-tokens is {max_tokens}: expected at least 1, or 0 for all.")
    if image not in FORMATS:
        raise InputError(
            f"there is no format {image!r}: expected {' or '.join(FORMATS)}."
            f"{suggest(image, FORMATS)}"
        )


def _read(
    path: Path, corpus: Path | None, beside: Path | None, asked: _Asked, *, page: bool
) -> _Reports:
    from typing import cast

    from prismlm.cli.progress import ConsoleReporter
    from prismlm.corpus import Corpus
    from prismlm.corpus.sequences import Sequences
    from prismlm.index.training_corpus import training_corpus
    from prismlm.instruments.channels.build_report import ReportOptions, channel_report
    from prismlm.models.checkpoint import read_checkpoint
    from prismlm.models.decoders.mixers import check_channel, check_layer, mixers_of

    model, tokenizer = read_checkpoint(path)
    if page or asked.channel is not None:
        mixers = mixers_of(model)
        if asked.layer is not None and asked.channel is not None:
            check_layer(len(mixers), asked.layer)
            check_channel(mixers[asked.layer].channels, asked.layer, asked.channel)
    opened = sequences = None
    if corpus is not None:
        opened = Corpus.open(corpus)
    elif asked.text is None or beside is not None:
        opened = training_corpus(path)
    if opened is not None:
        sequences = Sequences(opened, cast("SplitName", asked.split), max_tokens=asked.max_tokens)

    def report(
        of: Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text: str | None = None,
        layers: tuple[int, ...] | None = None,
    ) -> ChannelReport:
        return channel_report(
            model,
            tokenizer,
            sequences,
            text=text,
            name=of.resolve().name,
            options=ReportOptions(layers=layers, kept=asked.top),
            progress=ConsoleReporter(),
        )

    layers = None if asked.layer is None else (asked.layer,)
    found = report(path, model, tokenizer, asked.text, layers)
    # Of another depth the second has other layers.
    other = None if beside is None else report(beside, *read_checkpoint(beside))
    return _Reports(found, other, model, opened)


def _draw(found: _Reports, asked: _Asked, out: Path, image: str) -> None:
    from prismlm.pages.channel_plots import figures

    curve = None
    if asked.layer is not None and asked.channel is not None:
        curve = (asked.layer, asked.channel)
    for name, figure in figures(found.report, found.beside, curve).items():
        path = out / f"{name}.{image}"
        with output_file(path) as temporary:
            # No date in it: the same report is the same file but for ids.
            metadata: dict[str, Any] = {"Date": None} if image == "svg" else {}
            figure.savefig(temporary, format=image, dpi=DOTS_PER_INCH, metadata=metadata)
        typer.echo(f"wrote {path}", err=True)


def _value(found: _Reports, channel: int | None) -> dict[str, Any]:
    value = found.report.to_dict()
    if channel is not None:
        for layer in value["layers"]:
            layer["channels"] = [c for c in layer["channels"] if c["channel"] == channel]
    value["beside"] = None
    if found.beside is not None:
        other = found.beside.to_dict()
        layers = [
            {key: layer[key] for key in ("layer", "shared_gates", "metrics")}
            for layer in other["layers"]
        ]
        value["beside"] = {"model": other["model"], "of": other["of"], "layers": layers}
    return value
