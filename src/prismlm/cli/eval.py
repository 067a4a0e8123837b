"""prismlm eval: benchmarks of a model and of its parts, and studies of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, flag, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import InputError
from prismlm.outputs import check_outputs, output_file
from prismlm.probes.results import Row
from prismlm.probes.results import as_json as json_values
from prismlm.run_state import orderly_end

if TYPE_CHECKING:
    from prismlm.eval.robustness import OpenedModel

PLOT_FILE = "eval.svg"
# lm-eval handles --help itself.
PASS_THROUGH = {"ignore_unknown_options": True, "help_option_names": list[str]()}

Tasks = Annotated[str | None, option("A,B", "Only these tasks, such as cola,sst2.")]
Data = Annotated[Path | None, option("DIR", "Parquet files (default: the hub).")]
Rate = Annotated[float | None, option("R", "Default: of --search, or the source.", min=0)]
Warmup = Annotated[float | None, option("W", "Share of the steps.", min=0, max=1)]
Models = Annotated[list[Path], argument("MODEL...", "To compare.")]
JUDGED_HELP = "Model directories; none: examine a judge alone."
BY_HELP = (
    "How --judge compares texts: asked; by the higher probability (likelihood), or by the one "
    "closest to the prompt's (typical)."
)
JudgeBy = Annotated[Literal["asked", "likelihood", "typical"], option(None, BY_HELP)]
Pairs = Annotated[Path, option("FILE", "Pairs of texts, as Parquet, of any slices.")]
PairLimit = Annotated[int | None, option("N", "Pairs of each slice, drawn.", min=1)]
Entropy = Annotated[float | None, option("E", "Nats (default: the models' lowest).", min=0)]
Corpora = Annotated[Path | None, option("DIR", "The corpora (default: from the hub).")]
Similarity = Annotated[float, option("C", "The least cosine of a pair.", min=-1, max=1)]

app = opt.group_with_default(
    "suite", "Ask benchmarks of a model: `prismlm eval MODEL`; or make a study of models."
)


@app.command()
def suite(
    model: opt.Model,
    suite: Annotated[str, option("SUITE", "seed: PRISM's eight tasks.")] = "seed",
    tasks: Tasks = None,
    data: Data = None,
    limit: Annotated[int | None, option("N", "Questions of each task, drawn.", min=1)] = None,
    shots: Annotated[int, option("N", "Examples before each question.", min=0)] = 0,
    seed: opt.Seed = 0,
    batch_size: Annotated[int, option("N", "Texts per batch.", min=1)] = 8,
    device: opt.Device = "cpu",
    out: opt.OutDir = None,
    as_json: opt.Json = False,
) -> None:
    """Ask benchmarks of a model, of its prototypes alone and of its residual alone.

    Finished tasks are kept in MODEL/eval/SUITE or --out: run the same command again to resume.
    """
    import logging

    from prismlm.eval.predictors import open_predictors
    from prismlm.eval.suite import RESULT_FILE, SuiteOptions, run_suite, select_benchmarks
    from prismlm.pages.plots import accuracy_figure

    names = opt.split_names(tasks)
    options = SuiteOptions(suite=suite, data=data, limit=limit, seed=seed, shots=shots)
    select_benchmarks(suite, names)
    directory = model / "eval" / suite if out is None else out
    check_outputs(directory=directory, inputs=(model, data), overwrite=True)
    # Silence the logging and progress bars of lm-eval.
    import datasets

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm = open_predictors(model, device=device, batch_size=batch_size)
    with orderly_end():
        result = run_suite(lm, str(model), directory, options, names, ConsoleReporter())
    with output_file(directory / PLOT_FILE) as temporary:
        # Without a date, so that the same result gives the same file.
        accuracy_figure(result).savefig(temporary, format="svg", metadata={"Date": None})
    output.report_written(directory / RESULT_FILE, directory / PLOT_FILE)
    output.print_json(result) if as_json else _print_accuracies(result)


def lm_eval(
    arguments: Annotated[list[str] | None, argument("ARGS...", "As lm-eval takes them.")] = None,
) -> None:
    """Run lm-eval's own command line over prismlm's models and uncertainty feedback."""
    from prismlm.eval.predictors import run_harness

    run_harness(arguments or [])


def _print_accuracies(result: Row) -> None:
    """Print each task's accuracies, chance, and changes from plain."""
    metric = result["metric"]
    rows = [
        {"task": task["title"], "questions": task["questions"], "chance": task["chance"]}
        | {name: _accuracy(figures[metric]) for name, figures in task["predictors"].items()}
        for task in result["tasks"]
    ]
    rows.append({"task": "mean"} | {name: _accuracy(one) for name, one in result["mean"].items()})
    columns = {"task": "", "questions": ",", "chance": ".1%"}
    facts = {
        "metric": f"{metric} of lm-eval {result['versions']['lm_eval']}",
        "examples before each question": result["shots"] or "0-shot",
        "questions cut at the left": sum(task["truncated"] for task in result["tasks"]),
    }
    title = f"{result['model']}: accuracy ± one standard error, in brackets the change from plain"
    output.print_rows(title, columns | dict.fromkeys(result["predictors"], ""), rows, **facts)


