"""prismlm explain: which training text each prediction along a text relies on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import prismlm
from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, flag, option
from prismlm.errors import InputError
from prismlm.files import read_text
from prismlm.outputs import write_text
from prismlm.run_state import orderly_end

if TYPE_CHECKING:
    from prismlm.cli.trace import PrintOptions
    from prismlm.corpus.chat import Messages
    from prismlm.explain.language_model import PrismLM
    from prismlm.explain.trace import Trace

    # What the model reads, and how many tokens it then writes.
    Prompt = tuple[str | Messages, int]

STDIN = "-"
CHAT_TOKENS = 50
FILE_HELP = "Text, or texts in json, jsonl, csv, parquet; - is stdin."
GENERATE_HELP = "Tokens to add and explain (default: 0; chat: 50)."
Tokens = Annotated[str | None, option("all|last|A:B", "Print the table of predictions.")]


def explain(
    model: opt.Model,
    text: Annotated[str | None, argument("TEXT", "The text to explain, or use --file.")] = None,
    chat: opt.Chat = False,
    system: opt.System = None,
    generate: Annotated[int | None, option("N", GENERATE_HELP, min=0)] = None,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    file: Annotated[str | None, option("FILE", FILE_HELP)] = None,
    lines: Annotated[bool, flag("--lines", "Each line is a text.")] = False,
    lens: opt.Lens = None,
    corpus: opt.CorpusLocation = None,
    device: opt.Device = "cpu",
    by: opt.By = None,
    method: opt.Method = "evidence",
    where: opt.Where = None,
    top: Annotated[int, option("K", "Prototypes per row of --tokens.", min=0)] = 3,
    documents: Annotated[int, option("N", "Most documents, or passages, to print.", min=0)] = 5,
    passages: Annotated[bool, flag("--passages", "List passages, with small shares too.")] = False,
    against: Annotated[int, option("N", "Passages where another token came next.", min=0)] = 0,
    tokens: Tokens = None,
    controller: opt.Controller = None,
    as_json: opt.Json = False,
    html: opt.Html = None,
    parquet: Annotated[Path | None, option("FILE", "Write a row per active prototype.")] = None,
    overwrite: opt.Overwrite = False,
    parts: opt.PartCount = None,
    workers: opt.Workers = None,
    engine: opt.Engine = "local",
) -> None:
    """Show which training text an answer, or each prediction along a text, relies on.

    With --parts or --workers, only --parquet is written, and finished parts are kept.
    """
    opt.check_output_files(model, lens, file, overwrite=overwrite, html=html, parquet=parquet)
    prompts = _prompts(read_texts(model, text, file, lines), chat, system, generate)
    if count := opt.count_parts(parts, workers, engine):
        return _explain_in_parts(prompts, count, locals())
    selection = _parse_span(tokens)
    from prismlm.cli.trace import PrintOptions
    from prismlm.explain.trace import write_parquet
    from prismlm.lens.cells import parse_where
    from prismlm.pages.trace import page

    search = {"method": method, "where": parse_where(where or [])}
    edits = [prismlm.Controller.load(controller)] if controller else []
    lm = opt.open_model(model, lens, corpus, device)
    if by or against or where or method != "evidence":
        lm.lens_for("training text to point to")
    column = by or ("domain" if lm.lens is None else lm.lens.default_group_by)
    printed = opt.fill(PrintOptions, locals(), by=column, table=tokens is not None)
    how: dict[str, Any] = {"temperature": temperature, "seed": seed}
    moved, traces = _explain(lm, prompts, edits, selection, None if as_json else printed, how)
    output.write(html, lambda path: write_text(path, page(traces, against=against)))
    output.write(parquet, partial(write_parquet, traces))
    if as_json:
        values = [trace.to_dict(column, documents, **search, against=against) for trace in traces]
        for value, one in zip(values, moved, strict=False):
            value["controller"] = one
        output.show(values[0] if len(values) == 1 else {"texts": values}, True)


def _explain(
    lm: PrismLM,
    prompts: list[Prompt],
    edits: list[Any],
    selection: slice | None,
    printed: PrintOptions | None,
    how: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[Trace]]:
    """Return what a controller moved, and the traces; print both, unless ``printed`` is None."""
    from prismlm.cli.trace import explain_and_print, select
    from prismlm.interventions.steering import compare_answers

    moved = [compare_answers(lm, text, edit, n, **how) for edit in edits for text, n in prompts]
    for one in moved if printed else ():
        output.say(_controlled(one))
    traces: list[Trace] = []
    with lm.edit(*edits):
        for prompt, count in prompts:
            settings: dict[str, Any] = how | {"generate": count}
            if printed is None:
                traces.append(select(lm.explain(prompt, **settings), selection))
            else:
                traces.append(explain_and_print(lm, prompt, printed, selection, **settings))
    return moved, traces


def _controlled(found: dict[str, Any]) -> Iterator[Any]:
    """Yield what a controller did to an answer."""
    from prismlm.cli.inspect import contexts_of

    if found["position"] is None:
        yield output.heading("With the controller the answer is as without it.\n")
        return
    old, new = (output.token_text(token) for token in (found["token_without"], found["token_with"]))
    yield output.dim(f"without the controller: {found['without'].strip()}")
    yield (
        f"They part where “{new}” takes the place of “{old}”, which led by {found['gap']:.2f}: "
        f"turned prototypes give “{new}” {found['gained']:+.2f} on it."
    )
    yield output.table("", "prototype scale:.2f gained:+.3f name", found["moves"])
    for move in found["moves"][:3]:
        yield output.heading(f"#{move['prototype']}")
        yield from contexts_of(move["contexts"])
    yield ""


def _explain_in_parts(prompts: list[Prompt], count: int, options: dict[str, Any]) -> None:
    """Explain texts with workers, and write their table."""
    if options["parquet"] is None:
        raise InputError("workers write a table of all texts: add --parquet FILE.")
    others = {name: options[name] or None for name in ("html", "tokens", "controller", "by")}
    others |= {name: options[name] or None for name in ("where", "against")}
    others |= {"json": options["as_json"], "method": options["method"] != "evidence"}
    opt.check_unused("workers write a table of all texts alone", **others)
    from prismlm.explain.parts import TraceJob, explain_in_parts

    job: TraceJob = opt.fill(TraceJob, options, texts=tuple(prompts), out=options["parquet"])
    how: dict[str, Any] = {name: options[name] for name in ("engine", "overwrite")}
    how |= {"workers": options["workers"] or 1, "progress": output.progress()}
    with orderly_end():
        explain_in_parts(job, count, **how)
    output.report_written(job.out)


def _prompts(
    texts: Sequence[str | Messages], chat: bool, system: str | None, generate: int | None
) -> list[Prompt]:
    """Return what the model reads; --chat and --system are for the strings among chats."""
    from prismlm.corpus.chat import ASSISTANT

    prompts = opt.build_prompts(texts, chat, system)
    answered = [isinstance(p, str) or p[-1]["role"] == ASSISTANT for p in prompts]
    counts = [0 if done else CHAT_TOKENS for done in answered]
    return [(p, n if generate is None else generate) for p, n in zip(prompts, counts, strict=True)]


def read_texts(
    model: Path, text: str | None, file: str | None, lines: bool
) -> Sequence[str | Messages]:
    """Return the text, every text of a file of records, or with ``lines`` those that have words."""
    from prismlm.corpus.formats import WHOLE_FILES, extension

    opt.check_one_of("a TEXT or --file FILE (- reads stdin)", text, file)
    if file not in (None, STDIN) and extension(Path(file)) not in (None, *WHOLE_FILES):
        from prismlm.corpus.read import DocumentReader
        from prismlm.corpus.tokenizer import load_tokenizer

        reader = DocumentReader(Path(file), tokenizer=load_tokenizer(model))
        return [document.messages or document.text for document in reader]
    source = "stdin" if file == STDIN else file or "the text"
    stream = sys.stdin.buffer if file == STDIN else None
    content = read_text(source, stream) if file is not None else text or ""
    if (file is not None or lines) and not content.strip():
        raise InputError(f"{source} is empty: expected at least one token of text.")
    return [line for line in content.splitlines() if line.strip()] if lines else [content]


def _parse_span(tokens: str | None) -> slice | None:
    """Return the selected predictions; None for all."""
    if tokens in (None, "all"):
        return None
    match = re.fullmatch(r"(-?\d{1,9})?:(-?\d{1,9})?", "-1:" if tokens == "last" else tokens)
    if match is None:
        raise InputError(f"--tokens {tokens}: expected all, last or A:B, such as 0:20 or -5:.")
    return slice(*(int(number) if number else None for number in match.groups()))
