"""prismlm explain: what each prediction along a text relies on, and where that text comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.options import (
    By,
    Chat,
    Json,
    Lens,
    Method,
    Model,
    MovedCorpus,
    Overwrite,
    Page,
    SamplingSeed,
    System,
    Temperature,
    Where,
    flag,
    number,
    option,
    parse_places,
    put,
)
from prismlm.cli.output import console_for_reading, plain, print_json
from prismlm.cli.progress import waiting
from prismlm.errors import InputError
from prismlm.files import read_text
from prismlm.outputs import check_ending, check_outputs

if TYPE_CHECKING:
    from prismlm.cli.printing.trace import Shown
    from prismlm.corpus.chat import Messages
    from prismlm.explain.language_model import PrismLM
    from prismlm.explain.trace import Trace

STDIN = "-"
WRITTEN_IN_CHAT = 50
TextFile = Annotated[
    str | None,
    option("FILE", "Read the text from here, or texts (json, jsonl, csv, parquet); - is stdin."),
]
Attention = Annotated[
    list[str] | None, option("L:H", "With --json: what head H of layer L looks at; repeatable.")
]
Span = Annotated[
    str | None,
    option("all|last|A:B", "Print the table of predictions: all, or only these, counted from 0."),
]


def explain(
    model: Model,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text to explain, or use --file.")
    ] = None,
    chat: Chat = False,
    system: System = None,
    generate: Annotated[
        int | None, number("N", "Tokens to add and explain (default: 0, or 50 to answer a chat).")
    ] = None,
    temperature: Temperature = 0.0,
    seed: SamplingSeed = 0,
    file: TextFile = None,
    lines: Annotated[bool, flag("--lines", "Every line of the file is a text of its own.")] = False,
    lens: Lens = None,
    corpus: MovedCorpus = None,
    by: By = None,
    method: Method = "evidence",
    where: Where = None,
    top: Annotated[int, number("K", "With --tokens: prototypes shown per prediction.")] = 3,
    documents: Annotated[int, number("N", "Documents shown at most, each with its passages.")] = 5,
    passages: Annotated[
        bool,
        flag("--passages", "Show documents that carry little, or of which support says none, too."),
    ] = False,
    against: Annotated[int, number("N", "Passages shown where another token came next.")] = 0,
    tokens: Span = None,
    attention: Attention = None,
    as_json: Json = False,
    html: Page = None,
    parquet: Annotated[Path | None, option("FILE", "Write one row per prototype in use.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Show what an answer, or each prediction along a text, relies on, and where it comes from."""
    read = (model, lens, None if file == STDIN else file)
    _check_outputs(html, parquet, read, overwrite=overwrite)
    given = _texts(model, text, file, lines)
    texts = [put(one, chat, system) if isinstance(one, str) else one for one in given]
    span, table = _span(tokens), tokens is not None
    heads = _heads(attention, as_json)
    from prismlm.explain.language_model import load
    from prismlm.index.where import parse_where

    conditions = parse_where(where or [])
    with waiting("Opening the model"):
        lm = load(model, lens=lens, corpus=corpus)
    column = by or ("domain" if lm.lens is None else lm.lens.telling)
    if lm.lens is None:
        _check_without_lens(lm, by, method, conditions, against)
    from prismlm.cli.printing.trace import Shown

    how: dict[str, Any] = {"method": method, "where": conditions}
    shown = Shown(column, documents, passages, against, table, top, **how)
    options: dict[str, Any] = {"temperature": temperature, "seed": seed, "attention": heads}
    chosen: list[Trace] = []
    for one in texts:
        options["generate"] = _to_write(one) if generate is None else generate
        chosen.append(_explain(lm, one, options, (span, tokens), None if as_json else shown))
    _write(chosen, html, parquet, against)
    if as_json:
        _print_json(chosen, shown)


def _check_outputs(
    html: Path | None, parquet: Path | None, read: tuple[Any, ...], *, overwrite: bool
) -> None:
    check_outputs(html, parquet, inputs=read, overwrite=overwrite)
    check_ending(html, ".html")
    check_ending(parquet, ".parquet")


def _print_json(traces: list[Trace], shown: Shown) -> None:
    how: dict[str, Any] = {name: getattr(shown, name) for name in ("method", "where", "against")}
    values = [trace.to_dict(shown.by, shown.documents, **how) for trace in traces]
    print_json(values[0] if len(values) == 1 else {"texts": values})


def _to_write(text: str | Messages) -> int:
    """Return how many tokens are written unless told: some to answer a chat, none after a text."""
    from prismlm.corpus.chat import ASSISTANT

    return 0 if isinstance(text, str) or text[-1]["role"] == ASSISTANT else WRITTEN_IN_CHAT


