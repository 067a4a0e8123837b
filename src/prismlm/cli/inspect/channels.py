"""prismlm inspect channels: what the channels of prototype mixers carry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from prismlm.cli import options as opt
from prismlm.cli.format import count
from prismlm.cli.inspect.corpus_to_read import Tokens, corpus_of
from prismlm.cli.options import option
from prismlm.cli.output import print_json, say, show, show_rows, show_value, token_text, wrote
from prismlm.errors import InputError
from prismlm.outputs import check_ending, check_outputs, output_file

if TYPE_CHECKING:
    from prismlm.probes.channels.curves import WordedCurves
    from prismlm.probes.channels.report import ChannelReport
    from prismlm.probes.results import Row

DOTS_PER_INCH = 160
CHANNELS_SHOWN, TOKENS_SHOWN, LAYERS_OF_A_TEXT = 8, 3, 4
SecondModel = Annotated[Path | None, option("MODEL", "Metrics of a second model beside it.")]
ImageFormat = Annotated[Literal["svg", "png"], option(None, "Of the plots.", "--format")]


def channels(
    model: opt.Model,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    max_tokens: Tokens = 100_000,
    layer: opt.Layer = None,
    channel: Annotated[int | None, option("K", "Only this channel of --layer, in full.")] = None,
    text: Annotated[str | None, option("TEXT", "Show what this text writes and reads.")] = None,
    top: Annotated[int, option("N", "Sequences kept of each channel.")] = 10,
    beside: SecondModel = None,
    out: Annotated[Path | None, option("DIR", "Write plots; needs the extra plot.")] = None,
    image: ImageFormat = "svg",
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
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
    from prismlm.corpus.sequences import Sequences
    from prismlm.models.checkpoint import read_checkpoint

    opened, tokenizer = read_checkpoint(model)
    if html is not None or channel is not None:
        _check_mixers(opened, layer, channel)
    sequences = None
    if corpus is not None or text is None or beside is not None:
        sequences = Sequences(corpus_of(model, corpus), split, max_tokens=max_tokens or None)
    layers = None if layer is None else (layer,)
    report = _report(model, opened, tokenizer, sequences, text, layers=layers, kept=top)
    other = None
    if beside is not None:
        # Of another depth it has other layers.
        other = _report(beside, *read_checkpoint(beside), sequences, None, kept=top)
    if html is not None:
        from prismlm.pages.channels import channel_page
        from prismlm.pages.frame import write_page

        write_page(channel_page(report, opened, sequences.corpus if sequences else None), html)
        wrote(html)
    if out is not None:
        curve = None if layer is None or channel is None else (layer, channel)
        _draw(report, other, curve, out, image)
    if as_json:
        print_json(_value(report, other, channel))
    else:
        _print(report, other, layer, channel)


def _check_mixers(model: Any, layer: int | None, channel: int | None) -> None:
    from prismlm.models.decoders.mixers import check_channel, check_layer, mixers_of

    mixers = mixers_of(model)
    if layer is not None and channel is not None:
        check_layer(len(mixers), layer)
        check_channel(mixers[layer].channels, layer, channel)


def _report(
    path: Path, model: Any, tokenizer: Any, sequences: Any, text: str | None, **options: Any
) -> ChannelReport:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.probes.channels import ReportOptions, channel_report

    how: dict[str, Any] = {"options": ReportOptions(**options), "progress": ConsoleReporter()}
    name = path.resolve().name
    return channel_report(model, tokenizer, sequences, text=text, name=name, **how)


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
        wrote(path)


def _value(
    report: ChannelReport, beside: ChannelReport | None, channel: int | None
) -> dict[str, Any]:
    value = report.to_dict()
    if channel is not None:
        for layer in value["layers"]:
            layer["channels"] = [c for c in layer["channels"] if c["channel"] == channel]
    value["beside"] = None
    if beside is not None:
        other, keys = beside.to_dict(), ("layer", "shared_gates", "metrics")
        layers = [{key: layer[key] for key in keys} for layer in other["layers"]]
        value["beside"] = {"model": other["model"], "of": other["of"], "layers": layers}
    return value


def _print(
    report: ChannelReport, beside: ChannelReport | None, layer: int | None, channel: int | None
) -> None:
    """Print a report; all channels of a layer that was asked for, all of one channel."""
    say(report.model + "\n", style="bold")
    if report.of == "heads":
        say("No prototype mixers, so there are no channels: these are norms of value heads.\n")
    if report.corpus is not None:
        read = report.corpus
        say(f"{count(read.positions)} tokens of {read.name}, {read.split}\n", style="dim")
        for one in (report, beside):
            if one is not None:
                show(one.metrics)
        for table in report.tables[1:] if channel is None else ():
            show(table)
    for one in report.to_dict()["layers"]:
        if channel is not None:
            say(f"Layer {one['layer']}", style="bold")
            show_value(one["channels"][channel])
        elif one["channels"]:
            _print_channels(one, all_shown=layer is not None)
    if report.text is not None:
        _print_text(report.text) if channel is None else _print_curve(report.text, channel)


def _print_channels(layer: Row, *, all_shown: bool) -> None:
    """Print channels, all or some spread evenly over the half-lives, both ends included."""
    chosen = sorted(layer["channels"], key=lambda channel: channel["half_life"] or 0.0)
    if not all_shown:
        step = max(1.0, (len(chosen) - 1) / (CHANNELS_SHOWN - 1))
        chosen = [chosen[round(step * i)] for i in range(min(CHANNELS_SHOWN, len(chosen)))]
    rows: list[Row] = []
    for channel in chosen:
        tokens = [token_text(token["text"]) for token in channel["tokens"][:TOKENS_SHOWN]]
        first = channel["sequences"][0]["tokens"] if channel["sequences"] else []
        sequence = " ".join(token_text(token["text"]) for token in first)
        row = {"writes_most": "  ".join(tokens) or None, "in first sequence": sequence or None}
        rows.append(channel | row)
    columns = {"channel": "", "half_life": ".2f", "repetition": ".2f"}
    columns |= {"writes_most": "", "in first sequence": ""}
    title = f"Layer {layer['layer']}: {len(chosen)} of {len(layer['channels'])}; all with --layer"
    show_rows(title, columns, rows)


def _print_text(text: WordedCurves) -> None:
    """Print the channel that each token writes and reads most, with its share of the gate."""
    rows: list[Row] = [{"token": token_text(token)} for token in text.text.tokens]
    for curves in text.curves[-LAYERS_OF_A_TEXT:]:
        for what, gate in (("writes", curves.write), ("reads", curves.read)):
            best = gate.max(-1)
            for row, value, number in zip(rows, *(x.tolist() for x in best), strict=True):
                row[f"layer {curves.layer} {what}"] = f"#{number:<3} {value:.2f}"
    show_rows(
        "The text: the channel each token writes and reads most", dict.fromkeys(rows[0], ""), rows
    )


def _print_curve(text: WordedCurves, channel: int) -> None:
    """Print what each token writes and reads, and what the channel then holds."""
    curves = text.curves[0]
    memory, tokens = curves.memory(channel), [token_text(token) for token in text.text.tokens]
    rows: list[Row] = []
    for i, token in enumerate(tokens):
        strongest = int(memory[i].argmax())
        share = memory[i, strongest].item()
        rows.append(
            {
                "token": token,
                "write": curves.write[i, channel].item(),
                "read": curves.read[i, channel].item(),
                "still_held": curves.mass[i, channel].item(),
                "holds_most_of": f"{tokens[strongest]} {share:.0%}" if share > 0 else None,
            }
        )
    columns = {"token": "", "write": ".3f", "read": ".3f", "still_held": ".2f"}
    show_rows("The text", columns | {"holds_most_of": ""}, rows)
