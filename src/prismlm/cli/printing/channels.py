"""A channel report on a terminal: figures, channels, sequences, a text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from prismlm.cli.format import count
from prismlm.cli.output import bar, console_for_reading, fit, plain, print_head, table_of
from prismlm.cli.printing.tables import show
from prismlm.corpus.words import DITTO
from prismlm.instruments.channels.curves import LayerCurves, WordedCurves
from prismlm.instruments.channels.report import Channel, ChannelReport, LayerReport
from prismlm.instruments.channels.top_sequences import ChannelSequence, Passage
from prismlm.instruments.results import Row, Table, text_of
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
        show(console, report.metrics)
        if beside is not None:
            show(console, beside.metrics)
        if channel is None:
            for table in report.tables[1:]:
                show(console, table)
    for one in report.layers:
        if channel is None:
            _print_channels(console, one, report, all_shown=layer is not None)
        else:
            _print_channel(console, one, one.channels[channel], report)
    if report.text is not None:
        console.print("The text", style="bold")
        tokens = [Text(fit(visible(plain(token)))) for token in report.text.text.tokens]
        if channel is None:
            _print_strongest(console, report.text, tokens)
        else:
            _print_curve(console, report.text, report.text.curves[0], tokens, channel)
        console.print()


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
    if not layer.channels:
        return
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
    """Return channels that lie evenly over the half-lives, the ends among them.

    Without half-lives they lie evenly over their numbers.
    """
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


def _word(word: str) -> str:
    return "end of document" if word == "" else plain(word.strip()) or visible(word)


def _print_channel(
    console: Console, layer: LayerReport, channel: Channel, report: ChannelReport
) -> None:
    console.print(f"Layer {layer.layer}, channel {channel.channel}", style="bold")
    if channel.half_life is None:
        line = "no half-life of its own: β depends on the token"
        read = () if report.text is None else report.text.curves
        curves = next((one for one in read if one.layer == layer.layer), None)
        if curves is not None:
            life = curves.half_life[channel.channel].item()
            line += f" (over the text {life:.3g} positions)"
    else:
        line = f"half-life {channel.half_life:.3g} positions (β {channel.decay:.4f})"
    if channel.repetition is not None:
        line += f" · repetition {channel.repetition:.2f}"
    if layer.lags is not None and not layer.shared_gates:
        p = layer.lags.p[channel.channel].item()
        best = layer.lags.correlation[channel.channel].max().item()
        line += (
            f" · read and write correlate most at lag {text_of(_lag(layer, channel.channel), '+d')}"
            f" ({text_of(best, '+.2f')}, p {p:.2f})"
        )
    console.print(line)
    if channel.tokens:
        shown = "  ".join(
            f"{visible(plain(token.text))} {token.count}×{token.gate:.2f}"
            for token in channel.tokens
        )
        console.print(Text("writes most: ").append(shown))
    for number, sequence in enumerate(channel.sequences, 1):
        passage = report.passages[sequence.start]
        head = Text(f"\n{number:>3}  ", "bold").append(f"writes {sequence.total:.2f} in all  ")
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
        inner = word.lstrip()
        if not word or word[0].isspace():
            shown.append(" ")
        if number in marked:
            shown.append(f"[{_word(word)}]", "bold")
        else:
            shown.append(plain(" ".join(inner.split())))
    return shown


def _print_strongest(console: Console, worded_curves: WordedCurves, tokens: Sequence[Text]) -> None:
    shown = worded_curves.curves[-LAYERS_OF_A_TEXT:]
    headings = [f"layer {c.layer} {what}" for c in shown for what in ("writes", "reads")]
    table = table_of("token", *headings)
    for i, token in enumerate(tokens):
        row: list[str | Text] = [token]
        for curves in shown:
            for gate in (curves.write[i], curves.read[i]):
                best = int(gate.argmax())
                row.append(f"#{best:<3} {gate[best].item():.2f}")
        table.add_row(*row)
    console.print(table)
    console.print(
        "The channel that a token writes and reads most, with its share of the gate; one "
        "channel's curve with --layer N --channel K",
        style="dim",
    )


def _print_curve(
    console: Console,
    worded_curves: WordedCurves,
    curves: LayerCurves,
    tokens: Sequence[Text],
    channel: int,
) -> None:
    memory = curves.memory(channel)
    write, read, mass = (x[:, channel].tolist() for x in (curves.write, curves.read, curves.mass))
    top = max(*write, *read, 1e-9)
    table = table_of("token", "write", "read", "*still held", "holds most of")
    for i, token in enumerate(tokens):
        strongest = int(memory[i].argmax())
        share = memory[i, strongest].item()
        held = Text("–")
        if share > 0:
            name = visible(plain(_token_at(worded_curves.text.tokens, strongest)))
            held = Text(f"{fit(name)} {share:.0%}")
        table.add_row(
            token,
            Text(f"{write[i]:.3f} {bar(write[i] / top, 14)}", "cyan"),
            Text(f"{read[i]:.3f} {bar(read[i] / top, 14)}", "yellow"),
            f"{mass[i]:.2f}",
            held,
        )
    console.print(table)


def _token_at(tokens: Sequence[str], place: int) -> str:
    """Return a token's text, or the character that it is more bytes of."""
    while tokens[place] == DITTO and place:
        place -= 1
    return tokens[place]
