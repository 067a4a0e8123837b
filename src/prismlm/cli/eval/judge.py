"""prismlm eval judge: which model continues a text best, by a judge that is judged first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli.format import count
from prismlm.cli.options import option
from prismlm.cli.output import print_facts, print_json, say, show_value, wrote
from prismlm.errors import InputError
from prismlm.outputs import check_outputs

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
Out = Annotated[Path | None, option("DIR", "Default: eval/judge of the first model.")]


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
    if found := result["judge"]:
        verdict = "usable" if found["usable"] else f"unusable: {'; '.join(found['reasons'])}"
        say(f"The judge {found['source']} is {verdict}.", style="bold")
        say("A judge that does not look at the texts has 50 %.\n")
        print_facts(found["preferred"] | {"order": found["order"]})
    if ratings := result["ratings"]:
        say("" if ratings["readable"] else "\nRatings, not to be read since the judge is unusable")
        show_value(ratings)
    if bleu := result["bleu"]:
        rows = [{"model": name} | figures for name, figures in bleu["models"].items()]
        show_value({"BLEU, and against another prompt's text": rows, "samples": bleu["samples"]})
    say(f"{result['prompts']:,} prompts, {len(result['models'])} models", style="dim")


def _announce(what: str, questions: int, tokens: int) -> None:
    if questions:
        typer.echo(
            f"{questions:,} questions about {what}, some {count(tokens)} tokens in; "
            "verdicts are kept.",
            err=True,
        )
