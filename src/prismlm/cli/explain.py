"""prismlm explain: what each prediction along a text relies on, and where that text comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import flag, option
from prismlm.cli.progress import waiting
from prismlm.errors import InputError
from prismlm.files import read_text

if TYPE_CHECKING:
    from prismlm.cli.trace import Shown
    from prismlm.corpus.chat import Messages
    from prismlm.explain.language_model import PrismLM
    from prismlm.explain.trace import Trace

STDIN = "-"
WRITTEN_IN_CHAT = 50
TextFile = Annotated[
    str | None,
    option("FILE", "Read the text from here, or texts (json, jsonl, csv, parquet); - is stdin."),
]
Generate = Annotated[
    int | None,
    option("N", "Tokens to add and explain (default: 0, or 50 to answer a chat).", least=0),
]
Attention = Annotated[list[str] | None, option("L:H", "For --json: heads H of layers L.")]
Span = Annotated[str | None, option("all|last|A:B", "Print the table of predictions.")]


def explain(
    model: opt.Model,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text to explain, or use --file.")
    ] = None,
    chat: opt.Chat = False,
    system: opt.System = None,
    generate: Generate = None,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    file: TextFile = None,
    lines: Annotated[bool, flag("--lines", "Every line of the file is a text of its own.")] = False,
    lens: opt.Lens = None,
    corpus: opt.MovedCorpus = None,
    by: opt.By = None,
    method: opt.Method = "evidence",
    where: opt.Where = None,
    top: Annotated[int, option("K", "With --tokens: prototypes shown of each.", least=0)] = 3,
    documents: Annotated[int, option("N", "Documents shown at most.", least=0)] = 5,
    passages: Annotated[bool, flag("--passages", "Show documents that carry little too.")] = False,
    against: Annotated[int, option("N", "Passages where another token came next.", least=0)] = 0,
    tokens: Span = None,
    attention: Attention = None,
    as_json: opt.Json = False,
    html: opt.Html = None,
    parquet: Annotated[Path | None, option("FILE", "Write one row per prototype in use.")] = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Show what an answer, or each prediction along a text, relies on, and where it comes from."""
    read = None if file == STDIN else file
    opt.check_results(model, lens, read, overwrite=overwrite, html=html, parquet=parquet)
    given = _texts(model, text, file, lines)
    texts = [opt.prompt_of(one, chat, system) if isinstance(one, str) else one for one in given]
    span, heads = _span(tokens), opt.parse_places("--attention", "HEAD", attention)
    if heads and not as_json:
        raise InputError("--attention is a part of the JSON document: add --json.")
    from prismlm.cli.trace import Shown
    from prismlm.lens.where import parse_where

    conditions = parse_where(where or [])
    needs_lens = bool(by or conditions or against or method != "evidence")
    lm = _open(model, lens, corpus, needs_lens=needs_lens)
    column = by or ("domain" if lm.lens is None else lm.lens.telling)
    table = tokens is not None
    shown = Shown(column, documents, passages, against, table, top, method, conditions)
    how: dict[str, Any] = {"temperature": temperature, "seed": seed, "attention": heads}
    traces: list[Trace] = []
    for one in texts:
        how["generate"] = _tokens_to_write(one) if generate is None else generate
        if as_json:
            traces.append(_select(lm.explain(one, **how), span))
        else:
            traces.append(explain_and_print(lm, one, shown, span, **how))
    _write(traces, html, parquet, against)
    if as_json:
        kind: dict[str, Any] = {"method": method, "where": conditions, "against": against}
        values = [trace.to_dict(column, documents, **kind) for trace in traces]
        output.print_json(values[0] if len(values) == 1 else {"texts": values})


def _open(model: Path, lens: str | None, corpus: Path | None, *, needs_lens: bool) -> PrismLM:
    from prismlm.explain.language_model import load

    with waiting("Opening the model"):
        lm = load(model, lens=lens, corpus=corpus)
    if needs_lens:
        lm.lens_for("training text to point to")
    return lm


