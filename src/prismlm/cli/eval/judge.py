"""prismlm eval judge: which model continues a text best, by a judge that is judged first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli.format import count
from prismlm.cli.options import option
from prismlm.cli.output import print_json, say, show_rows, wrote
from prismlm.errors import InputError
from prismlm.outputs import check_outputs

if TYPE_CHECKING:
    from prismlm.statistics import Interval

Models = Annotated[
    list[Path] | None,
    typer.Argument(metavar="MODEL...", help="Model directories; none: examine a judge alone."),
]
JudgeBy = Annotated[
    Literal["asked", "likelihood", "typical"],
    option(
        None,
        "How --judge judges: asked; or by what it finds probable: the more the better "
        "(likelihood), or the nearer to the text that is continued (typical).",
    ),
]
Out = Annotated[
    Path | None, option("DIR", "Where all is kept (default: eval/judge of the first model).")
]


def judge(
    models: Models = None,
    corpus: Annotated[Path | None, option("DIR", "Continue its held-out documents.")] = None,
    prompts: Annotated[Path | None, option("FILE", "Or continue the lines of a text.")] = None,
    prompts_count: Annotated[int, option("N", "Texts, drawn by the seed.", least=2)] = 100,
    prompt_words: Annotated[int, option("N", "Words of a text that are given.", least=1)] = 64,
    new_tokens: Annotated[int, option("N", "Tokens each model writes, at most.", least=1)] = 50,
    temperature: opt.Temperature = 0.0,
    judge: Annotated[Path | None, option("DIR", "A model directory that judges.")] = None,
    by: JudgeBy = "asked",
    endpoint: opt.Endpoint = None,
    endpoint_model: opt.EndpointModel = None,
    seed: Annotated[int, option("S", "Random seed.", least=0)] = 0,
    out: Out = None,
    as_json: opt.Json = False,
) -> None:
    """Have models continue the same texts; compare them by BLEU, and by a judge that is examined.

    The judge says of each pair of continuations, in both orders, which is better; that makes Elo
    and Bradley-Terry ratings. First it is asked about real text and words shuffled or repeated: the
    ratings by one that fails are not to be read. What is made is kept: run the same command
    again to resume, or with more models.
    """
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.corpus.store import Corpus
    from prismlm.eval.judging.continuations import Writing, corpus_prompts, file_prompts
    from prismlm.eval.judging.judges import judge_opener
    from prismlm.eval.judging.study import RESULT_FILE, Study, named, run_judging
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
        result = run_judging(study, ConsoleReporter(), _announce)
    wrote(place / RESULT_FILE)
    if as_json:
        print_json(result)
        return
    for name, printed in (
        ("judge", _print_judge),
        ("ratings", _print_ratings),
        ("bleu", _print_bleu),
    ):
        if result[name] is not None:
            printed(result[name])
    say(f"{result['prompts']:,} prompts, {len(result['models'])} models", style="dim")


def _announce(what: str, questions: int, tokens: int) -> None:
    if questions:
        typer.echo(
            f"{questions:,} questions about {what}, some {count(tokens)} tokens in; "
            "verdicts are kept.",
            err=True,
        )


def _print_judge(judge: dict[str, Any]) -> None:
    """Print the judge's own examination."""
    preferred, order = judge["preferred"], judge["order"]
    verdict = "usable" if judge["usable"] else f"unusable: {'; '.join(judge['reasons'])}"
    say(f"The judge {judge['source']} is {verdict}.", style="bold" if judge["usable"] else "red")
    shares = {
        "prefers real text to its words shuffled": preferred["shuffled"],
        "prefers real text to that of another prompt": preferred["elsewhere"],
        "prefers real text to the prompt's last words repeated": preferred["repeated"],
        "changes its mind with the order": order["changed"],
        "prefers the same place in both orders": order["by_position"],
        "says A, of A and B": order["first"],
    }
    rows = [{"judge": label, "share": _interval(one)} for label, one in shares.items()]
    facts = {"pairs, in both orders": order["pairs"], "without an answer": order["failed"]}
    title = "A judge that does not look at the texts has 50 %"
    show_rows(title, {"judge": "", "share": ".0%"}, rows, **facts)


def _print_ratings(ratings: dict[str, Any]) -> None:
    ranked = sorted(ratings["models"], key=lambda one: -one["bradley_terry"]["value"])
    rows = [
        {"model": one["model"]} | {name: _interval(one[name]) for name in ("elo", "bradley_terry")}
        for one in ranked
    ]
    order = ratings["order"]
    facts = {name: order[name] for name in ("pairs", "ties", "failed")}
    facts["change with the order"] = order["changed"]["value"]
    title = "Ratings"
    if not ratings["readable"]:
        title = "Ratings, not to be read since the judge is unusable"
    show_rows(title, {"model": "", "elo": ".0f", "bradley_terry": ".0f"}, rows, **facts)


def _print_bleu(bleu: dict[str, Any]) -> None:
    columns = {"model": "", "mean": ".2f", "other_prompt": ".2f", "difference": "+.2f"}
    rows = [
        {"model": name} | {key: _interval(one[key]) for key in list(columns)[1:]}
        for name, one in bleu["models"].items()
    ]
    show_rows("BLEU, and against another prompt's text", columns, rows)
    for sample in bleu["samples"]:
        texts = {"prompt": sample["text"], "reference": sample["reference"]}
        texts |= {f"{one['model']} ({one['bleu']:.1f})": one["text"] for one in sample["texts"]}
        say(f"Best of {sample['best']}", style="bold")
        say(*(f"{label}: {' '.join(text.split())}" for label, text in texts.items()), "")


def _interval(found: dict[str, Any]) -> Interval:
    from prismlm.statistics import Interval

    return Interval(found["value"], found["low"], found["high"])
