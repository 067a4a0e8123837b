"""An explanation on a terminal: the answer, support, documents, shares, the table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from prismlm.cli.output import (
    Writer,
    bar,
    console_for_reading,
    count,
    fit_ends,
    plain,
    show,
    show_rows,
    token_text,
)
from prismlm.explain.attribution import Passage, Sources, worth_showing
from prismlm.explain.positions import Method
from prismlm.explain.steps import Step
from prismlm.explain.summary import LEAST_SAID
from prismlm.explain.trace import Trace
from prismlm.explain.verbatim import Quote
from prismlm.lens.lens import Lens
from prismlm.lens.text import Around, joined
from prismlm.lens.where import UNKNOWN, Where
from prismlm.pages.colours import colour
from prismlm.pages.trace import CAVEAT
from prismlm.probes.results import Row, Table

# Lines of a prompt; of a longer one, both ends are shown.
PROMPT_LINES = 3
SHARES_SHOWN, QUOTES_SHOWN = 6, 3
# Passages that those of the documents are looked for among.
PASSAGES_READ = 50
INDENT, BAR_WIDTH, KEY_WIDTH, PLACE_WIDTH = 7, 24, 40, 320
REBUILD = "prismlm index MODEL --corpus DIR --positions 1 --overwrite"
STYLES = {"strong": "bold green", "weak": "bold yellow", "none": "bold red"}


class AnswerPrinter:
    """Prints what a model was asked, dim, and below it what the model wrote.

    Args:
        console: that is written to.
        question: a text, or a chat's last message of the user.
    """

    def __init__(self, console: Console, question: str) -> None:
        self._console, self._writer, self._question = console, Writer(console), question
        self._begun = False

    def follow(self, step: Step) -> None:
        """Print the target of one step, if the model wrote it."""
        shown = step.pieces[1].shown if step.target_from == "generated" else ""
        if shown := shown if self._begun else shown.lstrip():
            self._begin()
            self._writer.write(shown)

    def pause(self) -> None:
        """End the line of what was written so far."""
        if self._begun:
            self._writer.end()

    def finish(self, trace: Trace, is_text: bool) -> None:
        """Print what was not printed yet, and what must be said of the answer."""
        answers = trace.written or trace.first
        if not answers:
            self._writer.write(self._question if is_text else trace.answer)
        elif not self._begun:
            self._begin()
            self._writer.write(trace.answer.strip())
        if not trace.written and is_text:
            self._writer.write(f" → {token_text(trace.steps[-1].pieces[1].label)}")
        self._writer.end()
        if trace.written and not trace.answer.strip():
            self._console.print("The model wrote nothing: it ended the text at once.", style="bold")
        elif answers and repeats(self._question, trace.answer):
            note = "The answer repeats the question, so what follows is about the question's words."
            self._console.print(note, style="yellow")
        self._console.print()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            shown = fit_ends(self._question, PROMPT_LINES * self._console.width)
            self._console.print(shown, style="dim", end="\n\n")


def repeats(question: str, answer: str) -> bool:
    """Say whether an answer is little more than the question, or its beginning, once again."""
    asked, said = (re.findall(r"\w+", text.casefold()) for text in (question, answer))
    same = min(len(asked), len(said))
    return same > 3 and asked[:same] == said[:same] and len(said) <= 2 * len(asked)


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
    documents: int = 5
    passages: bool = False
    against: int = 0
    table: bool = False
    top: int = 3
    method: Method = "evidence"
    where: Where = field(default_factory=dict[str, Any])


class Found(NamedTuple):
    """What stands behind a trace; ``against`` are estimates, until the text is read again."""

    sources: Sources
    documents: Sequence[Passage]
    near: Mapping[str, Passage]
    quotes: Sequence[Quote]
    against: Sequence[Passage]


def find_sources(trace: Trace, shown: Shown) -> Found | None:
    """Return what will be printed, which takes time and may be refused; None without a lens."""
    lens = trace.lens
    if lens is None:
        return None
    how: dict[str, Any] = {"method": shown.method, "where": shown.where}
    documents = trace.documents(shown.documents, **how) if shown.documents else []
    near: dict[str, Passage] = {}
    if documents and shown.method == "evidence":
        for passage in trace.passages(PASSAGES_READ, where=shown.where):
            near.setdefault(passage.doc_id, passage)
    quotes = trace.verbatim(QUOTES_SHOWN) if documents and lens.suffixes is not None else []
    against: Sequence[Passage] = []
    if shown.against:
        against = trace.against(shown.against, where=shown.where, estimated=True)
    return Found(trace.sources(shown.by, **how), documents, near, quotes, against)


def print_trace(trace: Trace, found: Found | None, shown: Shown) -> None:
    """Print what stands below an answer: support, documents, shares, and the table if asked for."""
    console = console_for_reading()
    for note in trace.notes:
        console.print(plain(note), style="yellow")
    if found is None:
        console.print("No lens, so no training text: build one with prismlm index.", style="dim")
    elif not trace.written or trace.answer.strip() or shown.passages:
        _print_found(console, trace, found, shown)
    if shown.table:
        print_predictions(trace.steps, shown.top)
    if trace.lens is not None:
        console.print(_about(trace.lens), style="dim")
        table = "" if shown.table else "--tokens all explains every token. "
        more = "--json prints every figure, with document ids for prismlm sources."
        console.print(table + more, style="dim")


def _print_found(console: Console, trace: Trace, found: Found, shown: Shown) -> None:
    support = trace.support
    absent = support is not None and support.level == "none"
    if support is not None:
        console.print(support.sentence, style=STYLES[support.level])
    assert trace.lens is not None
    for note in _missing(trace, trace.lens):
        console.print(note, style="yellow")
    # The summary is of all text by evidence, and would not fit shares of another kind.
    if shown.method == "evidence" and not shown.where and not absent:
        console.print(plain(trace.summary or ""))
    console.print()
    if absent and not shown.passages:
        console.print("--passages shows the text that comes nearest, all the same.\n", style="dim")
    else:
        documents = found.documents if shown.passages else worth_showing(list(found.documents))
        print_documents(console, documents, found.near)
        if len(documents) < len(found.documents):
            console.print("All others carry far less: --passages shows them.\n", style="dim")
        print_shares(found.sources)
        if documents:
            _print_quotes(console, found.quotes)
    if shown.against:
        with console.capture() as estimates:
            _print_against(console, found.against, "estimates; the model reads it again …")
        # They stand on a terminal until the model's figures replace them, and never in a pipe.
        text = Text.from_ansi(estimates.get())
        with Live(text, console=console, auto_refresh=False, transient=True):
            against = trace.against(shown.against, where=shown.where)
        _print_against(console, against, "shares of these alone")


def _missing(trace: Trace, lens: Lens) -> Iterator[str]:
    """Yield what a lens lacks: a scale of support, or the corpus itself."""
    # Where states are zero, that has been said.
    if trace.support is None and not trace.doubts:
        yield f"Support is unknown: this lens has no support scale. To measure one: {REBUILD}"
    if lens.corpus is None:
        own = lens.readable is not None
        given = "are decoded from the lens's own tokens" if own else "have no text"
        yield (
            f"The corpus {lens.meta.corpus_name} is not where it was, or has changed since it was "
            f"indexed, so passages {given}. --corpus DIR says where it is."
        )


def _about(lens: Lens) -> str:
    """Return what corpus this is, and what a share does not mean."""
    meta = lens.meta
    texts = "1 document" if meta.documents == 1 else f"{count(meta.documents)} documents"
    about = f"Lens {lens.name}: {count(meta.tokens)} tokens of {texts}."
    if meta.trained_on is False:
        about += " The model was not trained on this corpus."
    elif meta.trained_on and meta.split == "heldout":
        about += " These documents were held out when the model was trained."
    elif meta.trained_on == "fine-tuned":
        about += " This corpus is the fine-tuning data; the pre-training data is not indexed."
    return f"{about} {CAVEAT}"


def print_predictions(steps: Sequence[Step], top: int) -> None:
    """Print a row for each prediction, and what led to it through channels where there are any."""
    rows = [
        {
            "no": step.position,
            "token": token_text(step.pieces[0].label),
            "target": Text(token_text(step.pieces[1].label), "bold"),
            "prob": percent(step.probability),
            "explained": Text(f"{bar(step.explained_share, 4):<4} {step.explained_share:>4.0%}"),
            "fed_back": step.uncertainty,
            "resid": step.residual,
            "logits of prototypes": _prototypes(step, top),
        }
        for step in steps
    ]
    columns = dict.fromkeys(rows[0], "") | {"fed_back": ".0%", "resid": "+.2f"}
    show(Table("", columns, tuple(rows)), cut="logits of prototypes")
    chained = [row for step in steps for row in _chain(step)]
    if chained:
        columns = {"target": "", "prototype": "", "channels": "+.1%", "the largest ← tokens": ""}
        title = "Through channels: share of the leading prototype's activation, direct path only"
        show(Table(title, columns, tuple(chained)), cut="the largest ← tokens")


def _prototypes(step: Step, top: int) -> Text:
    shown = Text()
    for use in step.prototypes[:top]:
        shown.append(f"{use.contribution:+.2f} ")
        shown.append(fit_ends(use.name or "prototype", 24), colour(use.category))
        shown.append(f" #{use.id}  ", "dim")
    others = len(step.prototypes) - top
    return shown.append(f"and {others}" if others > 0 else "", "dim")


def _chain(step: Step) -> Iterator[Row]:
    """Yield what the leading prototype had directly through channels, if it had any."""
    for chain in (step.chains or ())[:1]:
        leading = "nothing was written before"
        if chain.channels:
            use = chain.channels[0]
            tokens = (
                f'"{token_text(source.token)}" {source.part / chain.activation:+.1%}'
                for source in use.tokens
            )
            leading = f"L{use.layer} channel {use.channel} (half-life {use.half_life:.1f}) "
            leading += f"{use.share:+.1%} ← {', '.join(tokens)}"
        yield {
            "target": Text(token_text(step.pieces[1].label), "bold"),
            "prototype": f"#{chain.prototype}",
            "channels": sum(chain.mixers) / chain.activation,
            "the largest ← tokens": leading,
        }


def print_shares(sources: Sources) -> None:
    """Print shares as bars, beside those that the corpus has of each."""
    shown = [item for item in sources.items[:SHARES_SHOWN] if item.share >= LEAST_SAID]
    others = sources.items[len(shown) :]
    rows = [(item.key, item.share, item.base_rate, "cyan") for item in shown]
    if others:
        rows.append((f"others: {len(others)}", sum(item.share for item in others), None, "blue"))
    if sources.where:
        rows.append(("elsewhere", sources.elsewhere, None, "blue"))
    rows.append(("not traced to the corpus", sources.unattributed, None, "bright_black"))
    widest = max([share for _, share, _, _ in rows] + [1e-9])
    cells = [
        {
            sources.by: fit_ends(key, KEY_WIDTH),
            "share": Text(f"{percent(share):>5}"),
            "base rate": Text("" if rate is None else f"{percent(rate):>9}", "dim"),
            "": Text(bar(share / widest, BAR_WIDTH), style),
        }
        for key, share, rate, style in rows
    ]
    show_rows("Where it comes from", dict.fromkeys(cells[0], ""), cells)


def print_documents(
    console: Console,
    documents: Sequence[Passage],
    near: Mapping[str, Passage] | None = None,
) -> None:
    """Print documents and their shares, each with the passage that carries most, by its id."""
    if documents:
        console.print("Documents behind it", style="bold")
        for document in documents:
            _print_document(console, document, (near or {}).get(document.doc_id, document))
        console.print()


def _print_document(console: Console, document: Passage, place: Passage) -> None:
    head = Text(f"{percent(document.share):>5}  ", style="bold")
    head.append(fit_ends(document.title or document.doc_id, console.width - head.cell_len))
    facts = (document.source, document.license or f"licence {UNKNOWN}")
    rest = fit_ends(" · ".join(filter(None, facts)), max(8, console.width - head.cell_len - 2))
    console.print(head.append(f"  {rest}", "dim"), no_wrap=True, overflow="ellipsis")
    if place.around is not None:
        print_place(console, place.around, place.also)


def print_place(console: Console, around: Around, also: Sequence[tuple[int, int]] = ()) -> None:
    """Print the sentence around a place, below a document."""
    text = place_text(around, also, console.width - INDENT)
    for line in text.wrap(console, console.width - INDENT):
        line.rstrip()
        console.print(Text(" " * INDENT).append_text(line))


def place_text(around: Around, also: Sequence[tuple[int, int]], width: int) -> Text:
    """Return the sentence around a place, in brackets what is marked: there may be no colour."""
    text, begin, end = str(around), len(around.before), len(around.before + around.token)
    if around.token.strip():
        begin = end - len(around.token.lstrip())
    stretches = sorted([*also, (begin, end)])
    shown, done, at = Text(), 0, 0
    for first, last in joined(text, stretches) if around.token.strip() else stretches:
        shown.append(_flat(text[done:first]))
        if first <= begin < last:
            at = len(shown)
        marked = text[first:last]
        shown.append(f"[{_flat(marked) if marked.strip() else token_text(marked)}]", "bold")
        done = last
    shown.append(_flat(text[done:]))
    side = max(10, min(PLACE_WIDTH, 2 * width) // 2)
    left, right = max(0, at - side), min(len(shown), at + side)
    # A word that is cut goes, if there is a blank near it.
    if left and (blank := shown.plain.find(" ", left, at)) >= 0:
        left = blank + 1
    if right < len(shown) and (blank := shown.plain.rfind(" ", at, right)) >= 0:
        right = blank
    cut = shown[left:right]
    cut.rstrip()
    return Text("…" * (left > 0)).append_text(cut).append("…" * (right < len(shown)))


def _print_against(console: Console, passages: Sequence[Passage], figures: str) -> None:
    """Print what speaks against the predictions, and what figures these are."""
    console.print(f"Against: text where another token came next; {figures}", style="bold")
    for passage in passages:
        _print_document(console, passage, passage)
        given = f", to which the model gave {percent(passage.probability or 0.0)} there"
        line = f"instead of {token_text(passage.predicted or '', 24)}{given}"
        console.print(" " * INDENT + line, style="dim", no_wrap=True, overflow="ellipsis")
    console.print("" if passages else "none was found\n")


def _print_quotes(console: Console, quotes: Sequence[Quote]) -> None:
    """Print what stands in the corpus word for word: that is no evidence of where it is from."""
    if quotes:
        console.print("Word for word in the corpus", style="bold")
        for quote in quotes:
            first = quote.places[0]
            name = first["title"] or first["doc_id"] or f"position {first['position']:,}"
            more = f" and {quote.span.count - 1:,} more" if quote.span.count > 1 else ""
            half = console.width // 2 - INDENT
            text = f"“{fit_ends(quote.text.strip(), half)}”  {fit_ends(name, half)}{more}"
            console.print(" " * INDENT + text, soft_wrap=True)
        console.print()


def _flat(text: str) -> str:
    return re.sub(r"[ \t]*\n\s*", " ↵ ", plain(text)).replace("\t", " ")


def percent(share: float) -> str:
    """Return a share without decimals."""
    return f"{share:.0%}" if share >= LEAST_SAID else "<1%"
