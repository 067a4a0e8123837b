"""A channel report on a terminal: figures, channels, sequences, a text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from prismlm.cli.format import count
from prismlm.cli.output import console_for_reading, fit, plain, print_head
from prismlm.cli.printing.tables import show
from prismlm.corpus.words import DITTO
from prismlm.instruments.channels.curves import LayerCurves, WordedCurves
from prismlm.instruments.channels.report import Channel, ChannelReport, LayerReport
from prismlm.instruments.channels.top_sequences import ChannelSequence, Passage
from prismlm.instruments.results import Row, Table
from prismlm.pages.trace_data import visible

CHANNELS_SHOWN = 8
TOKENS_SHOWN = 3
WORDS_AROUND, WORDS_IN_FULL = 2, 14
LAYERS_OF_A_TEXT = 4


def print_report(
    report: ChannelReport,
    beside: ChannelReport | None,
    *,
    layer: int | None,
    channel: int | None,
) -> None:
    """Print a report; all channels of a layer that was asked for, all of one channel."""
    console = console_for_reading()
    _print_header(console, report)
    if report.of == "heads":
        console.print(
            f"{plain(report.model)} has no prototype mixer, so there are no channels: these are "
            "norms of its value heads.\n"
        )
    if report.corpus is not None:
        tables = [report.metrics, *([] if beside is None else [beside.metrics])]
        for table in [*tables, *(report.tables[1:] if channel is None else ())]:
            show(console, table)
    for one in report.layers:
        if channel is not None:
            _print_channel(console, one, one.channels[channel], report)
        elif one.channels:
            _print_channels(console, one, report, all_shown=layer is not None)
    if report.text is not None:
        shown = _strongest(report.text) if channel is None else _curve(report.text, channel)
        show(console, shown)


def _print_header(console: Console, report: ChannelReport) -> None:
    facts: list[str] = []
    if report.of == "channels":
        numbers = sorted({len(layer.channels) for layer in report.layers})
        layers = "layer" if len(report.layers) == 1 else "layers"
        facts.append(f"{len(report.layers)} {layers} of {'–'.join(map(str, numbers))} channels")
    if report.corpus is not None:
        read = report.corpus
        facts.append(f"{count(read.positions)} tokens of {plain(read.name)}, {read.split}")
    print_head(console, report.model, *facts)


def _print_channels(
    console: Console, layer: LayerReport, report: ChannelReport, *, all_shown: bool
) -> None:
    shown = layer.channels if all_shown else _spread(layer.channels)
    columns = {"channel": "", "half_life": ".2f", "repetition": ".2f", "lag": "+d",
               "writes_most": "", "first_sequence": ""}  # fmt: skip
    rows = tuple(_row(channel, layer, report) for channel in shown)
    show(console, Table(f"Layer {layer.layer}", columns, rows))
    if len(shown) < len(layer.channels):
        console.print(
            f"{len(shown)} of {len(layer.channels)}, from the shortest half-life to the longest; "
            f"all with --layer {layer.layer}\n",
            style="dim",
        )


def _row(channel: Channel, layer: LayerReport, report: ChannelReport) -> Row:
    row: Row = {name: getattr(channel, name) for name in ("channel", "half_life", "repetition")}
    row["lag"] = _lag(layer, channel.channel)
    if channel.sequences:
        tokens = [visible(token.text) for token in channel.tokens[:TOKENS_SHOWN]]
        first = channel.sequences[0]
        row["writes_most"] = "  ".join(tokens)
        row["first_sequence"] = _excerpt(first, report.passages[first.start], WORDS_AROUND).plain
    return row


def _spread(channels: Sequence[Channel]) -> list[Channel]:
    """Return channels spread evenly over the half-lives, else over their numbers, ends included."""
    ordered = sorted(channels, key=lambda channel: channel.half_life or 0.0)
    if len(ordered) <= CHANNELS_SHOWN:
        return ordered
    step = (len(ordered) - 1) / (CHANNELS_SHOWN - 1)
    return [ordered[round(step * i)] for i in range(CHANNELS_SHOWN)]


def _lag(layer: LayerReport, channel: int) -> int | None:
    """Return the lag of the peak; None with shared gates or a gate that never varies."""
    if layer.lags is None or layer.shared_gates or layer.lags.p[channel].isnan():
        return None
    return int(layer.lags.peak[channel].item())


def _print_channel(
    console: Console, layer: LayerReport, channel: Channel, report: ChannelReport
) -> None:
    number, facts = channel.channel, dict[str, object]()
    if channel.half_life is not None:
        facts |= {"half-life, positions": channel.half_life, "β": channel.decay}
    for curves in () if report.text is None else report.text.curves:
        if channel.half_life is None and curves.layer == layer.layer:
            facts["half-life over the text"] = curves.half_life[number].item()
    if channel.repetition is not None:
        facts["repetition"] = channel.repetition
    if layer.lags is not None and not layer.shared_gates:
        facts |= {
            "read and write correlate most at lag": _lag(layer, number),
            "correlation": layer.lags.correlation[number].max().item(),
            "p": layer.lags.p[number].item(),
        }
    rows = tuple(
        {"writes most": visible(token.text), "times": token.count, "gate": token.gate}
        for token in channel.tokens
    )
    columns = {"writes most": "", "times": "", "gate": ".2f"}
    show(console, Table(f"Layer {layer.layer}, channel {number}", columns, rows, facts))
    for place, sequence in enumerate(channel.sequences, 1):
        passage = report.passages[sequence.start]
        head = Text(f"{place:>3}  ", "bold").append(f"writes {sequence.total:.2f} in all  ")
        head.append(plain(passage.document.title or passage.document.doc_id), "dim")
        head.truncate(console.width, overflow="ellipsis")
        console.print(head, no_wrap=True)
        for line in _excerpt(sequence, passage, WORDS_IN_FULL).wrap(console, console.width - 6):
            console.print(Text("     ").append_text(line))
    console.print()


def _excerpt(sequence: ChannelSequence, passage: Passage, around: int) -> Text:
    """Return the words around the one that writes most, kept ones in brackets."""
    words = passage.text
    marked = {words.word_of[token.position - sequence.start] for token in sequence.tokens}
    middle = words.word_of[sequence.tokens[0].position - sequence.start]
    first = max(0, middle - around)
    shown = Text("…" if first else "")
    for number, word in enumerate(words.words[first : middle + around + 1], first):
        if not word or word[0].isspace():
            shown.append(" ")
        if number in marked:
            inner = plain(word.strip()) or visible(word) if word else "end of document"
            shown.append(f"[{inner}]", "bold")
        else:
            shown.append(plain(" ".join(word.split())))
    return shown


def _tokens(text: WordedCurves) -> list[str]:
    return [fit(visible(plain(token))) for token in text.text.tokens]


def _strongest(text: WordedCurves) -> Table:
    """Return the channel that each token writes and reads most, with its share of the gate."""
    rows: list[Row] = [{"token": token} for token in _tokens(text)]
    for curves in text.curves[-LAYERS_OF_A_TEXT:]:
        for what, gate in (("writes", curves.write), ("reads", curves.read)):
            best = gate.max(-1)
            for row, value, number in zip(rows, *(x.tolist() for x in best), strict=True):
                row[f"layer {curves.layer} {what}"] = f"#{number:<3} {value:.2f}"
    title = "The text: the channel each token writes and reads most (--layer N --channel K for one)"
    return Table(title, dict.fromkeys(rows[0], ""), tuple(rows))


def _curve(text: WordedCurves, channel: int) -> Table:
    """Return what each token writes and reads, and what the channel then holds."""
    curves: LayerCurves = text.curves[0]
    memory, tokens = curves.memory(channel), _tokens(text)
    rows: list[Row] = []
    for i, token in enumerate(tokens):
        strongest = place = int(memory[i].argmax())
        # A token that is only more bytes of a character is shown by that.
        while text.text.tokens[place] == DITTO and place:
            place -= 1
        share = memory[i, strongest].item()
        gates = {name: getattr(curves, name)[i, channel].item() for name in ("write", "read")}
        row: Row = {"token": token} | gates | {"still_held": curves.mass[i, channel].item()}
        row["holds_most_of"] = f"{tokens[place]} {share:.0%}" if share > 0 else None
        rows.append(row)
    columns = {"token": "", "write": ".3f", "read": ".3f", "still_held": ".2f",
               "holds_most_of": ""}  # fmt: skip
    return Table("The text", columns, tuple(rows))
