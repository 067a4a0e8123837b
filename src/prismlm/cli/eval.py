"""prismlm eval: benchmarks of a model and of its parts, and studies of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, flag, option
from prismlm.errors import InputError
from prismlm.outputs import check_outputs
from prismlm.probes.results import Row, Table
from prismlm.probes.results import as_json as json_values
from prismlm.run_state import orderly_end

if TYPE_CHECKING:
    from prismlm.eval.robustness import OpenedModel

# lm-eval handles --help itself.
PASS_THROUGH = {"ignore_unknown_options": True, "help_option_names": list[str]()}

Rate = Annotated[float | None, option("R", "Default: that of --search, or of the paper.", min=1e-9)]
Warmup = Annotated[float | None, option("W", "Warm-up, as a share of the steps.", min=0, max=1)]
JUDGED_HELP = "Model directories; without any, only a judge is examined."
Pairs = Annotated[Path, option("FILE", "Pairs of texts, as Parquet.")]
PairLimit = Annotated[int | None, option("N", "Pairs per slice, sampled.", min=1)]

app = opt.group_with_default(
    "suite", "Run benchmarks: `prismlm eval MODEL`; or compare models in a study."
)


@app.command()
def suite(
    model: opt.Model,
    suite: Annotated[str, option("SUITE", "seed: PRISM's eight tasks.")] = "seed",
    tasks: opt.Tasks = None,
    data: opt.Data = None,
    limit: Annotated[int | None, option("N", "Questions per task, sampled.", min=1)] = None,
    shots: Annotated[int, option("N", "Examples before each question.", min=0)] = 0,
    seed: opt.Seed = 0,
    batch_size: Annotated[int, option("N", "Texts per batch.", min=1)] = 8,
    device: opt.Device = "cpu",
    out: opt.OutDir = None,
    as_json: opt.Json = False,
) -> None:
    """Run benchmarks on a model, on its prototypes alone and on its residual alone.

    Finished tasks are kept in MODEL/eval/SUITE or --out: run again to resume.
    """
    from prismlm.eval import suite as study
    from prismlm.eval.predictors import open_predictors

    names, options = opt.split_names(tasks), opt.fill(study.SuiteOptions, locals())
    study.select_benchmarks(suite, names)
    directory = model / "eval" / suite if out is None else out
    check_outputs(directory=directory, inputs=(model, data), overwrite=True)
    lm = open_predictors(model, device=device, batch_size=batch_size)
    with orderly_end():
        result = study.run_suite(lm, str(model), directory, options, names, output.progress())
    output.report_written(directory / study.RESULT_FILE)
    output.show(result, as_json, _accuracies(result))


def lm_eval(
    arguments: Annotated[list[str] | None, argument("ARGS...", "Arguments of lm-eval.")] = None,
) -> None:
    """Run lm-eval's command line with prismlm's models, and --controller FILE."""
    from prismlm.eval.predictors import run_harness

    run_harness(arguments or [])


def _accuracies(result: Row) -> Table:
    metric, columns = result["metric"], "task questions:, chance:.1%"
    for name in result["predictors"]:
        columns += f" {name}.value:.1% {name}.stderr:.1% {name}.change:+.0f"
    rows = [
        {"task": task["title"], "questions": task["questions"], "chance": task["chance"]}
        | {name: figures[metric] for name, figures in task["predictors"].items()}
        for task in result["tasks"]
    ]
    facts = {"metric": metric, "examples before each question": result["shots"]}
    title = f"{result['model']}: accuracy, its standard error, and the change from plain in %"
    return output.table(title, columns, [*rows, {"task": "mean"} | result["mean"]], **facts)


@app.command()
def judge(
    models: Annotated[list[Path] | None, argument("MODEL...", JUDGED_HELP)] = None,
    corpus: Annotated[Path | None, option("DIR", "Continue its held-out documents.")] = None,
    prompts: Annotated[Path | None, option("FILE", "Or continue each line of this text.")] = None,
    prompts_count: Annotated[int, option("N", "Number of texts.", min=2)] = 100,
    prompt_words: Annotated[int, option("N", "Words per prompt.", min=1)] = 64,
    new_tokens: Annotated[int, option("N", "Maximum tokens per continuation.", min=1)] = 50,
    temperature: opt.Temperature = 0.0,
    judge: Annotated[Path | None, option("DIR", "A model directory that judges.")] = None,
    endpoint: opt.Endpoint = None,
    endpoint_model: opt.EndpointModel = None,
    seed: opt.Seed = 0,
    out: Annotated[Path | None, option("DIR", "Default: eval/judge of the first model.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Have models continue the same texts; compare them by BLEU, and by a judge that is examined.

    The judge is first tested on real text against shuffled or repeated words: ignore the ratings
    of one that fails. Run again to resume, or with more models.
    """
    from prismlm.corpus.store import Corpus
    from prismlm.eval import judging as study
    from prismlm.eval.runs import unique_names

    paths = models or []
    asked = opt.open_endpoint(endpoint, endpoint_model)
    if not paths and (out is None or (judge is None and asked is None)):
        raise InputError("name a MODEL, or a judge to examine and its --out DIR.")
    opt.check_one_of("texts by --corpus DIR or --prompts FILE, one of them", corpus, prompts)
    directory = paths[0] / "eval" / "judge" if out is None else out
    check_outputs(directory=directory, inputs=(*paths, corpus, prompts, judge), overwrite=True)
    judging = study.open_judge(judge, asked, directory)
    writing = study.Writing(prompt_words, new_tokens, temperature, seed)
    if prompts is not None:
        texts = study.file_prompts(prompts, prompts_count, writing)
    else:
        texts = study.corpus_prompts(Corpus.open(str(corpus)), prompts_count, writing)
    named, progress = unique_names(paths), output.progress()
    for path in paths:
        if not path.is_dir():
            raise InputError(f"there is no model directory {path}.")
    with orderly_end():
        result = study.run_judging(named, texts, writing, directory, judging, progress=progress)
    output.report_written(directory / study.RESULT_FILE)
    output.show(result, as_json, _judgement(result))


