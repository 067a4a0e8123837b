"""prismlm eval judge: which model continues a text best, by a judge that is judged first."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from prismlm.cli.format import count
from prismlm.cli.label import ModelThere, Url
from prismlm.cli.options import DryRun, Json, Temperature, choice, number, option
from prismlm.cli.output import console_for_reading, plain, print_cost, print_json, table_of
from prismlm.errors import InputError
from prismlm.outputs import check_outputs

Models = Annotated[
    list[Path] | None,
    typer.Argument(metavar="MODEL...", help="Model directories; none: examine a judge alone."),
]
By = Annotated[
    str,
    choice(
        "HOW",
        "How --judge judges: asked; or not asked, by what it finds probable: the more the better "
        "(likelihood), or the nearer to the text that is continued (typical).",
        ("asked", "likelihood", "typical"),
    ),
]
Out = Annotated[
    Path | None, option("DIR", "Where all is kept (default: eval/judge of the first model).")
]
NOT_TO_BE_READ = "Not to be read, since the judge is unusable:"


def judge(
    models: Models = None,
    corpus: Annotated[Path | None, option("DIR", "Continue its held-out documents.")] = None,
    prompts: Annotated[Path | None, option("FILE", "Or continue the lines of a text.")] = None,
    prompts_count: Annotated[int, number("N", "Texts, of a corpus drawn by the seed.", 2)] = 100,
    prompt_words: Annotated[int, number("N", "Words of a text that are given.", 1)] = 64,
    new_tokens: Annotated[int, number("N", "Tokens that each model writes, at most.", 1)] = 50,
    temperature: Temperature = 0.0,
    judge: Annotated[Path | None, option("DIR", "A model directory that judges.")] = None,
    by: By = "asked",
    endpoint: Url = None,
    endpoint_model: ModelThere = None,
    seed: Annotated[int, number("S", "Of all that is drawn.")] = 0,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Have models continue the same texts; compare them by BLEU, and by a judge that is examined.

    The judge says of each pair of continuations, in both orders, which is better; that makes Elo
    and Bradley-Terry ratings. First it is asked about real text and words shuffled or repeated: the
    ratings by one that fails are not to be read. What is made is kept: run the same command
    again to resume, or with more models.
    """
    from prismlm.corpus.store import Corpus
    from prismlm.eval.judging.continuations import Writing, corpus_prompts, file_prompts
    from prismlm.eval.judging.judges import judge_opener
    from prismlm.eval.judging.study import RESULT_FILE, Study, estimate_judging, named, run_judging
    from prismlm.run_state import orderly_end

    given = models or []
    opened = judge_opener(judge, endpoint, endpoint_model, by=by)
    if not given and (opened is None or out is None):
        raise InputError("give a MODEL or more; without one, a judge to examine and --out DIR.")
    if (corpus is None) == (prompts is None):
        raise InputError("give the texts: --corpus DIR or --prompts FILE, one of them.")
    place = given[0] / "eval" / "judge" if out is None else out
    check_outputs(directory=place, inputs=(*given, corpus, prompts, judge), overwrite=True)
    how = Writing(prompt_words, new_tokens, temperature, seed)
    if prompts is not None:
        texts = file_prompts(prompts, prompts_count, how)
    else:
        texts = corpus_prompts(Corpus.open(str(corpus)), prompts_count, how)
    study = Study(named(given), texts, how, place, opened)
    with orderly_end():
        if dry_run:
            print_cost(estimate_judging(study), as_json=as_json)
            return
        from prismlm.cli.progress import ConsoleReporter

        result = run_judging(study, ConsoleReporter(), _announce)
    typer.echo(f"wrote {place / RESULT_FILE}", err=True)
    print_json(result) if as_json else print_judging(result)


def _announce(what: str, questions: int, tokens: int) -> None:
    if questions:
        typer.echo(
            f"{questions:,} questions about {what}, some {count(tokens)} tokens in; "
            "verdicts are kept.",
            err=True,
        )


