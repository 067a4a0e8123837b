"""An explanation on a terminal: the answer, support, documents, shares, the table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from prismlm.cli.output import (
    Writer,
    bar,
    format_count,
    print_rows,
    print_table,
    sanitize,
    shorten,
    stdout_console,
    token_text,
)
from prismlm.explain.attribution import Method, Passage, Sources, worth_showing
from prismlm.explain.support import MIN_PERCENT, Quote
from prismlm.explain.trace import Step, Trace
from prismlm.lens.cells import UNKNOWN, Where
from prismlm.lens.lens import Lens
from prismlm.lens.text import Around, joined
from prismlm.pages.frame import colour
from prismlm.pages.trace import CAVEAT
from prismlm.probes.results import Row, Table

# A longer prompt is cut in the middle.
PROMPT_LINES = 3
MAX_SHARES, MAX_QUOTES = 6, 3
# The passages printed below the documents are chosen among so many.
PASSAGE_CANDIDATES = 50
INDENT, BAR_WIDTH, KEY_WIDTH, PASSAGE_WIDTH = 7, 24, 40, 320
REBUILD = "prismlm index MODEL --corpus DIR --positions 1 --overwrite"
STYLES = {"strong": "bold green", "weak": "bold yellow", "none": "bold red"}


class AnswerPrinter:
    """Prints the prompt, dim, and below it the answer.

    Args:
        console: the output.
        question: a text, or a chat's last message of the user.
    """

    def __init__(self, console: Console, question: str) -> None:
        self._console, self._writer, self._question = console, Writer(console), question
        self._started = False

    def print_step(self, step: Step) -> None:
        """Print the target of a step if it was generated."""
        text = step.pieces[1].shown if step.target_from == "generated" else ""
        if text := text if self._started else text.lstrip():
            self._start()
            self._writer.write(text)

    def end_line(self) -> None:
        """End the line of the text printed so far."""
        if self._started:
            self._writer.end()

    def finish(self, trace: Trace, is_text: bool) -> None:
        """Print the rest of the answer, and a note if it is empty or repeats the question."""
        answers = trace.written or trace.first
        if not answers:
            self._writer.write(self._question if is_text else trace.answer)
        elif not self._started:
            self._start()
            self._writer.write(trace.answer.strip())
        if not trace.written and is_text:
            self._writer.write(f" → {token_text(trace.steps[-1].pieces[1].label)}")
        self._writer.end()
        if trace.written and not trace.answer.strip():
            self._console.print("The model wrote nothing: it ended the text at once.", style="bold")
        elif answers and repeats_question(self._question, trace.answer):
            note = "The answer repeats the question, so what follows is about the question's words."
            self._console.print(note, style="yellow")
        self._console.print()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            prompt = shorten(self._question, PROMPT_LINES * self._console.width)
            self._console.print(prompt, style="dim", end="\n\n")


def repeats_question(question: str, answer: str) -> bool:
    """Return whether an answer is little more than the question or its beginning."""
    asked, answered = (re.findall(r"\w+", text.casefold()) for text in (question, answer))
    shorter = min(len(asked), len(answered))
    same = asked[:shorter] == answered[:shorter]
    return shorter > 3 and same and len(answered) <= 2 * len(asked)


@dataclass(frozen=True)
class PrintOptions:
    """Which parts of a trace are printed.

    Attributes:
        by: the column of the shares.
        documents: maximum number of documents, each with its leading passage.
        passages: print documents with small shares too, and those of an unsupported answer.
        against: number of passages where another token came next.
        table: print the table of predictions.
        top: prototypes per prediction in it.
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


class Evidence(NamedTuple):
    """The training text behind a trace, with the leading passage of each document by its id."""

    sources: Sources
    documents: Sequence[Passage]
    passages: Mapping[str, Passage]
    quotes: Sequence[Quote]
    against: Sequence[Passage]


def find_evidence(trace: Trace, options: PrintOptions) -> Evidence | None:
    """Find the training text to print; None without a lens."""
    lens = trace.lens
    if lens is None:
        return None
    filters: dict[str, Any] = {"method": options.method, "where": options.where}
    documents = trace.documents(options.documents, **filters) if options.documents else []
    passages: dict[str, Passage] = {}
    if documents and options.method == "evidence":
        for passage in trace.passages(PASSAGE_CANDIDATES, where=options.where):
            passages.setdefault(passage.doc_id, passage)
    quotes = trace.verbatim(MAX_QUOTES) if documents and lens.suffixes is not None else []
    against = trace.against(options.against, where=options.where) if options.against else []
    return Evidence(trace.sources(options.by, **filters), documents, passages, quotes, against)