def _judgement(result: Row) -> Iterator[Any]:
    if examined := result["judge"]:
        verdict = "usable" if examined["usable"] else f"unusable: {'; '.join(examined['reasons'])}"
        yield output.heading(f"The judge {examined['source']} is {verdict}.")
        yield "A judge that ignores the texts scores 50 %.\n"
        yield examined["preferred"] | {"order": examined["order"]}
    if ratings := result["ratings"]:
        if not ratings["readable"]:
            yield "\nRatings, to be ignored since the judge is unusable"
        yield from output.tables(ratings)
    if bleu := result["bleu"]:
        rows = [{"model": name} | figures for name, figures in bleu["models"].items()]
        yield from output.tables({"BLEU, and against the reference of another prompt": rows})
    yield output.dim(f"{result['prompts']:,} prompts, {len(result['models'])} models")


@app.command()
def glue(
    model: opt.Model,
    tasks: opt.Tasks = None,
    data: opt.Data = None,
    limit: Annotated[int | None, option("N", "Training rows, sampled by seed.", min=1)] = None,
    dev_limit: Annotated[int | None, option("N", "Rows per dev set, sampled.", min=3)] = None,
    seeds: Annotated[str, option("A,B", "One run per seed.")] = "0,1,2",
    learning_rate: Rate = None,
    warmup: Warmup = None,
    search: Annotated[bool, flag("--search", "Choose rate and warm-up on two tasks.")] = False,
    from_scratch: Annotated[bool, flag("--from-scratch", "Also train random weights.")] = False,
    epochs: Annotated[int, option("N", "Maximum number of epochs.", min=1)] = 3,
    device: opt.Device = "cpu",
    out: opt.OutDir = None,
    as_json: opt.Json = False,
) -> None:
    """Fine-tune all weights of a model on GLUE's nine tasks, and evaluate it on their dev sets.

    Finished runs are kept in MODEL/eval/glue or --out: run again to resume.
    """
    from prismlm.eval import glue as study

    if search:
        reason = "--search chooses rate and warm-up on SST-2 and MNLI"
        others = {"from_scratch": from_scratch, "learning_rate": learning_rate, "warmup": warmup}
        opt.check_unused(reason, tasks=tasks, **others)
    options = opt.fill(study.GlueOptions, locals())
    names, numbers = opt.split_names(tasks), _parse_seeds(seeds)
    study.select_tasks(names)
    directory = model / "eval" / "glue" if out is None else out
    check_outputs(directory=directory, inputs=(model, data), overwrite=True)
    lm, progress = study.GlueModel(model, device=device), output.progress()
    with orderly_end():
        if search:
            result = study.search(lm, directory, options, numbers[0], progress)
        else:
            settings: dict[str, Any] = {"from_scratch": from_scratch, "progress": progress}
            result = study.run_glue(lm, directory, options, names, numbers, **settings)
    output.show(result, as_json, *([] if search else [_glue_scores(result)]))