def print_judging(result: dict[str, Any]) -> None:
    """Print what a study found; the judge's own examination first."""
    console = console_for_reading()
    if result["judge"] is not None:
        _print_judge(console, result["judge"])
    if result["ratings"] is not None:
        _print_ratings(console, result["ratings"])
    if result["bleu"] is not None:
        _print_bleu(console, result["bleu"])
    models = len(result["models"])
    console.print(f"\n{result['prompts']:,} prompts, {models} models", style="dim")


def _print_judge(console: Console, judge: dict[str, Any]) -> None:
    name, order = plain(judge["source"]), judge["order"]
    if judge["usable"]:
        console.print(f"The judge {name} is usable.", style="bold")
    else:
        reasons = "; ".join(judge["reasons"])
        console.print(f"The judge {name} is unusable: {reasons}.", style="bold red")
    rows = (
        ("prefers real text to its words shuffled", judge["preferred"]["shuffled"]),
        ("prefers real text to that of another prompt", judge["preferred"]["elsewhere"]),
        ("prefers real text to the prompt's last words repeated", judge["preferred"]["repeated"]),
        ("changes its mind with the order", order["changed"]),
        ("prefers the same place in both orders", order["by_position"]),
        ("says A, of A and B", order["first"]),
    )
    table = table_of("", "*share", "*95 % interval")
    for label, found in rows:
        table.add_row(label, _share(found["value"]), _interval(found, ".0%"))
    console.print(table)
    failed = f"; {order['failed']:,} without an answer" if order["failed"] else ""
    note = f"{order['pairs']:,} pairs, each in both orders{failed}; no look at the texts: 50 %"
    console.print(note, style="dim")


def _print_ratings(console: Console, ratings: dict[str, Any]) -> None:
    console.print()
    if not ratings["readable"]:
        console.print(NOT_TO_BE_READ, style="bold red")
    table = table_of("model", "*Elo", "*95 % interval", "*Bradley-Terry", "*95 % interval")
    for one in sorted(ratings["models"], key=lambda one: -one["bradley_terry"]["value"]):
        elo, fitted = one["elo"], one["bradley_terry"]
        figures = f"{elo['value']:.0f}", _interval(elo, ".0f"), f"{fitted['value']:.0f}"
        table.add_row(Text(plain(one["model"])), *figures, _interval(fitted, ".0f"))
    console.print(table)
    order = ratings["order"]
    note = (
        f"{order['pairs']:,} pairs; {_share(order['changed']['value'])} change with the order, "
        f"{_share(order['ties'])} of the verdicts are ties, {order['failed']:,} failed"
    )
    console.print(note, style="dim")


def _print_bleu(console: Console, bleu: dict[str, Any]) -> None:
    console.print()
    table = table_of("model", "*BLEU", "*95 % interval", "*of another prompt", "*difference")
    for name, one in bleu["models"].items():
        mean, other, gap = (one[key] for key in ("mean", "other_prompt", "difference"))
        difference = f"{gap['value']:+.2f} ({gap['low']:+.2f} to {gap['high']:+.2f})"
        figures = f"{mean['value']:.2f}", _interval(mean, ".2f"), f"{other['value']:.2f}"
        table.add_row(Text(plain(name)), *figures, difference)
    console.print(table)
    for sample in bleu["samples"]:
        console.print(f"\nBest of {plain(sample['best'])}", style="bold")
        for label, text in (("prompt", sample["text"]), ("reference", sample["reference"])):
            console.print(f"{label}: {_line(text)}", style="dim")
        for one in sample["texts"]:
            console.print(f"{plain(one['model'])} ({one['bleu']:.1f}): {_line(one['text'])}")


def _line(text: str) -> str:
    return plain(" ".join(text.split()))


def _share(value: float) -> str:
    return "–" if isnan(value) else f"{value:.0%}"


def _interval(found: dict[str, Any], form: str) -> str:
    return "–" if isnan(found["low"]) else f"{found['low']:{form}} to {found['high']:{form}}"
