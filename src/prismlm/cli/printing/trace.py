"""A trace on a terminal: support, documents with passages, shares, a table of predictions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from prismlm.cli.format import count
from prismlm.cli.output import (
    NARROW_TOKEN_WIDTH,
    TOKEN_WIDTH,
    WIDTH_WHERE_PIPED,
    bar,
    fit_ends,
    fit_name,
    plain,
    table_of,
)
from prismlm.cli.printing.chains import print_chains
from prismlm.explain.passages import Passage
from prismlm.explain.shares import DocumentShare, Method, Sources, worth_showing
from prismlm.explain.steps import Step
from prismlm.explain.summary import LEAST_SAID, doubts
from prismlm.explain.trace import Trace
from prismlm.explain.verbatim import Quote
from prismlm.index.around import Around, joined
from prismlm.index.lens import Lens
from prismlm.index.where import UNKNOWN, Where
from prismlm.pages.colours import colour
from prismlm.pages.trace import CAVEAT
from prismlm.pages.trace_data import visible

SHARES_SHOWN = 6
# Passages that those of the documents are looked for among.
PASSAGES_READ = 50
INDENT = 7
# What is left of a word at the ends of a text that is cut, in scripts with spaces.
WORD_ENDS, WORD_BEGINS = re.compile(r"\S{0,24}(?=\s)"), re.compile(r"(?<=\s)\S{0,24}$")
# The heading of the column of what uncertainty feedback gave.
FED_BACK_WIDTH = 8
PLACE_WIDTH = 320
QUOTES_SHOWN = 3
LEAST_BAR, LEAST_FACT = 10, 8
# Columns of how many prototypes are beside those shown, and of a name beside another.
MORE_WIDTH, NAME_WIDTH, LEAST_NAME = 4, 24, 20


@dataclass(frozen=True)
class Shown:
    """What is printed of a trace.

    Attributes:
        by: what shares are by.
        documents: how many documents, each with its passages.
        passages: whether documents are printed, too, that carry little, or of an answer that the
            corpus has nothing about.
        against: how many passages where another token came next.
        table: whether the table of predictions is printed.
        top: prototypes shown in it for each.
        method, where: as of :meth:`Trace.sources`.
    """

    by: str
    documents: int
    passages: bool
    against: int
    table: bool
    top: int
    method: Method
    where: Where


def prepare(trace: Trace, shown: Shown) -> None:
    """Find what will be printed, which takes time and may be refused.

    Raises:
        InputError: a filter names what is not there, or there is no text to speak against.
    """
    if trace.lens is not None:
        _ = trace.summary, trace.sources(shown.by, method=shown.method, where=shown.where)
        if shown.against:
            trace.against(shown.against, where=shown.where, estimated=True)


def print_trace(console: Console, trace: Trace, shown: Shown) -> None:
    """Print what stands below an answer: support, documents, shares, and the table if asked for."""
    for note in trace.notes:
        console.print(plain(note), style="yellow")
    if trace.lens is None:
        console.print("No lens, so no training text: build one with prismlm index.", style="dim")
    elif not trace.written or trace.answer.strip() or shown.passages:
        _print_sources(console, trace, shown)
    if shown.table:
        _print_predictions(console, trace.steps, shown.top)
        if any(step.chains is not None for step in trace.steps):
            console.print()
            print_chains(console, trace.steps)
        console.print()
    if trace.lens is not None:
        _print_footer(console, trace, shown)


def _print_sources(console: Console, trace: Trace, shown: Shown) -> None:
    lens, support = trace.lens, trace.support
    assert lens is not None
    absent = support is not None and support.level == "none"
    if support is not None:
        style = {"strong": "bold green", "weak": "bold yellow", "none": "bold red"}[support.level]
        console.print(support.sentence, style=style)
    for note in _missing(trace, lens):
        console.print(note, style="yellow")
    # It is of all text by evidence: beside shares of another kind it would not fit these.
    if shown.method == "evidence" and not shown.where and not absent:
        console.print(plain(trace.summary or ""))
    console.print()
    how: dict[str, Any] = {"method": shown.method, "where": shown.where}
    if not absent or shown.passages:
        found = trace.documents(shown.documents, **how) if shown.documents else []
        documents = found if shown.passages else worth_showing(found)
        near: dict[str, Passage] = {}
        if documents and shown.method == "evidence" and lens.cells is not None:
            for passage in trace.passages(PASSAGES_READ, where=shown.where):
                near.setdefault(passage.doc_id, passage)
        print_documents(console, documents, near, cut=len(documents) < len(found))
        print_shares(console, trace.sources(shown.by, **how))
        if documents and lens.suffixes is not None:
            _print_quotes(console, trace.verbatim(QUOTES_SHOWN))
    else:
        console.print("--passages shows the text that comes nearest, all the same.\n", style="dim")
    if shown.against:
        look = partial(trace.against, shown.against, where=shown.where)
        with console.capture() as estimates:
            _print_against(console, look(estimated=True), "estimates; the model reads it again …")
        text = Text.from_ansi(estimates.get())
        with Live(text, console=console, auto_refresh=False, transient=True):
            passages = look()
        _print_against(console, passages, "shares of these alone")


def _missing(trace: Trace, lens: Lens) -> Iterator[str]:
    """Yield what a lens lacks: cells, a scale of support, or the corpus itself."""
    again = "prismlm index MODEL --corpus DIR --positions 1 --overwrite"
    if lens.cells is None:
        yield (
            "This lens has no cells, so it names documents by their kept contexts and knows no "
            f"passages, base rates or support. To add them: {again}"
        )
        return
    # Where states are zero, that has been said.
    if trace.support is None and not doubts(trace.table):
        yield (
            "How well the corpus supports the answer is unknown: this lens has no support scale. "
            f"To measure one, of a few dozen documents or more: {again}"
        )
    if lens.corpus is None:
        own = lens.readable is not None
        given = "are decoded from the lens's own tokens" if own else "have no text"
        yield (
            f"The corpus {lens.meta.corpus_name} is not where it was, or has changed since it was "
            f"indexed, so passages {given}. --corpus DIR says where it is."
        )


def _print_footer(console: Console, trace: Trace, shown: Shown) -> None:
    """Print in small print what corpus this is, what a share does not mean, and where more is."""
    assert trace.lens is not None
    lens, meta = trace.lens, trace.lens.meta
    texts = "1 document" if meta.documents == 1 else f"{count(meta.documents)} documents"
    said = [f"Lens {lens.name}: {count(meta.tokens)} tokens of {texts}."]
    if meta.trained_on is False:
        said.append("The model was not trained on this corpus.")
    elif meta.trained_on and meta.split == "heldout":
        said.append("These documents were held out when the model was trained.")
    elif meta.trained_on == "fine-tuned":
        said.append("This corpus is the fine-tuning data; the pre-training data is not indexed.")
    console.print(" ".join([*said, CAVEAT]), style="dim")
    more = "" if shown.table else "--tokens all explains every token. "
    more += "--json prints every figure, with document ids for prismlm sources."
    console.print(more, style="dim")


def _print_predictions(console: Console, steps: Sequence[Step], top: int) -> None:
    longest = TOKEN_WIDTH if console.width >= WIDTH_WHERE_PIPED else NARROW_TOKEN_WIDTH
    tokens, targets = (
        [fit_ends(visible(plain(step.pieces[side].label)), longest) for step in steps]
        for side in (0, 1)
    )
    fed_back = any(step.uncertainty is not None for step in steps)
    widths = {
        "*no.": max(3, len(str(steps[-1].position))),
        "token": max(5, *map(cell_len, tokens)),
        "target": max(6, *map(cell_len, targets)),
        "*prob.": 5,
        "explained": 10,
        **({"*fed back": FED_BACK_WIDTH} if fed_back else {}),
    }
    # One to spare: rich 13.9 squeezes a column where the edge's padding would not fit as well.
    room = console.width - sum(widths.values()) - 2 * len(widths) - 2 - MORE_WIDTH - 2 - 6 - 1
    widths |= {"logits of prototypes": max(12, room), "*more": MORE_WIDTH, "*resid.": 6}
    room = widths["logits of prototypes"]
    table = table_of(*widths, widths=widths.values())
    for step, token, target in zip(steps, tokens, targets, strict=True):
        share = Text(bar(step.explained_share, 4), style="cyan")
        share.append(f" {step.explained_share:>4.0%}", style="default")
        table.add_row(
            str(step.position),
            Text(token),
            Text(target, style="bold"),
            _percent(step.probability),
            share,
            *(["–" if (one := step.uncertainty) is None else f"{one:.0%}"] if fed_back else []),
            *_prototypes(step, top, room),
            f"{step.residual:+.2f}",
        )
    console.print(table)


def _prototypes(step: Step, top: int, room: int) -> tuple[Text, str]:
    """Return as many of the first ``top`` prototypes as fit, and how many there are beside."""
    shown, fitting = Text(), 0
    for use in step.prototypes[:top]:
        item = Text("  " if fitting else "").append(f"{use.contribution:+.2f} ")
        number = f" #{use.id}"
        left = room - shown.cell_len - item.cell_len - len(number)
        # The first is always shown, so its name has what its figures leave.
        if fitting and left < LEAST_NAME:
            break
        alone = not fitting and left < 2 * LEAST_NAME + len(number) + len("  +0.00 ")
        name = fit_name(plain(use.name or "prototype"), left if alone else min(left, NAME_WIDTH))
        item.append(name, colour(use.category)).append(number, "dim")
        shown.append_text(item)
        fitting += 1
    beside = len(step.prototypes) - fitting
    return shown, str(beside) if beside else ""


def print_shares(console: Console, sources: Sources) -> None:
    """Print shares as bars, beside those that the corpus has of each."""
    console.print(Text("Where it comes from", style="bold").append(f"  by {sources.by}", "dim"))
    shown = [item for item in sources.items[:SHARES_SHOWN] if item.share >= LEAST_SAID]
    others = sources.items[len(shown) :]
    rows = [(item.key, item.share, item.base_rate, "cyan") for item in shown]
    if others:
        rows.append((f"others: {len(others)}", sum(item.share for item in others), None, "blue"))
    if sources.where:
        rows.append(("elsewhere", sources.elsewhere, None, "blue"))
    rows.append(("not traced to the corpus", sources.unattributed, None, "bright_black"))
    rated = any(rate is not None for _, _, rate, _ in rows)
    widest = max([share for _, share, _, _ in rows] + [1e-9])
    # Numbers keep their columns whatever a key is called; keys and bars share what is left.
    numbers = [("share", 6), *([("of the corpus", 13)] if rated else [])]
    room = console.width - sum(width + 2 for _, width in numbers) - 3
    longest = max(cell_len(plain(key)) for key, *_ in rows)
    key_width = max(10, min(40, longest, room - LEAST_BAR))
    bar_width = max(LEAST_BAR, min(36, room - key_width))
    widths = (key_width, *(width for _, width in numbers), bar_width)
    table = table_of("", *(f"*{heading}" for heading, _ in numbers), "", widths=widths)
    for key, share, rate, style in rows:
        drawn = Text(bar(share / widest, bar_width).rstrip(), style=style)
        columns = [Text("" if rate is None else _percent(rate), "dim")] if rated else []
        table.add_row(Text(fit_ends(plain(key), key_width)), _percent(share), *columns, drawn)
    console.print(table)
    console.print()


def print_documents(
    console: Console,
    documents: Sequence[DocumentShare],
    passages: Mapping[str, Passage] | None = None,
    *,
    cut: bool = False,
) -> None:
    """Print documents and their shares, each with the passage that carries most, by its id."""
    if not documents:
        return
    console.print("Documents behind it", style="bold")
    for document in documents:
        _print_document(console, document, (passages or {}).get(document.doc_id, document))
    if cut:
        console.print("All others carry far less: --passages shows them.", style="dim")
    console.print()


def _print_document(console: Console, document: DocumentShare, place: DocumentShare) -> None:
    head = Text(f"{_percent(document.share):>5}  ", style="bold")
    head.append(fit_ends(_flat(document.title or document.doc_id), console.width - head.cell_len))
    facts = [document.source, document.license or f"licence {UNKNOWN}"]
    rest = " · ".join(_flat(fact) for fact in facts if fact)
    if (room := console.width - head.cell_len - 2) >= LEAST_FACT:
        head.append(f"  {fit_ends(rest, room)}", "dim")
    console.print(head, no_wrap=True)
    if place.around is None:
        return
    also = place.also if isinstance(place, Passage) else []
    text = place_text(place.around, also, console.width - INDENT)
    for line in text.wrap(console, console.width - INDENT):
        line.rstrip()
        console.print(Text(" " * INDENT).append_text(line))


def _print_against(console: Console, passages: Sequence[Passage], figures: str) -> None:
    """Print what speaks against the predictions, and what figures these are."""
    title = Text("Against", style="bold")
    console.print(title.append(f"  text where another token came next; {figures}", "dim"))
    for passage in passages:
        _print_document(console, passage, passage)
        assert passage.predicted is not None
        assert passage.probability is not None
        instead = Text(" " * INDENT + "instead of ", style="dim")
        instead.append(visible(plain(passage.predicted)), "not dim")
        instead.append(f", to which the model gave {_percent(passage.probability)} there")
        console.print(instead, no_wrap=True, overflow="ellipsis")
    if not passages:
        console.print("none was found", style="dim")
    console.print()


def _print_quotes(console: Console, quotes: list[Quote]) -> None:
    """Print what stands in the corpus word for word: that is no evidence of where it is from."""
    if not quotes:
        return
    console.print("Word for word in the corpus", style="bold")
    for quote in quotes:
        line = Text(" " * INDENT).append(f"“{_flat(quote.text).strip()}”")
        first = quote.places[0]
        name = first["title"] or first["doc_id"] or f"position {first['position']:,}"
        more = f" and {quote.span.count - 1:,} more" if quote.span.count > 1 else ""
        line.truncate(
            max(console.width // 2, console.width - 2 - cell_len(f"{plain(name)}{more}")),
            overflow="ellipsis",
        )
        line.append("  " + fit_ends(plain(name), console.width - line.cell_len - 2 - len(more)))
        console.print(line.append(more), no_wrap=True)
    console.print()


def place_text(around: Around, also: Sequence[tuple[int, int]], width: int) -> Text:
    """Return the sentence around a place, in brackets what is marked: there may be no colour."""
    text, begin, end = str(around), len(around.before), len(around.before + around.token)
    # Of a token of blanks alone, its line end is what is marked.
    word = around.token.lstrip() or around.token.lstrip(" ")
    own = (end - len(word), end) if word else (begin, end)
    stretches = sorted([*also, own])
    token, place = visible(plain(text[slice(*own)])).replace("·", " "), Text()
    at = done = 0
    for first, last in joined(text, stretches) if word.strip() else stretches:
        place.append(_flat(text[done:first])).append("[", "bold")
        if first <= own[0] < last:
            place.append(_flat(text[first : own[0]]), "bold")
            at = len(place)
            place.append(token, "bold reverse").append(_flat(text[own[1] : last]), "bold")
        else:
            place.append(_flat(text[first:last]), "bold")
        place.append("]", "bold")
        done = last
    place.append(_flat(text[done:]))
    side = max(10, (min(PLACE_WIDTH, 2 * width) - cell_len(token) - 2) // 2)
    first, last = max(0, at - side), min(len(place), at + len(token) + side)
    # A word that is cut goes, and no ellipsis stands where nothing is cut off.
    if first and (part := WORD_ENDS.match(place.plain, first, at)):
        first = part.end()
    if last < len(place) and (part := WORD_BEGINS.search(place.plain, at + len(token), last)):
        last = part.start()
    shown = place[first:last]
    cut = first > 0, last < len(place)
    shown = shown[len(shown.plain) - len(shown.plain.lstrip()) :]
    shown.rstrip()
    return Text("…" * cut[0]).append_text(shown).append("…" * cut[1])


def _flat(text: str | None) -> str:
    return re.sub(r"[ \t]*\n\s*", " ↵ ", plain(text or "")).replace("\t", " ")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= LEAST_SAID else "<1%"
