"""An explanation on a terminal: the answer, support, documents, shares, the table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from prismlm.cli.output import (
    Writer,
    bar,
    dim,
    format_count,
    heading,
    sanitize,
    say,
    shorten,
    spinner,
    stdout_console,
    table,
    token_text,
    warning,
)
from prismlm.corpus.chat import Messages, question_of
from prismlm.errors import InputError
from prismlm.explain.attribution import Passage, Sources
from prismlm.explain.language_model import PrismLM
from prismlm.explain.subject import CANDIDATES, worth_showing
from prismlm.explain.trace import MIN_PERCENT, Step, Trace
from prismlm.explain.verbatim import Quote
from prismlm.lens.cells import UNKNOWN
from prismlm.lens.layout import trained_on_words
from prismlm.lens.lens import Around, Lens, joined
from prismlm.pages.frame import colour
from prismlm.pages.trace import CAVEAT
from prismlm.probes.results import Row, Table

# A longer prompt is cut in the middle.
PROMPT_LINES = 3
MAX_SHARES, MAX_QUOTES = 6, 3
INDENT, BAR_WIDTH, PASSAGE_WIDTH = 7, 24, 320
REBUILD = "prismlm index MODEL --corpus DIR --positions 1 --overwrite"
EVERYTHING: dict[str, Any] = {"method": "evidence", "where": {}}
STYLES = {"strong": "bold green", "weak": "bold yellow", "none": "bold red"}


@dataclass(frozen=True)
class PrintOptions:
    """Which parts of a trace are printed."""

    by: str  # the column of the shares
    documents: int = 5  # maximum number, each with its leading passage
    passages: bool = False  # list passages, with small shares too, and of an unsupported answer
    against: int = 0  # number of passages where another token came next
    table: bool = False  # print the table of predictions
    top: int = 3  # prototypes per prediction in it
    search: Mapping[str, Any] = field(default_factory=lambda: EVERYTHING)


def explain_and_print(
    lm: PrismLM,
    prompt: str | Messages,
    options: PrintOptions,
    selection: slice | None = None,
    **settings: Any,
) -> Trace:
    """Explain a text and print the explanation; a terminal shows the answer as it is written."""
    console, question = stdout_console(), question_of(prompt)
    writer = Writer(console, shorten(question, PROMPT_LINES * console.width))
    full = lm.explain(prompt, **settings, on_text=writer.write if console.is_terminal else None)
    trace = select(full, selection)
    streamed = console.is_terminal and full.written
    if streamed:
        writer.write("", end=True)
    # Before anything else is printed, since it may be refused.
    with spinner("Searching the corpus"):
        sources = trace.sources(options.by, **options.search) if trace.lens else None
    if not (full.written or full.first):
        text = full.answer
        if isinstance(prompt, str):
            text = f"{prompt} → {token_text(full.steps[-1].pieces[1].label)}"
        Writer(console).write(text, end=True)
    elif not streamed:
        writer.write(full.answer.strip(), end=True)
    if full.written and not full.answer.strip():
        wrote = "nothing but blanks." if full.answer else "nothing: it ended the text at once."
        say(heading(f"The model wrote {wrote}"))
    elif (full.written or full.first) and repeats_question(question, full.answer):
        note = "The answer repeats the question, so what follows is about the question's words."
        say(warning(note))
    console.print()
    if trace is not full:
        first, last = trace.steps[0], trace.steps[-1]
        if first is last:
            said = f"{token_text(first.pieces[0].label)} → {_target(first)}"
            say(f"Prediction {first.position} alone: {said}")
        else:
            said = trace.answer.strip() or _target(last)
            say(f"Predictions {first.position} to {last.position} alone: “{said}”")
    say(_trace_parts(trace, sources, options), "")
    return trace


def select(trace: Trace, selection: slice | None) -> Trace:
    """Return a trace of the selected predictions; None selects all."""
    selected = trace if selection is None else trace[selection]
    if not len(selected):
        raise InputError(f"--tokens selects none of the {len(trace)} predictions, from 0 on.")
    return selected


def repeats_question(question: str, answer: str) -> bool:
    """Return whether an answer is little more than the question or its beginning."""
    asked, answered = (re.findall(r"\w+", text.casefold()) for text in (question, answer))
    shorter = min(len(asked), len(answered))
    same = asked[:shorter] == answered[:shorter]
    return shorter > 3 and same and len(answered) <= 2 * len(asked)


def _trace_parts(trace: Trace, sources: Sources | None, options: PrintOptions) -> Iterator[Any]:
    yield from map(warning, trace.notes)
    if sources is None:
        yield dim("No lens, so no training text: build one with prismlm index.")
    elif not trace.written or trace.answer.strip() or options.passages:
        yield from _evidence(trace, sources, options)
    if options.table:
        yield from _predictions(trace.steps, options.top)
    if trace.lens is not None:
        more = "" if options.table else "--tokens all explains every token. "
        more += "--json prints every figure, with document ids for prismlm sources."
        yield from (dim(_describe_lens(trace.lens)), dim(more))


def _evidence(trace: Trace, sources: Sources, options: PrintOptions) -> Iterator[Any]:
    support, where = trace.support, options.search["where"]
    unsupported = support is not None and support.level == "none"
    if support is not None:
        yield Text(support.sentence, STYLES[support.level])
    assert trace.lens is not None
    yield from map(warning, _missing_parts(trace, trace.lens))
    # The summary is of evidence in all text; it does not match shares of another kind.
    if options.search == EVERYTHING and not unsupported:
        yield trace.summary or ""
    yield ""
    if unsupported and not options.passages:
        yield dim("--passages shows the nearest text all the same.\n")
    else:
        shown, passages, more = _shown(trace, options)
        yield from documents_of(shown, passages)
        if more:
            yield dim("Others carry less or name less of the question: --passages shows them.\n")
        yield shares_of(sources)
        if shown and trace.lens.suffixes is not None:
            yield from quotes_of(trace.verbatim(MAX_QUOTES))
    if options.against:
        yield from _against(trace.against(options.against, where=where))


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
    trained = trained_on_words(meta.trained_on, meta.split)
    return (
        f"Lens {lens.name}: {meta.size(format_count)}; model trained on them: {trained}. {CAVEAT}"
    )


def _predictions(steps: Sequence[Step], top: int) -> Iterator[Table]:
    rows = [
        {
            "no": step.position,
            "token": token_text(step.pieces[0].label),
            "target": _target(step),
            "prob": percent(step.probability),
            "explained": step.explained_share,
            "fed_back": step.uncertainty,
            "resid": step.residual,
            "logits_of_prototypes": _prototypes(step, top),
        }
        for step in steps
    ]
    columns = "no token target prob explained:.0% fed_back:.0% resid:+.2f logits_of_prototypes"
    yield table("", columns, rows)
    if chains := [_chain(step, step.chains[0]) for step in steps if step.chains]:
        title = "Through channels: share of the leading prototype's activation, direct path only"
        yield table(title, "target prototype channels:+.1% the_largest_←_tokens", chains)


def _target(step: Step) -> str:
    return token_text(step.pieces[1].label)


def _prototypes(step: Step, top: int) -> Text:
    text, others = Text(no_wrap=True, overflow="ellipsis"), len(step.prototypes) - top
    for use in step.prototypes[:top]:
        name = shorten(use.name or "prototype", 24)
        text.append(f"{use.contribution:+.2f} {name} #{use.id}  ", colour(use.category))
    return text.append(f"and {others}" if others > 0 else "", "dim")


def _chain(step: Step, chain: Any) -> Row:
    """Return the direct path from channels to the leading prototype."""
    largest = "the first token: channels are empty"
    if chain.channels:
        use = chain.channels[0]
        parts = (f'"{token_text(x.token)}" {x.part / chain.activation:+.1%}' for x in use.tokens)
        largest = f"L{use.layer} channel {use.channel} (half-life {use.half_life:.1f}) "
        largest += f"{use.share:+.1%} ← {', '.join(parts)}"
    return {
        "target": _target(step),
        "prototype": f"#{chain.prototype}",
        "channels": sum(chain.mixers) / chain.activation,
        "the_largest_←_tokens": Text(largest, no_wrap=True, overflow="ellipsis"),
    }


def shares_of(sources: Sources) -> Table:
    """Return shares as bars, with those of an even spread over the corpus."""
    items = [item for item in sources.items[:MAX_SHARES] if item.share >= MIN_PERCENT]
    rows = [(item.key, item.share, item.expected) for item in items]
    if others := sources.items[len(items) :]:
        rows.append((f"others: {len(others)}", sum(item.share for item in others), None))
    if sources.where:
        rows.append(("elsewhere", sources.elsewhere, None))
    rows.append(("not traced to the corpus", sources.unattributed, None))
    largest = max(share for _, share, _ in rows) or 1.0
    # Ids of documents may differ in the middle alone: bars get what they leave.
    room = stdout_console().width - 17
    longest = max(4, min(BAR_WIDTH, room - max(len(key) for key, _, _ in rows)))
    cells = [
        {
            sources.by: shorten(key, room - longest),
            "share": Text(f"{percent(share):>5}"),
            "expected": Text("" if rate is None else f"{percent(rate):>8}", "dim"),
            "_": Text(bar(share / largest, longest), "cyan" if rate else "bright_black"),
        }
        for key, share, rate in rows
    ]
    return table("Where it comes from", f"{sources.by} share expected _", cells)


def _shown(
    trace: Trace, options: PrintOptions
) -> tuple[Sequence[Passage], dict[str, list[Passage]], bool]:
    """Return the documents to print, passages of each by its id, and whether there are others."""
    search, limit, by_id = options.search, options.documents, dict[str, list[Passage]]()
    documents, passages = trace.documents(max(CANDIDATES, limit), **search), list[Passage]()
    if search["method"] == "evidence":
        passages = trace.passages(max(CANDIDATES, limit), where=search["where"])
    if options.passages and passages:
        for passage in worth_showing(passages, limit, trace.subject, fill=True):
            by_id.setdefault(passage.doc_id, []).append(passage)
        of_passages = {one.doc_id: one for one in documents}
        return [of_passages.get(name, some[0]) for name, some in by_id.items()], by_id, False
    for passage in passages:
        by_id.setdefault(passage.doc_id, [passage])
    shown = worth_showing(documents, limit, trace.subject, fill=options.passages)
    return shown, by_id, len(shown) < min(limit, len(documents))


def documents_of(
    documents: Sequence[Passage], passages: Mapping[str, Sequence[Passage]] | None = None
) -> Iterator[Any]:
    """Yield the lines of documents and their shares, each with passages."""
    if documents:
        yield heading("Documents behind it")
        for document in documents:
            yield from _document(document, (passages or {}).get(document.doc_id, [document]))
        yield ""


def _document(document: Passage, passages: Sequence[Passage]) -> Iterator[Text]:
    width = stdout_console().width
    head = Text(f"{percent(document.share):>5}  ", style="bold")
    head.append(shorten(document.title or document.doc_id, width - head.cell_len - 10))
    origin = " · ".join(filter(None, (document.source, document.license or f"licence {UNKNOWN}")))
    head.append("  " + shorten(origin, width - head.cell_len - 2), "dim")
    yield head
    for passage in passages:
        if passage.around is not None:
            yield from passage_lines(passage.around, passage.also)


def passage_lines(around: Around, also: Sequence[tuple[int, int]] = ()) -> Iterator[Text]:
    """Yield the sentence around a token in lines, indented below its document."""
    console = stdout_console()
    width = console.width - INDENT
    for line in passage_text(around, also, width).wrap(console, width):
        line.rstrip()
        yield Text(" " * INDENT).append_text(line)


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


def _against(passages: Sequence[Passage]) -> Iterator[Any]:
    yield heading("Against: text where another token came next; shares of these alone")
    for passage in passages:
        yield from _document(passage, [passage])
        share, token = percent(passage.probability or 0.0), token_text(passage.predicted or "", 24)
        line = dim(f"{' ' * INDENT}instead of {token}, to which the model gave {share} there")
        line.truncate(stdout_console().width, overflow="ellipsis")
        yield line
    yield "" if passages else "no such text in the active cells\n"


def quotes_of(quotes: Sequence[Quote]) -> Iterator[Any]:
    """Yield verbatim matches, which do not prove that the model learned the words there."""
    if not quotes:
        return
    width = stdout_console().width
    yield heading("Word for word in the corpus")
    for quote in quotes:
        first = quote.places[0]
        name = first["title"] or first["doc_id"] or f"position {first['position']:,}"
        more = f" and {quote.count - 1:,} more" if quote.count > 1 else ""
        name = shorten(name, width // 2 - INDENT) + more
        # Cut at its end: two ends in one would read as if they stood together.
        text = Text(f"{' ' * INDENT}“{_one_line(quote.text.strip())}", no_wrap=True)
        text.truncate(width - len("”  ") - cell_len(name), overflow="ellipsis")
        yield text.append(f"”  {name}")
    yield ""


def _one_line(text: str) -> str:
    return re.sub(r"[ \t]*\n\s*", " ↵ ", sanitize(text)).replace("\t", " ")


def percent(share: float) -> str:
    """Return a share without decimals."""
    return f"{share:.0%}" if share >= MIN_PERCENT else "<1%"