def print_trace(trace: Trace, evidence: Evidence | None, options: PrintOptions) -> None:
    """Print everything below an answer: support, documents, shares, and the table."""
    console = stdout_console()
    for note in trace.notes:
        console.print(sanitize(note), style="yellow")
    if evidence is None:
        console.print("No lens, so no training text: build one with prismlm index.", style="dim")
    elif not trace.written or trace.answer.strip() or options.passages:
        _print_evidence(console, trace, evidence, options)
    if options.table:
        print_predictions(trace.steps, options.top)
    if trace.lens is not None:
        console.print(_describe_lens(trace.lens), style="dim")
        table = "" if options.table else "--tokens all explains every token. "
        more = "--json prints every figure, with document ids for prismlm sources."
        console.print(table + more, style="dim")


def _print_evidence(
    console: Console, trace: Trace, evidence: Evidence, options: PrintOptions
) -> None:
    support = trace.support
    unsupported = support is not None and support.level == "none"
    if support is not None:
        console.print(support.sentence, style=STYLES[support.level])
    assert trace.lens is not None
    for note in _missing_parts(trace, trace.lens):
        console.print(note, style="yellow")
    # The summary is of evidence in all text; it does not match shares of another kind.
    if options.method == "evidence" and not options.where and not unsupported:
        console.print(sanitize(trace.summary or ""))
    console.print()
    if unsupported and not options.passages:
        console.print("--passages shows the nearest text all the same.\n", style="dim")
    else:
        documents = list(evidence.documents)
        if not options.passages:
            documents = worth_showing(documents)
        print_documents(documents, evidence.passages)
        if len(documents) < len(evidence.documents):
            console.print("All others carry far less: --passages shows them.\n", style="dim")
        print_shares(evidence.sources)
        if documents:
            _print_quotes(console, evidence.quotes)
    if options.against:
        _print_against(console, evidence.against)


def _missing_parts(trace: Trace, lens: Lens) -> Iterator[str]:
    # Zero states are already reported.
    if trace.support is None and not trace.warnings:
        yield f"Support is unknown: this lens has no support scale. To measure one: {REBUILD}"
    if lens.corpus is None:
        decoded = lens.text_source is not None
        passages = "are decoded from the lens's own tokens" if decoded else "have no text"
        yield (
            f"The corpus {lens.meta.corpus_name} was moved or has changed since it was indexed, so "
            f"passages {passages}. --corpus DIR gives its location."
        )


def _describe_lens(lens: Lens) -> str:
    meta = lens.meta
    documents = "1 document" if meta.documents == 1 else f"{format_count(meta.documents)} documents"
    text = f"Lens {lens.name}: {format_count(meta.tokens)} tokens of {documents}."
    if meta.trained_on is False:
        text += " The model was not trained on this corpus."
    elif meta.trained_on and meta.split == "heldout":
        text += " These documents were held out when the model was trained."
    elif meta.trained_on == "fine-tuned":
        text += " This corpus is the fine-tuning data; the pre-training data is not indexed."
    return f"{text} {CAVEAT}"


def print_predictions(steps: Sequence[Step], top: int) -> None:
    """Print a row for each prediction, and its path through channels if the model has any."""
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
    print_table(Table("", columns, tuple(rows)), truncate="logits of prototypes")
    chains = [row for step in steps for row in _chain(step)]
    if chains:
        columns = {"target": "", "prototype": "", "channels": "+.1%", "the largest ← tokens": ""}
        title = "Through channels: share of the leading prototype's activation, direct path only"
        print_table(Table(title, columns, tuple(chains)), truncate="the largest ← tokens")


def _prototypes(step: Step, top: int) -> Text:
    text = Text()
    for use in step.prototypes[:top]:
        text.append(f"{use.contribution:+.2f} ")
        text.append(shorten(use.name or "prototype", 24), colour(use.category))
        text.append(f" #{use.id}  ", "dim")
    others = len(step.prototypes) - top
    return text.append(f"and {others}" if others > 0 else "", "dim")


def _chain(step: Step) -> Iterator[Row]:
    """Yield the direct path from channels to the leading prototype, if it has one."""
    for chain in (step.chains or ())[:1]:
        leading = "the first token: channels are empty"
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
    """Print shares as bars, with the share that the corpus has of each."""
    items = [item for item in sources.items[:MAX_SHARES] if item.share >= MIN_PERCENT]
    others = sources.items[len(items) :]
    rows = [(item.key, item.share, item.base_rate, "cyan") for item in items]
    if others:
        rows.append((f"others: {len(others)}", sum(item.share for item in others), None, "blue"))
    if sources.where:
        rows.append(("elsewhere", sources.elsewhere, None, "blue"))
    rows.append(("not traced to the corpus", sources.unattributed, None, "bright_black"))
    largest = max([share for _, share, _, _ in rows] + [1e-9])
    cells = [
        {
            sources.by: shorten(key, KEY_WIDTH),
            "share": Text(f"{percent(share):>5}"),
            "base rate": Text("" if rate is None else f"{percent(rate):>9}", "dim"),
            "": Text(bar(share / largest, BAR_WIDTH), style),
        }
        for key, share, rate, style in rows
    ]
    print_rows("Where it comes from", dict.fromkeys(cells[0], ""), cells)