def _accuracy(figure: Row) -> str:
    error = "" if figure["stderr"] is None else f" ± {figure['stderr']:.1%}"
    change = figure.get("change")
    if change is None:
        return f"{figure['value']:.1%}{error}"
    spread = "" if figure["change_stderr"] is None else f" ± {figure['change_stderr']:.0f}"
    return f"{figure['value']:.1%} ({change:+.0f}{spread} %)"


@app.command()
def judge(
    models: Annotated[list[Path] | None, argument("MODEL...", JUDGED_HELP)] = None,
    corpus: Annotated[Path | None, option("DIR", "Continue its held-out documents.")] = None,
    prompts: Annotated[Path | None, option("FILE", "Or continue the lines of a text.")] = None,
    prompts_count: Annotated[int, option("N", "Number of texts.", min=2)] = 100,
    prompt_words: Annotated[int, option("N", "Words per prompt.", min=1)] = 64,
    new_tokens: Annotated[int, option("N", "Maximum tokens per continuation.", min=1)] = 50,
    temperature: opt.Temperature = 0.0,
    judge: Annotated[Path | None, option("DIR", "A model directory that judges.")] = None,
    by: JudgeBy = "asked",
    endpoint: opt.Endpoint = None,
    endpoint_model: opt.EndpointModel = None,
    seed: opt.Seed = 0,
    out: Annotated[Path | None, option("DIR", "Default: eval/judge of the first model.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Have models continue the same texts; compare them by BLEU, and by a judge that is examined.

    The judge says of each pair of continuations, in both orders, which is better; that makes Elo
    and Bradley-Terry ratings. First it is asked about real text and words shuffled or repeated: the
    ratings by one that fails are not to be read. Results are kept: run the same command
    again to resume, or with more models.
    """
    from prismlm.corpus.store import Corpus
    from prismlm.eval.judging import study
    from prismlm.eval.judging.judges import judge_opener

    paths = models or []
    opener = judge_opener(judge, endpoint, endpoint_model, by=by)
    if not paths and (opener is None or out is None):
        raise InputError("give a MODEL or more; without one, a judge to examine and --out DIR.")
    opt.check_one_of("texts by --corpus DIR or --prompts FILE, one of them", corpus, prompts)
    directory = paths[0] / "eval" / "judge" if out is None else out
    check_outputs(directory=directory, inputs=(*paths, corpus, prompts, judge), overwrite=True)
    writing = study.Writing(prompt_words, new_tokens, temperature, seed)
    if prompts is not None:
        texts = study.file_prompts(prompts, prompts_count, writing)
    else:
        texts = study.corpus_prompts(Corpus.open(str(corpus)), prompts_count, writing)
    named, progress = study.unique_names(paths), ConsoleReporter()
    with orderly_end():
        result = study.run_judging(named, texts, writing, directory, opener, progress=progress)
    output.report_written(directory / study.RESULT_FILE)
    output.print_json(result) if as_json else _print_judgement(result)


def _print_judgement(result: Row) -> None:
    if examined := result["judge"]:
        verdict = "usable" if examined["usable"] else f"unusable: {'; '.join(examined['reasons'])}"
        output.say(f"The judge {examined['source']} is {verdict}.", style="bold")
        output.say("A judge that ignores the texts has 50 %.\n")
        output.print_facts(examined["preferred"] | {"order": examined["order"]})
    if ratings := result["ratings"]:
        if not ratings["readable"]:
            output.say("\nRatings, not to be read since the judge is unusable")
        output.print_value(ratings)
    if bleu := result["bleu"]:
        rows = [{"model": name} | figures for name, figures in bleu["models"].items()]
        title = "BLEU, and against the reference of another prompt"
        output.print_value({title: rows})
    output.say(f"{result['prompts']:,} prompts, {len(result['models'])} models", style="dim")


@app.command()
def glue(
    model: opt.Model,
    tasks: Tasks = None,
    data: Data = None,
    limit: Annotated[int | None, option("N", "Training rows, drawn by the seed.", min=1)] = None,
    dev_limit: Annotated[int | None, option("N", "Rows of each dev set, drawn.", min=3)] = None,
    seeds: Annotated[str, option("A,B", "One run per seed.")] = "0,1,2",
    learning_rate: Rate = None,
    warmup: Warmup = None,
    search: Annotated[bool, flag("--search", "Choose both on SST-2 and MNLI.")] = False,
    from_scratch: Annotated[bool, flag("--from-scratch", "Also from random weights.")] = False,
    epochs: Annotated[int, option("N", "At most.", min=1)] = 3,
    test: Annotated[bool, flag("--test/--no-test", "Predict available test sets.")] = True,
    device: opt.Device = "cpu",
    out: opt.OutDir = None,
    as_json: opt.Json = False,
) -> None:
    """Fine-tune a model on GLUE's nine tasks, all of its weights, and measure it on their dev sets.

    Finished runs are kept in MODEL/eval/glue or --out: run the same command again to resume.
    """
    from prismlm.eval.glue import study
    from prismlm.eval.glue.data import select_tasks
    from prismlm.eval.glue.fine_tune import GlueModel, GlueOptions

    if search and (tasks or from_scratch or learning_rate is not None or warmup is not None):
        raise InputError(
            "--search chooses rate and warm-up on SST-2 and MNLI: leave out --tasks, "
            "--from-scratch, --learning-rate and --warmup."
        )
    options = GlueOptions(data, limit, dev_limit, learning_rate, warmup, epochs, test=test)
    names, numbers = opt.split_names(tasks), _parse_seeds(seeds)
    select_tasks(names)
    directory = model / "eval" / "glue" if out is None else out
    check_outputs(directory=directory, inputs=(model, data), overwrite=True)
    lm, progress = GlueModel(model, device=device), ConsoleReporter()
    with orderly_end():
        if search:
            result = study.search(lm, directory, options, numbers[0], progress)
        else:
            settings: dict[str, Any] = {"from_scratch": from_scratch, "progress": progress}
            result = study.run_glue(lm, directory, options, names, numbers, **settings)
    if as_json:
        output.print_json(result)
    elif search:
        columns = {"learning_rate": "g", "warmup": "g", "sst2": ".3f", "mnli": ".3f"}
        choice = {name: result[name] for name in ("learning_rate", "warmup")}
        output.print_rows("Dev accuracies; below, the choice", columns, result["tried"], **choice)
    else:
        _print_glue(result)


def _parse_seeds(text: str) -> list[int]:
    parts = opt.split_names(text) or []
    if not all(part.isdecimal() and len(part) < 20 for part in parts):
        raise InputError(f"--seeds is {text!r}: expected whole numbers, such as 0,1,2.")
    return [int(part) for part in dict.fromkeys(parts)]


def _print_glue(result: Row) -> None:
    """Print each task's metrics over seeds, a constant answer, and training from scratch."""
    rows = [
        {
            "task": row["title"] + " test" * row["split"].startswith("test"),
            "trained on": row["train"]["rows"],
            "rows": row["measured"]["rows"],
            "metric": metric,
            "mean": row["fine_tuned"]["mean"][metric],
            "least": min(row["fine_tuned"]["values"][metric]),
            "most": max(row["fine_tuned"]["values"][metric]),
            "constant": row["constant"][metric],
            "from scratch": row["from_scratch"] and row["from_scratch"]["mean"][metric],
        }
        for row in result["tasks"]
        for metric in row["metrics"]
    ]
    columns = {"task": "", "trained on": ",", "rows": ",", "metric": ""}
    columns |= dict.fromkeys(("mean", "least", "most", "constant", "from scratch"), ".3f")
    facts = {name: result[name] for name in ("learning_rate", "warmup", "rate_from")}
    title = f"{result['name']}: means over seeds, of dev sets unless test is said"
    output.print_rows(title, columns, rows, **facts)


@app.command()
def robustness(
    models: Models,
    pairs: Pairs,
    entropy: Entropy = None,
    limit: PairLimit = None,
    seed: opt.Seed = 0,
    out: opt.OutJson = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Compare predictions after texts and their variants: Jensen-Shannon divergence and ranks."""
    check_outputs(out, inputs=(*models, pairs), overwrite=overwrite)
    from prismlm.eval.pairs import read_pairs
    from prismlm.eval.robustness import measure_robustness

    with orderly_end():
        drawn = read_pairs(pairs, limit, seed)
        settings: dict[str, Any] = {"entropy": entropy, "seed": seed}
        settings["progress"] = ConsoleReporter()
        result = measure_robustness(_open_models(models), drawn, **settings)
    _finish_study(result, {"pairs": str(pairs), "limit": limit}, out, as_json, _print_robustness)


@app.command()
def clamping(
    model: opt.Model,
    pairs: Pairs,
    limit: PairLimit = None,
    seed: opt.Seed = 0,
    out: opt.OutJson = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Read variants with the routing of their originals: does it bring predictions back?"""
    check_outputs(out, inputs=(model, pairs), overwrite=overwrite)
    from prismlm.eval.clamping import measure_clamping
    from prismlm.eval.pairs import read_pairs

    with orderly_end():
        drawn = read_pairs(pairs, limit, seed)
        (opened,) = _open_models([model])
        result = measure_clamping(opened, drawn, seed=seed, progress=ConsoleReporter())
    _finish_study(result, {"pairs": str(pairs), "limit": limit}, out, as_json, _print_clamping)


def _open_models(paths: Sequence[Path]) -> Iterator[OpenedModel]:
    """Yield models in float32, with the shortest unique names."""
    from prismlm.eval.robustness import OpenedModel
    from prismlm.models.checkpoint import read_checkpoint

    names = [path.resolve().name for path in paths]
    for path, name in zip(paths, names, strict=True):
        model, tokenizer = read_checkpoint(path)
        unique = name if names.count(name) == 1 else str(path)
        yield OpenedModel(unique, model.float(), tokenizer)


def _finish_study(
    result: Row, head: Row, out: Path | None, as_json: bool, show: Callable[[Row], None]
) -> None:
    value = head | json_values(result)
    if out is not None:
        output.write_json(out, value)
    output.print_json(value) if as_json else show(result)


def _print_robustness(result: Row) -> None:
    """Print each slice and model with intervals, then differences from the first model."""
    facts: Row = {
        "mean entropy matched to": result["target"],
        "pairs empty or too long for a model": result["left_out"],
        "JS comparable, over one vocabulary": result["comparable"],
    }
    columns = {"name": "", "entropy": ".3f", "temperature": ".3f"}
    output.print_rows("Models", columns, result["models"], **facts)
    first = result["models"][0]["name"]
    rows: list[Row] = []
    for part in result["slices"]:
        differences = [d for d in part["differences"] if d["of"][0] == first]
        figures = part["models"] | {f"first − {d['of'][1]}": d for d in differences}
        head = {"slice": part["name"], "pairs": part["pairs"]}
        rows += [head | {"model": name} | values for name, values in figures.items()]
    names = ("js", "js_matched", "overlap.value", "spearman.value", "same_top.value")
    columns = {"slice": "", "pairs": "", "model": ""} | dict.fromkeys(names, ".3f")
    title = "JS in bits, plain and at matched entropies; 95 % intervals over pairs"
    output.print_rows(title, columns, rows)


def _print_clamping(result: Row) -> None:
    """Print PMR of each slice with the original's routing and with a random text's."""
    rows = [
        {"slice": part["name"], "routing_of": of} | (part[key] or {"pairs": 0})
        for part in result["slices"]
        for of, key in (("original", "clamped"), ("random text", "control"))
    ]
    columns = {"slice": "", "routing_of": "", "mean": "+.3f", "deviation": ".3f"}
    columns |= {"share_positive": ".3f", "pooled.value": "+.3f", "base.value": ".4f"}
    columns |= {"js.value": ".4f", "pairs": "", "unmoved": ""}
    output.print_rows(f"PMR: {result['name']}, {result['routing']} clamped", columns, rows)
    columns = dict.fromkeys(("name", "of_equal_length", "unaligned", "below_floor"), "")
    title = "Pairs left out; gain: JS with random routing minus the original's"
    output.print_rows(title, columns | {"gain": "+.3f"}, result["slices"])


@app.command()
def pairs(
    out: Annotated[Path, option("DIR", "Where the two files of pairs go.")],
    data: Corpora = None,
    per_slice: Annotated[int, option("N", "Pairs of each slice.", min=1)] = 500,
    seed: opt.Seed = 0,
    similarity: Similarity = 0.75,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Make pairs of sentences that mean the same, and of sentences that do not.

    The pairs are of the corpora's licences, AG News for research only: they do not ship.
    """
    from prismlm.eval.perturbations.generate import FILES, PairOptions, write_pairs

    files = [out / name for name in FILES]
    check_outputs(*files, inputs=(data,), overwrite=overwrite)
    options = PairOptions(per_slice, seed, similarity)
    with orderly_end():
        result = write_pairs(out, data, options, ConsoleReporter())
    output.report_written(*files)
    output.print_json(result) if as_json else output.print_value(result)