def explain_and_print(
    lm: PrismLM, text: str | Messages, shown: Shown, span: slice | None = None, **how: Any
) -> Trace:
    """Return what an answer relies on, and print both, on a terminal while it is written."""
    from prismlm.cli.trace import AnswerPrinter, find_sources, print_trace
    from prismlm.corpus.chat import question_of

    console = output.console_for_reading()
    answer, special = AnswerPrinter(console, question_of(text)), set(lm.tokenizer.all_special_ids)
    if console.is_terminal:
        how["on_step"] = lambda step: None if step.target_id in special else answer.follow(step)
    whole = lm.explain(text, **how)
    trace = _select(whole, span)
    answer.pause()
    with waiting("Looking for its sources"):
        found = find_sources(trace, shown)
    answer.finish(whole, isinstance(text, str))
    if trace is not whole:
        first, last = trace.steps[0].position, trace.steps[-1].position
        output.say(f"Predictions {first} to {last} alone: “{trace.answer.strip()}”")
    print_trace(trace, found, shown)
    console.print()
    return trace


def _tokens_to_write(text: str | Messages) -> int:
    """Return how many tokens are written by default: some to answer a chat, none after a text."""
    from prismlm.corpus.chat import ASSISTANT

    return 0 if isinstance(text, str) or text[-1]["role"] == ASSISTANT else WRITTEN_IN_CHAT


def _write(traces: list[Trace], html: Path | None, parquet: Path | None, against: int) -> None:
    from prismlm.explain.trace import write_parquet
    from prismlm.pages.frame import write_page
    from prismlm.pages.trace import page

    if html is not None:
        write_page(page(traces, against=against), html)
    if parquet is not None:
        write_parquet(traces, parquet)
    output.wrote(html, parquet)


def _texts(
    model: Path, text: str | None, file: str | None, lines: bool
) -> list[str] | list[str | Messages]:
    """Return the text, or every text of a file of records, or every line that is not blank."""
    from prismlm.corpus.formats import WHOLE_FILES, extension

    if (text is None) == (file is None):
        had = "neither" if text is None else "both"
        raise InputError(f"expected a TEXT or --file FILE (- reads stdin), got {had}.")
    if file not in (None, STDIN) and extension(Path(file)) not in (None, *WHOLE_FILES):
        if lines:
            raise InputError(f"{file} holds records, not lines of text: leave out --lines.")
        from prismlm.corpus.read import DocumentReader
        from prismlm.corpus.tokenizer import load_tokenizer

        reader = DocumentReader(Path(file), tokenizer=load_tokenizer(model))
        return [document.messages or document.text for document in reader]
    source = "stdin" if file == STDIN else file or "the text"
    stream = sys.stdin.buffer if file == STDIN else None
    words = read_text(source, stream) if file is not None else text or ""
    if (file is not None or lines) and not words.strip():
        raise InputError(f"{source} is empty: expected at least one token of text.")
    return [line for line in words.splitlines() if line.strip()] if lines else [words]


def _span(tokens: str | None) -> slice | None:
    """Return the predictions that were asked for; None for all."""
    if tokens in (None, "all"):
        return None
    if tokens == "last":
        return slice(-1, None)
    first, colon, last = tokens.partition(":")
    try:
        if colon:
            return slice(int(first) if first else None, int(last) if last else None)
        return slice(int(first), int(first) + 1 or None)
    except ValueError:
        raise InputError(
            f"--tokens {tokens} cannot be read: expected all, last, A:B, such as 0:20 or -5:, or "
            "one number."
        ) from None


def _select(trace: Trace, span: slice | None) -> Trace:
    if span is None:
        return trace
    chosen = trace[span]
    if not len(chosen):
        raise InputError(f"--tokens holds none of the {len(trace)} predictions, from 0 on.")
    return chosen