def print_documents(
    documents: Sequence[Passage], passages: Mapping[str, Passage] | None = None
) -> None:
    """Print documents and their shares, each with its leading passage."""
    if documents:
        console = stdout_console()
        console.print("Documents behind it", style="bold")
        for document in documents:
            passage = (passages or {}).get(document.doc_id, document)
            _print_document(console, document, passage)
        console.print()


def _print_document(console: Console, document: Passage, passage: Passage) -> None:
    head = Text(f"{percent(document.share):>5}  ", style="bold")
    head.append(shorten(document.title or document.doc_id, console.width - head.cell_len))
    origin = " · ".join(filter(None, (document.source, document.license or f"licence {UNKNOWN}")))
    rest = shorten(origin, max(8, console.width - head.cell_len - 2))
    console.print(head.append(f"  {rest}", "dim"), no_wrap=True, overflow="ellipsis")
    if passage.around is not None:
        print_passage(console, passage.around, passage.also)


def print_passage(console: Console, around: Around, also: Sequence[tuple[int, int]] = ()) -> None:
    """Print the sentence around a token, indented below its document."""
    text = passage_text(around, also, console.width - INDENT)
    for line in text.wrap(console, console.width - INDENT):
        line.rstrip()
        console.print(Text(" " * INDENT).append_text(line))


def passage_text(around: Around, also: Sequence[tuple[int, int]], width: int) -> Text:
    """Return the sentence around a token; marked spans are in brackets: there may be no colour."""
    sentence = str(around)
    begin, end = len(around.before), len(around.before + around.token)
    if around.token.strip():
        begin = end - len(around.token.lstrip())
    spans = sorted([*also, (begin, end)])
    text, done, centre = Text(), 0, 0
    for first, last in joined(sentence, spans) if around.token.strip() else spans:
        text.append(_one_line(sentence[done:first]))
        if first <= begin < last:
            centre = len(text)
        marked = sentence[first:last]
        text.append(f"[{_one_line(marked) if marked.strip() else token_text(marked)}]", "bold")
        done = last
    text.append(_one_line(sentence[done:]))
    side = max(10, min(PASSAGE_WIDTH, 2 * width) // 2)
    left, right = max(0, centre - side), min(len(text), centre + side)
    # Cut at a blank if there is one.
    if left and (blank := text.plain.find(" ", left, centre)) >= 0:
        left = blank + 1
    if right < len(text) and (blank := text.plain.rfind(" ", centre, right)) >= 0:
        right = blank
    cut = text[left:right]
    cut.rstrip()
    return Text("…" * (left > 0)).append_text(cut).append("…" * (right < len(text)))


def _print_against(console: Console, passages: Sequence[Passage]) -> None:
    title = "Against: text where another token came next; shares of these alone"
    console.print(title, style="bold")
    for passage in passages:
        _print_document(console, passage, passage)
        probability = percent(passage.probability or 0.0)
        line = f"instead of {token_text(passage.predicted or '', 24)}, "
        line += f"to which the model gave {probability} there"
        console.print(" " * INDENT + line, style="dim", no_wrap=True, overflow="ellipsis")
    console.print("" if passages else "no such text in the active cells\n")


def _print_quotes(console: Console, quotes: Sequence[Quote]) -> None:
    """Print verbatim matches, which do not prove that the model learned the words there."""
    if quotes:
        console.print("Word for word in the corpus", style="bold")
        for quote in quotes:
            first = quote.places[0]
            name = first["title"] or first["doc_id"] or f"position {first['position']:,}"
            more = f" and {quote.span.count - 1:,} more" if quote.span.count > 1 else ""
            half = console.width // 2 - INDENT
            text = f"“{shorten(quote.text.strip(), half)}”  {shorten(name, half)}{more}"
            console.print(" " * INDENT + text, soft_wrap=True)
        console.print()


def _one_line(text: str) -> str:
    return re.sub(r"[ \t]*\n\s*", " ↵ ", sanitize(text)).replace("\t", " ")


def percent(share: float) -> str:
    """Return a share without decimals."""
    return f"{share:.0%}" if share >= MIN_PERCENT else "<1%"
