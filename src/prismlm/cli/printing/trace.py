"""A trace on a terminal: coloured tokens, a table of predictions, shares and documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from prismlm.cli.format import count
from prismlm.cli.output import (
    NARROW_TOKEN_WIDTH,
    TOKEN_WIDTH,
    WIDTH_WHERE_PIPED,
    bar,
    console_for_reading,
    fit_ends,
    fit_name,
    plain,
    print_head,
    table_of,
)
from prismlm.cli.printing.chains import print_chains
from prismlm.explain.passages import Passage
from prismlm.explain.shares import DocumentShare, Share, Sources
from prismlm.explain.steps import Step
from prismlm.explain.support import WORDS
from prismlm.explain.trace import Trace
from prismlm.explain.verbatim import MINIMUM, Quote
from prismlm.index.around import Around, joined
from prismlm.index.where import UNKNOWN
from prismlm.pages.colours import colour
from prismlm.pages.trace import CAVEAT
from prismlm.pages.trace_data import visible

PREDICTIONS_SHOWN = 12
SHARES_SHOWN = 10
SMALLEST_SHOWN = 0.0005
# The heading of the column of what uncertainty feedback gave.
FED_BACK_WIDTH = 8
PLACE_WIDTH = 320
QUOTES_SHOWN = 3
LEAST_BAR, LEAST_FACT = 10, 8
# Columns of how many prototypes are beside those shown, and of a name beside another.
MORE_WIDTH, NAME_WIDTH, LEAST_NAME = 4, 24, 20


def print_trace(
    trace: Trace,
    sources: Sources | None,
    documents: Sequence[DocumentShare],
    against: Sequence[Passage] | None = None,
    *,
    top: int,
    all_shown: bool,
) -> None:
    """Print a trace and its shares; a pipe gets the same text without colour, 100 columns wide.

    ``against`` is printed where it was asked for.
    """
    console = console_for_reading()
    for note in trace.notes:
        console.print(plain(note), style="yellow")
    _print_support(console, trace)
    # It is of all text by evidence: beside shares of another kind it would not fit these.
    if sources is not None and sources.method == "evidence" and not sources.where:
        console.print(f"{plain(trace.summary or '')}\n")
    _print_header(console, trace)
    console.print(_tokens(trace))
    console.print()
    steps = trace.steps if all_shown else trace.steps[-PREDICTIONS_SHOWN:]
    _print_predictions(console, steps, top)
    if len(steps) < len(trace):
        console.print(
            f"Showing the last {len(steps)} of {len(trace)} predictions (--tokens A:B for a range, "
            "`--tokens 0:` for all)",
            style="dim",
        )
    console.print()
    if any(step.chains is not None for step in steps):
        print_chains(console, steps)
    if sources is None:
        console.print("No lens, so no training text: build one with prismlm index.", style="dim")
        return
    written = f"of the {trace.written:,} tokens written" if trace.written > 1 else None
    print_shares(console, sources, written)
    print_documents(console, documents)
    if against is not None:
        _print_against(console, against)
    for note in _notes(trace):
        console.print(note, style="yellow")
    if documents and trace.lens is not None and trace.lens.suffixes is not None:
        _print_quotes(console, trace.verbatim(QUOTES_SHOWN))
    console.print(CAVEAT, style="dim")


def _print_header(console: Console, trace: Trace) -> None:
    facts: list[str | Text] = []
    if trace.lens is not None:
        meta = trace.lens.meta
        facts.append(f"lens {trace.lens.name}")
        facts.append(f"{count(meta.tokens)} tokens of {count(meta.documents)} documents")
        if meta.trained_on is False:
            facts.append(Text("not what it was trained on", style="yellow"))
        elif meta.trained_on == "fine-tuned" and meta.split != "heldout":
            facts.append(
                "this corpus is the fine-tuning data; the pre-training data is not indexed"
            )
        elif meta.trained_on and meta.split == "heldout":
            facts.append(Text("held out when it was trained", style="yellow"))
    print_head(console, trace.model, *facts)


def _print_support(console: Console, trace: Trace) -> None:
    """Say first how well the corpus supports the answer at all."""
    support = trace.support
    if support is None:
        return
    style = {"strong": "bold green", "weak": "bold yellow", "none": "bold red"}[support.level]
    line = Text(f"Support: {support.level}", style=style)
    line.append(f"  {WORDS[support.level]}", "default")
    why = f"{support.score:.2f}; unseen {support.low:.2f}–{support.high:.2f}"
    if support.level == "none" and support.score >= support.low:
        why = f"{support.words:.1f} tokens stand together; unseen {support.low_words:.1f} or more"
    line.append(f"  ({why})", "dim")
    console.print(line)


def _tokens(trace: Trace) -> Text:
    text = Text()
    for step in trace.steps:
        shown = plain(step.pieces[0].shown).replace("\n", "↵\n")
        leading = max(step.prototypes, key=lambda use: use.evidence, default=None)
        text.append(
            shown,
            Style(color="#1b1a17", bgcolor=colour(leading.category))
            if leading is not None
            else Style(),
        )
    last = trace.steps[-1]
    if last.target_from != "text":
        text.append(" → ", "dim")
        text.append(visible(plain(last.pieces[1].label)), "italic")
    return text


def _print_predictions(console: Console, steps: Sequence[Step], top: int) -> None:
    longest = TOKEN_WIDTH if console.width >= WIDTH_WHERE_PIPED else NARROW_TOKEN_WIDTH
    tokens, targets = (
        [fit_ends(visible(plain(step.pieces[side].label)), longest) for step in steps]
        for side in (0, 1)
    )
    fed_back = any(step.uncertainty is not None for step in steps)
    widths = {
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


def print_shares(console: Console, sources: Sources, of: str | None = None) -> None:
    """Print shares as bars, and what they are shares of where that is not plain."""
    beside = f"  by {sources.by}" + (f", {of}" if of else "")
    console.print(Text("Where it comes from", style="bold").append(beside, "dim"))
    # What would read 0.0 % is told with the rest.
    count = sum(item.share >= SMALLEST_SHOWN for item in sources.items[:SHARES_SHOWN])
    shown, others = sources.items[:count], sources.items[count:]
    rows = [(item.key, item.share, _beside(item), "cyan") for item in shown]
    if others:
        rows.append((f"{len(others)} more", sum(item.share for item in others), [], "blue"))
    if sources.where:
        rows.append(("elsewhere", sources.elsewhere, [], "blue"))
    rows.append(("unattributed", sources.unattributed, [], "bright_black"))
    rated = any(beside for _, _, beside, _ in rows)
    widest = max([share for _, share, _, _ in rows] + [1e-9])
    # Numbers keep their columns whatever a key is called; keys and bars share what is left.
    numbers = [("share", 6), *((("in corpus", 9), ("lift", 8)) if rated else ())]
    room = console.width - sum(width + 2 for _, width in numbers) - 3
    longest = max(cell_len(plain(key)) for key, *_ in rows)
    key_width = max(10, min(40, longest, room - LEAST_BAR))
    bar_width = max(LEAST_BAR, min(36, room - key_width))
    widths = (key_width, *(width for _, width in numbers), bar_width)
    table = table_of("", *(f"*{heading}" for heading, _ in numbers), "", widths=widths)
    table.show_header = rated
    for column in table.columns[2:4] if rated else ():
        column.style = "dim"
    for key, share, beside, style in rows:
        drawn = Text(bar(share / widest, bar_width).rstrip(), style=style)
        columns = (beside or ["", ""]) if rated else []
        table.add_row(Text(fit_ends(plain(key), key_width)), f"{share:.1%}", *columns, drawn)
    console.print(table)
    console.print()


def _beside(share: Share) -> list[str]:
    """Return the base rate of a share and its lift, where they are known."""
    if share.base_rate is None or share.lift is None:
        return []
    return [_percent(share.base_rate), f"× {share.lift:.1f}"]


def print_documents(console: Console, documents: Sequence[DocumentShare]) -> None:
    """Print passages, or documents with their places, and their shares."""
    if not documents:
        return
    passages = isinstance(documents[0], Passage)
    console.print("Passages" if passages else "Documents", style="bold")
    for document in documents:
        _print_document(console, document)
    console.print()


def _print_document(console: Console, document: DocumentShare) -> None:
    head = Text(f"{document.share:>6.1%}  ", style="bold")
    facts = [document.title, document.source, document.license or f"licence {UNKNOWN}"]
    _print_named(console, head, document.doc_id, [fact for fact in facts if fact])
    if document.around is not None:
        also = document.also if isinstance(document, Passage) else []
        place = _place(document.around, also, console.width - 8)
        for line in place.wrap(console, console.width - 8):
            line.rstrip()
            console.print(Text(" " * 8).append_text(line))


def _print_named(console: Console, head: Text, name: str, facts: Sequence[str]) -> None:
    """Print a line of a name and facts after a head; the facts have what the name leaves."""
    head.append(fit_ends(plain(name), console.width - head.cell_len))
    first, *others = [_flat(fact) for fact in facts]
    rest = "".join(f" · {fact}" for fact in others)
    room = console.width - head.cell_len - 2
    left = room - cell_len(rest)
    if room >= LEAST_FACT:
        shown = fit_ends(first, left) + rest if left >= LEAST_FACT else fit_ends(first + rest, room)
        head.append(f"  {shown}", "dim")
    console.print(head, no_wrap=True)


def _print_against(console: Console, passages: Sequence[Passage]) -> None:
    """Print what speaks against the predictions; its shares are of its own kind alone."""
    title = Text("Against", style="bold")
    console.print(
        title.append("  text where another token came next; shares of these alone", "dim")
    )
    for passage in passages:
        _print_document(console, passage)
        assert passage.predicted is not None
        assert passage.probability is not None
        instead = Text(" " * 8 + "instead of ", style="dim")
        instead.append(visible(plain(passage.predicted)), "not dim")
        instead.append(f", to which the model gave {_percent(passage.probability)} there")
        console.print(instead, no_wrap=True, overflow="ellipsis")
    if not passages:
        console.print("none was found", style="dim")
    console.print()


def _notes(trace: Trace) -> Iterator[str]:
    """Yield what is missing: cells, the corpus itself, or predicted tokens in it."""
    lens = trace.lens
    if lens is None:
        return
    if lens.cells is None:
        yield (
            "This lens has no cells, so it names documents by their kept contexts and knows no "
            "passages, base rates or support: prismlm index --positions 1 adds them."
        )
    elif lens.corpus is None:
        yield (
            f"The corpus {lens.meta.corpus_name} is not where it was, or has changed since it was "
            "indexed, so passages have no text."
        )
    if trace.support is not None:
        tokens = trace.support.tokens
        absent = sum(token.nearest < 0 for token in tokens)
        if absent:
            yield (
                f"For {absent} of {len(tokens)} tokens, no indexed position in the active cells "
                "has that next token; their evidence stays unattributed."
            )


def _print_quotes(console: Console, quotes: list[Quote]) -> None:
    """Print what stands in the corpus word for word: that is no evidence of where it is from."""
    title = Text("Verbatim", style="bold").append("  stands word for word in the corpus", "dim")
    console.print(title)
    if not quotes:
        console.print(f"nothing of {MINIMUM} tokens or more", style="dim")
    for quote in quotes:
        line = Text(f"{quote.span.length:>4} tokens  ", style="bold")
        line.append(f"“{_flat(quote.text).strip()}”")
        first = quote.places[0]
        name = first["title"] or first["doc_id"] or f"position {first['position']:,}"
        more = f" and {quote.span.count - 1:,} more" if quote.span.count > 1 else ""
        line.truncate(max(console.width // 2, console.width - 2 - cell_len(f"{plain(name)}{more}")))
        line.append("  " + fit_ends(plain(name), console.width - line.cell_len - 2 - len(more)))
        console.print(line.append(more), no_wrap=True)
    console.print()


def _place(around: Around, also: Sequence[tuple[int, int]], width: int) -> Text:
    """Return a sentence; brackets say what is marked in it wherever there is no colour."""
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
    shown = place[max(0, at - side) : at + len(token) + side]
    blanks = len(shown.plain) - len(shown.plain.lstrip())
    shown = shown[blanks:]
    shown.rstrip()
    return Text("…").append_text(shown).append("…")


def _flat(text: str | None) -> str:
    return re.sub(r"[ \t]*\n\s*", " ↵ ", plain(text or "")).replace("\t", " ")


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "<0.1%"