def _parse_seeds(text: str) -> list[int]:
    parts = opt.split_names(text) or []
    if not all(part.isdecimal() and len(part) < 20 for part in parts):
        raise InputError(f"--seeds is {text!r}: expected whole numbers, such as 0,1,2.")
    return [int(part) for part in dict.fromkeys(parts)]


def _glue_scores(result: Row) -> Table:
    rows = [
        row
        | {"metric": metric, "mean": row["fine_tuned"]["mean"][metric]}
        | {"constant": row["constant"][metric]}
        | {"from_scratch": row["from_scratch"] and row["from_scratch"]["mean"][metric]}
        for row in result["tasks"]
        for metric in row["metrics"]
    ]
    columns = "title train.rows:, measured.rows:, metric mean:.3f constant:.3f from_scratch:.3f"
    facts = {name: result[name] for name in ("learning_rate", "warmup", "rate_from")}
    return output.table(f"{result['name']}: means over seeds, on dev sets", columns, rows, **facts)


@app.command()
def robustness(
    models: opt.Models,
    pairs: Pairs,
    limit: PairLimit = None,
    seed: opt.Seed = 0,
    out: opt.OutJson = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Compare predictions after texts and their variants: Jensen-Shannon divergence and ranks."""
    check_outputs(out, inputs=(*models, pairs), overwrite=overwrite)
    from prismlm.eval.robustness import measure_robustness, read_pairs

    with orderly_end():
        sample, opened = read_pairs(pairs, limit, seed), _open_models(models)
        figures = measure_robustness(opened, sample, seed=seed, progress=output.progress())
    value = {"pairs": str(pairs), "limit": limit} | json_values(figures)
    output.write_json(out, value)
    facts: Row = {
        "mean entropy matched to": figures["target"],
        "pairs empty or too long for a model": figures["left_out"],
        "JS comparable, over one vocabulary": figures["comparable"],
    }
    rows = [
        {"slice": part["name"], "pairs": part["pairs"], "model": name} | values
        for part in figures["slices"]
        for name, values in part["models"].items()
    ]
    columns = "slice pairs model js:.3f js_matched:.3f overlap.value:.3f spearman.value:.3f"
    title = "JS in bits, plain and at matched entropies; 95 % intervals over pairs"
    entropies = output.table(
        "Models", "name entropy:.3f temperature:.3f", figures["models"], **facts
    )
    compared = output.table(title, f"{columns} same_top.value:.3f", rows)
    output.show(value, as_json, entropies, compared)


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
    """Run variants with the routing of their originals: does that restore the predictions?"""
    check_outputs(out, inputs=(model, pairs), overwrite=overwrite)
    from prismlm.eval.robustness import measure_clamping, read_pairs

    with orderly_end():
        sample, (decoder,) = read_pairs(pairs, limit, seed), _open_models([model])
        figures = measure_clamping(decoder, sample, seed=seed, progress=output.progress())
    value = {"pairs": str(pairs), "limit": limit} | json_values(figures)
    output.write_json(out, value)
    columns = "name pairs unaligned below_floor clamped.mean:+.3f clamped.pooled:+.3f"
    columns += " control.mean:+.3f control.pooled:+.3f gain:+.3f"
    title = f"PMR: {figures['name']}, {figures['routing']} clamped; control: of a random text"
    output.show(value, as_json, output.table(title, columns, figures["slices"]))


def _open_models(paths: Sequence[Path]) -> Iterator[OpenedModel]:
    """Yield models in float32, with unique names."""
    from prismlm.eval.robustness import OpenedModel
    from prismlm.eval.runs import unique_names
    from prismlm.models.checkpoint import read_checkpoint

    for name, path in unique_names(paths).items():
        model, tokenizer = read_checkpoint(path)
        yield OpenedModel(name, model.float(), tokenizer)


@app.command()
def pairs(
    out: Annotated[Path, option("DIR", "Directory for the two files of pairs.")],
    data: opt.Data = None,
    per_slice: Annotated[int, option("N", "Maximum pairs per slice.", min=1)] = 500,
    seed: opt.Seed = 0,
    similarity: Annotated[float, option("C", "Minimum cosine of a pair.", min=-1, max=1)] = 0.75,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Make pairs of sentences that mean the same, and of sentences that do not.

    Pairs have the licences of the corpora (AG News: research only), so none come with prismlm.
    """
    from prismlm.eval.perturbations.generate import FILES, PairOptions, write_pairs

    files = [out / name for name in FILES]
    check_outputs(*files, inputs=(data,), overwrite=overwrite)
    options = PairOptions(per_slice, seed, similarity)
    with orderly_end():
        result = write_pairs(out, data, options, output.progress())
    output.report_written(*files)
    output.show(result, as_json)