def _explain(
    lm: PrismLM,
    text: str | Messages,
    options: dict[str, Any],
    chosen: tuple[slice | None, str | None],
    shown: Shown | None,
) -> Trace:
    """Return what an answer relies on, and print both, on a terminal while it is written."""
    if shown is None:
        return _select(lm.explain(text, **options), *chosen)
    from prismlm.cli.printing.answer import AnswerPrinter
    from prismlm.cli.printing.trace import prepare, print_trace

    console = console_for_reading()
    answer, special = AnswerPrinter(console, text), set(lm.tokenizer.all_special_ids)
    if console.is_terminal:
        options |= {"on_step": lambda step: answer.follow(step, step.target_id in special)}
    whole = lm.explain(text, **options)
    trace = _select(whole, *chosen)
    answer.pause()
    with waiting("Looking for its sources"):
        prepare(trace, shown)
    answer.finish(whole)
    if trace is not whole:
        first, last = trace.steps[0].position, trace.steps[-1].position
        console.print(f"Predictions {first} to {last} alone: “{plain(trace.answer).strip()}”")
    print_trace(console, trace, shown)
    console.print()
    return trace


def _check_without_lens(lm: PrismLM, by: str | None, method: str, where: Any, against: int) -> None:
    """Raise InputError where something is asked for that takes a lens."""
    wanted = f"shares by {by}" if by else "filter" if where else f"method {method}"
    wanted = "text against a prediction" if against else wanted
    if by or where or against or method != "evidence":
        lm.lens_for(wanted)


def _heads(attention: list[str] | None, as_json: bool) -> list[tuple[int, int]]:
    """Return the layers and heads that were asked for."""
    heads = parse_places("--attention", "HEAD", attention)
    if heads and not as_json:
        raise InputError(
            "--attention is a part of the JSON document: add --json, or look at a picture with "
            "prismlm inspect attention."
        )
    return heads


def _write(traces: list[Trace], html: Path | None, parquet: Path | None, against: int) -> None:
    from prismlm.explain.trace import write_parquet
    from prismlm.pages.frame import write_page
    from prismlm.pages.trace import page

    if html is not None:
        write_page(page(traces, against=against), html)
        typer.echo(f"wrote {html}", err=True)
    if parquet is not None:
        write_parquet(traces, parquet)
        typer.echo(f"wrote {parquet}", err=True)


def _texts(
    model: Path, text: str | None, file: str | None, lines: bool
) -> list[str] | list[str | Messages]:
    """Return the text, or every text of a file of records, or every line that is not blank."""
    from prismlm.corpus.formats import WHOLE_FILES, extension

    records = file is not None and extension(Path(file)) not in (None, *WHOLE_FILES)
    if records and text is None:
        if lines:
            raise InputError(f"{file} holds records, not lines of text: leave out --lines.")
        from prismlm.corpus.read import DocumentReader
        from prismlm.corpus.tokenizer import load_tokenizer

        reader = DocumentReader(Path(file or ""), tokenizer=load_tokenizer(model))
        return [document.messages or document.text for document in reader]
    words = _text(text, file)
    if not lines:
        return [words]
    found = [line for line in words.splitlines() if line.strip()]
    if not found:
        raise InputError(f"{file or 'the text'} has no line with text.")
    return found


def _text(text: str | None, file: str | None) -> str:
    if (text is None) == (file is None):
        had = "neither" if text is None else "both"
        raise InputError(
            f'expected a text or --file, got {had}: prismlm explain MODEL "text", or '
            "prismlm explain MODEL --file FILE (- reads stdin)."
        )
    if file is None:
        assert text is not None
        return text
    words = read_text("stdin", sys.stdin.buffer) if file == STDIN else read_text(file)
    if not words:
        raise InputError(
            f"{'stdin' if file == STDIN else file} is empty: expected at least one token of text."
        )
    return words


def _span(tokens: str | None) -> slice | None:
    """Return the predictions that were asked for; None for all."""
    if tokens is None or tokens == "all":
        return None
    if tokens == "last":
        return slice(-1, None)
    first, colon, last = tokens.partition(":")
    try:
        return slice(
            int(first) if first else None,
            (int(last) if last else None) if colon else int(first) + 1 or None,
        )
    except ValueError:
        raise InputError(
            f"--tokens {tokens} cannot be read: expected all, last, A:B, such as 0:20 or -5:, or "
            "one number."
        ) from None


def _select(trace: Trace, span: slice | None, tokens: str | None) -> Trace:
    if span is None:
        return trace
    chosen = trace[span]
    if not len(chosen):
        raise InputError(
            f"--tokens {tokens} holds none of the {len(trace)} predictions, 0 to {len(trace) - 1}."
        )
    return chosen
