"""prismlm eval judge: which model continues a text best, by a judge that is judged first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismlm.cli.label import ModelThere, Url
from prismlm.cli.options import DryRun, Json, Temperature, number, option
from prismlm.cli.output import print_cost, print_json
from prismlm.errors import InputError
from prismlm.outputs import check_outputs

if TYPE_CHECKING:
    from prismlm.eval.judging.continuations import Prompt, Writing


Models = Annotated[
    list[Path] | None,
    typer.Argument(metavar="MODEL...", help="Model directories; none: examine a judge alone."),
]
Texts = Annotated[Path | None, option("DIR", "Continue its held-out documents.")]
Prompts = Annotated[Path | None, option("FILE", "Or continue the lines of a text.")]
Count = Annotated[int, number("N", "Texts, of a corpus drawn by the seed.", 2)]
Words = Annotated[int, number("N", "Words of a text that are given.", 1)]
NewTokens = Annotated[int, number("N", "Tokens that each model writes, at most.", 1)]
LocalJudge = Annotated[Path | None, option("DIR", "A model directory that judges.")]
Seed = Annotated[int, number("S", "Of all that is drawn.")]
Out = Annotated[
    Path | None, option("DIR", "Where all is kept; else eval/judge of the first model.")
]


def judge(
    models: Models = None,
    corpus: Texts = None,
    prompts: Prompts = None,
    prompts_count: Count = 100,
    prompt_words: Words = 64,
    new_tokens: NewTokens = 50,
    temperature: Temperature = 0.0,
    judge: LocalJudge = None,
    endpoint: Url = None,
    endpoint_model: ModelThere = None,
    seed: Seed = 0,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Have models continue the same texts; compare them by BLEU, and by a judge that is examined.

    The judge says of each pair of continuations, in both orders, which is better; that makes Elo
    and Bradley-Terry ratings. First it is asked about real text and the same words shuffled: the
    ratings by one that fails are not to be read. What is made is kept: the same command goes on
    where it was stopped, and models may be added.
    """
    from prismlm.eval.judging.continuations import Writing
    from prismlm.eval.judging.estimate import estimate_judging
    from prismlm.eval.judging.judges import judge_opener
    from prismlm.eval.judging.study import RESULT_FILE, Study, named, run_judging
    from prismlm.run_state import orderly_end

    given = models or []
    opened = judge_opener(judge, endpoint, endpoint_model)
    if not given and (opened is None or out is None):
        raise InputError("give a MODEL or more; without one, a judge to examine and --out DIR.")
    if (corpus is None) == (prompts is None):
        raise InputError("give the texts: --corpus DIR or --prompts FILE, one of them.")
    place = given[0] / "eval" / "judge" if out is None else out
    # What was made there before is gone on from.
    check_outputs(directory=place, inputs=(*given, corpus, prompts, judge), overwrite=True)
    how = Writing(prompt_words, new_tokens, temperature, seed)
    texts = _texts(corpus, prompts, prompts_count, how)
    study = Study(named(given), texts, how, place, opened)
    with orderly_end():
        if dry_run:
            print_cost(estimate_judging(study), as_json=as_json)
            return
        from prismlm.cli.progress import ConsoleReporter

        result = run_judging(study, ConsoleReporter(), _announce)
    typer.echo(f"wrote {place / RESULT_FILE}", err=True)
    if as_json:
        print_json(result)
    else:
        from prismlm.cli.printing.judge import print_judging

        print_judging(result)


def _texts(corpus: Path | None, prompts: Path | None, count: int, how: Writing) -> list[Prompt]:
    from prismlm.corpus.store import Corpus
    from prismlm.eval.judging.continuations import corpus_prompts, file_prompts

    if corpus is not None:
        return corpus_prompts(Corpus.open(corpus), count, how)
    assert prompts is not None
    return file_prompts(prompts, count, how)


def _announce(what: str, questions: int, tokens: int) -> None:
    from prismlm.cli.format import count

    if questions:
        typer.echo(
            f"{questions:,} questions about {what}, some {count(tokens)} tokens in; "
            "verdicts are kept.",
            err=True,
        )
