"""A channel report on a terminal: figures, channels, sequences, a text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from prismlm.cli.format import count
from prismlm.cli.output import bar, console_for_reading, fit, plain, print_head, table_of
from prismlm.corpus.words import DITTO
from prismlm.instruments.channels.curves import LayerCurves, WordedCurves
from prismlm.instruments.channels.report import Channel, ChannelReport, LayerReport
from prismlm.instruments.channels.top_sequences import ChannelSequence, Passage
from prismlm.instruments.channels.wording import (
    lag_words,
    locality_words,
    median_correlation,
    signed,
)
from prismlm.pages.trace_data import visible

CHANNELS_SHOWN = 8
TOKENS_SHOWN = 5
TOKENS_WIDTH = 26
# Columns of the channels' table before its last, with the gaps between them.
TAKEN = 7 + 9 + 7 + 3 + TOKENS_WIDTH + 5 * 2 + 1
WORDS_AROUND = 12
WORDS_AROUND_IN_FULL = 14
LAYERS_OF_A_TEXT = 4
KINDS = {"write": "write", "read": "read", "values": "‖value‖"}


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
    _print_metrics(console, [report] if beside is None else [report, beside])
    if report.locality is not None and channel is None:
        _print_findings(console, report)
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


def _print_metrics(console: Console, reports: Sequence[ChannelReport]) -> None:
    if not any(layer.metrics for report in reports for layer in report.layers):
        return
    table = table_of(
        "layer", "gate", "*L1 sparsity", "*of", "*Gini", "*entropy", "*of ln R", "*information",
        "*corrected", *(["model"] if len(reports) > 1 else []),
    )  # fmt: skip
    for report in reports:
        for layer in report.layers:
            for kind, found in layer.metrics.items():
                table.add_row(
                    str(layer.layer),
                    KINDS[kind],
                    f"{found.sparsity_ratio:.2f}",
                    str(found.width),
                    f"{found.gini:.3f}",
                    f"{found.entropy:.3f}",
                    "–" if math.isnan(found.entropy_share) else f"{found.entropy_share:.0%}",
                    f"{found.mutual_information:.3f}",
                    f"{found.mutual_information_corrected:.3f}",
                    *([Text(plain(report.model))] if len(reports) > 1 else []),
                )
    console.print(table)
    console.print(
        "entropy and mutual information with the token in nats; corrected after Miller and Madow",
        style="dim",
    )
    console.print()


def _print_findings(console: Console, report: ChannelReport) -> None:
    locality = report.locality
    assert locality is not None
    console.print("Half-life against repetition", style="bold")
    for line in locality_words(locality):
        console.print(line)
    if locality.quartiles is not None:
        means = "  ".join(f"{mean:.3f}" for mean in locality.quartiles.means)
        bounds = "  ".join(f"{bound:.3g}" for bound in locality.quartiles.bounds)
        console.print(f"mean repetition by quartile: {means}   (half-lives {bounds} between)")
    console.print()
    console.print("Is a channel read before it is written?", style="bold")
    for layer in report.layers:
        line = f"layer {layer.layer}  {lag_words(layer)}"
        if not layer.shared_gates:
            found, mean, deviation = median_correlation(layer, 1)
            line += (
                f"; at lag +1 the median correlation is {signed(found, 3)}, shuffled "
                f"{signed(mean, 3)} ± {deviation:.3f}"
            )
        console.print(line)
    console.print()


def _print_channels(
    console: Console, layer: LayerReport, report: ChannelReport, *, all_shown: bool
) -> None:
    if not layer.channels:
        return
    shown = layer.channels if all_shown else _spread(layer.channels)
    note = " · reads by its write gate" if layer.shared_gates else ""
    console.print(Text(f"Layer {layer.layer}", style="bold").append(note, "dim"))
    ranked = any(channel.sequences for channel in shown)
    if not ranked:
        lives = sorted(c.half_life for c in layer.channels if c.half_life is not None)
        console.print(
            f"half-lives {lives[0]:.3g} to {lives[-1]:.3g}, median {lives[len(lives) // 2]:.3g} "
            "positions"
            if lives
            else "decays depend on the token, so channels have no half-life of their own"
        )
    table = table_of("*channel", "*half-life", *(["*repeats", "*lag"] if ranked else []))
    room = console.width - TAKEN
    if ranked:
        table.add_column("writes most", no_wrap=True, width=TOKENS_WIDTH, overflow="ellipsis")
        table.add_column("first sequence", no_wrap=True, width=room, overflow="ellipsis")
    for channel in shown:
        life = "–" if channel.half_life is None else f"{channel.half_life:.2f}"
        row: list[str | Text] = [str(channel.channel), life]
        if ranked:
            row += [f"{channel.repetition:.2f}", _lag(layer, channel.channel)]
            tokens = [visible(plain(t.text)) for t in channel.tokens[:TOKENS_SHOWN]]
            first = [_snippet(one, report, room) for one in channel.sequences[:1]]
            row += [Text("  ".join(tokens)), *first]
        table.add_row(*row)
    console.print(table)
    if len(shown) < len(layer.channels):
        order = (
            "evenly by number"
            if shown[0].half_life is None
            else "from the shortest half-life to the longest"
        )
        console.print(
            f"{len(shown)} of {len(layer.channels)}, {order}; all with --layer {layer.layer}",
            style="dim",
        )
    console.print()


def _spread(channels: Sequence[Channel]) -> list[Channel]:
    """Return channels that lie evenly over the half-lives, the ends among them.

    Without half-lives they lie evenly over their numbers.
    """
    ordered = sorted(channels, key=lambda channel: channel.half_life or 0.0)
    if len(ordered) <= CHANNELS_SHOWN:
        return ordered
    step = (len(ordered) - 1) / (CHANNELS_SHOWN - 1)
    return [ordered[round(step * i)] for i in range(CHANNELS_SHOWN)]


def _lag(layer: LayerReport, channel: int) -> str:
    """Return the lag of the peak; nothing with shared gates or a gate that never varies."""
    if layer.lags is None or layer.shared_gates or layer.lags.p[channel].isnan():
        return "–"
    return f"{layer.lags.peak[channel].item():+d}".replace("-", "−").replace("+0", "0")


def _snippet(sequence: ChannelSequence, report: ChannelReport, room: int) -> Text:
    """Return the place where a sequence writes most, the word in brackets."""
    place = sequence.tokens[0].position - sequence.start
    before, word, after = report.passages[sequence.start].text.around(place, WORDS_AROUND)
    marked = f"[{fit(_word(word), max(4, room - 4))}]"
    left = plain(" ".join((before + (" " if _apart(word) else "")).split()))
    shown = Text(left[-max(0, (room - len(marked)) // 2) :].lstrip())
    shown.append(" " if _apart(word) and shown else "").append(marked, "bold")
    following = plain(" ".join(after.split()))
    return shown.append(" " if after[:1].isspace() else "").append(following)


def _apart(word: str) -> bool:
    """Say whether a space stands before a word."""
    return not word or word[0].isspace()


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
            f" · read and write correlate most at lag {_lag(layer, channel.channel)} "
            f"({signed(best, 2)}, p {p:.2f})"
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
        for line in _excerpt(sequence, passage).wrap(console, console.width - 6):
            console.print(Text("     ").append_text(line))
    console.print()


def _excerpt(sequence: ChannelSequence, passage: Passage) -> Text:
    """Return the words around the one that writes most, kept ones in brackets."""
    words = passage.text
    marked = {words.word_of[token.position - sequence.start] for token in sequence.tokens}
    middle = words.word_of[sequence.tokens[0].position - sequence.start]
    first = max(0, middle - WORDS_AROUND_IN_FULL)
    shown = Text("…" if first else "")
    for number, word in enumerate(words.words[first : middle + WORDS_AROUND_IN_FULL + 1], first):
        inner = word.lstrip()
        if _apart(word):
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
